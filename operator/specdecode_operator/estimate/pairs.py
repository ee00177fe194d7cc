"""What one block, or a pair of blocks, says about two arms: a log ratio at equal batch.

A stratum is a batch bucket. Two arms are compared inside each stratum, never on sums over them:
the load moves between blocks. Inside a bucket the batch still moves, and under an open load the
faster arm runs at a smaller one, hence the batch term (beta, see goodput.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.conditions import Reason

from .counters import NoEstimate, Window
from .goodput import BETA

# A stratum counts where both arms spent at least this share of their block in it.
LEAST_SHARE: Final = 0.05


@dataclass(frozen=True)
class Stratum:
    """What one arm did at one batch bucket: sums over pods and blocks.

    `requests` and `steps` are those of decode-only steps: their ratio is the mean batch.
    """

    tokens: float = 0.0
    busy_seconds: float = 0.0
    requests: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Stratum) -> Stratum:
        return Stratum(
            self.tokens + other.tokens,
            self.busy_seconds + other.busy_seconds,
            self.requests + other.requests,
            self.steps + other.steps,
        )

    @property
    def is_usable(self) -> bool:
        """Tell whether goodput and mean batch are numbers above 0."""
        values = (self.tokens, self.busy_seconds, self.requests, self.steps)
        return all(math.isfinite(x) and x > 0 for x in values)


Arm = Mapping[int, Stratum]


@dataclass(frozen=True)
class Difference:
    """ln goodput of the candidate less that of the baseline at equal batch, and by stratum.

    `weights` are the busy seconds on which each stratum stands.
    """

    log_ratio: float
    by_stratum: Mapping[int, float]
    weights: Mapping[int, float]


def strata_of(window: Window, *, arm: int) -> dict[int, Stratum]:
    """Sum what one arm did by batch bucket, over its decode-only and mixed steps."""
    strata: dict[int, Stratum] = defaultdict(Stratum)
    for cell in window.cells:
        if cell.arm == arm:
            strata[cell.batch] += Stratum(cell.tokens, cell.seconds, cell.requests, cell.steps)
    for mixed in window.mixed:
        if mixed.arm == arm:
            strata[mixed.batch] += Stratum(mixed.tokens, mixed.seconds)
    return dict(strata)


def join(arms: Iterable[Arm]) -> dict[int, Stratum]:
    """Add up blocks or pods that ran the same arm."""
    strata: dict[int, Stratum] = defaultdict(Stratum)
    for arm in arms:
        for batch, stratum in arm.items():
            strata[batch] += stratum
    return dict(strata)


def compare_arms(candidate: Arm, baseline: Arm, *, beta: float = BETA) -> Difference | NoEstimate:
    """Compare two arms by stratum, weighted by the time on which each stratum stands."""
    common = _shared(candidate) & _shared(baseline)
    if not common:
        return NoEstimate(
            Reason.NO_TRAFFIC, "The two arms did not run at the same batch for 5 % of a block."
        )
    by_stratum = {
        batch: _at_equal_batch(candidate[batch], baseline[batch], beta) for batch in sorted(common)
    }
    weights = {
        batch: min(candidate[batch].busy_seconds, baseline[batch].busy_seconds)
        for batch in by_stratum
    }
    total = sum(weights.values())
    return Difference(
        log_ratio=sum(weights[batch] * by_stratum[batch] for batch in by_stratum) / total,
        by_stratum=by_stratum,
        weights=weights,
    )


def _shared(arm: Arm) -> set[int]:
    busy = sum(stratum.busy_seconds for stratum in arm.values())
    return {
        batch
        for batch, stratum in arm.items()
        if stratum.is_usable and stratum.busy_seconds >= LEAST_SHARE * busy
    }


def _at_equal_batch(candidate: Stratum, baseline: Stratum, beta: float) -> float:
    def log_goodput(stratum: Stratum) -> float:
        return math.log(stratum.tokens / stratum.busy_seconds)

    def log_batch(stratum: Stratum) -> float:
        return math.log(stratum.requests / stratum.steps)

    return (log_goodput(candidate) - log_goodput(baseline)) - beta * (
        log_batch(candidate) - log_batch(baseline)
    )
