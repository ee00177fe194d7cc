"""The only maker of status: facts → conditions → phase, rounded and steady.

Figures are written only when they move (1 %, or every five minutes), so that an idle object
causes no writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from specdecode_operator.api import metadata
from specdecode_operator.api.conditions import ConditionType, Reason, set_condition
from specdecode_operator.api.v1alpha1 import (
    ActiveStatus,
    Condition,
    EffectiveStatus,
    EstimateStatus,
    Phase,
    Plugin,
    RolloutStatus,
    Spec,
    Status,
)
from specdecode_operator.decide.facts import Facts
from specdecode_operator.decide.rollout import Hold
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.observation import (
    Acknowledgement,
    InvalidSpec,
    Observation,
    ObservedPod,
)
from specdecode_operator.domain.table import KTable

FIGURE_MOVES: Final = 0.01
FIGURE_AGE: Final = timedelta(minutes=5)
LONGEST_MESSAGE: Final = 1024
_START_FAILURES: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
# A missing Secret, an image that runs as root, a command that is not there.
_CONTAINER_FAILURES: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)


def build_invalid_status(seen: Observation, spec: InvalidSpec) -> Status:
    """Say what is wrong with a spec that cannot be read; everything else stays as it was."""
    stored = seen.target.status
    why = Hold(Reason.INVALID_SPEC, "; ".join(spec.problems))
    conditions = list(stored.conditions)
    if not conditions:
        conditions = _put(seen, conditions, ConditionType.READY, why, status="False")
    conditions = _put(seen, conditions, ConditionType.DEGRADED, why, status="True")
    return stored.model_copy(
        update={"observed_generation": seen.target.generation, "conditions": conditions}
    )


def build_status(seen: Observation, spec: Spec, facts: Facts) -> Status:
    """Build the whole status of one pass."""
    stored = seen.target.status
    alive = [pod for pod in seen.pods if not pod.deleting]
    ready = sum(1 for pod in alive if pod.ready)
    return stored.model_copy(
        update={
            "observed_generation": seen.target.generation,
            "phase": _choose_phase(facts, ready),
            "conditions": _build_conditions(seen, spec, facts, alive, ready),
            "replicas": len(alive),
            "ready_replicas": ready,
            "ready": f"{ready}/{spec.replicas}",
            "selector": f"{metadata.LABEL_OBJECT}={seen.target.key.name}",
            "mode": spec.tuning.mode.value,
            "active": _build_active(seen, facts),
            "effective": _build_effective(seen, facts),
            "estimate": _steady(stored.estimate, facts.tuning.estimate),
            "experiment": facts.tuning.experiment,
            "rollout": _build_rollout(seen, facts),
            "tuning": facts.tuning.tuning,
            "quarantine": facts.answer.quarantine,
            "fall": facts.fall,
            "faults": facts.answer.faults,
        }
    )


def _choose_phase(facts: Facts, ready: int) -> Phase:
    if facts.fall is not None:
        if facts.fall.recovered_at is not None:
            return Phase.QUARANTINED
        return Phase.FAULT if facts.fall.kill_switch_at is None else Phase.SPEC_OFF
    if facts.rolling:
        return Phase.PROMOTE
    if facts.tuning.experiment is not None:
        return Phase.EXPERIMENT
    return Phase.IDLE if ready else Phase.PENDING


def _build_active(seen: Observation, facts: Facts) -> ActiveStatus:
    speculation = facts.inputs.speculation
    generation = _written_generation(seen, facts)
    if speculation is None or not facts.serving:
        return ActiveStatus(
            revision=facts.serving, table="off", speculation="Off", table_generation=generation
        )
    table = _table_in_force(facts)
    return ActiveStatus(
        revision=facts.serving,
        table="off" if facts.fall else table.compact(),
        k_table=table.to_rows(),
        table_generation=generation,
        num_speculative_tokens=speculation.num_speculative_tokens,
        adaptive_verification=speculation.adaptive_verification,
        cudagraph_mode=speculation.cudagraph_mode,
        speculation="Off" if facts.fall else "On",
    )


def _table_in_force(facts: Facts) -> KTable:
    """Return the live table, or the one that the serving revision was started with for good."""
    fixed = levers.fixed_table(facts.inputs) if facts.live is not None else None
    return fixed or facts.tables.stable.table


def _written_generation(seen: Observation, facts: Facts) -> int | None:
    """Return the last generation, that of this pass where it writes tables; see cycle.py."""
    stored = seen.target.status.active.table_generation
    if not facts.serving or (facts.fall is None and not facts.tuning.asked):
        return stored
    files = (facts.tables.stable, facts.tables.canary)
    return max([stored or 0, *(file.generation for file in files if file is not None)])


def _build_effective(seen: Observation, facts: Facts) -> EffectiveStatus:
    stored = seen.target.status.effective
    if not facts.tuning.asked:
        return stored
    acks: list[Acknowledgement] = [
        seen.acknowledgements[pod.name]
        for pod in seen.pods
        if pod.name in seen.acknowledgements and not pod.deleting
    ]
    return EffectiveStatus(
        table_generation=min((ack.generation for ack in acks if ack.live), default=None),
        pods_at_table=facts.acknowledged,
        pods_live=sum(1 for ack in acks if ack.live),
        cudagraph_mode=_common([ack.cudagraph_mode for ack in acks]),
        engine_version=_common([ack.engine_version for ack in acks]),
        method=_common([ack.method for ack in acks]),
    )


def _common(values: Sequence[str]) -> str:
    """Join what engines report: one value, or all of them while they differ."""
    return ",".join(sorted(set(values)))


def _build_rollout(seen: Observation, facts: Facts) -> RolloutStatus | None:
    target = facts.target
    if target is None or target.change is None or target.revision == facts.serving:
        return None
    stored = seen.target.status.rollout
    if stored is not None and stored.to_revision == target.revision:
        return stored
    return RolloutStatus(
        change=target.change,
        from_revision=facts.serving,
        to_revision=target.revision,
        started_at=seen.now,
    )


def _steady(stored: EstimateStatus, new: EstimateStatus) -> EstimateStatus:
    """Keep the stored figures while the new ones differ by less than 1 % and are young."""
    if new.measured_at is None or stored.measured_at is None:
        return new
    same_batch = stored.batch == new.batch
    pairs = (
        (stored.goodput_tokens_per_second, new.goodput_tokens_per_second),
        (stored.mean_acceptance_length, new.mean_acceptance_length),
    )
    moved = any(
        (a is None) != (b is None) or (a and b and abs(b - a) > FIGURE_MOVES * abs(a))
        for a, b in pairs
    )
    old = new.measured_at - stored.measured_at >= FIGURE_AGE
    return new if moved or old or not same_batch else stored


# ------------------------------------------------------------------------ conditions


def _build_conditions(
    seen: Observation, spec: Spec, facts: Facts, alive: Sequence[ObservedPod], ready: int
) -> list[Condition]:
    conditions = list(seen.target.status.conditions)
    told: list[tuple[ConditionType, str, Hold]] = [
        (ConditionType.READY, *_tell_ready(spec, facts, ready)),
        (ConditionType.PROGRESSING, *_tell_progressing(facts)),
        (ConditionType.SPECULATION_ENABLED, *_tell_speculation(facts)),
        (ConditionType.DEGRADED, *_tell_degraded(seen, facts, alive)),
    ]
    if facts.tuning.asked:
        told += [
            (ConditionType.METRICS_AVAILABLE, *_tell_metrics(facts, ready)),
            (ConditionType.TABLE_APPLIED, *_tell_table(seen, facts)),
            (ConditionType.TUNED, *_tell_tuned(facts)),
        ]
    for kind, status, why in told:
        conditions = _put(seen, conditions, kind, why, status=status)
    return conditions


def _put(
    seen: Observation,
    conditions: Sequence[Condition],
    kind: ConditionType,
    why: Hold,
    *,
    status: str,
) -> list[Condition]:
    condition = Condition(
        type=kind,
        status=status,
        reason=why.reason,
        message=why.message[:LONGEST_MESSAGE],
        observed_generation=seen.target.generation,
        last_transition_time=seen.now,
    )
    return list(set_condition(conditions, condition))


def _tell_ready(spec: Spec, facts: Facts, ready: int) -> tuple[str, Hold]:
    if spec.replicas == 0:
        return "True", Hold(Reason.SCALED_TO_ZERO, "no pods are wanted")
    if facts.target is None and facts.refused is not None:
        return "False", facts.refused
    enough = ready >= spec.replicas
    reason = Reason.PODS_READY if enough else Reason.PODS_NOT_READY
    return _truth(enough), Hold(reason, f"{ready} of {spec.replicas} pods are Ready")


def _tell_progressing(facts: Facts) -> tuple[str, Hold]:
    target = facts.target
    if target is not None and target.hold is not None:
        return "False", target.hold
    if facts.rolling and target is not None:
        pods = ", ".join(f"{name}: {number}" for name, number in sorted(facts.replicas.items()))
        return "True", Hold(
            Reason.ROLLING_OUT, f"{target.change or 'revision'} → {target.revision} ({pods})"
        )
    return "False", Hold(Reason.ROLLED_OUT, f"revision {facts.serving or 'none'}")


def _tell_speculation(facts: Facts) -> tuple[str, Hold]:
    speculation = facts.inputs.speculation
    if facts.fall is not None and speculation is not None:
        switch = "K=0 on every pod" if facts.live is None else "no kill switch here"
        return "False", Hold(Reason.KILL_SWITCH, f"{switch}; speculation off is rolling out")
    if speculation is None and facts.answer.quarantine:
        evidence = facts.answer.quarantine[-1].evidence
        return "False", Hold(
            Reason.QUARANTINED,
            f"off after {evidence.fault_class} in pod {evidence.pod} (revision "
            f"{evidence.revision}, exit code {evidence.exit_code}): {evidence.line}",
        )
    if speculation is None or not facts.serving:
        return "False", Hold(Reason.NOT_ASKED_FOR, "speculation is off")
    table = _table_in_force(facts).compact()
    return "True", Hold(Reason.SPECULATING, f"{speculation.method}, table {table}")


def _tell_degraded(
    seen: Observation, facts: Facts, alive: Sequence[ObservedPod]
) -> tuple[str, Hold]:
    if facts.refused is not None:
        return "True", facts.refused
    without = {r.revision for r in seen.revisions if r.inputs.speculation is None}
    for pod in alive:
        trouble = _find_trouble(pod, facts, speculating=pod.revision not in without)
        if trouble is not None:
            return "True", trouble
    if facts.fall is not None:
        last = facts.answer.faults.last
        return "True", Hold(
            Reason.ILLEGAL_MEMORY_ACCESS, last.line if last else "illegal memory access"
        )
    return "False", Hold(Reason.HEALTHY, "")


def _find_trouble(pod: ObservedPod, facts: Facts, *, speculating: bool) -> Hold | None:
    """Say in the engine's or the kubelet's own words why a pod does not come up."""
    if pod.ready:
        return None
    waiting = pod.waiting
    if waiting is not None and waiting.reason in _START_FAILURES:
        return Hold(Reason.IMAGE_PULL_FAILED, f"pod {pod.name}: {waiting.message}")
    if waiting is not None and waiting.reason in _CONTAINER_FAILURES:
        said = f"pod {pod.name}: {waiting.reason}: {waiting.message}"
        return Hold(Reason.ENGINE_START_FAILED, said)
    if pod.unschedulable:
        return Hold(Reason.UNSCHEDULABLE, f"pod {pod.name}: {pod.unschedulable}")
    last = facts.answer.faults.last
    if pod.termination is None or last is None or last.pod_uid != pod.uid:
        return None
    if last.fault_class == "illegal-memory-access":
        reason = Reason.ILLEGAL_MEMORY_ACCESS if speculating else Reason.NOT_SPECULATION
        return Hold(reason, f"pod {pod.name}: {last.line}")
    reason = Reason.ENGINE_CRASHED if pod.ever_ready else Reason.ENGINE_START_FAILED
    return Hold(
        reason,
        f"pod {pod.name}: {last.fault_class}, exit code {last.exit_code}: "
        f"{last.line or 'no fatal line in its log'}",
    )


def _tell_metrics(facts: Facts, ready: int) -> tuple[str, Hold]:
    if facts.inputs.engine.plugin is Plugin.NONE:
        return "False", Hold(
            Reason.NO_PLUGIN, "engine.plugin is None: vLLM alone does not export what is measured"
        )
    if facts.tuning.metrics is not None:
        return "False", facts.tuning.metrics
    if ready == 0:
        return "Unknown", Hold(Reason.NO_READY_PODS, "no engine is Ready")
    return "True", Hold(Reason.SCRAPED, f"{ready} pods are scraped")


def _tell_table(seen: Observation, facts: Facts) -> tuple[str, Hold]:
    if facts.live is not None:
        return "False", facts.live
    pods = [pod.name for pod in seen.pods if pod.name in facts.arms and pod.ready]
    stale = [
        name for name in pods if (a := seen.acknowledgements.get(name)) is not None and a.stale
    ]
    file = facts.tables.stable
    if stale:
        return "False", Hold(
            Reason.TABLE_REFUSED,
            f"pod {stale[0]} refused a table file and keeps the one before (stale)",
        )
    text = f"generation {file.generation} on {facts.acknowledged} of {len(pods)} pods"
    if pods and facts.acknowledged >= len(pods):
        return "True", Hold(Reason.APPLIED, text)
    not_live = [n for n in pods if (a := seen.acknowledgements.get(n)) is not None and not a.live]
    if not_live:
        return "False", Hold(
            Reason.NOT_LIVE, f"pod {not_live[0]} reports no live table: no kill switch there"
        )
    return "False", Hold(Reason.WAITING_FOR_ENGINES, text)


def _tell_tuned(facts: Facts) -> tuple[str, Hold]:
    tuned = facts.tuning
    done = tuned.reason in (Reason.CONVERGED, Reason.DOES_NOT_PAY)
    return _truth(done), Hold(tuned.reason, tuned.message)


def _truth(value: bool) -> str:
    return "True" if value else "False"
