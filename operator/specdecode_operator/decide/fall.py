"""From terminated engines to fault records, and to the fall to speculation off.

Each termination is answered once: it is known by pod uid, container and restart count, and what
was answered is kept in status while the pod is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from specdecode_operator.api.v1alpha1 import (
    FallStatus,
    FaultRecord,
    FaultsStatus,
    HandledTermination,
    OnIllegalMemoryAccess,
    QuarantineEntry,
    Spec,
    Status,
)
from specdecode_operator.decide import faults
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.decision import Event, EventType
from specdecode_operator.domain.evidence import (
    FaultAction,
    FaultClass,
    FaultContext,
)
from specdecode_operator.domain.observation import ObservedPod, ObservedRevision

MOST_QUARANTINED: Final = 16


@dataclass(frozen=True)
class Answer:
    """What the new terminations of one pass lead to."""

    faults: FaultsStatus
    quarantine: list[QuarantineEntry]
    fall: FallStatus | None
    events: tuple[Event, ...]
    crashed: tuple[FaultRecord, ...]


def answer_terminations(
    *,
    spec: Spec,
    status: Status,
    pods: Sequence[ObservedPod],
    revisions: Mapping[str, ObservedRevision],
    serving: str | None,
    now: datetime,
) -> Answer:
    """Classify what ended since the last pass, and fall where it was an illegal memory access."""
    state = Answer(
        faults=status.faults,
        quarantine=list(status.quarantine),
        fall=status.fall,
        events=(),
        crashed=(),
    )
    for pod in pods:
        if pod.termination is not None and not is_handled(status.faults, pod):
            state = _answer(state, pod, spec, revisions, serving, now)
    return _forget_gone(state, pods)


def is_handled(known: FaultsStatus, pod: ObservedPod) -> bool:
    """Tell whether the pod's latest termination was answered already."""
    ended = pod.termination
    return ended is not None and any(
        h.pod_uid == pod.uid
        and h.container == ended.container
        and h.restart_count >= ended.restart_count
        for h in known.handled
    )


def _answer(
    state: Answer,
    pod: ObservedPod,
    spec: Spec,
    revisions: Mapping[str, ObservedRevision],
    serving: str | None,
    now: datetime,
) -> Answer:
    ended = pod.termination
    assert ended is not None
    revision = revisions.get(pod.revision)
    speculation = revision is not None and revision.inputs.speculation is not None
    in_flight = serving is not None and pod.revision != serving
    verdict = faults.classify(ended.evidence)
    action = faults.choose_action(
        verdict,
        FaultContext(
            speculation=speculation,
            ever_ready=ended.evidence.ever_ready,
            change_in_flight=in_flight,
        ),
    )
    if (
        action is FaultAction.SPEC_OFF
        and spec.faults.on_illegal_memory_access is OnIllegalMemoryAccess.REPORT
    ):
        action = FaultAction.REPORT
    memory_fault = verdict.fault_class is FaultClass.ILLEGAL_MEMORY_ACCESS
    if action is FaultAction.REVERT_CHANGE and not (memory_fault and speculation):
        action = FaultAction.REPORT  # only quarantine takes a change back: say no more than is done
    record = _record(pod, verdict.fault_class, action, verdict.line, now)
    handled = HandledTermination(
        pod_uid=pod.uid, container=ended.container, restart_count=ended.restart_count
    )
    if action is FaultAction.NONE:
        return _with_faults(state, handled=handled, record=None)
    state = _with_faults(state, handled=handled, record=record)
    state = _tell(state, record, speculation)
    if memory_fault and action in (FaultAction.SPEC_OFF, FaultAction.REVERT_CHANGE):
        state = _quarantine(state, record, revision, now)
    if action is FaultAction.SPEC_OFF and state.fall is None:
        state = _fall(state, record, spec, now)
    return state


def _record(
    pod: ObservedPod,
    fault_class: FaultClass,
    action: FaultAction,
    line: str | None,
    now: datetime,
) -> FaultRecord:
    ended = pod.termination
    assert ended is not None
    end = ended.evidence.termination
    uptime = (
        (end.finished_at - end.started_at).total_seconds()
        if end and end.finished_at and end.started_at
        else None
    )
    return FaultRecord(
        pod=pod.name,
        pod_uid=pod.uid,
        container=ended.container,
        restart_count=ended.restart_count,
        revision=pod.revision,
        node=pod.node,
        fault_class=fault_class,
        action=action,
        line=faults.redact(line or ""),
        exit_code=end.exit_code if end else None,
        uptime_seconds=uptime,
        at=(end.finished_at if end else None) or now,
    )


def _with_faults(
    state: Answer, *, handled: HandledTermination, record: FaultRecord | None
) -> Answer:
    counts = dict(state.faults.counts)
    if record is not None:
        counts[record.fault_class] = counts.get(record.fault_class, 0) + 1
    others = [
        h
        for h in state.faults.handled
        if (h.pod_uid, h.container) != (handled.pod_uid, handled.container)
    ]
    updated = FaultsStatus(
        counts=counts, last=record or state.faults.last, handled=[*others, handled]
    )
    crashed = (*state.crashed, record) if record else state.crashed
    return replace(state, faults=updated, crashed=crashed)


def _tell(state: Answer, record: FaultRecord, speculation: bool) -> Answer:
    on = "on" if speculation else "off"
    uptime = "" if record.uptime_seconds is None else f" after {record.uptime_seconds:.0f} s"
    event = Event(
        reason="EngineFault",
        message=f"pod {record.pod} ended{uptime} with speculation {on}: {record.fault_class} "
        f"(exit code {record.exit_code}, restart {record.restart_count}), "
        f"answer {record.action}: {record.line or 'no fatal line found'}",
        type=EventType.WARNING,
    )
    return _with_event(state, event)


def _quarantine(
    state: Answer, record: FaultRecord, revision: ObservedRevision | None, now: datetime
) -> Answer:
    fingerprint = levers.fingerprint_of(revision.inputs) if revision else None
    if fingerprint is None or any(q.fingerprint == fingerprint for q in state.quarantine):
        return state
    entry = QuarantineEntry(
        fingerprint=fingerprint, revision=record.revision, at=now, evidence=record
    )
    event = Event(
        reason="Quarantined",
        message=f"revision {record.revision} ({fingerprint.method}, K_max "
        f"{fingerprint.num_speculative_tokens}, {fingerprint.cudagraph_mode}, adaptive "
        f"verification {fingerprint.adaptive_verification}, {fingerprint.image}) is not "
        "started again by itself",
        type=EventType.WARNING,
    )
    kept = [*state.quarantine, entry][-MOST_QUARANTINED:]
    return _with_event(replace(state, quarantine=kept), event)


def _fall(state: Answer, record: FaultRecord, spec: Spec, now: datetime) -> Answer:
    fall = FallStatus(
        detected_at=now, from_revision=record.revision, user_levers=levers.levers_digest(spec)
    )
    event = Event(
        reason="SpeculationOff",
        message=f"illegal memory access in pod {record.pod}: K=0 on every pod now, then a "
        "rolling change to speculation off. Edit a lever of spec.speculation or the image to "
        "try again",
        type=EventType.WARNING,
    )
    return _with_event(replace(state, fall=fall), event)


def _with_event(state: Answer, event: Event) -> Answer:
    return replace(state, events=(*state.events, event))


def _forget_gone(state: Answer, pods: Sequence[ObservedPod]) -> Answer:
    alive = {pod.uid for pod in pods}
    kept = [h for h in state.faults.handled if h.pod_uid in alive]
    updated = state.faults.model_copy(update={"handled": kept})
    return replace(state, faults=updated)


def is_released(fall: FallStatus, spec: Spec) -> bool:
    """Tell whether the user edited a lever after the fall, so that one canary may try again."""
    return levers.levers_digest(spec) != fall.user_levers


def advance_fall(
    fall: FallStatus | None,
    *,
    switched: bool,
    first_spec_off: bool,
    recovered: bool,
    now: datetime,
) -> FallStatus | None:
    """Record the times of a fall as they are reached; each is set once."""
    if fall is None:
        return None
    reached = {
        "kill_switch_at": switched and fall.kill_switch_at is None,
        "spec_off_at": first_spec_off and fall.spec_off_at is None,
        "recovered_at": recovered and fall.recovered_at is None,
    }
    return fall.model_copy(update={name: now for name, is_new in reached.items() if is_new})
