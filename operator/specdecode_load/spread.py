"""Samples of many requests in a few figures. No samples are no figure, never zero."""

from array import array
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class _Summary:
    """Mean and percentiles over `count` samples (at least one); field `pNN` is percentile NN."""

    count: int
    mean: float

    @classmethod
    def of(cls, samples: "array[float]") -> Self | None:
        """Summarise samples; None when there are none."""
        if not samples:
            return None
        ordered = sorted(samples)
        names = [field.name for field in fields(cls) if field.name not in ("count", "mean")]
        percentiles = {name: percentile(ordered, int(name.removeprefix("p"))) for name in names}
        return cls(count=len(ordered), mean=sum(ordered) / len(ordered), **percentiles)


@dataclass(frozen=True)
class Spread(_Summary):
    """Mean and percentiles of a time, in seconds, over `count` samples (at least one)."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Distribution(_Summary):
    """Mean and percentiles of a ratio, of which the low end tells as much as the high one."""

    p10: float
    p50: float
    p90: float


def percentile(ordered: list[float], percent: float) -> float:
    """Interpolate a percentile of ascending samples (at least one), as numpy does by default."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
