"""Goodput, the one figure by which K is judged: tokens emitted per second of busy engine time.

Busy time is that of decode-only and of mixed steps: a faster decode finishes requests sooner and
so runs more prefills in the same time, and only the sum is fair. Comparisons are at equal batch:
a faster engine serves an open load at a smaller batch, which hides most of its gain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.conditions import Reason

from .counters import CellDelta, MixedDelta, NoEstimate, Window

ARM_STABLE: Final = 0

# Slope of ln goodput in ln batch at fixed K.
BETA: Final = 0.7

_MIN_PARTS: Final = 4
# No engine is faster; busy seconds far below their steps are a corrupted counter.
_MOST_STEPS_PER_SECOND: Final = 20_000.0
_MIN_OWN_SHARE: Final = 0.5


@dataclass(frozen=True)
class Rate:
    """Goodput of one engine at a mean batch; the error is a relative standard error, if known.

    `context_tokens` is the mean context of a request in decode-only steps, if known.
    """

    tokens_per_second: float
    mean_batch: float
    relative_error: float | None = None
    context_tokens: float | None = None


@dataclass(frozen=True)
class Measurement(Rate):
    """Goodput of one (batch bucket, K) as measured in a window.

    `present_seconds` is the part of the window's wall time that belongs to this bucket.
    """

    batch: int = 0
    k: int = 0
    steps: float = 0.0
    step_seconds: float = 0.0
    present_seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """How much better one rate is than another, at equal batch."""

    log_ratio: float
    relative_error: float | None

    @property
    def percent(self) -> float:
        """The gain in percent."""
        return 100.0 * math.expm1(min(self.log_ratio, 50.0))


def busy_seconds_by_batch(window: Window, arm: int = ARM_STABLE) -> dict[int, float]:
    """Return the busy time of each batch bucket, all K together."""
    busy: dict[int, float] = defaultdict(float)
    deltas: list[CellDelta | MixedDelta] = [*window.cells, *window.mixed]
    for delta in deltas:
        if delta.arm == arm and delta.seconds > 0:
            busy[delta.batch] += delta.seconds
    return dict(busy)


def measure_goodput(
    window: Window, *, batch: int, k: int, parts: Sequence[Window] = ()
) -> Measurement | NoEstimate:
    """Measure one (batch bucket, K) of the stable arm over a window in which one table ruled.

    Mixed steps carry no K, therefore one table. `parts` of the same window give the error.
    """
    deltas = _deltas(window, batch, k)
    tokens, seconds, steps = _totals(deltas)
    requests = sum(delta.requests for delta in deltas)
    if not (tokens > 0 and seconds > 0 and steps > 0 and requests > 0):
        return NoEstimate(Reason.NO_TRAFFIC, f"No step at batch {batch} with K {k}.")
    decoded = [c for c in window.cells if c.batch == batch and c.arm == ARM_STABLE]
    own = sum(c.steps for c in decoded if c.k == k)
    if own < _MIN_OWN_SHARE * sum(c.steps for c in decoded):
        return NoEstimate(Reason.COLLECTING, f"Most steps at batch {batch} did not run with K {k}.")
    if not math.isfinite(tokens / seconds) or steps > _MOST_STEPS_PER_SECOND * seconds:
        return NoEstimate(
            Reason.BAD_DATA,
            f"The counters at batch {batch} make no sense: {steps:.0f} steps with {tokens:.0f} "
            f"tokens in {seconds:.3g} s.",
        )
    busy = busy_seconds_by_batch(window)
    return Measurement(
        tokens_per_second=tokens / seconds,
        mean_batch=requests / steps,
        relative_error=_relative_error([_totals(_deltas(part, batch, k))[:2] for part in parts]),
        batch=batch,
        k=k,
        steps=steps,
        step_seconds=seconds / steps,
        present_seconds=window.seconds * busy[batch] / sum(busy.values()),
        context_tokens=_mean_context([c for c in decoded if c.k == k]),
    )


def compare_at_equal_batch(
    candidate: Rate, baseline: Rate, *, beta: float = BETA
) -> Comparison | NoEstimate:
    """Compare two rates as if both had run at the same batch: ln ratio − beta·Δ ln batch."""
    values = (
        candidate.tokens_per_second,
        candidate.mean_batch,
        baseline.tokens_per_second,
        baseline.mean_batch,
    )
    if not all(math.isfinite(x) and x > 0 for x in values):
        return NoEstimate(Reason.COLLECTING, "A rate of 0 or none at all cannot be compared.")
    gain = math.log(candidate.tokens_per_second) - math.log(baseline.tokens_per_second)
    shift = math.log(candidate.mean_batch) - math.log(baseline.mean_batch)
    return Comparison(
        gain - beta * shift, _joint(candidate.relative_error, baseline.relative_error)
    )


def _deltas(window: Window, batch: int, k: int) -> list[CellDelta | MixedDelta]:
    cells = [c for c in window.cells if c.batch == batch and c.k == k and c.arm == ARM_STABLE]
    mixed = [m for m in window.mixed if m.batch == batch and m.arm == ARM_STABLE]
    return [*cells, *mixed]


def _mean_context(cells: Sequence[CellDelta]) -> float | None:
    requests = sum(cell.requests for cell in cells)
    context = sum(cell.context_tokens for cell in cells)
    return context / requests if requests > 0 and context > 0 else None


def _totals(deltas: Sequence[CellDelta | MixedDelta]) -> tuple[float, float, float]:
    return (
        sum(delta.tokens for delta in deltas),
        sum(delta.seconds for delta in deltas),
        sum(delta.steps for delta in deltas),
    )


def _relative_error(parts: Sequence[tuple[float, float]]) -> float | None:
    """Return the relative standard error of the ratio Σ tokens ÷ Σ seconds over parts."""
    used = [(tokens, seconds) for tokens, seconds in parts if seconds > 0]
    tokens, seconds = sum(t for t, _ in used), sum(s for _, s in used)
    if len(used) < _MIN_PARTS or not tokens > 0:
        return None
    rate = tokens / seconds
    squares = sum((t - rate * s) ** 2 for t, s in used)
    return math.sqrt(squares * len(used) / (len(used) - 1)) / tokens


def _joint(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else math.hypot(one, other)
