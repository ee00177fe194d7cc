"""Verdicts: which evidence ends an experiment, and how."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from specdecode_operator.decide.verdict import (
    Evidence,
    Judgement,
    Verdict,
    Why,
    judge,
    judge_users_change,
)
from specdecode_operator.estimate.pairs import Difference


def pairs(
    effect_percent: float, count: int, *, spread: float = 0.01, batch: int = 32
) -> list[Difference]:
    """Draw pairs around an effect; their mean is the effect exactly."""
    draw = random.Random(2)
    raw = [draw.gauss(0.0, spread) for _ in range(count)]
    middle = sum(raw) / count
    effect = math.log1p(effect_percent / 100)
    return [
        Difference(effect + r - middle, {batch: effect + r - middle}, {batch: 1.0}) for r in raw
    ]


def two_strata(one: float, other: float, count: int) -> list[Difference]:
    draw = random.Random(3)
    found = []
    for _ in range(count):
        a = math.log1p(one / 100) + draw.gauss(0.0, 0.004)
        b = math.log1p(other / 100) + draw.gauss(0.0, 0.004)
        found.append(Difference((a + b) / 2, {32: a, 64: b}, {32: 1.0, 64: 1.0}))
    return found


def judged(
    found: Sequence[Difference],
    *,
    soaked: bool = True,
    out_of_time: bool = False,
    guards: Mapping[str, Sequence[float]] | None = None,
) -> Judgement:
    evidence = Evidence(found, soaked=soaked, out_of_time=out_of_time, guards=guards or {})
    return judge(evidence, min_gain_percent=2.0)


WORSE = [0.10 + 0.001 * n for n in range(10)]
NOISY = [0.10 * (-1) ** n for n in range(10)]

CASES = {
    "a clear gain": (judged(pairs(5, 10)), Verdict.SUCCESSFUL, Why.GAIN),
    "a clear loss": (judged(pairs(-5, 10)), Verdict.FAILED, Why.LOSS),
    "a gain below the minimum goes on": (judged(pairs(1.5, 8)), None, None),
    "a gain below the minimum ends as no gain": (
        judged(pairs(0.2, 20)),
        Verdict.INCONCLUSIVE,
        Why.NO_GAIN,
    ),
    "five pairs are too few": (judged(pairs(5, 5)), None, None),
    "the least time was not reached": (judged(pairs(5, 10), soaked=False), None, None),
    "time is over with nothing told": (
        judged(pairs(1.5, 8), out_of_time=True),
        Verdict.INCONCLUSIVE,
        Why.OUT_OF_TIME,
    ),
    "time is over before the soak": (
        judged(pairs(5, 5), soaked=False, out_of_time=True),
        Verdict.INCONCLUSIVE,
        Why.OUT_OF_TIME,
    ),
    "no pairs at all": (judged([]), None, None),
    "a guard is worse": (
        judged(pairs(5, 10), guards={"TPOT": WORSE}),
        Verdict.FAILED,
        Why.GUARD,
    ),
    "a guard that only wavers is no veto": (
        judged(pairs(5, 10), guards={"TPOT": NOISY}),
        Verdict.SUCCESSFUL,
        Why.GAIN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_evidence_gives_its_verdict(name: str) -> None:
    found, verdict, why = CASES[name]
    assert (found.verdict, found.why) == (verdict, why)


def test_a_stratum_that_loses_is_named_and_the_rest_is_judged() -> None:
    found = judged(two_strata(6, -6, 15))
    assert found.verdict is Verdict.SUCCESSFUL
    assert found.lost == (64,)


def test_a_stratum_that_loses_less_than_the_minimum_gain_keeps_its_rows() -> None:
    assert judged(two_strata(6, -1, 15)).lost == ()


def test_the_message_holds_the_numbers() -> None:
    assert "+5.0 % at equal batch" in judged(pairs(5, 10)).message


def test_it_says_how_many_pairs_the_minimum_gain_needs() -> None:
    found = judged(pairs(1.5, 8, spread=0.03))
    assert found.pairs_expected is not None
    assert 8 < found.pairs_expected < 60


USERS = {
    "soaked without harm": (pairs(0, 8), {}, True, Verdict.SUCCESSFUL, Why.SOAKED),
    "a loss is told and is no veto": (pairs(-10, 8), {}, True, Verdict.SUCCESSFUL, Why.LOSS),
    "no metrics at all": ([], {}, True, Verdict.SUCCESSFUL, Why.SOAKED),
    "errors are a veto": (pairs(5, 8), {"errors": WORSE}, True, Verdict.FAILED, Why.GUARD),
    "the soak is not over": (pairs(5, 8), {}, False, None, None),
}


@pytest.mark.parametrize("name", USERS)
def test_a_users_change_is_judged_for_harm_only(name: str) -> None:
    found, guards, soaked, verdict, why = USERS[name]
    judgement = judge_users_change(Evidence(found, soaked, out_of_time=False, guards=guards))
    assert (judgement.verdict, judgement.why) == (verdict, why)
