"""From the raw text of a container's log to the few lines worth judging.

Logs come as the container runtime, a log shipper or a person kept them: with prefixes, colours,
quotes, cut lines, newest line first, megabytes of chatter, and prompts that quote errors. Here
they become plain lines in time order; what they mean is not decided here.

Blocks without any needle are skipped whole, so that 200 MB take seconds and little memory.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from specdecode_operator.decide import fault_signatures as signatures

BLOCK_CHARACTERS = 1 << 18
MAX_LINE_CHARACTERS = 1 << 20  # of a longer line the middle is dropped

_LEVELS = "TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL"
_ERROR_LEVELS = frozenset({"ERROR", "CRITICAL", "FATAL", "E", "F", "C"})
_QUIET_LEVELS = frozenset(
    {"TRACE", "DEBUG", "INFO", "NOTICE", "WARNING", "WARN", "D", "I", "V", "W"}
)

_ANSI = re.compile(
    r"(?:\x1b|\\x1b|\\u001b|\\e|\\033|#033|\^\[)"
    r"(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])",
    re.IGNORECASE,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_CRI = re.compile(r"^\d{4}-\d\d-\d\dT\S+ (?P<stream>stdout|stderr) (?P<tag>[FP])(?::\S*)? ?")
_CRI_PARTIAL = re.compile(r" std(?:out|err) P")
_STAMP = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
# Tried again and again at the front of a line until none fits.
_PREFIX = re.compile(
    r"(?:"
    r"\((?P<process>[^()]{1,80}?\bpid=\d+[^()]{0,80})\)"  # vLLM, Ray
    rf"|(?P<level>{_LEVELS}) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?"
    r" (?:\[[^\]]{1,120}\]|[\w./]+:\d+\])"
    rf"|(?P<uvicorn>{_LEVELS}):[ \t]*(?=[ \t]|$)"
    r"|\[(?P<rank>(?:default|rank)\d+)\]:?"  # torchrun
    r"|\[(?P<c10>[EWIF])(?:\d{3,4} \d\d:\d\d:\d\d\.\d+)? [\w./]+:\d+\]"  # PyTorch's C++
    r"|(?P<glog>[EWIFD])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\]"
    rf"|\[{_STAMP} (?P<ray>[EWIFDC]) \d+ \d+\](?: \([^)]*\))? \S+:\d+:"  # Ray's C++
    rf"|\[{_STAMP}(?P<scheduler>(?: [A-Z]{{2,3}}\d+){{0,4}})\]"  # SGLang
    r"|\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]|\[(?:TRT-LLM|TensorRT-LLM)\]|\[RANK (?P<mpi>\d+)\]"
    rf"|\[(?P<tag>[EWIVFD]|{_LEVELS})\]"
    r"|\[(?:pod|container)/\S+\]"  # kubectl logs --prefix
    rf"|{_STAMP}(?: (?:- )?(?:[\w.]{{1,60}} (?:- )?)?(?P<stamped>{_LEVELS})\b(?: -|:)?)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ (?=kernel:|\S+\[\d+\]:)"  # syslog
    r"|(?P<kernel>kernel:)|\[ *\d+\.\d{6}\]"
    r")(?: |$|(?=\[))"
)
_CLOCK = re.compile(r"(?:(?P<month>\d\d)[-/](?P<day>\d\d)[T ]|\b)(?P<time>\d\d:\d\d:\d\d)\b")
_JSON_MESSAGES = ("message", "msg", "log", "event", "text", "body")
_JSON_LEVELS = ("level", "levelname", "severity", "log.level")
_JSON_REQUESTS = ("prompt", "messages", "prompt_token_ids", "sampling_params")
_OPEN_PROMPT = re.compile(
    r"(?:received request|generated response)\b.*?(?:prompt|output)['\"]?\s*[:=]\s*"
    r"(?P<quote>['\"])",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class LogLine:
    """One line without its prefixes.

    `process` is the name in the prefix ("Worker_TP1 pid=168", "rank0", "TP5", "kernel"), empty
    where there is none. `indent` counts the blanks between the prefix and the text.
    """

    text: str
    process: str = ""
    level: str = ""
    indent: int = 0
    number: int = 0

    @property
    def is_error_level(self) -> bool:
        """Tell whether the line was logged as an error."""
        return self.level in _ERROR_LEVELS

    @property
    def is_quiet_level(self) -> bool:
        """Tell whether the line was logged as a warning or less."""
        return self.level in _QUIET_LEVELS

    @property
    def is_server(self) -> bool:
        """Tell whether the API server wrote the line, whose exceptions end one request each."""
        return self.process.startswith(("APIServer", "ApiServer"))


def read_lines(blocks: Iterable[str]) -> Iterator[LogLine]:
    """Yield the lines worth judging, oldest first; code, requests and noise are still among them.

    A skipped stretch of log in which the engine made tokens leaves the last such line behind.
    """
    whole = _whole_lines(blocks)
    first = next(whole, "")
    if is_newest_first(first):
        lines = [line for block in (first, *whole) for line in block.split("\n")]
        return _Reader().read(["\n".join(reversed(lines))])
    return _Reader().read(itertools.chain([first], whole))


def to_blocks(text: str) -> Iterator[str]:
    """Cut a text into blocks as they would come from a file."""
    return (text[at : at + BLOCK_CHARACTERS] for at in range(0, len(text), BLOCK_CHARACTERS))


def is_newest_first(head: str) -> bool:
    """Tell whether a log's beginning runs backwards in time.

    Clock steps vote, and so do a traceback below its own frames and an orderly shutdown on top;
    kernel lines do not, their clock is another one.
    """
    forwards = backwards = 0
    previous_clock = ""
    previous_line = ""
    for raw in head[:BLOCK_CHARACTERS].split("\n")[:2000]:
        if "kernel:" in raw:
            continue
        match = _CLOCK.search(raw[:200])
        if match:
            clock = f"{match['month'] or ''}{match['day'] or ''} {match['time']}"
            if previous_clock and len(clock) == len(previous_clock) and clock != previous_clock:
                forwards += clock > previous_clock
                backwards += clock < previous_clock
            previous_clock = clock
        if "Traceback (most recent call last)" in raw and 'File "' in previous_line.replace(
            "\\", ""
        ):
            backwards += 1
        if (
            'File "' in raw.replace("\\", "")
            and "Traceback (most recent call last)" in previous_line
        ):
            forwards += 1
        if "Shutting down" in raw and "Waiting for application shutdown" in previous_line:
            backwards += 1
        previous_line = raw
    return backwards >= 2 and backwards > 3 * forwards


def clean(raw: str, number: int = 0) -> list[LogLine]:
    """Return a line without colours, quotes, control characters and prefixes.

    A quoted or structured line may hold several, a traceback for instance.
    """
    text = _CONTROL.sub("", _ANSI.sub("", raw)).rstrip()
    level = ""
    if text[:1] == '"' and text[-1:] == '"':
        text = _unquote(text)
    if text[:1] == "{" and text[-1:] == "}":
        text, level = _from_json(text)
    lines = (_strip_prefixes(each, level, number) for each in text.split("\n"))
    return [line for line in lines if line.text]


def _strip_prefixes(text: str, level: str, number: int) -> LogLine:
    process = ""
    at = 0
    while at < len(text) and (match := _PREFIX.match(text, at)):
        groups = match.groupdict()
        process = _process_of(groups) or process
        level = _level_of(groups) or level
        at = match.end()
        if groups["uvicorn"]:
            at = len(text) - len(text[at:].lstrip())
    body = text[at:].strip()
    return LogLine(body, process, level, len(text[at:].rstrip()) - len(body), number)


def _process_of(groups: dict[str, str | None]) -> str:
    if groups["kernel"]:
        return "kernel"
    if groups["mpi"]:
        return f"rank{groups['mpi']}"
    return (groups["process"] or groups["rank"] or groups["scheduler"] or "").strip()


def _level_of(groups: dict[str, str | None]) -> str:
    names = ("level", "uvicorn", "c10", "glog", "ray", "tag", "stamped")
    return next((found for name in names if (found := groups[name])), "").upper()


def _unquote(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text[1:-1].replace('\\"', '"')
    return value if isinstance(value, str) else text


def _from_json(text: str) -> tuple[str, str]:
    """Return the message and the level of a structured line; a request's body becomes nothing."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text, ""
    if not isinstance(fields, dict) or any(key in fields for key in _JSON_REQUESTS):
        return "", ""
    message = next((fields[k] for k in _JSON_MESSAGES if isinstance(fields.get(k), str)), "")
    level = next((fields[k] for k in _JSON_LEVELS if isinstance(fields.get(k), str)), "")
    return message.strip("\n"), level.upper()


def _whole_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Regroup chunks so that each ends with the end of a line; keep the ends of endless lines."""
    rest = ""
    for chunk in chunks:
        end = chunk.rfind("\n")
        if end < 0:
            rest += chunk
            if len(rest) > MAX_LINE_CHARACTERS:
                half = MAX_LINE_CHARACTERS // 2
                rest = rest[:half] + rest[-half:]
            continue
        yield rest + chunk[:end]
        rest = chunk[end + 1 :]
    if rest:
        yield rest


def _has_needle(low: str) -> bool:
    return any(needle in low for needle in signatures.NEEDLES)


@dataclass
class _Reader:
    """The little that must be remembered from line to line."""

    number: int = 0
    partial: dict[str, str] = field(default_factory=dict)
    prompt_quote: str = ""

    def read(self, blocks: Iterable[str]) -> Iterator[LogLine]:
        for block in blocks:
            # A wide encoding, read as if it were UTF-8, has a NUL beside each letter.
            text = block.replace("\x00", "") if "\x00" in block else block
            yield from self._skip(text) if self._is_dull(text) else self._read_block(text)
        for rest in self.partial.values():
            yield from clean(rest, self.number)

    def _is_dull(self, block: str) -> bool:
        if self.partial or self.prompt_quote or _CRI_PARTIAL.search(block):
            return False
        return not _has_needle(block.lower())

    def _skip(self, block: str) -> Iterator[LogLine]:
        self.number += block.count("\n") + 1
        self._watch_prompt(block[max(0, block.rfind("Received request")) :])
        at = block.rfind("throughput")
        if at >= 0:
            line = block[block.rfind("\n", 0, at) + 1 : at + 60].partition("\n")[0]
            yield from clean(line, self.number)

    def _read_block(self, block: str) -> Iterator[LogLine]:
        for raw in block.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
            self.number += 1
            whole = self._join(raw)
            if whole is None or self._is_prompt(whole):
                continue
            low = whole.lower()
            if "throughput" in low or _has_needle(low):
                yield from clean(whole, self.number)

    def _join(self, raw: str) -> str | None:
        """Put the parts of a line together that the container runtime split."""
        match = _CRI.match(raw)
        if not match:
            return raw
        stream = match["stream"]
        text = self.partial.pop(stream, "") + raw[match.end() :]
        if match["tag"] == "P" and len(text) <= MAX_LINE_CHARACTERS:
            self.partial[stream] = text
            return None
        return text

    def _is_prompt(self, raw: str) -> bool:
        """Tell whether a line continues a request that an earlier line began to quote."""
        if self.prompt_quote:
            if not _PREFIX.match(_ANSI.sub("", raw)):
                if re.search(rf"{self.prompt_quote}\s*(?:[,)}}\]]|$)", raw):
                    self.prompt_quote = ""
                return True
            self.prompt_quote = ""
        self._watch_prompt(raw)
        return False

    def _watch_prompt(self, text: str) -> None:
        if "eceived request" not in text and "enerated response" not in text:
            return
        match = _OPEN_PROMPT.search(text)
        if match and not re.search(rf"{match['quote']}\s*[,)}}\]]", text[match.end() :]):
            self.prompt_quote = match["quote"]
