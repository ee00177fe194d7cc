"""The step-cost model: recovers a known cost, never extrapolates far, survives odd cells."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.step_cost import (
    Drift,
    PredictedStepTime,
    StepCost,
    StepTime,
    detect_drift,
    fit_step_cost,
    is_stale,
)
from tests.support.closed_loop import HIGH_ACCEPTANCE, KS, LOW_ACCEPTANCE, Landscape

TABLES = Path(__file__).parents[2] / "data" / "tables"


def cost(batch: float, k: int) -> float:
    tokens = batch * (k + 1)
    return 0.010 + 0.0004 * tokens + 0.001 * math.sqrt(tokens) + 0.002 * k


def cell_of(landscape: Landscape, batch: int, k: int) -> StepTime:
    length = sum(landscape.hazard**position for position in range(k + 1))
    return StepTime(batch, k, batch * length / landscape.at(batch, k), 100)


def fitted(cells: list[StepTime]) -> StepCost:
    model = fit_step_cost(cells)
    assert isinstance(model, StepCost)
    return model


def seconds(model: StepCost, batch: float, k: int) -> PredictedStepTime:
    predicted = model.predict(batch, k)
    assert isinstance(predicted, PredictedStepTime)
    return predicted


def test_a_known_cost_is_recovered() -> None:
    model = fitted([StepTime(b, k, cost(b, k), 100) for b in (1, 8, 64) for k in (0, 3, 7)])
    assert model.relative_error < 1e-6
    for batch, k in ((1, 1), (32, 5), (64, 2)):
        assert seconds(model, batch, k).seconds == pytest.approx(cost(batch, k), rel=1e-3)


@pytest.mark.parametrize("landscape", [HIGH_ACCEPTANCE, LOW_ACCEPTANCE])
def test_it_fits_the_real_landscape_within_a_fifth(landscape: Landscape) -> None:
    cells = [cell_of(landscape, b, k) for b in landscape.goodput for k in KS]
    model = fitted(cells)
    assert model.relative_error < 0.15
    for cell in cells:
        assert seconds(model, cell.batch, cell.k).seconds == pytest.approx(cell.seconds, rel=0.35)


@pytest.mark.parametrize("landscape", [HIGH_ACCEPTANCE, LOW_ACCEPTANCE])
def test_from_k_above_zero_it_tells_k_zero_within_a_sixth(landscape: Landscape) -> None:
    model = fitted([cell_of(landscape, b, k) for b in landscape.goodput for k in KS if k > 0])
    for batch in landscape.goodput:
        zero, one = (seconds(model, batch, k).seconds for k in (0, 1))
        truth = landscape.at(batch, 0) / landscape.at(batch, 1)
        assert one / zero / (1 + landscape.hazard) == pytest.approx(truth, rel=1 / 6)


def test_a_cell_of_more_steps_weighs_more() -> None:
    model = fitted([StepTime(8, 3, 0.02, 400), StepTime(8, 3, 0.04, 4)])
    assert seconds(model, 8, 3).seconds < 0.0215


def test_it_says_where_it_extrapolates_and_stops_at_twice_the_largest_batch() -> None:
    model = fitted([StepTime(b, k, cost(b, k), 100) for b in (8, 32) for k in (1, 3)])
    assert not seconds(model, 16, 2).extrapolated
    assert seconds(model, 4, 2).extrapolated
    assert seconds(model, 16, 5).extrapolated
    assert seconds(model, 64, 2).extrapolated
    assert isinstance(model.predict(65, 2), NoEstimate)


def test_no_coefficient_is_negative_even_where_more_drafts_looked_cheaper() -> None:
    model = fitted([StepTime(1, 5, 0.0202, 100), StepTime(1, 7, 0.0186, 100)])
    assert min(model.coefficients) >= 0
    assert model.modelled(1, 7) >= model.modelled(1, 5)


def test_nothing_measured_is_no_estimate() -> None:
    assert isinstance(fit_step_cost([]), NoEstimate)
    assert isinstance(fit_step_cost([StepTime(8, 1, math.nan, 10)]), NoEstimate)


def test_one_cell_predicts_itself_and_is_unsure_of_all_else() -> None:
    model = fitted([StepTime(8, 3, 0.02, 1000)])
    here, there = seconds(model, 8, 3), seconds(model, 8, 7)
    assert here.seconds == pytest.approx(0.02, rel=0.01)
    assert here.relative_error < 0.04 < there.relative_error


# ------------------------------------------------------------------- model and measurement


def test_a_measured_cell_is_blended_with_the_model_by_their_variances() -> None:
    cells = [StepTime(b, k, cost(b, k), 2000) for b in (1, 4, 16, 64) for k in (1, 3, 5)]
    odd = [StepTime(16, 7, 1.3 * cost(16, 7), steps) for steps in (20_000, 20)]
    long, short = (seconds(fitted([*cells, one]), 16, 7) for one in odd)
    assert short.seconds < 1.1 * cost(16, 7) < 1.15 * cost(16, 7) < long.seconds
    assert long.relative_error < short.relative_error


def test_what_the_model_misses_fades_with_distance() -> None:
    cells = [StepTime(b, k, cost(b, k), 2000) for b in (1, 4, 16, 64) for k in (1, 3, 5)]
    model = fitted([*cells, StepTime(64, 7, 1.3 * cost(64, 7), 2000)])
    missed = [seconds(model, b, 7).seconds / model.modelled(b, 7) for b in (64, 32, 8, 1)]
    assert missed[0] > missed[1] > missed[2]
    assert missed[3] == pytest.approx(1, abs=0.03)


# ---------------------------------------------------------------- a public curve, the cliff


def public_cost() -> dict[int, float]:
    """Milliseconds of a verification step by tokens (vLLM blog, 2026-08-14, figure 2)."""
    rows = csv.DictReader((TABLES / "cost_dspark_v4flash_b300.csv").open())
    return {
        int(row["concurrency_or_batch"]): float(row["value"])
        for row in rows
        if row["metric"] == "verify_step_cost"
    }


def test_a_public_curve_is_told_within_a_few_percent_from_some_of_its_points() -> None:
    curve = {tokens: ms for tokens, ms in public_cost().items() if tokens <= 1024}
    some = [tokens for tokens in (1, 4, 16, 64, 128, 256, 512, 960) if tokens in curve]
    model = fit_step_cost(
        [StepTime(tokens, 0, curve[tokens] / 1000, 2000) for tokens in some], captured_tokens=1024
    )
    assert isinstance(model, StepCost)
    errors = [abs(seconds(model, n, 0).seconds / (ms / 1000) - 1) for n, ms in curve.items()]
    assert median(errors) < 0.03
    assert max(errors) < 0.15  # the curve itself jumps by 14 % from 144 to 152 tokens


def test_beyond_the_captured_graphs_is_a_cliff_that_is_neither_fitted_nor_predicted() -> None:
    inside = [StepTime(b, 3, cost(b, 3), 1000) for b in (8, 32, 128, 256)]
    beyond = StepTime(512, 3, 0.5, 1000)
    model = fit_step_cost([*inside, beyond], captured_tokens=1024)
    assert isinstance(model, StepCost)
    assert model.cells == 4
    assert seconds(model, 256, 3).seconds == pytest.approx(cost(256, 3), rel=0.02)
    refused = model.predict(256, 4)
    assert isinstance(refused, NoEstimate)
    assert refused.reason == Reason.OUT_OF_RANGE
    assert "1280 tokens" in refused.message
    assert isinstance(fit_step_cost([beyond], captured_tokens=1024), NoEstimate)


REFUSED = {
    "batch 0": (0, 3, Reason.BAD_DATA),
    "a negative batch": (-8, 3, Reason.BAD_DATA),
    "no number": (math.nan, 3, Reason.BAD_DATA),
    "a negative K": (8, -1, Reason.BAD_DATA),
    "K above the envelope": (8, 9, Reason.OUT_OF_RANGE),
    "more than twice the largest batch": (129, 3, Reason.OUT_OF_RANGE),
    "an endless batch": (math.inf, 3, Reason.BAD_DATA),
    "10^9 requests": (10**9, 3, Reason.OUT_OF_RANGE),
}


@pytest.mark.parametrize("situation", REFUSED)
def test_no_step_time_for(situation: str) -> None:
    batch, k, reason = REFUSED[situation]
    model = fit_step_cost([StepTime(b, 3, cost(b, 3), 100) for b in (8, 64)], k_max=7)
    assert isinstance(model, StepCost)
    refused = model.predict(batch, k)
    assert isinstance(refused, NoEstimate)
    assert refused.reason == reason


# -------------------------------------------------------------------- stale cells and drift


STALE = {
    "the same": (1000.0, "H100", False),
    "a context 25 % longer": (1250.0, "H100", False),
    "a context a third longer": (1334.0, "H100", True),
    "a context a third shorter": (666.0, "H100", True),
    "another GPU": (1000.0, "A100", True),
    "nothing known": (None, None, False),
    "a context that is no number": (math.nan, "H100", True),
}


@pytest.mark.parametrize("situation", STALE)
def test_a_cell_is_stale_beside(situation: str) -> None:
    context, product, expected = STALE[situation]
    one = StepTime(8, 3, 0.02, 100, context_tokens=1000.0, product="H100")
    assert is_stale(one, context_tokens=context, product=product) is expected


def test_stale_cells_are_left_out_of_the_fit() -> None:
    old = [StepTime(b, 3, 3 * cost(b, 3), 1000, context_tokens=8000) for b in (8, 64)]
    new = [StepTime(b, 3, cost(b, 3), 1000, context_tokens=1000) for b in (8, 64)]
    model = fit_step_cost([*old, *new], context_tokens=1100)
    assert isinstance(model, StepCost)
    assert model.cells == 2
    assert seconds(model, 8, 3).seconds == pytest.approx(cost(8, 3), rel=0.01)


DRIFTS = [(1.0, False), (1.03, False), (1.2, True), (0.8, True)]


@pytest.mark.parametrize(("factor", "expected"), DRIFTS)
def test_an_engine_has_drifted_when_its_steps_take_longer_or_shorter(
    factor: float, expected: bool
) -> None:
    model = fitted([StepTime(b, k, cost(b, k), 2000) for b in (1, 8, 64) for k in (1, 3, 7)])
    drift = detect_drift(model, [StepTime(b, 3, factor * cost(b, 3), 2000) for b in (8, 32)])
    assert isinstance(drift, Drift)
    assert drift.has_drifted is expected
    assert drift.percent == pytest.approx(100 * (factor - 1), abs=1.5)


def test_drift_is_not_told_from_outside_of_the_cells() -> None:
    model = fitted([StepTime(b, 3, cost(b, 3), 2000) for b in (8, 64)])
    assert isinstance(detect_drift(model, [StepTime(128, 3, 9.0, 2000)]), NoEstimate)
    assert isinstance(detect_drift(model, [StepTime(8, 3, math.nan, 2000)]), NoEstimate)
    assert isinstance(detect_drift(model, []), NoEstimate)


# ------------------------------------------------------------------------------ odd input


odd = st.one_of(st.floats(), st.floats(1e-6, 1e9))


@given(
    st.lists(st.builds(StepTime, odd, st.integers(-1, 64), odd, odd), max_size=8),
    odd,
    st.integers(-1, 64),
)
def test_odd_cells_never_raise(cells: list[StepTime], batch: float, k: int) -> None:
    model = fit_step_cost(cells)
    if isinstance(model, StepCost):
        predicted = model.predict(batch, k)
        if isinstance(predicted, PredictedStepTime):
            assert predicted.seconds >= 0
            assert math.isfinite(predicted.seconds)
            assert math.isfinite(predicted.relative_error)
        drift = detect_drift(model, cells)
        assert isinstance(drift, NoEstimate) or math.isfinite(drift.percent)


def test_a_batch_that_no_engine_has_is_bad_data() -> None:
    huge = StepTime(8.98846567431158e307, 1, 1.0, 1.0)
    assert isinstance(fit_step_cost([huge]), NoEstimate)
