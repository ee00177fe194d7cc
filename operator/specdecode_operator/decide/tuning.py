"""Which table should be in force: the user's, or in mode Auto the tuned one.

Reasons not to tune come first; with no data nothing changes; a fault, a restart change or a pause
puts an open live change back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from specdecode_operator.api import metadata
from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import (
    EstimateStatus,
    ExperimentStatus,
    RevisionInputs,
    Spec,
    Status,
    TuningMode,
    TuningStatus,
)
from specdecode_operator.decide import checks, experiment, tables
from specdecode_operator.decide.rollout import Hold
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.decision import Event
from specdecode_operator.domain.observation import (
    MetricsAbsent,
    MetricsSamples,
    Observation,
)
from specdecode_operator.domain.table import KTable
from specdecode_operator.durations import parse_duration
from specdecode_operator.errors import InvalidTableError
from specdecode_operator.estimate import counters
from specdecode_operator.estimate.counters import NoEstimate

LEAST_SAMPLE_AGE: Final = timedelta(seconds=60)
_ENDS_EXPERIMENT: Final = frozenset(
    {
        Reason.QUARANTINED,
        Reason.NOT_ASKED_FOR,
        Reason.NOT_LIVE,
        Reason.UNKNOWN_ENGINE,
        Reason.ROLLING_OUT,
        Reason.PAUSED,
    }
)


@dataclass(frozen=True)
class TuningResult:
    """The table wanted in stable.json, the tuner's memory, and what to tell.

    `asked` is false in an urgent pass, which reads no metrics: conditions about metrics and
    tuning then stay as they are.
    """

    table: KTable
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    estimate: EstimateStatus
    reason: Reason
    message: str
    asked: bool = True
    metrics: Hold | None = None
    events: tuple[Event, ...] = ()
    requeue_after: timedelta | None = None


def tune(
    seen: Observation,
    spec: Spec,
    *,
    inputs: RevisionInputs,
    falling: bool,
    rolling: bool,
    cycle: timedelta,
) -> TuningResult:
    """Choose the table in force for the serving revision's envelope.

    Samples older than a cycle (at least four scrapes) and a minute are stale.
    """
    stored = seen.target.status
    users = _users_table(seen, spec, inputs)
    present = _present_table(stored, spec, users, inputs)
    tuning = stored.tuning
    if stored.mode != spec.tuning.mode:
        # What was measured in another mode counts for nothing: count from when engines report.
        tuning = tuning.model_copy(update={"last_change_at": None})
    result = TuningResult(
        table=present,
        tuning=tuning,
        experiment=stored.experiment,
        estimate=stored.estimate,
        reason=Reason.HELD,
        message="",
    )
    if isinstance(seen.metrics, MetricsAbsent) and not seen.metrics.reason:
        result = replace(result, asked=False)
        return _put_back(result, stored, present) if falling else result
    health = _metrics_health(seen, max(LEAST_SAMPLE_AGE, cycle))
    hold = checks.first_hold(
        checks.BEFORE_TUNING,
        checks.Situation(
            spec=spec,
            inputs=inputs,
            falling=falling,
            rolling=rolling,
            ready_pods=sum(1 for pod in seen.pods if pod.ready and not pod.deleting),
            metrics=health or seen.metrics,
        ),
    )
    result = replace(result, metrics=_as_hold(health))
    is_held = hold is not None or spec.tuning.mode is TuningMode.OFF
    if is_held and isinstance(seen.metrics, MetricsSamples) and health is None:
        result = replace(result, estimate=experiment.estimate_now(seen.metrics, stored.estimate))
    if spec.tuning.mode is TuningMode.OFF:
        return replace(
            result,
            table=users,
            experiment=None,
            reason=hold.reason if hold else Reason.TUNING_OFF,
            message=hold.message if hold else "spec.tuning.mode is Off: kTable is in force",
        )
    if hold is not None:
        result = replace(result, reason=hold.reason, message=hold.message)
        ends = hold.reason in _ENDS_EXPERIMENT
        return _put_back(result, stored, present) if ends else result
    return _advance(seen, spec, users, inputs, result)


def find_table(seen: Observation, spec: Spec, inputs: RevisionInputs) -> KTable:
    """Return the table in force where a revision of these inputs serves."""
    users = _users_table(seen, spec, inputs)
    return _present_table(seen.target.status, spec, users, inputs)


def _advance(
    seen: Observation, spec: Spec, users: KTable, inputs: RevisionInputs, result: TuningResult
) -> TuningResult:
    assert isinstance(seen.metrics, MetricsSamples)
    assert inputs.speculation is not None
    stored = seen.target.status
    outcome = experiment.advance_tuning(
        experiment.TuningInput(
            now=seen.now,
            mode=spec.tuning.mode,
            tuning=result.tuning,
            experiment=stored.experiment,
            spec_table=users,
            envelope=levers.envelope_of(inputs.speculation),
            min_k=spec.tuning.min_k,
            min_gain_percent=spec.tuning.min_gain_percent,
            min_steps=spec.rollout.live_soak.min_steps,
            min_block=parse_duration(spec.rollout.live_soak.min_duration),
            cooldown=parse_duration(spec.rollout.cooldown),
            samples=seen.metrics,
            acknowledged=_is_in_force(seen, result.table),
            estimate=stored.estimate,
            hold=None,
        )
    )
    return replace(
        result,
        table=outcome.table,
        tuning=outcome.tuning,
        experiment=outcome.experiment,
        estimate=outcome.estimate,
        reason=outcome.reason,
        message=outcome.message,
        events=outcome.events,
        requeue_after=outcome.requeue_after,
    )


def _users_table(seen: Observation, spec: Spec, inputs: RevisionInputs) -> KTable:
    """The user's kTable within what the serving engine prepared; K=0 without speculation."""
    speculation = inputs.speculation
    most = inputs.engine.max_num_seqs
    if speculation is None:
        return KTable.constant(0, most)
    wanted = spec.speculation or speculation
    envelope = levers.envelope_of(speculation)
    try:
        return levers.spec_table(wanted, most).clamped_to(envelope)
    except InvalidTableError:  # refused with a sentence elsewhere; what is in force stays
        there = seen.tables.stable if seen.tables else None
        return there.table if there else KTable.constant(envelope.k_max, most)


def _present_table(stored: Status, spec: Spec, users: KTable, inputs: RevisionInputs) -> KTable:
    """The table that status says is in force; the user's where he edited it or none was tuned."""
    speculation = inputs.speculation
    edited = stored.tuning.spec_table != users.compact()
    if speculation is None or spec.tuning.mode is not TuningMode.AUTO or edited:
        return users
    rows = stored.experiment.to_rows if stored.experiment else stored.tuning.rows
    table = levers.rows_to_table(rows) or users
    return table.clamped_to(levers.envelope_of(speculation))


def _put_back(result: TuningResult, stored: Status, present: KTable) -> TuningResult:
    """End an open live change without a verdict: the table before it is in force again."""
    if stored.experiment is None:
        return result
    table = levers.rows_to_table(stored.experiment.from_rows) or present
    event = Event(
        "ExplorationAborted",
        f"batch {stored.experiment.batch}: K {stored.experiment.to_k} put back to "
        f"{stored.experiment.from_k} without a verdict: {result.message or 'a fault came first'}",
    )
    return replace(result, table=table, experiment=None, events=(*result.events, event))


def _metrics_health(seen: Observation, oldest: timedelta) -> MetricsAbsent | NoEstimate | None:
    if isinstance(seen.metrics, MetricsAbsent):
        return seen.metrics
    ready = frozenset(pod.name for pod in seen.pods if pod.ready and not pod.deleting)
    if not ready:
        return None
    return counters.metrics_health(
        seen.metrics,
        ready_pods=ready,
        now=seen.now.timestamp(),
        max_age_seconds=oldest.total_seconds(),
    )


def _as_hold(health: MetricsAbsent | NoEstimate | None) -> Hold | None:
    return None if health is None else Hold(Reason(health.reason), health.message)


def _is_in_force(seen: Observation, table: KTable) -> bool:
    """Tell whether every Ready pod reports this table, as the file that is there now."""
    there = seen.tables
    if there is None or there.stable is None or there.stable.table != table:
        return False
    files = tables.WantedTables(there.stable, there.canary, changed=False, written_at=seen.now)
    ready = [pod for pod in seen.pods if pod.ready and not pod.deleting]
    return bool(ready) and all(
        tables.is_acknowledged(
            seen.acknowledgements.get(pod.name), pod.arm or metadata.ARM_STABLE, files
        )
        for pod in ready
    )
