"""Survival of drafts by position: right where K varies, honest where little was seen."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.estimate.acceptance import (
    Survival,
    estimate_survival,
    mean_acceptance_length,
    wilson_interval,
)
from specdecode_operator.estimate.counters import NoEstimate


def survival_of(at_risk: dict[int, float], accepted: dict[int, float]) -> Survival:
    survival = estimate_survival(at_risk, accepted)
    assert isinstance(survival, Survival)
    return survival


def draft(hazard: float, ks: list[int], count: int, seed: int = 1) -> tuple[dict, dict, int]:
    """Draft at each of these K in turn; return at risk, accepted, and all accepted tokens."""
    chance = random.Random(seed)
    at_risk: dict[int, float] = dict.fromkeys(range(max(ks)), 0.0)
    accepted = dict(at_risk)
    for index in range(count):
        for position in range(ks[index % len(ks)]):
            at_risk[position] += 1
            if chance.random() >= hazard:
                break
            accepted[position] += 1
    return at_risk, accepted, count


def test_survival_is_not_biased_by_a_varying_k() -> None:
    at_risk, accepted, drafts = draft(0.8, [1, 1, 1, 5], 40_000)
    survival = survival_of(at_risk, accepted)
    for position in range(5):
        assert survival.at(position) == pytest.approx(0.8 ** (position + 1), abs=0.02)
    naive = accepted[3] / drafts
    assert naive < 0.8**4 / 2


def test_mean_acceptance_length_counts_the_bonus_token() -> None:
    survival = survival_of({0: 1000, 1: 500}, {0: 500, 1: 250})
    assert mean_acceptance_length(survival, 0).tokens == 1
    assert mean_acceptance_length(survival, 1).tokens == 1.5
    assert mean_acceptance_length(survival, 2).tokens == 1.75
    assert not mean_acceptance_length(survival, 2).extrapolated


def test_beyond_the_last_observed_position_its_hazard_goes_on_and_it_says_so() -> None:
    survival = survival_of({0: 1000, 1: 500, 2: 3}, {0: 500, 1: 400, 2: 0})
    assert len(survival.positions) == 2
    length = mean_acceptance_length(survival, 4)
    assert length.extrapolated
    assert length.tokens == pytest.approx(1 + 0.5 + 0.4 + 0.32 + 0.256)


@pytest.mark.parametrize("at_risk", [{}, {0: 49}, {0: 0}, {0: math.nan}, {0: -5}, {1: 1000}])
def test_too_few_drafts_are_no_estimate(at_risk: dict[int, float]) -> None:
    survival = estimate_survival(at_risk, {0: 10})
    assert isinstance(survival, NoEstimate)
    assert survival.reason == Reason.COLLECTING


def test_the_interval_holds_the_truth_and_narrows_with_drafts() -> None:
    covered, widths = 0, []
    for seed in range(60):
        at_risk, accepted, _ = draft(0.7, [4], 400, seed=seed)
        third = survival_of(at_risk, accepted).positions[2]
        covered += third.lower <= 0.7**3 <= third.upper
        widths.append(third.upper - third.lower)
    assert covered >= 52
    at_risk, accepted, _ = draft(0.7, [4], 40_000)
    many = survival_of(at_risk, accepted).positions[2]
    assert many.upper - many.lower < min(widths) / 3


def test_no_draft_accepted_still_has_an_upper_bound() -> None:
    first = survival_of({0: 100}, {0: 0}).positions[0]
    assert (first.survival, first.lower) == (0, 0)
    assert 0 < first.upper < 0.05


@given(
    st.dictionaries(st.integers(0, 8), st.floats(allow_nan=True, allow_infinity=True)),
    st.dictionaries(st.integers(0, 8), st.floats(allow_nan=True, allow_infinity=True)),
    st.integers(-1, 20),
)
def test_odd_counts_never_raise_and_survival_only_falls(
    at_risk: dict[int, float], accepted: dict[int, float], k: int
) -> None:
    survival = estimate_survival(at_risk, accepted)
    if isinstance(survival, Survival):
        values = [survival.at(position) for position in range(12)]
        assert all(0 <= later <= earlier <= 1 for earlier, later in pairwise(values))
        assert all(0 <= p.lower <= p.upper <= 1 for p in survival.positions)
        assert 1 <= mean_acceptance_length(survival, k).tokens <= 1 + max(k, 0)


@given(st.floats(0, 1), st.floats(1, 1e9))
def test_wilson_holds_the_share(share: float, count: float) -> None:
    lower, upper = wilson_interval(share, count)
    assert 0 <= lower <= share + 1e-9
    assert share - 1e-9 <= upper <= 1
