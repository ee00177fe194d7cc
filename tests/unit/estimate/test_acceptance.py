"""Survival of drafts by position: right where K varies, honest where little was seen."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.estimate.acceptance import (
    Survival,
    estimate_clustered_survival,
    estimate_survival,
    mean_acceptance_length,
    tokens_per_step,
)
from specdecode_operator.estimate.counters import Counters, Drafts, NoEstimate, Window
from specdecode_operator.estimate.load import estimate_survival_now
from tests.bench.acceptance import SCENARIOS, measure
from tests.support.samples import cell, heartbeat, samples_of, series

TABLES = Path(__file__).parents[2] / "data" / "tables"


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


def test_beyond_the_last_observed_position_the_hazard_goes_on_and_it_says_so() -> None:
    survival = survival_of({0: 100_000, 1: 80_000, 2: 3}, {0: 80_000, 1: 64_000, 2: 0})
    assert len(survival.positions) == 2
    length = mean_acceptance_length(survival, 4)
    assert length.extrapolated
    assert length.tokens == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096, rel=1e-3)


def test_the_further_beyond_the_wider() -> None:
    survival = survival_of({0: 100_000, 1: 80_000}, {0: 80_000, 1: 64_000})
    relative = []
    for position in range(1, 7):
        lower, upper = survival.interval(position)
        assert lower <= survival.at(position) <= upper
        relative.append((upper - lower) / survival.at(position))
    assert relative == sorted(relative)
    assert relative[1] > 5 * relative[0]
    lengths = [mean_acceptance_length(survival, k) for k in range(1, 9)]
    assert all(one.upper - one.lower < more.upper - more.lower for one, more in pairwise(lengths))


def public_curves() -> list[list[float]]:
    """Published curves of cumulative acceptance, without n-gram drafters."""
    curves: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for path in sorted(TABLES.glob("acceptance_*.csv")):
        for row in csv.DictReader(path.open()):
            if "ngram" not in row["model"]:
                key = (path.name, row["source"], row["model"], row["k_max"])
                curves[key].append(float(row["cumulative_acceptance"]))
    return [curve for curve in curves.values() if len(curve) >= 3]


def test_forecasts_beyond_the_observed_positions_hold_on_public_curves() -> None:
    held = []
    for curve in public_curves():
        for seen in range(1, len(curve)):
            before = [1.0, *curve[: seen - 1]]
            survival = survival_of(
                {position: 1e5 * share for position, share in enumerate(before)},
                {position: 1e5 * share for position, share in enumerate(curve[:seen])},
            )
            for position in range(seen, len(curve)):
                lower, upper = survival.interval(position)
                held.append(lower <= curve[position] <= upper)
    assert len(held) > 150
    assert np.mean(held) >= 0.90


@pytest.mark.parametrize("at_risk", [{}, {0: 49}, {0: 0}, {1: 1000}])
def test_too_few_drafts_are_no_estimate(at_risk: dict[int, float]) -> None:
    survival = estimate_survival(at_risk, {0: 10})
    assert isinstance(survival, NoEstimate)
    assert survival.reason == Reason.COLLECTING


BAD = {
    "not a number": ({0: math.nan}, {0: 10}, Reason.BAD_DATA),
    "endless": ({0: 1000, 1: math.inf}, {0: 10}, Reason.BAD_DATA),
    "negative": ({0: -5}, {0: 10}, Reason.BAD_DATA),
    "negative hits": ({0: 1000, 1: 100}, {0: 100, 1: -1}, Reason.BAD_DATA),
    "more accepted than drafted": ({0: 1000, 1: 500}, {0: 500, 1: 600}, Reason.BAD_DATA),
    "nothing accepted": ({0: 1000}, {0: 0}, Reason.NOTHING_ACCEPTED),
    "nothing accepted and not said": ({0: 1000}, {}, Reason.NOTHING_ACCEPTED),
}


@pytest.mark.parametrize("situation", BAD)
def test_no_estimate_with_its_reason_when_counts_are(situation: str) -> None:
    at_risk, accepted, reason = BAD[situation]
    survival = estimate_survival(at_risk, accepted)
    assert isinstance(survival, NoEstimate)
    assert survival.reason == reason


def test_one_more_accepted_than_drafted_is_two_scrapes_a_step_apart() -> None:
    assert survival_of({0: 1000, 1: 500}, {0: 501, 1: 501}).positions[1].hazard == 1


def test_counts_of_thousands_of_millions_are_counts() -> None:
    survival = survival_of({0: 1e9, 1: 8e8}, {0: 8e8, 1: 6e8})
    assert survival.at(1) == pytest.approx(0.6)
    assert survival.positions[1].upper - survival.positions[1].lower < 1e-3


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


def test_none_or_all_accepted_at_a_position_still_has_a_bound() -> None:
    positions = survival_of({0: 200, 1: 100}, {0: 100, 1: 0}).positions
    assert (positions[1].survival, positions[1].lower) == (0, 0)
    assert 0 < positions[1].upper < 0.05
    first = survival_of({0: 100}, {0: 100}).positions[0]
    assert (first.survival, first.upper) == (1, 1)
    assert 0.9 < first.lower < 1


# ------------------------------------------------------------------------------- clusters


def drafts_of(hazard: float, *, spread: float, intervals: int, seed: int = 1) -> Drafts:
    """Draft 400 times an interval at K=2; the hazard moves from interval to interval."""
    chance = np.random.default_rng(seed)
    hazards = np.clip(hazard + spread * chance.standard_normal(intervals), 0.01, 0.99)
    first = chance.binomial(400, hazards)
    second = chance.binomial(first, hazards)
    return Drafts(
        np.column_stack([np.full(intervals, 400), first]).astype(float),
        np.column_stack([first, second]).astype(float),
    )


def clustered(drafts: Drafts) -> Survival:
    survival = estimate_clustered_survival(drafts)
    assert isinstance(survival, Survival)
    return survival


def test_intervals_are_wider_where_requests_differ() -> None:
    even = clustered(drafts_of(0.7, spread=0.0, intervals=48))
    uneven = clustered(drafts_of(0.7, spread=0.1, intervals=48))
    assert even.clustered
    assert even.design_effect < 3 < uneven.design_effect
    widths = [one.positions[1].upper - one.positions[1].lower for one in (even, uneven)]
    assert widths[1] > 1.5 * widths[0]
    lengths = [mean_acceptance_length(one, 2) for one in (even, uneven)]
    assert lengths[1].upper - lengths[1].lower > 1.5 * (lengths[0].upper - lengths[0].lower)


def test_a_difference_between_pods_counts_though_each_is_steady() -> None:
    one = drafts_of(0.6, spread=0.0, intervals=12)
    other = drafts_of(0.8, spread=0.0, intervals=12, seed=2)
    both = Drafts(
        np.vstack([one.at_risk, other.at_risk]), np.vstack([one.accepted, other.accepted])
    )
    assert clustered(both).design_effect > 5


def test_too_few_intervals_show_no_clusters_and_it_says_so() -> None:
    few = clustered(drafts_of(0.7, spread=0.1, intervals=5))
    assert not few.clustered
    assert few.design_effect == 1


def test_a_position_of_few_intervals_is_as_clustered_as_the_first() -> None:
    drafts = drafts_of(0.7, spread=0.1, intervals=40)
    drafts.at_risk[3:, 1] = drafts.accepted[3:, 1] = 0.0
    first, second = clustered(drafts).positions
    independent = survival_of(
        dict(enumerate(drafts.at_risk.sum(axis=0))), dict(enumerate(drafts.accepted.sum(axis=0)))
    ).positions[1]
    assert second.at_risk < first.at_risk / 10
    assert second.upper - second.lower > 1.5 * (independent.upper - independent.lower)


@pytest.mark.parametrize("scenario", SCENARIOS[:2] + SCENARIOS[3:4], ids=lambda one: one.name)
def test_coverage_and_bias_hold_in_the_benchmark_in_small(scenario) -> None:
    found = measure(scenario, seeds=60)
    assert max(abs(bias) for bias in found["bias"]) <= 0.005
    assert min(found["coverage"]) >= 0.85
    assert min(found["naiveBias"]) < -0.05


# ------------------------------------------------------- other engines: no plugin, and AV


MOMENTS = [5.0 * index for index in range(13)]


def own_counters(ks: list[int], drafts: int = 400) -> Counters:
    """vLLM's own counters of drafts of which 70 % are accepted at each position, K by interval."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0])
    for k in ks:
        growth = {"num_drafts_total": drafts, "num_draft_tokens_total": drafts * k}
        growth |= {str(p): drafts * 0.7 ** (p + 1) * (p < k) for p in range(7)}
        for name, amount in growth.items():
            totals[name].append(totals[name][-1] + amount)
    found = [heartbeat(MOMENTS)]
    for name, values in totals.items():
        samples = list(zip(MOMENTS, values, strict=False))
        if name.isdigit():
            full = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            found.append(series(full, samples, position=name))
        else:
            found.append(series(f"vllm:spec_decode_{name}", samples))
    return Counters.of(samples_of(*found))


def survival_now(counters: Counters) -> Survival | NoEstimate:
    window = counters.window(start=0, end=100)
    assert isinstance(window, Window)
    return estimate_survival_now(counters, window)


def test_without_the_plugin_a_window_of_constant_k_is_an_estimate() -> None:
    survival = survival_now(own_counters([3] * 12))
    assert isinstance(survival, Survival)
    assert [p.survival for p in survival.positions] == pytest.approx([0.7, 0.49, 0.343])


@pytest.mark.parametrize("ks", [[3] * 6 + [1] * 6, [1, 5] * 6, [2, 4] * 6, [7] * 11 + [6]])
def test_without_the_plugin_a_varying_k_is_none_and_it_says_so(ks: list[int]) -> None:
    survival = survival_now(own_counters(ks))
    assert isinstance(survival, NoEstimate)
    assert survival.reason == Reason.VARYING_K
    assert "plugin" in survival.message


def test_under_adaptive_verification_only_tokens_per_step_are_told() -> None:
    info = series("specdecode_plugin_info", [(60, 1)], adaptive_verification="true")
    counters = Counters.of(samples_of(*cell(MOMENTS, batch=8, k=7, step_tokens=24), info))
    window = counters.window(start=0, end=100)
    assert isinstance(window, Window)
    survival = estimate_survival_now(counters, window)
    assert isinstance(survival, NoEstimate)
    assert survival.reason == Reason.ADAPTIVE_VERIFICATION
    assert tokens_per_step(window) == pytest.approx(3)


# ------------------------------------------------------------------------------ odd input


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


odd = st.one_of(st.floats(0, 1e4), st.integers(0, 10**9), st.floats())


@given(st.integers(0, 5), st.integers(1, 4), st.data())
def test_odd_intervals_never_raise(rows: int, width: int, data: st.DataObject) -> None:
    numbers = st.lists(odd, min_size=rows * width, max_size=rows * width)
    columns = [np.array(data.draw(numbers), dtype=float).reshape(rows, width) for _ in range(2)]
    survival = estimate_clustered_survival(Drafts(*columns))
    if isinstance(survival, Survival):
        assert all(0 <= p.lower <= p.survival <= p.upper <= 1 for p in survival.positions)
        for k in (0, 1, 9, 10**6):
            length = mean_acceptance_length(survival, k)
            assert 1 <= length.lower <= length.tokens <= length.upper <= 1 + k
