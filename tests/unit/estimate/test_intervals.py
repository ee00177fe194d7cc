"""Intervals of an experiment: constants found by simulation, error rates, edges."""

from __future__ import annotations

import math
import random

import pytest

from specdecode_operator.estimate.intervals import (
    anytime_interval,
    canary_interval,
    pairs_needed,
    width_factor,
)

FACTORS = {6: 1.857, 8: 1.346, 10: 1.114, 15: 0.841, 20: 0.708, 30: 0.566, 45: 0.460}


@pytest.mark.parametrize(("pairs", "factor"), FACTORS.items())
def test_width_is_the_one_of_the_derivation(pairs: int, factor: float) -> None:
    assert width_factor(pairs) == pytest.approx(factor, abs=0.001)


def test_few_pairs_say_nothing() -> None:
    interval = anytime_interval([0.01, 0.012])
    assert (interval.lower, interval.upper) == (-math.inf, math.inf)


def test_no_pairs_are_an_interval_that_excludes_nothing() -> None:
    assert anytime_interval([]).upper == math.inf


def test_pairs_that_agree_to_the_last_digit_give_a_number() -> None:
    assert not math.isnan(anytime_interval([0.0, 0.0, 0.0]).upper)
    assert anytime_interval([0.01] * 8).lower == pytest.approx(0.01)


def test_the_interval_holds_at_all_looks_together() -> None:
    """Of 500 experiments without an effect at most alpha may exclude 0 at any of 40 looks."""
    draw = random.Random(1)
    wrong = 0
    for _ in range(500):
        seen: list[float] = []
        for _ in range(40):
            seen.append(draw.gauss(0.0, 0.02))
            interval = anytime_interval(seen)
            if interval.lower > 0 or interval.upper < 0:
                wrong += 1
                break
    assert wrong / 500 <= 0.10


def test_pairs_needed_fall_with_the_effect() -> None:
    assert pairs_needed(0.01, 0.05) < pairs_needed(0.01, 0.01)
    assert pairs_needed(1.0, 0.001, most=50) == 50


def test_a_canary_needs_eight_blocks() -> None:
    assert canary_interval([0.1] * 7, [0.0, 0.01, 0.02], canaries=1).lower == -math.inf


def test_a_canary_is_allowed_what_pods_differ_by() -> None:
    """No noise in time at all: what is left is that pods of one kind differ by 1 %."""
    interval = canary_interval([0.02] * 80, [0.0, 0.0, 0.0], canaries=1)
    assert interval.mean == pytest.approx(0.02)
    assert 0.015 < interval.mean - interval.lower < 0.03


def test_two_canaries_tell_more_than_one() -> None:
    one = canary_interval([0.02] * 80, [0.0, 0.0, 0.0], canaries=1)
    two = canary_interval([0.02] * 80, [0.0, 0.0], canaries=2)
    assert two.upper - two.lower < one.upper - one.lower


def test_stable_pods_that_differ_widen_the_interval() -> None:
    alike = canary_interval([0.02] * 80, [0.0, 0.001, -0.001], canaries=1)
    unlike = canary_interval([0.02] * 80, [0.0, 0.06, -0.06], canaries=1)
    assert unlike.upper - unlike.lower > 2 * (alike.upper - alike.lower)
