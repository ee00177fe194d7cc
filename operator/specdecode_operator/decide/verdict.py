"""What an experiment has shown so far: a verdict with its reason and numbers, or not yet.

Successful needs an interval above 0 and the minimum gain; Failed an interval below 0, or a guard
or a stratum that is worse by an interval of its own. A point estimate alone decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from specdecode_operator.estimate.intervals import ALPHA, Interval, anytime_interval, pairs_needed
from specdecode_operator.estimate.pairs import Difference

LEAST_PAIRS: Final = 6
NO_GAIN_PAIRS: Final = 12


class Verdict(StrEnum):
    """How an experiment ended."""

    SUCCESSFUL = "Successful"
    FAILED = "Failed"
    INCONCLUSIVE = "Inconclusive"
    ERROR = "Error"


class Why(StrEnum):
    """Why it ended so."""

    GAIN = "Gain"
    LOSS = "Loss"
    GUARD = "Guard"
    STRATUM = "StratumLoss"
    NO_GAIN = "NoGain"
    OUT_OF_TIME = "OutOfTime"
    SOAKED = "Soaked"


@dataclass(frozen=True)
class Judgement:
    """A verdict, or None while it goes on; `lost` are the strata (batch buckets) that lost.

    `pairs_expected` is how many pairs the minimum gain needs at the present spread.
    """

    verdict: Verdict | None
    why: Why | None
    message: str
    interval: Interval
    lost: tuple[int, ...] = ()
    pairs_expected: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What the pairs of an experiment showed.

    `guards` holds by name one log ratio a pair, above 0 where the change is worse. `soaked`: the
    least time and the least steps were reached in both arms. `out_of_time`: nothing more comes.
    """

    pairs: Sequence[Difference]
    soaked: bool
    out_of_time: bool
    guards: Mapping[str, Sequence[float]] = field(default_factory=dict)


def judge(evidence: Evidence, *, min_gain_percent: float, alpha: float = ALPHA) -> Judgement:
    """Judge the tuner's own change, after each pair."""
    least = math.log1p(min_gain_percent / 100)
    lost = _lost_strata(evidence, least, alpha)
    kept = _without(evidence.pairs, lost)
    interval = anytime_interval(kept, alpha=alpha)
    if len(evidence.pairs) < LEAST_PAIRS or not evidence.soaked:
        if evidence.out_of_time:
            return _end(Verdict.INCONCLUSIVE, Why.OUT_OF_TIME, interval)
        return _wait(interval, least, alpha)
    guard = _worse_guard(evidence, alpha)
    if guard is not None:
        return _end(Verdict.FAILED, Why.GUARD, interval, f"{guard} is worse")
    if lost and not kept:
        return _end(Verdict.FAILED, Why.STRATUM, interval, _name(lost), lost)
    if interval.upper < 0:
        return _end(Verdict.FAILED, Why.LOSS, interval, lost=lost)
    if interval.lower > 0 and interval.mean >= least:
        return _end(Verdict.SUCCESSFUL, Why.GAIN, interval, _name(lost), lost)
    if interval.count >= NO_GAIN_PAIRS and interval.upper < least:
        return _end(Verdict.INCONCLUSIVE, Why.NO_GAIN, interval, lost=lost)
    if evidence.out_of_time:
        return _end(Verdict.INCONCLUSIVE, Why.OUT_OF_TIME, interval, lost=lost)
    return _wait(interval, least, alpha, lost)


def judge_users_change(evidence: Evidence, *, alpha: float = ALPHA) -> Judgement:
    """Judge a change that the user asked for: for harm only; a mere loss is told, no veto."""
    interval = anytime_interval([pair.log_ratio for pair in evidence.pairs], alpha=alpha)
    guard = _worse_guard(evidence, alpha) if len(evidence.pairs) >= LEAST_PAIRS else None
    if guard is not None:
        return _end(Verdict.FAILED, Why.GUARD, interval, f"{guard} is worse")
    if evidence.soaked or evidence.out_of_time:
        why = Why.LOSS if interval.upper < 0 else Why.SOAKED
        return _end(Verdict.SUCCESSFUL, why, interval)
    return Judgement(None, None, _numbers(interval), interval)


def _lost_strata(evidence: Evidence, least: float, alpha: float) -> tuple[int, ...]:
    """List strata that lose at least the minimum gain, with an interval below 0."""
    strata = _strata(evidence)
    lost = []
    for batch in strata if len(strata) > 1 else ():
        values = [p.by_stratum[batch] for p in evidence.pairs if batch in p.by_stratum]
        interval = anytime_interval(values, alpha=_level(evidence, alpha))
        if len(values) >= LEAST_PAIRS and interval.mean < -least and interval.upper < 0:
            lost.append(batch)
    return tuple(lost)


def _worse_guard(evidence: Evidence, alpha: float) -> str | None:
    level = _level(evidence, alpha)
    for name, values in evidence.guards.items():
        if len(values) >= LEAST_PAIRS and anytime_interval(values, alpha=level).lower > 0:
            return name
    return None


def _strata(evidence: Evidence) -> list[int]:
    return sorted({batch for pair in evidence.pairs for batch in pair.by_stratum})


def _level(evidence: Evidence, alpha: float) -> float:
    """Share alpha among all intervals of guards and strata: each alone would fail A/A too often."""
    return alpha / max(len(_strata(evidence)) + len(evidence.guards), 1)


def _without(pairs: Sequence[Difference], lost: Sequence[int]) -> list[float]:
    """Return each pair's log ratio over the strata that did not lose."""
    if not lost:
        return [pair.log_ratio for pair in pairs]
    values = []
    for pair in pairs:
        kept = [batch for batch in pair.by_stratum if batch not in lost]
        weight = sum(pair.weights[batch] for batch in kept)
        if weight > 0:
            values.append(sum(pair.weights[b] * pair.by_stratum[b] for b in kept) / weight)
    return values


def _wait(interval: Interval, least: float, alpha: float, lost: tuple[int, ...] = ()) -> Judgement:
    expected = (
        pairs_needed(interval.spread, max(interval.mean, least), alpha=alpha)
        if interval.count >= 2 and least > 0
        else None
    )
    return Judgement(None, None, _numbers(interval), interval, lost, expected)


def _end(
    verdict: Verdict,
    why: Why,
    interval: Interval,
    detail: str = "",
    lost: tuple[int, ...] = (),
) -> Judgement:
    message = _numbers(interval) + (f"; {detail}" if detail else "")
    return Judgement(verdict, why, message, interval, lost)


def _name(lost: Sequence[int]) -> str:
    return "lost at batch " + ", ".join(f"≤ {batch}" for batch in lost) if lost else ""


def _numbers(interval: Interval) -> str:
    if math.isinf(interval.upper):
        return f"{percent(interval.mean):+.1f} % over {interval.count} pairs, no interval yet"
    return (
        f"{percent(interval.mean):+.1f} % at equal batch "
        f"({percent(interval.lower):+.1f} to {percent(interval.upper):+.1f}) "
        f"over {interval.count} pairs"
    )


def percent(log_ratio: float) -> float:
    """Turn a log ratio into percent."""
    return 100 * math.expm1(min(log_ratio, 50.0))
