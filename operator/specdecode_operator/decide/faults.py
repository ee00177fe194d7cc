"""Why an engine ended, and what to do about it.

The first fatal line in time decides; later lines are echoes. What the log and the termination
message do not tell is taken from the container's status, and where nothing is told the answer
is a crash to report: speculation is never turned off by guess.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from specdecode_operator.decide import fault_course, fault_log
from specdecode_operator.decide.fault_course import Outcome
from specdecode_operator.decide.redaction import redact as redact
from specdecode_operator.domain.evidence import (
    Classification,
    Evidence,
    FaultAction,
    FaultClass,
    FaultContext,
)

_KILLED_CODES = frozenset({137, 143})  # 128 + SIGKILL, 128 + SIGTERM
_KILLED_SIGNALS = frozenset({9, 15})
_OUTSIDE = frozenset({FaultClass.OOM_KILLED, FaultClass.PROBE_KILLED, FaultClass.EVICTED})


def classify(evidence: Evidence, *, log: Iterable[str] | None = None) -> Classification:
    """Say why the engine ended; never raises, whatever the evidence looks like.

    `log` replaces `evidence.log` where the log is too large for one text: pieces of any size.
    """
    blocks = fault_log.to_blocks(evidence.log or "") if log is None else log
    in_log = _follow(blocks, evidence)
    in_events = _follow(["\n".join(evidence.events)], evidence).decided
    for found in (in_log.decided, in_events):
        if found and found.fault_class is FaultClass.GPU_HARDWARE:
            return found
    message = evidence.termination.message if evidence.termination else ""
    told = _read_report(message)
    if told and told.fault_class is FaultClass.ILLEGAL_MEMORY_ACCESS:
        return told
    in_message = Outcome() if told else _follow([message], evidence)
    if in_log.decided:
        return in_log.decided
    if in_message.decided and not in_log.asked_to_end:
        return in_message.decided
    if in_events:
        return in_events
    return _from_status(evidence, told=told, in_log=in_log, in_message=in_message)


def choose_action(classification: Classification, context: FaultContext) -> FaultAction:
    """Say what to do about a fault of this class in this context."""
    fault_class = classification.fault_class
    revert_or_report = FaultAction.REVERT_CHANGE if context.change_in_flight else FaultAction.REPORT
    if fault_class is FaultClass.GPU_HARDWARE:
        return FaultAction.HAND_OVER
    if fault_class is FaultClass.GRACEFUL_SHUTDOWN:
        return FaultAction.NONE
    if fault_class is FaultClass.ILLEGAL_MEMORY_ACCESS:
        if context.change_in_flight and not context.ever_ready:
            return FaultAction.REVERT_CHANGE
        return FaultAction.SPEC_OFF if context.speculation else FaultAction.REPORT
    if fault_class in _OUTSIDE and context.ever_ready:
        return FaultAction.REPORT
    return revert_or_report


def _follow(blocks: Iterable[str], evidence: Evidence) -> Outcome:
    return fault_course.follow(
        fault_log.read_lines(blocks),
        ever_ready=evidence.ever_ready,
        deletion_requested=evidence.deletion_requested,
    )


def _read_report(message: str) -> Classification | None:
    """Read the plugin's own form of the message: one JSON object with a cause and its line."""
    if not message.lstrip().startswith("{"):
        return None
    try:
        fields = json.loads(message)
        fault_class = FaultClass(fields["cause"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    line, process = fields.get("line"), fields.get("process")
    return Classification(
        fault_class,
        line if isinstance(line, str) and line else None,
        process if isinstance(process, str) else "",
    )


def _from_status(
    evidence: Evidence, *, told: Classification | None, in_log: Outcome, in_message: Outcome
) -> Classification:
    """Classify what no line decides."""
    end = evidence.termination
    reason = end.reason if end else ""
    is_vague = told is None or told.fault_class is FaultClass.ENGINE_CRASH
    if told and not is_vague:
        return told
    if "Evicted" in (evidence.pod_reason, reason) or _has_event(evidence, "Evicted"):
        return _status(FaultClass.EVICTED)
    if reason == "OOMKilled":
        return _status(FaultClass.OOM_KILLED)
    if evidence.deletion_requested:
        return _status(FaultClass.GRACEFUL_SHUTDOWN)
    guess = in_log if in_log.likely else in_message
    if told or (guess.likely and not guess.only_server):
        return told or guess.likely or _status(FaultClass.ENGINE_CRASH)
    if evidence.hang:
        return _status(FaultClass.ENGINE_HANG)
    if in_log.asked_to_end or _was_killed(evidence):
        return _status(FaultClass.PROBE_KILLED)
    return guess.likely or _status(FaultClass.ENGINE_CRASH)


def _was_killed(evidence: Evidence) -> bool:
    end = evidence.termination
    if end is None or end.reason == "ContainerStatusUnknown":  # 137 is then the kubelet's filler
        return False
    return (
        end.exit_code in _KILLED_CODES
        or end.signal in _KILLED_SIGNALS
        or _has_event(evidence, "Killing", "probe")
    )


def _has_event(evidence: Evidence, *words: str) -> bool:
    return any(event.startswith(words[0]) and words[-1] in event for event in evidence.events)


def _status(fault_class: FaultClass) -> Classification:
    return Classification(fault_class, None, "pod status")
