"""One live change of the K-table at a time: open it, watch one block, keep it or put it back.

First version: before and after on the same pods, at the batch bucket in which the engines spend
most time now. All memory is in the status (`tuning`, `experiment`), so a pass may be the first
one after a restart. With no data nothing changes; a change that gets none is put back.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import (
    CellStatus,
    EstimateStatus,
    ExperimentStatus,
    RecommendationStatus,
    TuningMode,
    TuningStatus,
)
from specdecode_operator.decide import planner
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.decision import Event, EventType
from specdecode_operator.domain.observation import MetricsSamples
from specdecode_operator.domain.table import Envelope, KTable, bucket_first
from specdecode_operator.errors import InvalidTableError
from specdecode_operator.estimate.acceptance import (
    MIN_DRAFTS,
    Survival,
    estimate_survival,
    mean_acceptance_length,
)
from specdecode_operator.estimate.counters import (
    CellDelta,
    Counters,
    MixedDelta,
    NoEstimate,
    Window,
)
from specdecode_operator.estimate.goodput import (
    ARM_STABLE,
    Measurement,
    Rate,
    busy_seconds_by_batch,
    compare_at_equal_batch,
    measure_goodput,
)

MAX_CELLS: Final = 128

# Scrapes fall where they like: this much of a block is a block.
_WHOLE_BLOCK: Final = 0.9
_PARTS: Final = 6
# A change is put back when its batch is rare for this many blocks, or no data came for that many.
_BLOCKS_TO_WAIT: Final = 3
_BLOCKS_WITHOUT_DATA: Final = 10
_GONE_SHARE: Final = 0.05
# A gain that exceeds the minimum by less than this (log) must hold for a second block.
_MARGIN: Final = 0.02
# How far back the K in force may have been measured to stand as the baseline after a put-back.
_BASELINE_BLOCKS: Final = 4
_CELL_MOVED: Final = 0.05
_CELL_AGE: Final = timedelta(minutes=5)
_ESTIMATE_MOVED: Final = 0.01

_LEAST_REACH: Final = timedelta(seconds=60)
_SOON: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class TuningInput:
    """All that one pass of the tuner may look at.

    `acknowledged`: every pod reports the table in force. `hold`: why nothing may be started.
    `samples` should reach back by `reach(min_block)`, and over an open block.
    """

    now: datetime
    mode: TuningMode
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    spec_table: KTable
    envelope: Envelope
    min_k: int
    min_gain_percent: float
    min_steps: int
    min_block: timedelta
    cooldown: timedelta
    samples: MetricsSamples
    acknowledged: bool
    hold: str | None = None
    estimate: EstimateStatus = field(default_factory=EstimateStatus)


@dataclass(frozen=True)
class TuningOutcome:
    """What one pass decided: the table wanted in stable.json, the memory, what to tell."""

    table: KTable
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    estimate: EstimateStatus
    reason: Reason
    message: str
    events: tuple[Event, ...]
    requeue_after: timedelta


@dataclass(frozen=True)
class _State:
    """The pass as far as it has come; `accepted` is the table without the open experiment."""

    inputs: TuningInput
    counters: Counters
    accepted: KTable
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    events: tuple[Event, ...] = ()

    @property
    def now(self) -> float:
        return self.inputs.now.timestamp()

    @property
    def block_seconds(self) -> float:
        return max(self.inputs.min_block.total_seconds(), 1.0)

    @property
    def table(self) -> KTable:
        if self.experiment is None:
            return self.accepted
        return KTable.from_rows(self.experiment.to_rows)

    def remember(self, **changes: object) -> _State:
        return replace(self, tuning=self.tuning.model_copy(update=changes))

    def tell(self, reason: str, message: str, kind: EventType = EventType.NORMAL) -> _State:
        return replace(self, events=(*self.events, Event(reason, message, kind)))


def advance_tuning(inputs: TuningInput) -> TuningOutcome:
    """Take the tuner one step further."""
    state = _adopt_mode(_adopt_table(_begin(inputs)))
    if inputs.hold is not None:
        state = _give_up_without_data(state)
        return _outcome(state, Reason.HELD, inputs.hold, _idle_pause(state))
    if not inputs.acknowledged:
        return _wait_for_engines(state)
    if inputs.mode is not TuningMode.AUTO:
        return _advise(_settle(state))
    if state.experiment is not None:
        return _continue(_settle(state), state.experiment)
    return _explore(_settle(state))


def estimate_now(samples: MetricsSamples, stored: EstimateStatus | None = None) -> EstimateStatus:
    """Estimate acceptance and goodput at the batch bucket with most time now.

    The stored figures stay until one of them moves by 1 % or they are five minutes old.
    """
    return _estimate(Counters.of(samples), samples.end, stored or EstimateStatus())


def reach(min_block: timedelta) -> timedelta:
    """Tell how far back samples must go for a measurement outside of an experiment."""
    return max(_LEAST_REACH, _BLOCKS_TO_WAIT * min_block)


# ------------------------------------------------------------------ the table to start from


def _begin(inputs: TuningInput) -> _State:
    stored = _read_rows(inputs.tuning.rows)
    accepted = inputs.spec_table if stored is None else _fit(stored, inputs)
    return _State(
        inputs=inputs,
        counters=Counters.of(inputs.samples),
        accepted=accepted,
        tuning=inputs.tuning,
        experiment=inputs.experiment,
    )


def _read_rows(rows: list[list[int]]) -> KTable | None:
    try:
        return levers.rows_to_table(rows)
    except (InvalidTableError, TypeError):
        return None


def _fit(table: KTable, inputs: TuningInput) -> KTable:
    """Fit a remembered table to the envelope and the largest batch as they are now."""
    most = inputs.spec_table.max_batch
    starts = [(row.first, row.k) for row in table.rows if row.first <= most]
    return KTable.from_starts(starts, most).clamped_to(inputs.envelope)


def _adopt_table(state: _State) -> _State:
    """Take the user's kTable where it was edited: it replaces the tuned one and its cells."""
    users = state.inputs.spec_table
    compact = users.compact()
    if state.tuning.spec_table == compact:
        return state if state.tuning.rows else state.remember(rows=users.to_rows())
    first_time = not state.tuning.spec_table
    keeps_cells = first_time or state.inputs.mode is not TuningMode.AUTO
    adopted = replace(state, accepted=users, experiment=None).remember(
        spec_table=compact,
        rows=users.to_rows(),
        cells=state.tuning.cells if keeps_cells else [],
        last_change_at=state.inputs.now,
        recommendation=None,
    )
    if first_time:
        return adopted
    return adopted.tell(
        "TableReplaced",
        f"kTable was edited: {compact} replaces {state.table.compact()}"
        + ("" if keeps_cells else f"; {len(state.tuning.cells)} measured cells dropped"),
    )


def _adopt_mode(state: _State) -> _State:
    """End an experiment that may not go on: not in Auto, or outside the envelope now."""
    open_one = state.experiment
    if open_one is not None:
        if state.inputs.mode is not TuningMode.AUTO:
            state = _put_back(state, f"mode is {state.inputs.mode.value}")
        elif (
            open_one.to_k not in state.inputs.envelope.ks
            or _read_rows(open_one.to_rows) is None
            or open_one.to_rows[-1][1] != state.inputs.spec_table.max_batch
        ):
            state = _put_back(state, "the engines' envelope changed")
    if state.inputs.mode is not TuningMode.AUTO:
        return replace(state, accepted=state.inputs.spec_table)
    return state.remember(recommendation=None)


# ------------------------------------------------------------------------ waiting


def _wait_for_engines(state: _State) -> TuningOutcome:
    """Wait until every engine reports the table; what is measured counts from then."""
    if state.experiment is not None:
        renewed = state.experiment.model_copy(update={"judged_from": None})
        state = _give_up_without_data(replace(state, experiment=renewed))
    state = state.remember(last_change_at=state.inputs.now)
    return _outcome(
        state,
        Reason.WAITING_FOR_ENGINES,
        f"not every engine reports table {state.table.compact()} yet",
        _SOON,
    )


def _settle(state: _State) -> _State:
    """Note the moment from which samples belong to the table in force."""
    if state.tuning.last_change_at is None:
        state = state.remember(last_change_at=state.inputs.now)
    if state.experiment is not None and state.experiment.judged_from is None:
        judged = state.experiment.model_copy(update={"judged_from": state.inputs.now})
        state = replace(state, experiment=judged).remember(last_change_at=state.inputs.now)
    return state


def _give_up_without_data(state: _State) -> _State:
    if state.experiment is None:
        return state
    waited = (state.inputs.now - state.experiment.started_at).total_seconds()
    if waited < _BLOCKS_WITHOUT_DATA * state.block_seconds:
        return state
    return _put_back(state, f"no data for {waited:.0f} s")


# ------------------------------------------------------------------- an open experiment


def _continue(state: _State, open_one: ExperimentStatus) -> TuningOutcome:
    """Judge the open experiment when its block is over, else wait for it."""
    begun = (open_one.judged_from or state.inputs.now).timestamp()
    window = state.counters.window(start=begun, end=state.now)
    if isinstance(window, NoEstimate):
        state = _give_up_without_data(state)
        return _watching(state, window.message)
    measured = _measure(state, window, batch=open_one.batch, k=open_one.to_k)
    if isinstance(measured, Measurement) and _is_whole(state, measured):
        return _judge(state, open_one, measured, window)
    progress = _progress(state, measured)
    waited = state.now - begun
    if waited >= _BLOCKS_TO_WAIT * state.block_seconds or _has_left(state, open_one, window):
        state = _put_back(state, f"inconclusive, the load left this batch ({progress})")
        return _explore(state)
    return _watching(state, progress)


def _watching(state: _State, progress: str) -> TuningOutcome:
    open_one = state.experiment
    if open_one is None:
        return _outcome(state, Reason.COLLECTING, progress, _idle_pause(state))
    return _outcome(
        state,
        Reason.EXPLORING,
        f"{planner.batch_range(open_one.batch)}: K {open_one.from_k} → {open_one.to_k}, {progress}",
        _block_pause(state),
    )


def _has_left(state: _State, open_one: ExperimentStatus, window: Window) -> bool:
    """Tell whether the load has moved away: almost no time in the bucket for a block."""
    recent = state.counters.window(
        start=max(window.start, state.now - state.block_seconds), end=state.now
    )
    if isinstance(recent, NoEstimate) or recent.seconds < state.block_seconds / 2:
        return False
    busy = busy_seconds_by_batch(recent)
    total = sum(busy.values())
    return total > 0 and busy.get(open_one.batch, 0.0) < _GONE_SHARE * total


def _judge(
    state: _State, open_one: ExperimentStatus, measured: Measurement, window: Window
) -> TuningOutcome:
    baseline = Rate(open_one.baseline_tokens_per_second, open_one.baseline_mean_batch)
    compared = compare_at_equal_batch(measured, baseline)
    if isinstance(compared, NoEstimate):
        return _explore(_put_back(state, f"inconclusive: {compared.message}"))
    least = math.log1p(state.inputs.min_gain_percent / 100)
    one_block = measured.present_seconds < 2 * _WHOLE_BLOCK * state.block_seconds
    if least <= compared.log_ratio < least + _MARGIN and one_block:
        return _watching(state, f"{compared.percent:+.1f} % so far, watched for a second block")
    state = _remember_cell(state, measured, _acceptance_in(window))
    numbers = (
        f"{baseline.tokens_per_second:.4g} → {measured.tokens_per_second:.4g} tok/s, "
        f"{compared.percent:+.1f} % at equal batch over {measured.steps:.0f} steps"
    )
    if compared.log_ratio >= least:
        return _explore(_keep(state, open_one, numbers))
    return _explore(_put_back(state, numbers))


def _keep(state: _State, open_one: ExperimentStatus, numbers: str) -> _State:
    kept = replace(state, accepted=state.table, experiment=None)
    return kept.remember(rows=kept.accepted.to_rows()).tell(
        "KExplored",
        f"{planner.batch_range(open_one.batch)}: K {open_one.from_k} → {open_one.to_k} kept: "
        f"{numbers}; table {kept.accepted.compact()}",
    )


def _put_back(state: _State, why: str) -> _State:
    open_one = state.experiment
    if open_one is None:
        return state
    back = replace(state, experiment=None)
    return back.remember(last_change_at=state.inputs.now).tell(
        "KExplored",
        f"{planner.batch_range(open_one.batch)}: K {open_one.from_k} → {open_one.to_k} put back: "
        f"{why}; table {back.accepted.compact()}",
    )


# ------------------------------------------------------------------------ no experiment


def _explore(state: _State) -> TuningOutcome:
    """Measure the K in force at the present batch, and open an experiment when one is due."""
    found = _measure_present(state)
    if isinstance(found, NoEstimate):
        return _outcome(state, Reason(found.reason), found.message, _idle_pause(state))
    state, present = found
    candidate = planner.choose_candidate(present)
    if candidate is None:
        return _at_rest(state, present)
    rested = state.inputs.now - (state.tuning.last_change_at or state.inputs.now)
    if rested < state.inputs.cooldown:
        left = state.inputs.cooldown - rested
        return _outcome(
            state,
            Reason.EXPLORING,
            f"{planner.batch_range(present.batch)}: K {present.k} → {candidate.k} is next, "
            f"after {left.total_seconds():.0f} s of cooldown",
            min(left, _idle_pause(state)),
        )
    return _open(state, present, candidate)


def _measure_present(state: _State) -> tuple[_State, planner.Present] | NoEstimate:
    recent = _recent_window(state.counters, state.now, state.block_seconds)
    if isinstance(recent, NoEstimate):
        return recent
    batch = _busiest(recent)
    if batch is None:
        return NoEstimate(Reason.NO_TRAFFIC, f"no step in the last {recent.seconds:.0f} s")
    k = state.table.k_at(bucket_first(batch))
    begun = max(
        (state.tuning.last_change_at or state.inputs.now).timestamp(),
        state.now - reach(state.inputs.min_block).total_seconds(),
    )
    window = state.counters.window(start=begun, end=state.now)
    measured = (
        window if isinstance(window, NoEstimate) else _measure(state, window, batch=batch, k=k)
    )
    if (
        isinstance(measured, Measurement)
        and isinstance(window, Window)
        and _is_whole(state, measured)
    ):
        survival = _survival(state, window)
        state = _refresh_cell(state, measured, _acceptance_in(window))
        return state, _present(state, batch, k, measured, survival)
    rate = _recent_cell(state, batch, k, recent)
    if rate is not None:
        return state, _present(state, batch, k, rate, _survival(state, recent))
    return NoEstimate(
        Reason.COLLECTING,
        f"{planner.batch_range(batch)}, K={k}: {_progress(state, measured)}",
    )


def _present(
    state: _State, batch: int, k: int, rate: Rate, survival: Survival | None
) -> planner.Present:
    return planner.Present(
        batch=batch,
        k=k,
        rate=rate,
        survival=survival,
        cells=tuple(state.tuning.cells),
        envelope=state.inputs.envelope,
        min_k=state.inputs.min_k,
    )


def _recent_cell(state: _State, batch: int, k: int, recent: Window) -> Rate | None:
    """Return the K in force as measured just before, at a load and acceptance like now's."""
    oldest = state.inputs.now - _BASELINE_BLOCKS * state.inputs.min_block
    mean_batch = _mean_batch(recent, batch)
    for cell in state.tuning.cells:
        if (cell.batch, cell.k) == (batch, k) and cell.measured_at >= oldest:
            fresh = planner.is_fresh(cell, mean_batch=mean_batch, acceptance=_acceptance_in(recent))
            return Rate(cell.tokens_per_second, cell.mean_batch) if fresh else None
    return None


def _open(state: _State, present: planner.Present, candidate: planner.Forecast) -> TuningOutcome:
    table = state.accepted.with_bucket(present.batch, candidate.k)
    text = f"{present.batch}/{present.k}/{candidate.k}/{state.inputs.now.isoformat()}"
    opened = ExperimentStatus(
        id=hashlib.sha256(text.encode()).hexdigest()[:8],
        lever=levers.Lever.K_TABLE,
        batch=present.batch,
        from_k=present.k,
        to_k=candidate.k,
        from_rows=state.accepted.to_rows(),
        to_rows=table.to_rows(),
        baseline_tokens_per_second=_round(present.rate.tokens_per_second),
        baseline_mean_batch=_round(present.rate.mean_batch),
        started_at=state.inputs.now,
    )
    state = replace(state, experiment=opened).remember(last_change_at=state.inputs.now)
    message = (
        f"{planner.batch_range(present.batch)}: trying K {present.k} → {candidate.k}, "
        f"{present.rate.tokens_per_second:.4g} tok/s now, "
        f"{candidate.tokens_per_second:.4g} expected; table {table.compact()}"
    )
    state = state.tell("KExploring", message)
    return _outcome(state, Reason.EXPLORING, message, _SOON)


def _at_rest(state: _State, present: planner.Present) -> TuningOutcome:
    """Say what was reached, and whether speculation pays at this load."""
    payoff = planner.does_speculation_pay(present, min_gain_percent=state.inputs.min_gain_percent)
    others = ", ".join(
        f"K={f.k}: {f.tokens_per_second:.4g}"
        for f in planner.forecast_goodput(present)
        if f.measured and f.k != present.k
    )
    message = (
        f"{planner.batch_range(present.batch)}: K={present.k} gives "
        f"{present.rate.tokens_per_second:.4g} tok/s"
        + (f" ({others})" if others else "")
        + "; nothing is left to try"
    )
    if isinstance(payoff, NoEstimate) or payoff.pays:
        return _outcome(state, Reason.CONVERGED, message, _idle_pause(state))
    return _outcome(
        state,
        Reason.DOES_NOT_PAY,
        f"speculation does not pay: {payoff.message}",
        _idle_pause(state),
    )


# ------------------------------------------------------------------------ advice


def _advise(state: _State) -> TuningOutcome:
    """Measure under the user's table, and recommend another where it is clearly better."""
    found = _measure_present(state)
    if isinstance(found, NoEstimate):
        return _outcome(state, Reason(found.reason), found.message, _idle_pause(state))
    state, present = found
    presents = [present, *_other_presents(state, present)]
    advice = planner.recommend_table(
        presents,
        table=state.accepted,
        min_gain_percent=state.inputs.min_gain_percent,
        weights=_occupancy(state),
        stored=_stored_recommendation(state),
    )
    payoff = planner.does_speculation_pay(present, min_gain_percent=state.inputs.min_gain_percent)
    state = state.remember(recommendation=_recommendation(state, advice))
    said = _advice_message(state, present, advice)
    if isinstance(payoff, NoEstimate) or payoff.pays:
        return _outcome(state, Reason.ADVISING, said, _idle_pause(state))
    return _outcome(
        state,
        Reason.DOES_NOT_PAY,
        f"speculation does not pay: {payoff.message}; {said}",
        _idle_pause(state),
    )


def _other_presents(state: _State, present: planner.Present) -> list[planner.Present]:
    """List other buckets in which the K of the table was measured at today's acceptance."""
    others = []
    for cell in state.tuning.cells:
        k = state.accepted.k_at(bucket_first(cell.batch))
        fresh = planner.is_fresh(cell, mean_batch=cell.mean_batch, acceptance=present.acceptance)
        if cell.batch != present.batch and cell.k == k and fresh:
            rate = Rate(cell.tokens_per_second, cell.mean_batch)
            others.append(_present(state, cell.batch, k, rate, present.survival))
    return others


def _occupancy(state: _State) -> dict[int, float]:
    window = state.counters.window(start=-math.inf, end=math.inf)
    return {} if isinstance(window, NoEstimate) else busy_seconds_by_batch(window)


def _stored_recommendation(state: _State) -> KTable | None:
    stored = state.tuning.recommendation
    return None if stored is None else _read_rows(stored.k_table)


def _recommendation(state: _State, advice: planner.Advice | None) -> RecommendationStatus | None:
    """Make the recommendation; the stored one stays while table and gain are about the same."""
    if advice is None:
        return None
    stored = state.tuning.recommendation
    rows = advice.table.to_rows()
    gain = round(advice.gain_percent, 1)
    if stored and stored.k_table == rows and abs(stored.expected_gain_percent - gain) < 1:
        return stored
    return RecommendationStatus(
        table=advice.table.compact(),
        k_table=rows,
        expected_gain_percent=gain,
        why=advice.why,
        at=state.inputs.now,
    )


def _advice_message(state: _State, present: planner.Present, advice: planner.Advice | None) -> str:
    if advice is not None:
        return f"table {advice.table.compact()}: {advice.gain_percent:+.1f} % ({advice.why})"
    ks = {cell.k for cell in state.tuning.cells}
    if len(ks) < 2:
        return (
            f"only K={present.k} was measured, so the step time of another K is not known: "
            "mode Auto tries them, or a kTable with two values of K shows it"
        )
    return f"no table is better than {state.accepted.compact()} by the minimum gain"


# ------------------------------------------------------------------------ measuring


def _recent_window(counters: Counters, now: float, block_seconds: float) -> Window | NoEstimate:
    """Return the last part of a block, which shows the present load; at least four scrapes."""
    whole = counters.window(start=-math.inf, end=now)
    if isinstance(whole, NoEstimate):
        return whole
    scrape = whole.seconds / max(whole.scrapes - 1, 1)
    length = max(min(max(block_seconds / 2, 10.0), 60.0), 4 * scrape)
    recent = counters.window(start=whole.end - length, end=now)
    return whole if isinstance(recent, NoEstimate) else recent


def _busiest(window: Window) -> int | None:
    busy = busy_seconds_by_batch(window)
    return max(busy, key=lambda batch: busy[batch]) if busy else None


def _measure(state: _State, window: Window, *, batch: int, k: int) -> Measurement | NoEstimate:
    parts = state.counters.parts(start=window.start, end=window.end, count=_PARTS)
    return measure_goodput(window, batch=batch, k=k, parts=parts)


def _is_whole(state: _State, measured: Measurement) -> bool:
    """Tell whether a measurement is a full block at its bucket."""
    return (
        measured.present_seconds >= _WHOLE_BLOCK * state.block_seconds
        and measured.steps >= state.inputs.min_steps
    )


def _progress(state: _State, measured: Measurement | NoEstimate) -> str:
    if isinstance(measured, NoEstimate):
        return measured.message
    return (
        f"{measured.present_seconds:.0f} of {state.block_seconds:.0f} s and "
        f"{measured.steps:.0f} of {state.inputs.min_steps} steps"
    )


def _mean_batch(window: Window, batch: int) -> float:
    deltas: list[CellDelta | MixedDelta] = [*window.cells, *window.mixed]
    steps = sum(d.steps for d in deltas if d.batch == batch and d.arm == ARM_STABLE)
    requests = sum(d.requests for d in deltas if d.batch == batch and d.arm == ARM_STABLE)
    return requests / steps if steps > 0 and requests > 0 else float(batch)


def _acceptance_in(window: Window) -> float | None:
    survival = estimate_survival(window.at_risk, window.accepted)
    return None if isinstance(survival, NoEstimate) else survival.first


def _survival(state: _State, window: Window) -> Survival | None:
    """Estimate survival from a window, later positions from all samples where it has too few."""
    at_risk, accepted = dict(window.at_risk), dict(window.accepted)
    whole = state.counters.window(start=-math.inf, end=math.inf)
    if isinstance(whole, Window):
        for position, risk in whole.at_risk.items():
            if at_risk.get(position, 0.0) < MIN_DRAFTS:
                at_risk[position] = risk
                accepted[position] = whole.accepted.get(position, 0.0)
    survival = estimate_survival(at_risk, accepted)
    return None if isinstance(survival, NoEstimate) else survival


def _refresh_cell(state: _State, measured: Measurement, acceptance: float | None) -> _State:
    """Write the cell of the K in force when it moved or grew old, not at every pass."""
    for cell in state.tuning.cells:
        if (cell.batch, cell.k) == (measured.batch, measured.k):
            young = state.inputs.now - cell.measured_at < _CELL_AGE
            moved = abs(measured.tokens_per_second / cell.tokens_per_second - 1) > _CELL_MOVED
            fresh = planner.is_fresh(cell, mean_batch=measured.mean_batch, acceptance=acceptance)
            if young and fresh and not moved:
                return state
    return _remember_cell(state, measured, acceptance)


def _remember_cell(state: _State, measured: Measurement, acceptance: float | None) -> _State:
    cell = CellStatus(
        batch=measured.batch,
        k=measured.k,
        tokens_per_second=_round(measured.tokens_per_second),
        mean_batch=_round(measured.mean_batch),
        steps=int(min(measured.steps, 1e9)),
        step_seconds=_round(measured.step_seconds),
        acceptance=None if acceptance is None else round(acceptance, 3),
        measured_at=state.inputs.now,
    )
    others = [c for c in state.tuning.cells if (c.batch, c.k) != (cell.batch, cell.k)]
    youngest = sorted([*others, cell], key=lambda c: c.measured_at)[-MAX_CELLS:]
    return state.remember(cells=sorted(youngest, key=lambda c: (c.batch, c.k)))


# ------------------------------------------------------------------------ the outcome


def _outcome(
    state: _State, reason: Reason, message: str, requeue_after: timedelta
) -> TuningOutcome:
    return TuningOutcome(
        table=state.table,
        tuning=state.tuning,
        experiment=state.experiment,
        estimate=_estimate(state.counters, state.now, state.inputs.estimate),
        reason=reason,
        message=message,
        events=state.events,
        requeue_after=requeue_after,
    )


def _block_pause(state: _State) -> timedelta:
    """Wait for the rest of the block, then for its last scrape."""
    open_one = state.experiment
    begun = open_one.judged_from if open_one else None
    left = state.block_seconds - (state.now - begun.timestamp() if begun else 0.0)
    return timedelta(seconds=min(max(left, 2.0), 30.0))


def _idle_pause(state: _State) -> timedelta:
    """Look again soon enough to see a load that moved."""
    return timedelta(seconds=min(max(state.block_seconds / 3, 2.0), 60.0))


def _estimate(counters: Counters, now: float, stored: EstimateStatus) -> EstimateStatus:
    window = counters.window(start=now - _LEAST_REACH.total_seconds(), end=now)
    recent = _recent_window(counters, now, _LEAST_REACH.total_seconds() / 2)
    batch = None if isinstance(recent, NoEstimate) else _busiest(recent)
    if isinstance(window, NoEstimate) or batch is None:
        return stored
    steps = {c.k: c.steps for c in window.cells if c.batch == batch and c.arm == ARM_STABLE}
    k = max(steps, key=lambda each: steps[each], default=0)
    measured = measure_goodput(window, batch=batch, k=k)
    if isinstance(measured, NoEstimate):
        return stored
    survival = estimate_survival(window.at_risk, window.accepted)
    figures = EstimateStatus(
        batch=batch,
        mean_acceptance_length=1.0
        if isinstance(survival, NoEstimate)
        else round(mean_acceptance_length(survival, k).tokens, 2),
        acceptance=[]
        if isinstance(survival, NoEstimate)
        else [round(p.survival, 3) for p in survival.positions],
        goodput_tokens_per_second=_round(measured.tokens_per_second),
        tokens_per_second_per_user=_round(measured.tokens_per_second / measured.mean_batch),
        versus_spec_off_percent=stored.versus_spec_off_percent,
        measured_at=datetime.fromtimestamp(int(now), tz=UTC),
    )
    return figures if _has_moved(stored, figures) else stored


def _has_moved(stored: EstimateStatus, new: EstimateStatus) -> bool:
    if stored.batch != new.batch or stored.measured_at is None or new.measured_at is None:
        return True
    if new.measured_at - stored.measured_at >= _CELL_AGE:
        return True
    pairs = (
        (stored.goodput_tokens_per_second, new.goodput_tokens_per_second),
        (stored.mean_acceptance_length, new.mean_acceptance_length),
    )
    return any(
        old is None or fresh is None or abs(fresh - old) > _ESTIMATE_MOVED * abs(old)
        for old, fresh in pairs
    )


def _round(value: float) -> float:
    """Round to four significant digits: more is noise, and every change is a write."""
    return float(f"{value:.4g}")
