"""The tuner's course: what it tries, keeps and puts back, and what it does without data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import (
    CellStatus,
    EstimateStatus,
    ExperimentStatus,
    TuningMode,
    TuningStatus,
)
from specdecode_operator.decide.experiment import (
    TuningInput,
    TuningOutcome,
    advance_tuning,
    estimate_now,
    reach,
)
from specdecode_operator.decide.present import MAX_CELLS
from specdecode_operator.domain.observation import MetricsSamples, Series
from specdecode_operator.domain.table import Envelope, KTable, bucket_of
from tests.support.closed_loop import (
    HIGH_ACCEPTANCE,
    KS,
    LOW_ACCEPTANCE,
    STARTED,
    Course,
    Landscape,
    SimulatedEngine,
)

QUIET = 0.0
EMPTY = MetricsSamples(0.0, 0.0, ())
AT_REST = (Reason.CONVERGED, Reason.DOES_NOT_PAY)


def course(
    landscape: Landscape = HIGH_ACCEPTANCE,
    *,
    k: int = 7,
    noise: float = QUIET,
    seed: int = 1,
    **settings: object,
) -> Course:
    table = KTable.constant(k, 64)
    engine = SimulatedEngine(landscape, seed, table, noise=noise)
    return Course(engine, table, **settings)  # type: ignore[arg-type]


def run_until_open(tuned: Course, streams: int = 8) -> ExperimentStatus:
    tuned.run(streams, 120, lambda outcome: outcome.experiment is not None)
    assert tuned.experiment is not None
    return tuned.experiment


def is_at_rest(streams: int) -> Callable[[TuningOutcome], bool]:
    batch = bucket_of(streams)
    label = f"{batch}:" if batch == 1 else f"-{batch}:"
    return lambda outcome: outcome.reason in AT_REST and label in outcome.message


def explored(tuned: Course) -> list[str]:
    return [event.message for event in tuned.events if event.reason == "KExplored"]


# --------------------------------------------------------------------------- the whole course


@dataclass
class Leg:
    """What one load of the course came to."""

    streams: int
    blocks: int
    share_of_best: float
    seconds: float


def run_course(
    landscape: Landscape, *, seed: int, min_k: int, start_k: int, loads: tuple[int, ...]
) -> list[Leg]:
    tuned = course(landscape, k=start_k, noise=0.0375, seed=seed, min_k=min_k)
    legs = []
    for streams in loads:
        begun, told = tuned.engine.now, len(explored(tuned))
        tuned.run(streams, 12)
        tuned.run(streams, 240, is_at_rest(streams))
        seconds = tuned.engine.now - begun
        tuned.run(streams, 45)
        k = tuned.engine.table.k_at(streams)
        share = landscape.at(streams, k) / landscape.best(streams, min_k=min_k)
        legs.append(Leg(streams, len(explored(tuned)) - told, share, seconds))
    return legs


@pytest.mark.parametrize(
    ("landscape", "min_k", "start_k"),
    [(HIGH_ACCEPTANCE, 1, 7), (HIGH_ACCEPTANCE, 1, 3), (LOW_ACCEPTANCE, 0, 7)],
    ids=["high acceptance from K=7", "high acceptance from K=3", "low acceptance, K=0 allowed"],
)
def test_a_noisy_course_of_loads_ends_near_the_best_k_at_each(
    landscape: Landscape, min_k: int, start_k: int
) -> None:
    """Two seeds, 3 % noise from block to block; one leg of ten may miss by more than 5 %."""
    legs = [
        leg
        for seed in range(2)
        for leg in run_course(
            landscape, seed=seed, min_k=min_k, start_k=start_k, loads=(1, 8, 32, 64, 8)
        )
    ]
    assert sum(leg.share_of_best < 0.95 for leg in legs) <= 1
    assert min(leg.share_of_best for leg in legs) > 0.8
    assert max(leg.blocks for leg in legs) <= 7
    assert sum(leg.blocks for leg in legs) / 2 <= 16


def test_without_noise_every_load_reaches_its_best_and_coming_back_costs_nothing() -> None:
    tuned = course()
    for streams in (1, 8, 32, 64):
        tuned.run(streams, 12)
        outcomes = tuned.run(streams, 240, is_at_rest(streams))
        k = outcomes[-1].table.k_at(streams)
        assert HIGH_ACCEPTANCE.at(streams, k) >= 0.97 * HIGH_ACCEPTANCE.best(streams, min_k=1)
    told, table = len(explored(tuned)), tuned.engine.table
    tuned.run(8, 60)
    assert len(explored(tuned)) == told
    assert tuned.engine.table == table


def test_a_restart_of_the_operator_at_any_pass_changes_nothing() -> None:
    """All memory is in the status: the course already passes it through JSON at every pass."""
    first, second = course(noise=0.03), course(noise=0.03)
    first.run(8, 100)
    while second.engine.now < 100:
        second.tuning = TuningStatus.model_validate_json(
            second.tuning.model_dump_json(by_alias=True)
        )
        second.step(8)
    assert first.tuning == second.tuning
    assert [e.message for e in first.events] == [e.message for e in second.events]


# ---------------------------------------------------------------------- one experiment


def test_a_winner_is_kept_and_the_next_opens_at_once_with_its_block_as_baseline() -> None:
    tuned = course()
    first = run_until_open(tuned)
    assert (first.batch, first.from_k, first.to_k, first.lever) == (8, 7, 5, "KTable")
    tuned.run(
        8, 60, lambda outcome: outcome.experiment is not None and outcome.experiment.id != first.id
    )
    second = tuned.experiment
    assert second is not None
    assert (second.from_k, second.to_k) == (5, 3)
    assert second.baseline_tokens_per_second == pytest.approx(489, rel=0.01)
    assert second.from_rows == first.to_rows == tuned.tuning.rows
    assert "K 7 → 5 kept: 462 → 489 tok/s" in explored(tuned)[0]


def test_a_loser_is_put_back_and_remembered() -> None:
    tuned = course()
    run_until_open(tuned, streams=1)
    assert tuned.engine.table.compact() == "5"
    tuned.run(1, 60, is_at_rest(1))
    assert tuned.engine.table.compact() == "7"
    assert "K 7 → 5 put back: 194 → 163 tok/s, -16.0 %" in explored(tuned)[0]
    assert [(cell.batch, cell.k) for cell in tuned.tuning.cells] == [(1, 5), (1, 7)]
    assert not [o for o in tuned.run(1, 120) if o.experiment is not None]


def test_a_gain_below_the_minimum_is_put_back() -> None:
    tuned = course(min_gain_percent=10)
    run_until_open(tuned)
    tuned.run(8, 40)
    assert "K 7 → 5 put back: 462 → 489 tok/s, +5.8 %" in explored(tuned)[0]


def test_a_marginal_gain_is_watched_for_a_second_block() -> None:
    tuned = course(min_gain_percent=4.5)
    run_until_open(tuned)
    judged_after = 0.0
    begun = tuned.engine.now
    while not explored(tuned):
        outcome = tuned.step(8)
        judged_after = tuned.engine.now - begun
    assert "K 7 → 5 kept" in explored(tuned)[0]
    assert judged_after > 1.8 * tuned.block_seconds
    assert outcome.reason == Reason.EXPLORING


def test_a_machine_that_became_slower_is_no_reason_to_try_anything_anew() -> None:
    tuned = course()
    tuned.run(8, 600)
    told, before = len(explored(tuned)), ratios(tuned)
    slower = {batch: tuple(0.8 * x for x in row) for batch, row in HIGH_ACCEPTANCE.goodput.items()}
    tuned.engine.landscape = Landscape(HIGH_ACCEPTANCE.hazard, slower)
    tuned.run(8, 400)
    assert len(explored(tuned)) == told
    assert ratios(tuned) == pytest.approx(before, rel=0.01)


def ratios(tuned: Course) -> dict[int, float]:
    """Goodput of each K measured at 8 streams over that of the K in force."""
    cells = {cell.k: cell.tokens_per_second for cell in tuned.tuning.cells if cell.batch == 8}
    return {k: rate / cells[tuned.engine.table.k_at(8)] for k, rate in cells.items()}


def test_a_k_that_the_engine_lowers_is_put_back_and_not_tried_again() -> None:
    tuned = course(k=3)
    tuned.engine = LoweringEngine(HIGH_ACCEPTANCE, 1, tuned.spec_table, noise=QUIET)
    tuned.run(1, 400, lambda outcome: outcome.reason in AT_REST)
    lowered = [message for message in explored(tuned) if "the engine lowers it to K=3" in message]
    assert len(lowered) == len({message.partition(" put back")[0] for message in lowered}) > 0
    assert tuned.engine.table.k_at(1) <= 3


class LoweringEngine(SimulatedEngine):
    """An engine that has captured nothing beyond K=3."""

    def _serve(self, tick: float, streams: int) -> float:
        asked = self.table
        self.table = KTable.from_starts(
            [(row.first, min(row.k, 3)) for row in asked.rows], asked.max_batch
        )
        served = super()._serve(tick, streams)
        self.table = asked
        return served


def test_the_block_is_counted_from_when_every_engine_reported_the_table() -> None:
    tuned = course()
    opened = run_until_open(tuned)
    assert opened.judged_from is None
    inputs = input_of(tuned, acknowledged=False)
    waiting = advance_tuning(inputs)
    assert waiting.reason == Reason.WAITING_FOR_ENGINES
    assert waiting.experiment is not None
    assert waiting.experiment.judged_from is None
    judged = advance_tuning(replace(inputs, acknowledged=True))
    assert judged.experiment is not None
    assert judged.experiment.judged_from == inputs.now
    again = advance_tuning(replace(inputs, experiment=judged.experiment, acknowledged=False))
    assert again.experiment is not None
    assert again.experiment.judged_from is None


def test_waiting_for_an_engine_writes_the_status_once_and_then_no_more() -> None:
    tuned = course()
    tuned.run(8, 40, lambda outcome: outcome.tuning.last_change_at is not None)
    first = advance_tuning(input_of(tuned, acknowledged=False))
    later = tuned.now + timedelta(seconds=30)
    second = advance_tuning(input_of(tuned, acknowledged=False, tuning=first.tuning, now=later))
    assert first.tuning != tuned.tuning
    assert second.tuning == first.tuning
    assert (
        advance_tuning(input_of(tuned, tuning=second.tuning, now=later)).tuning.last_change_at
        == later
    )


def test_the_load_leaves_during_the_block_put_back_and_nothing_learned() -> None:
    tuned = course()
    opened = run_until_open(tuned)
    cells = tuned.tuning.cells
    tuned.run(64, 120, lambda outcome: outcome.experiment is None)
    assert "put back: inconclusive, the load left" in explored(tuned)[0]
    assert tuned.tuning.rows == opened.from_rows
    assert [c for c in tuned.tuning.cells if c.batch == 8] == cells


def test_no_data_under_a_hold_waits_and_at_last_puts_back() -> None:
    tuned = course()
    opened = run_until_open(tuned)
    inputs = replace(input_of(tuned), samples=EMPTY, hold="Prometheus is away")
    early = advance_tuning(inputs)
    assert (early.reason, early.message) == (Reason.HELD, "Prometheus is away")
    assert early.experiment == opened
    late = advance_tuning(replace(inputs, now=inputs.now + timedelta(seconds=151)))
    assert late.experiment is None
    assert late.table.to_rows() == opened.from_rows
    assert "no data for" in late.events[0].message


def test_cooldown_holds_the_next_change_but_not_the_verdict() -> None:
    tuned = course(cooldown_seconds=60)
    tuned.run(8, 59)
    assert tuned.experiment is None
    assert tuned.outcome is not None
    assert "cooldown" in tuned.outcome.message
    run_until_open(tuned)
    tuned.run(8, 30)
    assert "kept" in explored(tuned)[0]
    assert tuned.experiment is None


def test_min_steps_are_waited_for() -> None:
    tuned = course(min_steps=100_000)
    tuned.run(8, 120)
    assert tuned.experiment is None
    assert tuned.outcome is not None
    assert tuned.outcome.reason == Reason.COLLECTING


# ------------------------------------------------------------------- the user and the modes


def input_of(tuned: Course, **changes: object) -> TuningInput:
    inputs = TuningInput(
        now=tuned.now,
        mode=TuningMode.AUTO,
        tuning=tuned.tuning,
        experiment=tuned.experiment,
        spec_table=tuned.spec_table,
        envelope=Envelope(KS),
        min_k=1,
        min_gain_percent=2,
        min_steps=50,
        min_block=timedelta(seconds=15),
        cooldown=timedelta(0),
        samples=tuned.engine.samples(),
        acknowledged=True,
    )
    return replace(inputs, **changes)  # type: ignore[arg-type]


def test_an_edit_of_the_users_table_replaces_the_tuned_one_and_its_cells() -> None:
    tuned = course()
    run_until_open(tuned)
    outcome = advance_tuning(input_of(tuned, spec_table=KTable.constant(2, 64), acknowledged=False))
    assert outcome.table.compact() == "2"
    assert outcome.experiment is None
    assert (outcome.tuning.cells, outcome.tuning.spec_table) == ([], "2")
    assert outcome.events[0].reason == "TableReplaced"


def test_leaving_auto_ends_the_experiment_and_runs_the_users_table() -> None:
    tuned = course()
    run_until_open(tuned)
    outcome = advance_tuning(input_of(tuned, mode=TuningMode.ADVISE, acknowledged=False))
    assert (outcome.table.compact(), outcome.experiment) == ("7", None)
    assert "mode is Advise" in outcome.events[0].message


def test_advise_changes_nothing_and_says_what_it_lacks() -> None:
    tuned = course(mode=TuningMode.ADVISE)
    outcomes = tuned.run(32, 90)
    assert {outcome.table.compact() for outcome in outcomes} == {"7"}
    assert outcomes[-1].reason == Reason.ADVISING
    assert "only K=7 was measured" in outcomes[-1].message
    assert outcomes[-1].tuning.recommendation is None


def test_advise_recommends_what_auto_has_measured_once_and_steadily() -> None:
    tuned = course()
    tuned.run(32, 240, is_at_rest(32))
    tuned.mode = TuningMode.ADVISE
    tuned.run(32, 90)
    recommended = tuned.tuning.recommendation
    assert recommended is not None
    assert recommended.table == "7x16,1x32,7"
    assert recommended.expected_gain_percent == pytest.approx(65, abs=3)
    assert "measured" in recommended.why
    assert tuned.engine.table.compact() == "7"
    tuned.run(32, 60)
    assert tuned.tuning.recommendation == recommended
    assert len([e for e in tuned.events if e.reason == "TableRecommended"]) == 1


def test_k_zero_is_never_chosen_unless_asked_for_and_the_loss_is_told() -> None:
    tuned = course(LOW_ACCEPTANCE, k=3)
    outcomes = [*tuned.run(8, 150), *tuned.run(64, 200)]
    assert min(min(outcome.table.ks) for outcome in outcomes) == 1
    assert outcomes[-1].reason == Reason.DOES_NOT_PAY
    assert "K=0 gives" in outcomes[-1].message
    assert "predicted, not measured" in outcomes[-1].message


def test_k_zero_is_measured_and_chosen_where_it_was_asked_for() -> None:
    tuned = course(LOW_ACCEPTANCE, k=2, min_k=0)
    tuned.run(64, 12)
    outcome = tuned.run(64, 240, is_at_rest(64))[-1]
    assert outcome.table.k_at(64) == 0
    assert outcome.reason == Reason.DOES_NOT_PAY
    assert "(measured)" in outcome.message


def test_an_envelope_that_lost_a_k_ends_its_experiment() -> None:
    tuned = course()
    opened = run_until_open(tuned)
    smaller = Envelope(tuple(k for k in KS if k != opened.to_k))
    outcome = advance_tuning(input_of(tuned, envelope=smaller))
    assert outcome.experiment is None or outcome.experiment.to_k != opened.to_k
    assert outcome.table.ks <= set(smaller.ks)


# ------------------------------------------------------------------------ small and odd


NO_CHANGE = {
    "nothing was scraped": (EMPTY, Reason.NOT_SCRAPED),
    "no step was run": (
        MetricsSamples(
            0,
            10,
            (
                Series(
                    "specdecode_engine_iterations_total",
                    {"pod": "a"},
                    tuple((STARTED.timestamp() - back, 5.0) for back in (6, 4, 2)),
                ),
            ),
        ),
        Reason.NO_TRAFFIC,
    ),
}


@pytest.mark.parametrize("situation", NO_CHANGE)
def test_nothing_changes_when(situation: str) -> None:
    samples, reason = NO_CHANGE[situation]
    tuned = course()
    outcome = advance_tuning(input_of(tuned, samples=samples))
    assert (outcome.reason, outcome.table, outcome.experiment) == (reason, tuned.spec_table, None)


def test_figures_of_the_status_move_only_when_they_moved() -> None:
    tuned = course(mode=TuningMode.ADVISE)
    tuned.run(8, 60)
    first = estimate_now(tuned.engine.samples(), EstimateStatus())
    assert (first.batch, first.versus_spec_off_percent) == (8, "unknown")
    assert first.goodput_tokens_per_second == pytest.approx(462, rel=0.01)
    assert first.tokens_per_second_per_user == pytest.approx(462 / 8, rel=0.01)
    assert first.mean_acceptance_length == pytest.approx(3.6, abs=0.05)
    assert first.acceptance[0] == pytest.approx(0.75, abs=0.01)
    tuned.run(8, 20)
    assert estimate_now(tuned.engine.samples(), first) == first
    tuned.run(64, 60)
    assert estimate_now(tuned.engine.samples(), first).batch == 64


def test_cells_are_bounded_and_the_oldest_go() -> None:
    tuned = course(mode=TuningMode.ADVISE)
    tuned.run(8, 40)
    crowd = [
        CellStatus(
            batch=2 ** (index % 16),
            k=100 + index,
            tokens_per_second=1.0,
            mean_batch=1.0,
            steps=1,
            measured_at=STARTED - timedelta(days=1, seconds=-index),
        )
        for index in range(MAX_CELLS)
    ]
    stale = tuned.tuning.model_copy(update={"cells": crowd})
    outcome = advance_tuning(input_of(tuned, tuning=stale, mode=TuningMode.ADVISE))
    assert len(outcome.tuning.cells) == MAX_CELLS
    assert (8, 7) in {(cell.batch, cell.k) for cell in outcome.tuning.cells}
    assert 100 not in {cell.k for cell in outcome.tuning.cells}


def test_samples_must_reach_over_three_blocks() -> None:
    assert reach(timedelta(seconds=15)) == timedelta(seconds=60)
    assert reach(timedelta(minutes=2)) == timedelta(minutes=6)


odd = st.one_of(st.floats(), st.floats(0, 1e9), st.just(math.nan))


@st.composite
def odd_series(draw: st.DrawFn) -> Series:
    name = draw(
        st.sampled_from(
            [
                "specdecode_steps_total",
                "specdecode_step_seconds_total",
                "specdecode_step_tokens_total",
                "specdecode_step_requests_total",
                "specdecode_mixed_steps_total",
                "specdecode_at_risk_per_position_total",
                "specdecode_accepted_per_position_total",
            ]
        )
    )
    labels = {
        "pod": "a",
        "batch": draw(st.sampled_from(["1", "8", "3", "-1", "0", "x"])),
        "k": draw(st.sampled_from(["0", "3", "7", "99"])),
        "arm": draw(st.sampled_from(["0", "1", "2"])),
        "position": "0",
    }
    moments = [STARTED.timestamp() - 60 + 2 * index for index in range(30)]
    values = draw(st.lists(odd, min_size=2, max_size=30))
    return Series(name, labels, tuple(zip(moments, values, strict=False)))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(odd_series(), max_size=8),
    st.sampled_from(list(TuningMode)),
    st.booleans(),
    st.one_of(st.none(), st.just("held")),
    st.sampled_from(
        [[], [[1, 64, 3]], [[1, 4, 7], [5, 64, 1]], [[2, 1, 5]], [[1, 64]], [[1, 8, 99]]]
    ),
    st.booleans(),
    st.floats(0, 1e9),
)
def test_whatever_comes_in_a_table_within_the_envelope_comes_out(
    series: list[Series],
    mode: TuningMode,
    acknowledged: bool,
    hold: str | None,
    rows: list[list[int]],
    is_open: bool,
    baseline: float,
) -> None:
    tuned = course()
    opened = ExperimentStatus(
        id="x",
        lever="KTable",
        batch=8,
        from_k=7,
        to_k=3,
        from_rows=[[1, 64, 7]],
        to_rows=rows,
        baseline_tokens_per_second=baseline,
        baseline_mean_batch=8,
        started_at=STARTED - timedelta(seconds=50),
        judged_from=STARTED - timedelta(seconds=40),
    )
    outcome = advance_tuning(
        input_of(
            tuned,
            mode=mode,
            acknowledged=acknowledged,
            hold=hold,
            samples=MetricsSamples(0, STARTED.timestamp(), tuple(series)),
            tuning=TuningStatus(
                spec_table="7", rows=rows, last_change_at=STARTED - timedelta(seconds=60)
            ),
            experiment=opened if is_open else None,
        )
    )
    assert isinstance(outcome, TuningOutcome)
    assert outcome.table.ks <= set(KS)
    assert outcome.table.max_batch == 64
    assert outcome.requeue_after > timedelta(0)
    assert len(outcome.tuning.cells) <= MAX_CELLS
