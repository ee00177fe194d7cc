"""From the raw text of a container's log to the few lines worth judging.

Logs come as the container runtime, a log shipper or a person kept them: with prefixes, colours,
quotes, cut lines, newest line first, megabytes of chatter, and prompts that quote errors. Here
they become plain lines in time order; what they mean is not decided here.

A line is looked at closely only when its letters hold one of a few words, and a shape of chatter
is looked through once: 200 MB take seconds and little memory.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from specdecode_operator.decide import fault_signatures as signatures

BLOCK_CHARACTERS = 1 << 18
MAX_LINE_CHARACTERS = 1 << 20  # of a longer line the middle is dropped, to bound memory
MAX_TEXT_CHARACTERS = 1 << 14  # and this much of it is judged

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
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ (?:(?=kernel:)|\S+\[\d+\]:)"  # syslog
    r"|[\w.-]{1,60} +\|"  # Compose
    r"|(?P<kernel>kernel:)|\[ *\d+\.\d{6}\]"
    r")(?: |$|(?=\[))"
)
# Groups that name a process, and how; every other group is a level.
_PROCESS_NAMES = {
    "process": "{}",
    "rank": "{}",
    "scheduler": "{}",
    "mpi": "rank{}",
    "kernel": "kernel",
}
_CLOCK = re.compile(r"(?:(?P<month>\d\d)[-/](?P<day>\d\d)[T ]|\b)(?P<time>\d\d:\d\d:\d\d)\b")
_OWN_CLOCK = re.compile(
    r"(?:\[\d{4}-|[A-Z] )(?P<m1>\d\d)-(?P<d1>\d\d) (?P<t1>\d\d:\d\d:\d\d)"
    r"|\[[EWIF](?P<m2>\d{1,2})(?P<d2>\d\d) (?P<t2>\d\d:\d\d:\d\d)"
)
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
    prefix: str = ""

    @cached_property
    def clock(self) -> tuple[str, str] | None:
        """The engine's own clock, as (month and day, time of day), None where none is printed.

        A shipper's or the kernel's clock is another one and cannot be compared with it.
        """
        match = None if self.process == "kernel" else _OWN_CLOCK.search(self.prefix)
        if match is None:
            return None
        groups = match.groupdict()
        day = f"{groups['m1'] or groups['m2']:>02}-{groups['d1'] or groups['d2']}"
        return day, groups["t1"] or groups["t2"]

    @cached_property
    def low(self) -> str:
        """The text in lower case."""
        return self.text.lower()

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

    A stretch of chatter in which the engine made tokens leaves two such lines behind. A log that
    begins with its newest line is held in memory as a whole.
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
    earlier: re.Match[str] | None = None
    previous_line = ""
    for raw in head[:BLOCK_CHARACTERS].split("\n")[:2000]:
        if "kernel:" in raw:
            continue
        if match := _CLOCK.search(raw[:200]):
            step = _compare(earlier, match) if earlier else 0
            forwards += step > 0
            backwards += step < 0
            earlier = match
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


def _compare(earlier: re.Match[str], later: re.Match[str]) -> int:
    """Return the sign of the step between two clocks; the date counts where both have one."""
    names = ("month", "day", "time") if earlier["month"] and later["month"] else ("time",)
    before, after = earlier.group(*names), later.group(*names)
    return (after > before) - (after < before)


def clean(raw: str, number: int = 0) -> list[LogLine]:
    """Return a line without colours, quotes, control characters and prefixes.

    A quoted or structured line may hold several, a traceback for instance.
    """
    text = _CONTROL.sub("", _ANSI.sub("", _cut(raw, MAX_LINE_CHARACTERS))).rstrip()
    level = ""
    if text[:1] == '"' and text[-1:] == '"':
        text = _unquote(text)
    if text[:1] == "{" and text[-1:] == "}":
        text, level = _from_json(text)
    parts = (_cut(part, MAX_TEXT_CHARACTERS) for part in text.split("\n"))
    lines = (_strip_prefixes(part, level, number) for part in parts)
    return [line for line in lines if line.text]


def _strip_prefixes(text: str, level: str, number: int) -> LogLine:
    process = ""
    at = len(text) - len(text.lstrip("\ufeff\ufffd"))
    if at and not _PREFIX.match(text, at):  # broken bytes of the line's own
        at = 0
    while at < len(text) and (match := _PREFIX.match(text, at)):
        kind = match.lastgroup or ""
        value = match[kind].strip() if kind else ""
        if kind in _PROCESS_NAMES:
            process = _PROCESS_NAMES[kind].format(value) or process
        elif kind:
            level = value.upper()
        at = match.end()
        if kind == "uvicorn":
            at = len(text) - len(text[at:].lstrip())
    body = text[at:].strip()
    indent = len(text[at:].rstrip()) - len(body)
    return LogLine(body, process, level, indent, number, text[:at])


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


def _cut(text: str, most: int) -> str:
    """Keep both ends of what is too long: prefixes stand at one, errors often at the other."""
    return text if len(text) <= most else text[: most // 2] + text[-most // 2 :]


def _whole_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Regroup chunks so that each ends with the end of a line; keep the ends of endless lines."""
    rest = ""
    for chunk in chunks:
        end = chunk.rfind("\n")
        if end < 0:
            rest += chunk
            rest = _cut(rest, MAX_LINE_CHARACTERS)
            continue
        yield rest + chunk[:end]
        rest = chunk[end + 1 :]
    if rest:
        yield rest


# The shape of a line: its letters in lower case. Chatter has few shapes, whatever its figures.
_KEPT = b'abcdefghijklmnopqrstuvwxyz "_\n'
_TO_LOWER = bytes(range(256)).lower()
_DROPPED = bytes(byte for byte in range(256) if _TO_LOWER[byte] not in _KEPT)
_MAX_SHAPES = 4096
_MAX_SHAPE_BYTES = 1024
_HEAD_BYTES = 160  # where a line's own words begin, not what it quotes


def _shapes(block: str) -> list[bytes]:
    """Return the shape of each line."""
    return block.encode("utf-8", "replace").translate(_TO_LOWER, _DROPPED).split(b"\n")


@dataclass
class _Reader:
    """The little that must be remembered from line to line."""

    number: int = 0
    dull: set[bytes] = field(default_factory=set)  # shapes known to hold no needle
    lively: set[bytes] = field(default_factory=set)  # shapes of the lines that count tokens
    alive: deque[str] = field(default_factory=lambda: deque(maxlen=2))
    partial: dict[str, str] = field(default_factory=dict)
    prompt_quote: str = ""

    def read(self, blocks: Iterable[str]) -> Iterator[LogLine]:
        for block in blocks:
            # A wide encoding, read as if it were UTF-8, has a NUL beside each letter.
            text = block.replace("\x00", "") if "\x00" in block else block
            if self.partial or " stdout P" in text or " stderr P" in text:
                text = "\n".join(self._joined(text))
            yield from self._read_block(text)
        yield from self._read_block("\n".join(self.partial.values()))

    def _read_block(self, block: str) -> Iterator[LogLine]:
        shapes = _shapes(block)
        fresh = b"\n".join({*shapes} - self.dull - self.lively)
        needles = [needle for needle in signatures.NEEDLES if needle in fresh]
        for raw, shape in zip(block.split("\n"), shapes, strict=True):
            self.number += 1
            if shape in self.lively:
                self.alive.append(raw)
            elif self.prompt_quote or shape not in self.dull:
                yield from self._take(raw, shape, needles)

    def _take(self, raw: str, shape: bytes, needles: list[bytes]) -> Iterator[LogLine]:
        has_needle = any(needle in shape for needle in needles)
        is_request = shape.find(b"received request", 0, _HEAD_BYTES) >= 0
        if not has_needle and not is_request:
            self._remember(raw, shape)
        if self._is_prompt(raw) or is_request or not has_needle:
            return
        while self.alive:
            yield LogLine(self.alive.popleft(), number=self.number)
        for part in _CRI.sub("", raw).split("\r"):
            yield from clean(part, self.number)

    def _remember(self, raw: str, shape: bytes) -> None:
        is_lively = b"gen" in shape and b" throughput" in shape
        if is_lively:
            self.alive.append(raw)
        if len(shape) <= _MAX_SHAPE_BYTES and len(self.dull) < _MAX_SHAPES:
            (self.lively if is_lively else self.dull).add(shape)

    def _joined(self, block: str) -> Iterator[str]:
        wholes = (self._join(raw) for raw in block.split("\n"))
        return (whole for whole in wholes if whole is not None)

    def _join(self, raw: str) -> str | None:
        """Put the parts of a line together that the container runtime split."""
        match = _CRI.match(raw)
        if not match:
            return raw
        raw = raw.rstrip("\r")
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
        if "eceived request" in raw or "enerated response" in raw:
            match = _OPEN_PROMPT.search(raw)
            if match and not re.search(rf"{match['quote']}\s*[,)}}\]]", raw[match.end() :]):
                self.prompt_quote = match["quote"]
        return False
