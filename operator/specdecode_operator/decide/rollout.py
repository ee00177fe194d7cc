"""Which revision should run, and how many pods of each: one change at a time, one step a pass.

Everything is decided from what is there (revisions, ready pods) and from status, so that a
killed operator goes on where the cluster stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import (
    QuarantineEntry,
    RevisionInputs,
    Spec,
    Status,
    Strategy,
    Tuning,
    TuningMode,
)
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.lever import Lever
from specdecode_operator.domain.observation import ObservedPod, ObservedRevision


@dataclass(frozen=True)
class Hold:
    """A reason not to act, with a sentence for the user."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Target:
    """The revision to move to; `change` is None where nothing moves."""

    revision: str
    inputs: RevisionInputs
    change: Lever | None = None
    hold: Hold | None = None


@dataclass(frozen=True)
class Pods:
    """Pods of one revision: as its Deployment wants them, and how many of those are Ready."""

    wanted: int
    ready: int

    @property
    def not_ready(self) -> int:
        """Pods that a ReplicaSet gives up first."""
        return max(0, self.wanted - self.ready)


def count_pods(
    revisions: Sequence[ObservedRevision], pods: Sequence[ObservedPod]
) -> dict[str, Pods]:
    """Count each revision's pods; terminating ones count no more."""
    return {
        r.revision: Pods(
            wanted=r.replicas,
            ready=min(
                r.replicas,
                sum(1 for p in pods if p.revision == r.revision and p.ready and not p.deleting),
            ),
        )
        for r in revisions
    }


def find_current(
    status: Status, revisions: Sequence[ObservedRevision], counts: Mapping[str, Pods]
) -> ObservedRevision | None:
    """Return the revision that serves: the one in status, else the one with most Ready pods."""
    known = {r.revision: r for r in revisions}
    if status.active.revision in known:
        return known[status.active.revision]
    if not revisions:
        return None
    return max(revisions, key=lambda r: (counts[r.revision].ready, r.replicas, r.created_at))


def find_running_spec(
    status: Status, revisions: Sequence[ObservedRevision], pods: Sequence[ObservedPod]
) -> Spec | None:
    """Return a spec of what runs, so that a fall goes on while the user's cannot be read."""
    counts = count_pods(revisions, pods)
    current = find_current(status, revisions, counts)
    if current is None:
        return None
    return Spec(
        model=current.inputs.model,
        replicas=sum(there.wanted for there in counts.values()),
        engine=current.inputs.engine,
        speculation=current.inputs.speculation,
        tuning=Tuning(mode=TuningMode(status.mode or TuningMode.OFF)),
    )


def choose_target(
    *,
    spec: Spec,
    quarantine: Sequence[QuarantineEntry],
    falling: bool,
    refused: Hold | None,
    current: ObservedRevision | None,
    revisions: Sequence[ObservedRevision],
    counts: Mapping[str, Pods],
) -> Target | None:
    """Choose the next revision: the running one, or one change away from it.

    While falling, and as long as quarantine forbids what the user wants, it has speculation off.
    None: nothing runs and, as `refused` says, nothing may start.
    """
    wanted = levers.inputs_of(spec)
    if current is None:
        inputs = _allowed(wanted, None, quarantine, falling)
        return None if refused else Target(levers.revision_hash(inputs), inputs)
    if falling and current.inputs.speculation is not None:
        off = current.inputs.model_copy(update={"speculation": None})
        return _to_revision(off, revisions, Lever.SPECULATION, None)
    if refused:
        return Target(current.revision, current.inputs, hold=refused)
    allowed = _allowed(wanted, current.inputs, quarantine, falling)
    quarantined = [entry.fingerprint for entry in quarantine]
    step = levers.next_step(current.inputs, allowed, without=quarantined)
    if step is None:
        return Target(current.revision, current.inputs)
    change, inputs = step
    hold = _find_hold(spec, change, counts[current.revision])
    paused = spec.rollout.paused
    if hold is not None and not _is_under_way(inputs, revisions, counts, paused=paused):
        return Target(current.revision, current.inputs, hold=hold)
    return _to_revision(inputs, revisions, change, hold)


def _allowed(
    wanted: RevisionInputs,
    current: RevisionInputs | None,
    quarantine: Sequence[QuarantineEntry],
    falling: bool,
) -> RevisionInputs:
    """Return what the user wants, or the same with what quarantine allows."""
    off = wanted.model_copy(update={"speculation": None})
    if falling:
        return off
    quarantined = [entry.fingerprint for entry in quarantine]
    if levers.fingerprint_of(wanted) not in quarantined:
        return wanted
    if current is None:
        return off
    # What serves did not crash (it would fall), even where its fingerprint is the canary's own:
    # its speculation stays as it is.
    kept = wanted.model_copy(update={"speculation": current.speculation})
    return current if levers.fingerprint_of(kept) in quarantined else kept


def _to_revision(
    inputs: RevisionInputs,
    revisions: Sequence[ObservedRevision],
    change: Lever,
    hold: Hold | None,
) -> Target:
    """Name the target: an existing revision with the same inputs, else by its hash.

    Inputs are compared as read with the present models, so a field that a newer operator added
    with a default does not make another revision of the same wish.
    """
    same = next((r for r in revisions if r.inputs == inputs), None)
    name = same.revision if same else levers.revision_hash(inputs)
    return Target(name, inputs, change, hold)


def _is_under_way(
    inputs: RevisionInputs,
    revisions: Sequence[ObservedRevision],
    counts: Mapping[str, Pods],
    *,
    paused: bool,
) -> bool:
    """Tell whether a held change began: a paused one stands still, another goes on when proven."""
    there = [counts[r.revision] for r in revisions if r.inputs == inputs]
    return any(pods.wanted if paused else pods.ready for pods in there)


def _find_hold(spec: Spec, change: Lever, serving: Pods) -> Hold | None:
    if spec.rollout.paused:
        return Hold(Reason.PAUSED, f"change of {change} waits: spec.rollout.paused is true")
    downtime = spec.replicas == 1 and serving.ready > 0
    surge = spec.rollout.strategy is Strategy.SURGE
    if downtime and not surge and not spec.rollout.allow_downtime:
        return Hold(
            Reason.TOO_FEW_REPLICAS,
            f"change of {change} waits: it would stop the only pod. Raise replicas, set "
            "rollout.strategy to Surge (needs a free GPU), or rollout.allowDowntime to true",
        )
    return None


def plan_replicas(
    *,
    target: str,
    counts: Mapping[str, Pods],
    spec: Spec,
    current: str | None,
    falling: bool = False,
) -> dict[str, int]:
    """Plan the pods wanted of each revision, one step towards `target`.

    Not-ready pods of other revisions give way first (that frees their GPUs); then ready ones,
    the canary's number first and one at a time after it, each when the one before is Ready.
    Where more than one pod is wanted, a step never takes the last Ready one. A paused change
    stands still.
    """
    wanted = {name: pods.wanted for name, pods in counts.items()} | (
        {} if target in counts else {target: 0}
    )
    # What neither serves nor is wanted (an abandoned canary) gives way first.
    others = sorted((n for n in wanted if n != target and wanted[n]), key=lambda n: n == current)
    if not others or spec.replicas == 0:
        return {name: spec.replicas if name == target else 0 for name in wanted}
    before = wanted[target]
    ready = counts[target].ready if target in counts else 0
    settled = ready >= before
    step = 1 if before else min(spec.rollout.canary_replicas, max(1, spec.replicas - 1))
    surge = spec.rollout.strategy is Strategy.SURGE and not falling
    extra = step if surge and not settled else 0
    _shrink(wanted, counts, target=target, others=others, most=spec.replicas + extra)
    grows = target if ready or falling or current not in others else current
    _grow(wanted, grows, spec.replicas)
    if spec.rollout.paused and not falling and current not in (None, target):
        return wanted
    if surge:
        if settled and any(wanted[name] for name in others):
            wanted[target] = min(spec.replicas, before + step)
        return wanted
    # A pass may have been killed between two writes: what was just taken is not taken twice.
    left = {name: Pods(wanted[name], min(wanted[name], counts[name].ready)) for name in others}
    serving = sum(pods.ready for pods in left.values())
    if falling or ready or not serving:
        for name in others:
            _move(wanted, name, target, left[name].not_ready)
    if not settled or wanted[target] > before:
        return wanted
    broken = sum(pods.not_ready for pods in left.values())
    if spec.replicas > 1:
        step = min(step, broken + max(0, ready + serving - 1))
    for name in sorted(others, key=lambda n: left[n].not_ready == 0):
        step -= _move(wanted, name, target, step)
    return wanted


def _shrink(
    wanted: dict[str, int],
    counts: Mapping[str, Pods],
    *,
    target: str,
    others: Sequence[str],
    most: int,
) -> None:
    """Take what is too many: from the others, but the last Ready pod only after the target's."""
    spare = max(0, sum(pods.ready for pods in counts.values()) - 1)
    steps = [(name, counts[name].not_ready) for name in others]
    for name in others:
        steps.append((name, min(spare, counts[name].ready)))
        spare -= steps[-1][1]
    for name, number in [*steps, *((name, wanted[name]) for name in (target, *others))]:
        surplus = sum(wanted.values()) - most
        wanted[name] -= max(0, min(number, surplus, wanted[name]))


def _grow(wanted: dict[str, int], name: str | None, replicas: int) -> None:
    missing = replicas - sum(wanted.values())
    if name is not None and missing > 0:
        wanted[name] += missing


def _move(wanted: dict[str, int], source: str, target: str, number: int) -> int:
    moved = max(0, min(number, wanted[source]))
    wanted[source] -= moved
    wanted[target] += moved
    return moved
