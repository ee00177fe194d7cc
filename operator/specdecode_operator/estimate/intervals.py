"""Intervals for the effect of an experiment: one may look after every pair, or at four quarters.

Live experiments compare arms on the same pods in pairs of blocks, and are looked at after every
pair: the anytime-valid t interval with a Gaussian mixture (Lai 1976; Wang and Ramdas 2023) holds
at all of them together. Restart levers compare pods with other pods, so what pods differ by on
their own is added to the spread in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance
from typing import Final

from scipy.stats import t as student

ALPHA: Final = 0.10

# Relative standard deviation of pods of one kind, until this object's own record says more.
POD_SPREAD: Final = 0.01
_POD_SPREAD_DEGREES: Final = 4
_BATCHES: Final = 8
_LEVEL: Final = 0.975


@dataclass(frozen=True)
class Interval:
    """A mean log ratio with its interval, infinite where nothing can be said yet.

    `spread` is the standard deviation of one difference (divisor n), `count` their number.
    """

    mean: float
    lower: float
    upper: float
    spread: float
    count: int


def anytime_interval(differences: Sequence[float], *, alpha: float = ALPHA) -> Interval:
    """Give the two-sided interval at level 1 − alpha that holds at every look together."""
    count = len(differences)
    if count == 0:
        return Interval(0.0, -math.inf, math.inf, math.inf, 0)
    mean = fmean(differences)
    spread = math.sqrt(fmean((d - mean) ** 2 for d in differences))
    factor = width_factor(count, alpha)
    # Pairs that agree to the last digit carry no spread: with an infinite factor inf * 0 is nan.
    half = math.inf if math.isinf(factor) else factor * spread
    return Interval(mean, mean - half, mean + half, spread, count)


@cache
def width_factor(count: int, alpha: float = ALPHA) -> float:
    """Return half the interval's width in spreads, infinite where there are too few pairs."""
    q = 1 - ((count + 1) / alpha**2) ** (-1 / count)
    g = count / (count + 1) - q
    return math.sqrt(q / g) if g > 0 else math.inf


def pairs_needed(spread: float, effect: float, *, alpha: float = ALPHA, most: int = 1000) -> int:
    """Return the fewest pairs whose interval around an effect (log) of this size excludes 0.

    At most `most`, which then means: not to be had.
    """
    for count in range(1, most):
        if width_factor(count, alpha) * spread <= effect:
            return count
    return most


def canary_interval(
    differences: Sequence[float],
    stable_means: Sequence[float],
    *,
    canaries: int,
    pod_spread: float = POD_SPREAD,
) -> Interval:
    """Give the 95 % interval of a canary against the stable pods, for a look planned beforehand.

    `differences` is by block the mean over canaries less that over stable pods; it is cut into
    eight equal batches, whose spread allows for blocks that resemble the one before.
    `stable_means` holds the mean of each stable pod over the same blocks.
    """
    count = len(differences)
    if count < _BATCHES or not stable_means or canaries < 1:
        return Interval(fmean(differences) if differences else 0.0, -math.inf, math.inf, 0.0, count)
    mean = fmean(differences)
    length = count // _BATCHES
    used = differences[count - length * _BATCHES :]
    means = [fmean(used[at : at + length]) for at in range(0, len(used), length)]
    in_time = length * variance(means)
    by_pod = 1 / canaries + 1 / len(stable_means)
    least = pod_spread**2 + in_time / (by_pod * count)
    others = len(stable_means) - 1
    degrees = _POD_SPREAD_DEGREES + others
    seen = variance(stable_means) if others else 0.0
    pooled = max(least, (_POD_SPREAD_DEGREES * least + others * seen) / degrees)
    half = _quantile(degrees) * math.sqrt(by_pod * pooled)
    return Interval(mean, mean - half, mean + half, math.sqrt(in_time), count)


@cache
def _quantile(degrees: int) -> float:
    return float(student.ppf(_LEVEL, degrees))
