"""Samples of many requests in a few figures. No samples are no figure, never zero."""

from array import array
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of a time, in seconds, over `count` samples (at least one)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: "array[float]") -> "Spread | None":
        """Summarise samples; None when there are none."""
        if not samples:
            return None
        ordered = sorted(samples)
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
        )


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a ratio, of which the low end tells as much as the high one."""

    count: int
    mean: float
    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, samples: "array[float]") -> "Distribution | None":
        """Summarise samples; None when there are none."""
        if not samples:
            return None
        ordered = sorted(samples)
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            p10=percentile(ordered, 10),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
        )


def percentile(ordered: list[float], percent: float) -> float:
    """Interpolate a percentile of ascending samples (at least one), as numpy does by default."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
