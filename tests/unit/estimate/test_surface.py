"""A table of measurements becomes a surface: what was measured stands, holes are filled."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.surface import (
    Measurement,
    Surface,
    fit_surface,
    pool_measurements,
)
from specdecode_operator.estimate.surface_prior import Arm, draw_log_goodput

LOADS = (1.0, 4.0, 16.0, 64.0)
ARMS: tuple[Arm, ...] = (None, 1, 3, 7)


def fit(rows: list[Measurement]) -> Surface:
    surface = fit_surface(rows)
    assert isinstance(surface, Surface)
    return surface


def engine(batch: float, arm: Arm) -> float:
    """Goodput of an engine whose best K falls from 7 to 1 and then off."""
    k = arm or 0
    length = sum(0.75**position for position in range(k + 1))
    seconds = math.hypot(1.0, batch * (k + 1) / 90) + (0.0 if arm is None else 0.05 + 0.04 * k)
    return 100 * batch * length / seconds


def table(noise: float = 0.0, seed: int = 0) -> list[Measurement]:
    chance = np.random.default_rng(seed)
    return [
        Measurement(batch, arm, engine(batch, arm) * math.exp(noise * chance.standard_normal()))
        for batch, arm in product(LOADS, ARMS)
    ]


def test_a_measured_cell_stands_as_it_was_measured() -> None:
    rows = table(noise=0.02)
    surface = fit(rows)
    for row in rows:
        found = surface.estimates_at(row.batch)[row.arm]
        assert found.measured
        assert found.tokens_per_second == pytest.approx(row.tokens_per_second)
        assert found.lower < found.tokens_per_second < found.upper


def test_repeats_are_pooled_and_their_spread_widens_the_interval() -> None:
    calm = [Measurement(8, 3, rate) for rate in (999.0, 1000.0, 1001.0, 1000.0)]
    wild = [Measurement(8, 3, rate) for rate in (900.0, 1000.0, 1100.0, 1000.0)]
    (one,), (other,) = pool_measurements(calm), pool_measurements(wild)
    assert one.tokens_per_second == other.tokens_per_second == pytest.approx(1000.0)
    assert one.repeats == 4
    assert other.relative_error > 3 * one.relative_error


def test_a_row_of_more_repeats_counts_for_more() -> None:
    (cell,) = pool_measurements([Measurement(8, 3, 100.0, n=3), Measurement(8, 3, 200.0, n=1)])
    assert cell.tokens_per_second == pytest.approx(125.0)


def test_a_stated_error_is_taken_at_its_word() -> None:
    found = fit([Measurement(8, 3, 1000.0, stderr=50.0)]).estimates_at(8)[3]
    assert found.lower == pytest.approx(1000 * math.exp(-1.96 * 0.05))


def test_a_single_row_has_the_noise_of_the_repeats_elsewhere() -> None:
    repeats = [Measurement(1, 3, rate) for rate in (80.0, 100.0, 120.0, 90.0, 110.0)]
    alone, calm = Measurement(8, 3, 500.0), Measurement(8, 3, 500.0)
    noisy = next(c for c in pool_measurements([*repeats, alone]) if c.batch == 8)
    (quiet,) = pool_measurements([calm])
    assert noisy.relative_error > 5 * quiet.relative_error


@pytest.mark.parametrize("hole", list(product(LOADS, ARMS)), ids=str)
def test_one_hole_is_filled_near_the_truth(hole: tuple[float, Arm]) -> None:
    batch, arm = hole
    rows = [row for row in table(noise=0.005) if (row.batch, row.arm) != hole]
    found = fit(rows).estimates_at(batch)[arm]
    assert not found.measured
    assert found.tokens_per_second == pytest.approx(engine(batch, arm), rel=0.12)


def test_intervals_of_filled_holes_cover_the_truth() -> None:
    hits, holes = 0, 0
    for seed, hole in product(range(4), product(LOADS, ARMS)):
        rows = [row for row in table(0.01, seed) if (row.batch, row.arm) != hole]
        found = fit(rows).estimates_at(hole[0])[hole[1]]
        hits += found.lower <= engine(*hole) <= found.upper
        holes += 1
    assert hits / holes >= 0.9


def test_an_interval_is_wider_where_less_is_known() -> None:
    rows = [row for row in table() if row.batch != 16]
    surface = fit(rows)
    between = surface.estimates_at(16)[3]
    beyond = surface.estimates_at(128)[3]
    assert between.upper / between.lower < beyond.upper / beyond.lower


def test_the_best_k_may_rise_with_the_batch() -> None:
    rates = {1: (100, 98, 90), 8: (500, 520, 480), 32: (1200, 1350, 1340), 128: (2000, 2400, 2700)}
    rows = [
        Measurement(batch, k, rate)
        for batch, by_k in rates.items()
        for k, rate in zip((1, 3, 5), by_k, strict=True)
        if (batch, k) not in ((32, 5), (8, 1))
    ]
    estimates = fit(rows).estimates_at(128)
    assert max(estimates, key=lambda arm: estimates[arm].tokens_per_second) == 5


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Measurement(0, 3, 100.0), "batch=0"),
        (Measurement(math.nan, 3, 100.0), "batch=nan"),
        (Measurement(1, -1, 100.0), "arm=-1"),
        (Measurement(1, 10**9, 100.0), "arm=1000000000"),
        (Measurement(1, 3, 0.0), "tokens_per_second=0.0"),
        (Measurement(1, 3, math.inf), "tokens_per_second=inf"),
        (Measurement(1, 3, -5.0), "tokens_per_second=-5.0"),
        (Measurement(1, 3, 100.0, stderr=math.nan), "stderr=nan"),
        (Measurement(1, 3, 100.0, n=0), "n=0"),
    ],
)
def test_what_is_no_measurement_gives_no_estimate(row: Measurement, said: str) -> None:
    found = fit_surface([Measurement(1, 1, 100.0), row])
    assert isinstance(found, NoEstimate)
    assert said in found.message


def test_an_empty_table_gives_no_estimate() -> None:
    assert isinstance(fit_surface([]), NoEstimate)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
ROWS = st.builds(
    Measurement,
    batch=st.one_of(NUMBERS, st.integers(0, 512).map(float)),
    arm=st.one_of(st.none(), st.integers(-1, 16), st.integers()),
    tokens_per_second=st.one_of(NUMBERS, st.floats(1, 1e5)),
    stderr=st.one_of(st.none(), NUMBERS, st.floats(0, 100)),
    n=st.integers(-1, 5),
)


@given(st.lists(ROWS, max_size=8))
@settings(max_examples=60, deadline=None)
def test_whatever_is_given_every_estimate_is_a_number(rows: list[Measurement]) -> None:
    surface = fit_surface(rows)
    if isinstance(surface, NoEstimate):
        assert surface.message
        return
    for batch in surface.batches:
        for found in surface.estimates_at(batch).values():
            assert 0 < found.lower <= found.tokens_per_second <= found.upper < math.inf


def test_the_drawn_engines_take_no_side() -> None:
    """From batch 4 to batch 64 some of them gain by a larger K and some lose."""
    draws = draw_log_goodput([4, 4, 64, 64], [1, 5, 1, 5])
    change = (draws[:, 3] - draws[:, 2]) - (draws[:, 1] - draws[:, 0])
    assert (change > 0.02).mean() > 0.02
    assert (change < -0.02).mean() > 0.02
