"""The step-cost model: recovers a known cost, never extrapolates far, survives odd cells."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.step_cost import (
    PredictedStepTime,
    StepCost,
    StepTime,
    fit_step_cost,
)
from tests.support.closed_loop import HIGH_ACCEPTANCE, KS, LOW_ACCEPTANCE, Landscape


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
    assert seconds(model, 1, 7).seconds >= seconds(model, 1, 5).seconds


def test_nothing_measured_is_no_estimate() -> None:
    assert isinstance(fit_step_cost([]), NoEstimate)
    assert isinstance(fit_step_cost([StepTime(8, 1, math.nan, 10)]), NoEstimate)


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


def test_a_batch_that_no_engine_has_is_bad_data() -> None:
    huge = StepTime(8.98846567431158e307, 1, 1.0, 1.0)
    assert isinstance(fit_step_cost([huge]), NoEstimate)
