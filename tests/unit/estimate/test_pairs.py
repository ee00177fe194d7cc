"""Two arms compared by batch bucket and at equal batch."""

from __future__ import annotations

import math

import pytest

from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.goodput import BETA
from specdecode_operator.estimate.pairs import Difference, Stratum, compare_arms, join

BASE = Stratum(tokens=1000.0, busy_seconds=1.0, requests=320.0, steps=10.0)


def compare(candidate: dict[int, Stratum], baseline: dict[int, Stratum]) -> Difference:
    found = compare_arms(candidate, baseline)
    assert isinstance(found, Difference)
    return found


def test_the_same_work_is_no_difference() -> None:
    assert compare({32: BASE}, {32: BASE}).log_ratio == 0.0


def test_five_percent_more_tokens_at_the_same_batch() -> None:
    faster = Stratum(1050.0, 1.0, 320.0, 10.0)
    assert compare({32: faster}, {32: BASE}).log_ratio == pytest.approx(math.log(1.05))


def test_an_arm_that_serves_an_open_load_at_a_smaller_batch_gets_its_gain_back() -> None:
    """Tokens per busy second are the arrival rate there; only the batch tells the arms apart."""
    faster = Stratum(1000.0, 1.0, 288.0, 10.0)
    assert compare({32: faster}, {32: BASE}).log_ratio == pytest.approx(-BETA * math.log(0.9))


def test_strata_are_weighted_by_the_time_they_stand_on() -> None:
    worse = Stratum(90.0, 0.1, 32.0, 1.0)
    small = Stratum(100.0, 0.1, 32.0, 1.0)
    found = compare({32: BASE, 64: worse}, {32: BASE, 64: small})
    assert found.by_stratum == pytest.approx({32: 0.0, 64: math.log(0.9)})
    assert found.log_ratio == pytest.approx(math.log(0.9) * 0.1 / 1.1)


def test_a_stratum_that_one_arm_hardly_touched_is_left_out() -> None:
    brush = Stratum(1.0, 0.01, 3.2, 0.1)
    assert set(compare({32: BASE, 64: brush}, {32: BASE, 64: BASE}).by_stratum) == {32}


@pytest.mark.parametrize(
    "arm",
    [{}, {64: BASE}, {32: Stratum()}, {32: Stratum(math.nan, 1.0, 1.0, 1.0)}],
    ids=["nothing ran", "another batch", "zeros", "not a number"],
)
def test_arms_without_a_common_stratum_are_no_estimate(arm: dict[int, Stratum]) -> None:
    assert isinstance(compare_arms(arm, {32: BASE}), NoEstimate)


def test_blocks_of_one_arm_add_up() -> None:
    assert join([{32: BASE}, {32: BASE, 64: BASE}])[32].tokens == 2000.0
