"""Reads a crash case: one YAML file that holds what was known of one terminated engine.

Cases are how faults are talked about: a person sends one in, the classifier is tried on it.
Unknown keys are ignored, so that notes and expectations may stand beside the evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.domain.evidence import Evidence, FaultContext, Termination
from specdecode_operator.errors import PermanentError

REPEAT_MARKER = "{{logRepeat}}"
_REPEAT_CHARACTERS = 1 << 18
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


class InvalidCaseError(PermanentError):
    """The file is no crash case; the message says what to change."""


@dataclass(frozen=True)
class Case:
    """One case. `log_blocks()` is its log in pieces, `expect` what its author says of it."""

    name: str
    evidence: Evidence
    context: FaultContext
    expect: Mapping[str, Any]
    log: str
    repeat_line: str = ""
    repeat_times: int = 0

    def log_blocks(self) -> Iterator[str]:
        """Yield the log in pieces; a repeated line is never held in memory as a whole."""
        before, marker, after = self.log.partition(REPEAT_MARKER)
        yield before
        if marker:
            per_block = max(1, _REPEAT_CHARACTERS // max(1, len(self.repeat_line)))
            for done in range(0, self.repeat_times, per_block):
                yield self.repeat_line * min(per_block, self.repeat_times - done)
        yield after


def load(path: Path) -> Case:
    """Read a case file; raise InvalidCaseError with a sentence where it is none."""
    try:
        fields = yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise InvalidCaseError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidCaseError(f"{path}: not readable as YAML: {_one_line(error)}") from error
    if not isinstance(fields, Mapping):
        raise InvalidCaseError(f"{path}: expected a mapping with container, context and log")
    return parse(fields, name=path.stem)


def parse(fields: Mapping[str, Any], *, name: str) -> Case:
    """Return the case that the fields of a file describe."""
    container = _mapping(fields, "container")
    context = _mapping(fields, "context")
    repeat = _mapping(fields, "logRepeat")
    decode = _decode_escapes if fields.get("logEscapes") else str
    ever_ready = bool(context.get("everReady"))
    ended = any(container.get(key) is not None for key in ("exitCode", "signal", "reason"))
    termination = Termination(
        exit_code=_integer(container, "exitCode"),
        signal=_integer(container, "signal"),
        reason=_text(container, "reason"),
        message=decode(_text(container, "message")),
        started_at=None,
        finished_at=None,
    )
    return Case(
        name=name,
        evidence=Evidence(
            termination=termination if ended or termination.message else None,
            pod_reason=_text(fields, "podReason"),
            deletion_requested=bool(context.get("deletionRequested")),
            ever_ready=ever_ready,
            hang=bool(fields.get("hang")),
            events=tuple(str(event) for event in fields.get("events") or ()),
        ),
        context=FaultContext(
            speculation=bool(context.get("speculation")),
            ever_ready=ever_ready,
            change_in_flight=context.get("changeInFlight") is not None,
            earlier_faults_with_speculation_off=_integer(context, "earlierFaultsWithSpeculationOff")
            or 0,
        ),
        expect=_mapping(fields, "expect"),
        log=decode(_text(fields, "log")),
        repeat_line=decode(_text(repeat, "line")),
        repeat_times=_integer(repeat, "times") or 0,
    )


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML; the C parser where it is built in, for logs are long."""


def _mapping(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidCaseError(f"{key}: expected a mapping, got {type(value).__name__}")
    return value


def _integer(fields: Mapping[str, Any], key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise InvalidCaseError(f"{key}: expected a whole number, got {value!r}") from error


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    return "" if value is None else str(value)


def _decode_escapes(text: str) -> str:
    r"""Put the byte in the place of each \xNN and read the whole as UTF-8 again."""
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), text.encode("utf-8", "replace"))
    return raw.decode("utf-8", "replace")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
