"""One walk over a log's lines that ends at the first fatal one.

The difficulty is not to find errors but to tell which of them ended the engine: a request's
exception is survived, "EngineCore encountered a fatal error" names no cause, ranks and servers
repeat each other, and a shutdown that was asked for ends in tracebacks too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from specdecode_operator.decide import fault_signatures as signatures
from specdecode_operator.decide.fault_log import LogLine
from specdecode_operator.decide.fault_signatures import Signature, Weight
from specdecode_operator.domain.evidence import Classification, FaultClass

_NEAR_LINES = 3  # a traceback this close behind a marker belongs to it
_CODE_LINES = 8  # a frame shows no more source lines than this
_SIGNS_OF_LIFE = 2  # the first may be the average of the time before the error


@dataclass(frozen=True)
class Finding:
    """A line and what it means."""

    fault_class: FaultClass
    line: LogLine

    def to_classification(self) -> Classification:
        """Return the finding as the classifier's answer."""
        return Classification(self.fault_class, self.line.text, self.line.process)


@dataclass(frozen=True)
class Outcome:
    """What a walk found.

    `decided` ended the engine for sure. `likely` is the best guess where nothing is sure: an
    exception that nobody called fatal, or a line that says no more than that something died.
    `only_server` marks a guess from the API server, which survives the exceptions of requests.
    """

    decided: Classification | None = None
    likely: Classification | None = None
    only_server: bool = False
    asked_to_end: bool = False


def follow(
    lines: Iterable[LogLine], *, ever_ready: bool = False, deletion_requested: bool = False
) -> Outcome:
    """Return what ended the engine according to its lines, oldest first."""
    course = _Course(ever_ready=ever_ready, deletion_requested=deletion_requested)
    lines = iter(lines)
    for line in lines:
        found = course.hear(line)
        if found or (course.asked_to_end and deletion_requested):
            earlier = _find_earlier(lines, found.line if found else line)
            return course.end(earlier or found)
    return course.end(None)


def _find_earlier(lines: Iterable[LogLine], limit: LogLine) -> Finding | None:
    """Return the cause that a process told late, by its own clock, in the rest of the log.

    Each rank's output is buffered by itself: the rank that failed first may be printed last.
    """
    earliest: Finding | None = None
    for line in lines:
        clock, before = line.clock, (earliest.line if earliest else limit).clock
        if clock is None or before is None or clock >= before:
            continue
        signature = find_signature(line)
        if signature and signature.weight is Weight.CAUSE:
            earliest = Finding(signature.fault_class, line)
    return earliest


def find_signature(line: LogLine) -> Signature | None:
    """Return the first signature in the line, None where it only talks about one."""
    for signature in signatures.SIGNATURES:
        match = signature.spelling.search(line.text, line.low)
        if match is None:
            continue
        if line.is_quiet_level and not signature.any_level:
            continue
        return None if is_talk(line, match) else signature
    return None


def is_talk(line: LogLine, match: re.Match[str]) -> bool:
    """Tell whether a line quotes, explains or raises an error rather than reports one."""
    before, after = line.text[: match.start()], line.text[match.end() :]
    if signatures.REQUEST_BEFORE.search(before) or signatures.REQUEST_AFTER.search(after):
        return True
    if signatures.CODE.search(line.text):
        return True
    names = {name.lower().replace("_", "") for name in signatures.ERROR_NAMES.findall(line.text)}
    if len(names) > 1:  # a table of error codes
        return True
    if line.is_error_level or signatures.EXCEPTION.match(line.text):
        return False
    return bool(signatures.HELP_BEFORE.search(before) or signatures.HELP_AFTER.search(after))


@dataclass
class _Course:
    """What was heard so far and may still turn out to matter."""

    ever_ready: bool
    deletion_requested: bool
    asked_to_end: bool = False
    engine_error: Finding | None = None  # not yet called fatal
    server_error: Finding | None = None
    held: Finding | None = None  # fatal unless the engine lives on
    marker: LogLine | None = None  # something died, cause unknown
    unsettled: LogLine | None = None  # a marker whose traceback may follow
    opened: set[str] = field(default_factory=set)  # processes whose next exception is fatal
    survived: set[str] = field(default_factory=set)
    frames: dict[str, LogLine] = field(default_factory=dict)
    in_config: set[str] = field(default_factory=set)
    signs_of_life: int = 0

    def hear(self, line: LogLine) -> Finding | None:
        """Take one line in; return the answer as soon as there is one."""
        if self._note_frame(line) or self._is_code(line):
            return None
        if signatures.ALIVE_HINT in line.low and signatures.ALIVE.search(line.text):
            self._note_life()
            return None
        if found := self._settle(line):
            return found
        if signatures.TRACEBACK.search(line.text):
            self._note_traceback(line)
            return None
        if self._note_end_asked(line):
            return self.held
        return self._judge(line)

    def end(self, found: Finding | None) -> Outcome:
        """Return what was found, or what is left to believe when the log is over."""
        decided = found or self.held or self._promote(self.unsettled)
        marker = self.marker or self.unsettled
        died = _crash(marker) if marker else None
        likely = self.engine_error or died or self.server_error
        return Outcome(
            decided=decided.to_classification() if decided else None,
            likely=likely.to_classification() if likely else None,
            only_server=likely is not None and likely is self.server_error,
            asked_to_end=self.asked_to_end,
        )

    def _judge(self, line: LogLine) -> Finding | None:
        signature = find_signature(line)
        fault_class = signature.fault_class if signature else FaultClass.ENGINE_CRASH
        is_unspecific = fault_class is FaultClass.ENGINE_CRASH and (
            signatures.UNSPECIFIC.search(line.text, line.low) is not None
        )
        is_late = fault_class is FaultClass.CONFIG_REFUSED and self.ever_ready
        if signature and not is_unspecific and not is_late:
            return self._weigh(line, signature)
        if self.asked_to_end:
            return None
        if is_unspecific:
            self.marker = self.marker or line
            self.opened.discard(line.process)
            return None
        if signatures.EXCEPTION.match(line.text):
            return self._hear_exception(line)
        self._note_announcement(line)
        return None

    def _weigh(self, line: LogLine, signature: Signature) -> Finding | None:
        found = Finding(signature.fault_class, line)
        if signature.weight is Weight.CONSEQUENCE:
            if self.asked_to_end:
                return None
            marker = self.marker or self.unsettled
            is_own = marker is None or (marker is self.unsettled and marker.process == line.process)
            died = None if marker is None or is_own else _crash(marker)
            return self.held or self.engine_error or died or found
        if self.held:
            return self.held
        if signature.fault_class is FaultClass.CUDA_OUT_OF_MEMORY:
            self.held = found
            self.signs_of_life = 0
            return None
        return found

    def _hear_exception(self, line: LogLine) -> Finding | None:
        if signatures.REQUEST_AFTER.search(line.text):
            return None
        if signatures.ECHO_EXCEPTIONS.search(line.text, line.low):
            self.unsettled = self.unsettled or line
            return None
        if line.process in self.survived:
            self.survived.discard(line.process)
            return None
        refused = not self.ever_ready and _is_refusal(line, line.process in self.in_config)
        fault_class = FaultClass.CONFIG_REFUSED if refused else FaultClass.ENGINE_CRASH
        found = Finding(fault_class, line)
        if line.process in self.opened and not line.is_quiet_level:
            return self.held or found
        self.signs_of_life = 0
        if line.is_server or line.is_quiet_level:
            self.server_error = found
        else:
            self.engine_error = found
        return None

    def _note_announcement(self, line: LogLine) -> None:
        if signatures.SURVIVED.search(line.text, line.low):
            self.survived.add(line.process)
        elif signatures.OPENERS.search(line.text, line.low):
            self.opened |= {line.process, ""}
        elif signatures.MARKERS.search(line.text, line.low) and not line.text.startswith("Killing"):
            self.unsettled = self.unsettled or line

    def _note_traceback(self, line: LogLine) -> None:
        self.in_config.discard(line.process)
        self.frames.pop(line.process, None)
        if signatures.OPENERS.search(line.text, line.low):
            self.opened |= {line.process, ""}
        elif signatures.SURVIVED.search(line.text, line.low):
            self.survived.add(line.process)

    def _settle(self, line: LogLine) -> Finding | None:
        """Decide whether the last marker spoke of what came before it or of what comes now."""
        marker = self.unsettled
        if marker is None:
            return None
        is_near = line.number - marker.number <= _NEAR_LINES
        is_traceback = signatures.TRACEBACK.search(line.text) is not None
        if is_traceback and is_near and line.process == marker.process:
            self.opened.add(marker.process)
            self.unsettled = None
            return None
        if is_near and line.process != marker.process and not _is_telling(line):
            return None
        self.unsettled = None
        self.marker = self.marker or marker
        return self._promote(marker)

    def _promote(self, marker: LogLine | None) -> Finding | None:
        if marker is None or self.asked_to_end:
            return None
        server_error = self.server_error if marker.is_server else None
        return self.held or self.engine_error or server_error

    def _note_end_asked(self, line: LogLine) -> bool:
        if not signatures.ASKED_TO_END.search(line.text, line.low) or line.is_error_level:
            return False
        is_vague = line.text.startswith("Shutting down")
        failed = self.marker or self.engine_error or self.opened
        if is_vague and (failed or not self.deletion_requested):
            return False
        self.asked_to_end = True
        return True

    def _note_life(self) -> None:
        self.signs_of_life += 1
        if self.signs_of_life >= _SIGNS_OF_LIFE and not self.asked_to_end:
            self.engine_error = self.server_error = self.held = self.marker = None
            self.opened.clear()

    def _note_frame(self, line: LogLine) -> bool:
        match = signatures.FRAME.match(line.text)
        if not match:
            return False
        self.frames[line.process] = line
        if signatures.CONFIG_FRAMES.search(match["file"]) or "config" in (match["function"] or ""):
            self.in_config.add(line.process)
        return True

    def _is_code(self, line: LogLine) -> bool:
        frame = self.frames.get(line.process)
        return (
            frame is not None
            and line.indent > frame.indent
            and line.number - frame.number <= _CODE_LINES
        )


def _is_telling(line: LogLine) -> bool:
    return (
        signatures.MARKERS.search(line.text, line.low) is not None
        or signatures.ASKED_TO_END.search(line.text, line.low) is not None
        or find_signature(line) is not None
    )


def _crash(line: LogLine) -> Finding:
    return Finding(FaultClass.ENGINE_CRASH, line)


def _is_refusal(line: LogLine, in_config: bool) -> bool:
    if signatures.REFUSING_EXCEPTIONS.match(line.text):
        return in_config or signatures.REFUSAL_WORDS.search(line.text) is not None
    return in_config and signatures.REFUSING_IN_CONFIG.match(line.text) is not None
