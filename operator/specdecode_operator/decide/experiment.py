"""One live change of the K-table at a time: open it, watch one block, keep it or put it back.

First version: before and after on the same pods, at the batch bucket in which the engines spend
most time now. All memory is in the status (`tuning`, `experiment`), so any pass may be the first
one after a restart. With no data nothing changes; a change that gets none is put back.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Final

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import EstimateStatus, ExperimentStatus, TuningMode
from specdecode_operator.decide import planner
from specdecode_operator.decide.advice import advise
from specdecode_operator.decide.present import (
    WHOLE_BLOCK,
    find_lowered,
    is_whole,
    measure_block,
    measure_present,
    progress,
    remember_lowered,
    remember_trial,
)
from specdecode_operator.decide.tuner_state import (
    TunerState,
    TuningInput,
    TuningOutcome,
    reach,
    read_rows,
)
from specdecode_operator.domain.lever import Lever
from specdecode_operator.domain.observation import MetricsSamples
from specdecode_operator.domain.table import KTable
from specdecode_operator.estimate import load
from specdecode_operator.estimate.counters import Counters, NoEstimate, Window
from specdecode_operator.estimate.goodput import (
    Comparison,
    Measurement,
    Rate,
    busy_seconds_by_batch,
    compare_at_equal_batch,
)

__all__ = ["TuningInput", "TuningOutcome", "advance_tuning", "estimate_now", "reach"]

# A change is put back when its batch is rare for this many blocks, or no data came for that many.
_BLOCKS_TO_WAIT: Final = 3
_BLOCKS_WITHOUT_DATA: Final = 10
_GONE_SHARE: Final = 0.05
# A block may be off by this much (log), the mean of n blocks by the root of n less: an experiment
# whose gain is nearer to the minimum than that is watched on, for so many blocks at most. Where
# two K are so alike, watching costs nothing.
_MARGIN: Final = 0.03
_MOST_BLOCKS: Final = 3
# What the step-cost model makes of a gain is told where it differs by this much (log).
_TOLD: Final = 0.005


def advance_tuning(inputs: TuningInput) -> TuningOutcome:
    """Take the tuner one step further."""
    state = _adopt_mode(_adopt_table(_begin(inputs)))
    if inputs.hold is not None:
        return _give_up_without_data(state).ends(Reason.HELD, inputs.hold)
    if not inputs.acknowledged:
        return _wait_for_engines(state)
    state = _settle(state)
    if inputs.mode is not TuningMode.AUTO:
        return advise(state)
    if state.experiment is not None:
        return _watch(state, state.experiment)
    return _explore(state)


def estimate_now(samples: MetricsSamples, stored: EstimateStatus) -> EstimateStatus:
    """Estimate acceptance and goodput at the batch bucket with most time now."""
    return load.figures_now(Counters.of(samples), now=samples.end, stored=stored)


# ---------------------------------------------------------------- the table to start from


def _begin(inputs: TuningInput) -> TunerState:
    stored = read_rows(inputs.tuning.rows)
    return TunerState(
        inputs=inputs,
        counters=Counters.of(inputs.samples),
        accepted=inputs.spec_table if stored is None else _fit(stored, inputs),
        tuning=inputs.tuning,
        experiment=inputs.experiment,
    )


def _fit(table: KTable, inputs: TuningInput) -> KTable:
    """Fit a remembered table to the envelope and the largest batch as they are now."""
    most = inputs.spec_table.max_batch
    starts = [(row.first, row.k) for row in table.rows if row.first <= most]
    return KTable.from_starts(starts, most).clamped_to(inputs.envelope)


def _adopt_table(state: TunerState) -> TunerState:
    """Take the user's kTable where it was edited: it replaces the tuned one and its cells.

    In mode Advise the cells stay: they are what the next recommendation rests on.
    """
    users = state.inputs.spec_table
    compact = users.compact()
    if state.tuning.spec_table == compact:
        return state if state.tuning.rows else state.remember(rows=users.to_rows())
    before = state.tuning.spec_table
    dropped = len(state.tuning.cells) if before and state.inputs.mode is TuningMode.AUTO else 0
    adopted = replace(state, accepted=users, experiment=None).remember(
        spec_table=compact,
        rows=users.to_rows(),
        cells=[] if dropped else state.tuning.cells,
        last_change_at=None,
        recommendation=None,
    )
    if not before:
        return adopted
    return adopted.tell(
        "TableReplaced",
        f"kTable was edited: {compact} replaces {state.accepted.compact()}, "
        f"{dropped} measured cells dropped",
    )


def _adopt_mode(state: TunerState) -> TunerState:
    """End an experiment that may not go on: the mode is not Auto, or the envelope changed."""
    open_one = state.experiment
    if state.inputs.mode is not TuningMode.AUTO:
        state = _put_back(state, f"mode is {state.inputs.mode.value}")
        return replace(state, accepted=state.inputs.spec_table)
    if open_one is not None:
        table = read_rows(open_one.to_rows)
        if table is None or table != _fit(table, state.inputs):
            state = _put_back(state, "the engines' envelope changed")
    return state.remember(recommendation=None)


# ------------------------------------------------------------------------------- waiting


def _wait_for_engines(state: TunerState) -> TuningOutcome:
    """Wait until every engine reports the table; what is measured counts from then."""
    if state.experiment is not None:
        unjudged = state.experiment.model_copy(update={"judged_from": None})
        state = _give_up_without_data(replace(state, experiment=unjudged))
    return state.remember(last_change_at=None).ends(
        Reason.WAITING_FOR_ENGINES,
        f"not every engine reports table {state.table.compact()} yet",
    )


def _settle(state: TunerState) -> TunerState:
    """Note the moment at which every engine was first seen to report the table in force."""
    if state.experiment is not None and state.experiment.judged_from is None:
        judged = state.experiment.model_copy(update={"judged_from": state.inputs.now})
        return replace(state, experiment=judged).remember(last_change_at=state.inputs.now)
    if state.tuning.last_change_at is None:
        return state.remember(last_change_at=state.inputs.now)
    return state


def _give_up_without_data(state: TunerState) -> TunerState:
    if state.experiment is None:
        return state
    waited = (state.inputs.now - state.experiment.started_at).total_seconds()
    if waited < _BLOCKS_WITHOUT_DATA * state.block_seconds:
        return state
    return _put_back(state, f"no data for {waited:.0f} s")


# -------------------------------------------------------------------- an open experiment


def _watch(state: TunerState, open_one: ExperimentStatus) -> TuningOutcome:
    """Judge the open experiment when its block is over, else wait for it."""
    begun = (open_one.judged_from or state.inputs.now).timestamp()
    window = state.counters.window(start=begun, end=state.now)
    if isinstance(window, NoEstimate):
        return _go_on(_give_up_without_data(state), "waiting for the first scrapes")
    measured = measure_block(window, batch=open_one.batch, k=open_one.to_k)
    if is_whole(measured, state):
        return _judge(state, open_one, measured, window)
    lowered = find_lowered(state, window, batch=open_one.batch, k=open_one.to_k)
    if lowered is not None:
        state = remember_lowered(state, open_one)
        said = f"the engine lowers it to K={lowered}, beyond its captured graphs"
        return _explore(_put_back(state, said))
    seen = progress(state, measured)
    if state.now - begun >= _BLOCKS_TO_WAIT * state.block_seconds or _has_left(state, open_one):
        return _explore(_put_back(state, f"inconclusive, the load left this batch: {seen}"))
    return _go_on(state, seen)


def _go_on(state: TunerState, seen: str) -> TuningOutcome:
    open_one = state.experiment
    if open_one is None:
        return state.ends(Reason.COLLECTING, seen)
    return state.ends(Reason.EXPLORING, f"{_title(open_one)}, {seen}")


def _has_left(state: TunerState, open_one: ExperimentStatus) -> bool:
    """Tell whether the load has moved away: for a block almost no time in the bucket."""
    begun = open_one.judged_from or state.inputs.now
    start = max(begun.timestamp(), state.now - state.block_seconds)
    recent = state.counters.window(start=start, end=state.now)
    if isinstance(recent, NoEstimate) or recent.seconds < state.block_seconds / 2:
        return False
    busy = busy_seconds_by_batch(recent)
    return busy.get(open_one.batch, 0.0) < _GONE_SHARE * sum(busy.values())


def _judge(
    state: TunerState, open_one: ExperimentStatus, measured: Measurement, window: Window
) -> TuningOutcome:
    baseline = Rate(open_one.baseline_tokens_per_second, open_one.baseline_mean_batch)
    compared = compare_at_equal_batch(measured, baseline)
    if isinstance(compared, NoEstimate):
        return _explore(_put_back(state, f"inconclusive: {compared.message}"))
    least = math.log1p(state.inputs.min_gain_percent / 100)
    blocks = int(measured.present_seconds / (WHOLE_BLOCK * state.block_seconds))
    is_near = abs(compared.log_ratio - least) < _MARGIN / math.sqrt(blocks)
    if is_near and blocks < _MOST_BLOCKS:
        return _go_on(state, f"{compared.percent:+.1f} % so far, watched for another block")
    state = remember_trial(
        state,
        measured,
        load.first_acceptance(window),
        baseline=baseline,
        from_k=open_one.from_k,
    )
    luck = planner.find_luck(state.tuning.cells, open_one.batch)
    likely = compared.log_ratio - (luck.get(open_one.to_k, 0.0) - luck.get(open_one.from_k, 0.0))
    numbers = _numbers(baseline, measured, compared)
    if abs(likely - compared.log_ratio) >= _TOLD:
        numbers += f", likely {100 * math.expm1(likely):+.1f} % by all that was measured"
    if likely >= least:
        return _explore(_keep(state, open_one, numbers))
    return _explore(_put_back(state, numbers))


def _numbers(baseline: Rate, measured: Measurement, compared: Comparison) -> str:
    return (
        f"{baseline.tokens_per_second:.4g} → {measured.tokens_per_second:.4g} tok/s, "
        f"{compared.percent:+.1f} % at equal batch over {measured.steps:.0f} steps"
    )


def _keep(state: TunerState, open_one: ExperimentStatus, numbers: str) -> TunerState:
    kept = replace(state, accepted=state.table, experiment=None)
    return kept.remember(rows=kept.accepted.to_rows()).tell(
        "KExplored", f"{_title(open_one)} kept: {numbers}; table {kept.accepted.compact()}"
    )


def _put_back(state: TunerState, why: str) -> TunerState:
    """End the open experiment, if there is one, with the table that was in force before."""
    open_one = state.experiment
    if open_one is None:
        return state
    back = replace(state, experiment=None).remember(last_change_at=None)
    return back.tell(
        "KExplored", f"{_title(open_one)} put back: {why}; table {back.accepted.compact()}"
    )


def _title(open_one: ExperimentStatus) -> str:
    return f"{planner.batch_range(open_one.batch)}: K {open_one.from_k} → {open_one.to_k}"


# ------------------------------------------------------------------------- no experiment


def _explore(state: TunerState) -> TuningOutcome:
    """Measure the K in force at the present batch, and open an experiment when one is due."""
    found = measure_present(state)
    if isinstance(found, NoEstimate):
        return state.ends(Reason(found.reason), found.message)
    state, present = found
    candidate = planner.choose_candidate(present)
    if candidate is None:
        return _rest(state, present)
    left = state.inputs.cooldown - (state.inputs.now - state.changed_at)
    if left.total_seconds() > 0:
        return state.ends(
            Reason.EXPLORING,
            f"{planner.batch_range(present.batch)}: K {present.k} → {candidate.k} is next, "
            f"after {left.total_seconds():.0f} s of cooldown",
        )
    return _open(state, present, candidate)


def _open(
    state: TunerState, present: planner.Present, candidate: planner.Forecast
) -> TuningOutcome:
    table = planner.table_to_try(state.accepted, present, candidate.k)
    name = f"{present.batch}/{present.k}/{candidate.k}/{state.inputs.now.isoformat()}"
    opened = ExperimentStatus(
        id=hashlib.sha256(name.encode()).hexdigest()[:8],
        lever=Lever.K_TABLE,
        batch=present.batch,
        from_k=present.k,
        to_k=candidate.k,
        from_rows=state.accepted.to_rows(),
        to_rows=table.to_rows(),
        baseline_tokens_per_second=load.rounded(present.rate.tokens_per_second),
        baseline_mean_batch=load.rounded(present.rate.mean_batch),
        started_at=state.inputs.now,
    )
    message = (
        f"{_title(opened)} tried: {present.rate.tokens_per_second:.4g} tok/s now, "
        f"{candidate.tokens_per_second:.4g} expected; table {table.compact()}"
    )
    state = replace(state, experiment=opened).remember(last_change_at=None)
    return state.tell("KExploring", message).ends(Reason.EXPLORING, message)


def _rest(state: TunerState, present: planner.Present) -> TuningOutcome:
    """Say what was reached, and whether speculation pays at this load."""
    payoff = planner.does_speculation_pay(present, min_gain_percent=state.inputs.min_gain_percent)
    if isinstance(payoff, planner.Payoff) and not payoff.pays:
        return state.ends(Reason.DOES_NOT_PAY, payoff.message)
    others = ", ".join(
        f"K={f.k}: {f.tokens_per_second:.4g}"
        for f in planner.forecast_goodput(present)
        if f.measured and f.k != present.k
    )
    return state.ends(
        Reason.CONVERGED,
        f"{planner.batch_range(present.batch)}: K={present.k} gives "
        f"{present.rate.tokens_per_second:.4g} tok/s"
        + (f" ({others})" if others else "")
        + "; nothing is left to try",
    )
