"""Goodput of a (batch bucket, K): what counts, and comparison at equal batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.domain.observation import Series
from specdecode_operator.estimate.counters import Counters, NoEstimate, Window
from specdecode_operator.estimate.goodput import (
    Comparison,
    Measurement,
    Rate,
    busy_seconds_by_batch,
    compare_at_equal_batch,
    measure_goodput,
)
from tests.support.samples import cell, mixed_cell, samples_of

MOMENTS = [5.0 * index for index in range(7)]


def window_of(*found: Series) -> Window:
    window = Counters.of(samples_of(*found)).window(start=0, end=1e9)
    assert isinstance(window, Window)
    return window


def measured(window: Window, batch: int = 8, k: int = 3) -> Measurement:
    measurement = measure_goodput(window, batch=batch, k=k)
    assert isinstance(measurement, Measurement)
    return measurement


def test_goodput_is_tokens_over_busy_time_of_decode_only_and_mixed_steps() -> None:
    window = window_of(
        *cell(MOMENTS, batch=8, k=3, steps=100, step_seconds=0.02, step_tokens=16, requests=7),
        *mixed_cell(MOMENTS, batch=8, steps=50, step_seconds=0.04, step_tokens=10),
    )
    found = measured(window)
    assert found.tokens_per_second == pytest.approx((100 * 16 + 50 * 10) / (100 * 0.02 + 50 * 0.04))
    assert found.mean_batch == pytest.approx((100 * 7 + 50 * 8) / 150)
    assert found.step_seconds == pytest.approx(4 / 150)
    assert (found.steps, found.present_seconds) == (900, 30)


def test_other_arms_batches_and_k_do_not_count() -> None:
    window = window_of(
        *cell(MOMENTS, batch=8, k=3),
        *cell(MOMENTS, batch=8, k=3, arm=1, step_tokens=1),
        *cell(MOMENTS, batch=8, k=0, steps=2, step_tokens=1),
        *cell(MOMENTS, batch=16, k=3, step_tokens=1),
        *mixed_cell(MOMENTS, batch=8, arm=2, step_tokens=1),
    )
    assert measured(window).tokens_per_second == pytest.approx(16 / 0.02)


def test_a_bucket_owns_the_part_of_the_time_in_which_it_was_busy() -> None:
    window = window_of(
        *cell(MOMENTS, batch=8, k=3, steps=100), *cell(MOMENTS, batch=16, k=3, steps=300)
    )
    assert busy_seconds_by_batch(window) == {8: pytest.approx(12), 16: pytest.approx(36)}
    assert measured(window).present_seconds == pytest.approx(30 / 4)


def test_mixed_steps_alone_are_a_measurement() -> None:
    assert measured(window_of(*mixed_cell(MOMENTS, batch=8))).tokens_per_second == 16 / 0.02


def test_a_bucket_that_ran_mostly_with_another_k_is_not_measured() -> None:
    window = window_of(
        *cell(MOMENTS, batch=8, k=3, steps=10), *cell(MOMENTS, batch=8, k=1, steps=30)
    )
    found = measure_goodput(window, batch=8, k=3)
    assert isinstance(found, NoEstimate)
    assert found.reason == Reason.COLLECTING


def test_no_step_is_no_traffic() -> None:
    found = measure_goodput(window_of(*cell(MOMENTS, batch=8, k=3)), batch=64, k=3)
    assert isinstance(found, NoEstimate)
    assert found.reason == Reason.NO_TRAFFIC


def test_the_error_comes_from_the_parts() -> None:
    counters = Counters.of(samples_of(*cell(MOMENTS, batch=8, k=3)))
    window = counters.window(start=0, end=30)
    assert isinstance(window, Window)
    even = measure_goodput(window, batch=8, k=3, parts=counters.parts(start=0, end=30, count=6))
    assert isinstance(even, Measurement)
    assert even.relative_error == pytest.approx(0, abs=1e-9)
    assert measured(window).relative_error is None


def test_a_faster_arm_at_a_smaller_batch_is_compared_as_if_at_the_same() -> None:
    compared = compare_at_equal_batch(Rate(500, 6, 0.03), Rate(500, 8, 0.04))
    assert isinstance(compared, Comparison)
    assert compared.log_ratio == pytest.approx(0.7 * math.log(8 / 6))
    assert compared.percent > 20
    assert compared.relative_error == pytest.approx(0.05)


@given(st.floats(), st.floats(), st.floats(), st.floats())
def test_odd_rates_never_raise(a: float, b: float, c: float, d: float) -> None:
    compared = compare_at_equal_batch(Rate(a, b), Rate(c, d))
    if isinstance(compared, Comparison):
        assert math.isfinite(compared.log_ratio)
        assert math.isfinite(compared.percent)
