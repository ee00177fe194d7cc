"""One pass over one object: Observation in, Decision out.

Order: what ended → the fall → the revision → tuning → tables and arms → pods of each revision →
status. Each part is a function of its own module; this one only puts them in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from specdecode_operator.api import metadata
from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import FallStatus, Plugin, RevisionInputs, Spec
from specdecode_operator.decide import checks, fall, rollout, status, tables, tuning
from specdecode_operator.decide.facts import Facts
from specdecode_operator.decide.rollout import Hold, Pods, Target
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain import refusal
from specdecode_operator.domain.decision import (
    Action,
    Decision,
    DeleteRevision,
    EnsureService,
    Event,
    EventType,
    SetRevision,
    WriteTables,
)
from specdecode_operator.domain.observation import (
    InvalidSpec,
    Observation,
    ObservedPod,
    ObservedRevision,
)
from specdecode_operator.domain.table import KTable

SOON: Final = timedelta(seconds=0.3)
REVISIONS_KEPT: Final = 5


def decide(seen: Observation, *, cycle: timedelta) -> Decision:
    """Decide what one object needs now; never raises on what users or engines can send."""
    spec = seen.target.spec
    if not isinstance(spec, InvalidSpec):
        return _to_decision(seen, spec, _gather(seen, spec, cycle), cycle)
    running = rollout.find_running_spec(seen.target.status, seen.revisions, seen.pods)
    facts = _gather(seen, running, cycle) if running is not None else None
    if running is not None and facts is not None and facts.fall is not None:
        return _to_decision(seen, running, facts, cycle)
    return Decision(status=status.build_invalid_status(seen, spec), requeue_after=cycle)


def _to_decision(seen: Observation, spec: Spec, facts: Facts, cycle: timedelta) -> Decision:
    tables_and_arms = _plan_tables(seen, facts)
    revisions = _plan_revisions(seen, facts)
    return Decision(
        status=status.build_status(seen, spec, facts),
        urgent=tables_and_arms if facts.fall is not None else (),
        actions=(() if facts.fall is not None else tables_and_arms) + revisions,
        events=facts.events,
        faults=tuple(record.fault_class for record in facts.answer.crashed),
        requeue_after=_choose_requeue(seen, facts, cycle),
    )


def _gather(seen: Observation, spec: Spec, cycle: timedelta) -> Facts:
    """Work out everything that the status and the actions are made from."""
    stored = seen.target.status
    counts = rollout.count_pods(seen.revisions, seen.pods)
    by_name = {r.revision: r for r in seen.revisions}
    current = rollout.find_current(stored, seen.revisions, counts)
    answer = fall.answer_terminations(
        spec=spec,
        status=stored,
        pods=seen.pods,
        revisions=by_name,
        serving=current.revision if current else None,
        now=seen.now,
    )
    refused = _find_refusal(seen, spec)
    halfway = refused is not None or _is_speculating(seen.pods, by_name, current)
    falling, released = (answer.fall, ()) if halfway else _release(answer.fall, spec)
    target = rollout.choose_target(
        spec=spec,
        quarantine=answer.quarantine,
        falling=falling is not None,
        refused=refused,
        current=current,
        revisions=seen.revisions,
        counts=counts,
    )
    serving, inputs = _find_serving(target, current, counts, spec, falling)
    replicas = _plan_replicas(target, current, counts, spec, falling)
    rolling = _is_rolling(target, serving, replicas)
    tuned = tuning.tune(
        seen, spec, inputs=inputs, falling=falling is not None, rolling=rolling, cycle=cycle
    )
    live = checks.find_no_live_control(inputs)
    arms = _choose_arms(seen.pods, by_name, serving, falling is not None)
    wanted_tables = tables.plan_tables(
        stable=tuned.table,
        canary=_canary_table(seen, spec, target, serving),
        enabled=falling is None,
        reason=_table_reason(falling, tuned),
        observed=seen.tables,
        least_generation=stored.active.table_generation or 0,
        now=seen.now,
    )
    return Facts(
        answer=answer,
        fall=_advance_fall(falling, seen, arms, serving, by_name, spec, counts),
        refused=refused,
        target=target,
        counts=counts,
        replicas=replicas,
        serving=serving,
        inputs=inputs,
        rolling=rolling,
        tuning=tuned,
        arms=arms,
        tables=wanted_tables,
        live=live,
        acknowledged=sum(
            tables.is_acknowledged(seen.acknowledgements.get(pod), arm, wanted_tables)
            for pod, arm in arms.items()
        ),
        events=(
            *answer.events,
            *released,
            *tuned.events,
            *_rollout_events(seen, target),
            *_plugin_events(seen, serving, inputs),
        ),
    )


def _is_speculating(
    pods: Sequence[ObservedPod],
    revisions: Mapping[str, ObservedRevision],
    current: ObservedRevision | None,
) -> bool:
    """Tell whether a fall still has pods to replace: it is not released half way."""
    there = {pod.revision for pod in pods if not pod.deleting}
    left = [r for name, r in revisions.items() if name in there or r is current]
    return any(r.inputs.speculation is not None for r in left)


def _release(falling: FallStatus | None, spec: Spec) -> tuple[FallStatus | None, tuple[Event, ...]]:
    if falling is not None and fall.is_released(falling, spec):
        event = Event(
            "Released", "a lever was edited after the fall: speculation may start through a canary"
        )
        return None, (event,)
    return falling, ()


def _find_refusal(seen: Observation, spec: Spec) -> Hold | None:
    if isinstance(seen.target.spec, InvalidSpec):
        return Hold(Reason.INVALID_SPEC, "; ".join(seen.target.spec.problems))
    if not spec.engine.image:
        return Hold(
            Reason.IMAGE_NOT_SET,
            "spec.engine.image is not set: build the engine image from vllm-image/ and name it",
        )
    # What cannot be rendered may be refused already, in the same words.
    problems = dict.fromkeys([*refusal.find_refusals(spec), *filter(None, [seen.unrenderable])])
    return Hold(Reason.INVALID_SPEC, " ".join(problems)) if problems else None


def _find_serving(
    target: Target | None,
    current: ObservedRevision | None,
    counts: Mapping[str, Pods],
    spec: Spec,
    falling: FallStatus | None,
) -> tuple[str, RevisionInputs]:
    """Return the revision that serves after this pass: the target once it has all the pods.

    While falling it need not be Ready: there is no way back to what it replaced.
    """
    if target is None:
        return (
            ("", levers.inputs_of(spec))
            if current is None
            else (
                current.revision,
                current.inputs,
            )
        )
    if current is None or target.revision == current.revision:
        return target.revision, target.inputs
    there = counts.get(target.revision)
    others = sum(pods.wanted for name, pods in counts.items() if name != target.revision)
    ready = there is not None and (there.ready >= spec.replicas or falling is not None)
    done = ready and others == 0
    if done or spec.replicas == 0:
        return target.revision, target.inputs
    return current.revision, current.inputs


def _plan_replicas(
    target: Target | None,
    current: ObservedRevision | None,
    counts: Mapping[str, Pods],
    spec: Spec,
    falling: FallStatus | None,
) -> dict[str, int]:
    if target is None:
        return {}
    return rollout.plan_replicas(
        target=target.revision,
        counts=counts,
        spec=spec,
        current=current.revision if current else None,
        falling=falling is not None,
    )


def _is_rolling(target: Target | None, serving: str, replicas: Mapping[str, int]) -> bool:
    if target is None:
        return False
    return target.revision != serving or any(n for r, n in replicas.items() if r != serving)


def _choose_arms(
    pods: Sequence[ObservedPod],
    revisions: Mapping[str, ObservedRevision],
    serving: str,
    falling: bool,
) -> dict[str, str]:
    """Choose the arm of each pod that can follow one; while falling all are switched off."""
    arms: dict[str, str] = {}
    for pod in pods:
        revision = revisions.get(pod.revision)
        if revision is None or revision.inputs.speculation is None or pod.deleting:
            continue
        if revision.inputs.engine.plugin is Plugin.NONE:
            continue  # nobody there reads it
        moving = metadata.ARM_CANARY if pod.revision != serving else metadata.ARM_STABLE
        arms[pod.name] = metadata.ARM_OFF if falling else moving
    return arms


def _canary_table(
    seen: Observation, spec: Spec, target: Target | None, serving: str
) -> KTable | None:
    """While another revision comes in: the table that it will have when it serves."""
    if target is None or target.revision == serving or target.inputs.speculation is None:
        return None
    return tuning.find_table(seen, spec, target.inputs)


def _table_reason(falling: FallStatus | None, tuned: tuning.TuningResult) -> str:
    if falling is not None:
        return "kill switch: illegal memory access"
    return f"experiment {tuned.experiment.id}" if tuned.experiment else "in force"


def _advance_fall(
    falling: FallStatus | None,
    seen: Observation,
    arms: Mapping[str, str],
    serving: str,
    revisions: Mapping[str, ObservedRevision],
    spec: Spec,
    counts: Mapping[str, Pods],
) -> FallStatus | None:
    switched = all(pod.arm == metadata.ARM_OFF for pod in seen.pods if pod.name in arms) and not (
        seen.tables and seen.tables.stable and seen.tables.stable.enabled
    )
    off = [name for name, r in revisions.items() if r.inputs.speculation is None]
    ready = sum(counts[name].ready for name in off)
    return fall.advance_fall(
        falling,
        switched=switched,
        first_spec_off=any(pod.revision in off for pod in seen.pods),
        recovered=ready >= spec.replicas and serving in off,
        now=seen.now,
    )


def _rollout_events(seen: Observation, target: Target | None) -> tuple[Event, ...]:
    stored = seen.target.status.rollout
    if target is None or target.change is None:
        return ()
    if stored is not None and stored.to_revision == target.revision:
        return ()
    source = seen.target.status.active.revision or "nothing"
    return (
        Event(
            "RollingOut", f"{target.change}: revision {source} → {target.revision}, canary first"
        ),
    )


def _plugin_events(seen: Observation, serving: str, inputs: RevisionInputs) -> tuple[Event, ...]:
    """Say once what is lost where a revision without the plugin begins to serve."""
    is_new = serving not in ("", seen.target.status.active.revision)
    lost = checks.find_no_live_control(inputs)
    if not is_new or lost is None or inputs.engine.plugin is not Plugin.NONE:
        return ()
    return (Event("WithoutPlugin", lost.message, EventType.WARNING),)


def _plan_tables(seen: Observation, facts: Facts) -> tuple[Action, ...]:
    """Plan the ConfigMap and the pods' annotations; the kill switch's annotations go first."""
    wanted = facts.tables
    if facts.fall is None and not facts.tuning.asked:
        return ()  # an urgent pass has not asked the engines: everybody would look unacknowledged
    write: tuple[Action, ...] = ()
    if facts.serving and (wanted.changed or seen.tables is None):
        write = (WriteTables(wanted.stable, wanted.canary, wanted.written_at),)
    annotate = tables.plan_annotations(
        pods=seen.pods,
        arms=facts.arms,
        acknowledgements=seen.acknowledgements,
        tables=wanted,
        now=seen.now,
    )
    return (*annotate, *write) if facts.fall is not None else (*write, *annotate)


def _plan_revisions(seen: Observation, facts: Facts) -> tuple[Action, ...]:
    """Plan the Deployments: the target first (its pod waits Pending), then the others."""
    if facts.target is None:
        return ()
    target = facts.target
    by_name = {r.revision: r for r in seen.revisions}
    order = sorted(facts.replicas, key=lambda name: (name != target.revision, name))
    actions: list[Action] = [EnsureService()]
    for name in order:
        there = by_name.get(name)
        inputs = there.inputs if there else target.inputs
        actions.append(
            SetRevision(name, inputs, facts.replicas[name], there.template if there else None)
        )
    idle = sorted(
        (r for r in seen.revisions if not r.replicas and not facts.replicas.get(r.revision)),
        key=lambda r: r.created_at,
        reverse=True,
    )
    gone = [r for r in idle[REVISIONS_KEPT:] if r.revision != facts.serving]
    kept = [
        a
        for a in actions
        if not isinstance(a, SetRevision) or a.revision not in {r.revision for r in gone}
    ]
    return (*kept, *(DeleteRevision(r.revision) for r in gone))


def _choose_requeue(seen: Observation, facts: Facts, cycle: timedelta) -> timedelta:
    """Come back soon while engines still have to take a table, else with the cycle."""
    due = [cycle]
    if facts.tuning.requeue_after is not None:
        due.append(facts.tuning.requeue_after)
    waiting = facts.live is None and facts.acknowledged < sum(
        1 for pod in seen.pods if pod.name in facts.arms and pod.ready
    )
    if waiting:
        bump = tables.next_bump(facts.tables.written_at, seen.now)
        due.append(SOON if bump is not None else timedelta(seconds=5))
    if facts.fall is not None and facts.fall.recovered_at is None:
        due.append(timedelta(seconds=1))
    return min(due)
