"""The table for a benchmark in hand: which K at which batch, and whether speculation pays at all.

It stands on a surface of goodput (`estimate/surface.py`) and asks no cluster. The table is found
over power-of-two buckets of the batch by dynamic programming: a row must be worth its price, so
that noise writes no row, and a row's edge between measured batches lies where the surface puts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.domain.table import KTable, bucket_first, bucket_of
from specdecode_operator.estimate.surface import Z_95, Estimate, Surface
from specdecode_operator.estimate.surface_prior import Arm

# A further row must be worth this much goodput (log), all loads at weight 1 together. One load
# costs two rows at most, so at equal weights none loses more than twice this to simplicity.
ROW_PRICE: Final = 0.004
# A bucket without a load of its own only decides where an edge lies.
_NO_LOAD: Final = 0.01


@dataclass(frozen=True)
class LoadChoice:
    """The best arm at one load alone, off included, beside all arms there.

    `worth` is ln goodput to choose by (`worth_at`).
    """

    batch: float
    arm: Arm
    estimates: Mapping[Arm, Estimate]
    worth: Mapping[Arm, float]

    @property
    def expected(self) -> Estimate:
        """Goodput of the chosen arm."""
        return self.estimates[self.arm]

    @property
    def runner_up(self) -> Arm:
        """The second best arm; the chosen one where there is no other."""
        others = [arm for arm in self.worth if arm != self.arm]
        return max(others, key=self.worth.__getitem__, default=self.arm)


@dataclass(frozen=True)
class OfflinePlan:
    """What to run. `table` is None without an arm that speculates, the gain without off.

    `gain_log` is ln goodput of the table over speculation off, the mean over all loads.
    """

    by_load: tuple[LoadChoice, ...]
    table: KTable | None
    gain_log: float | None

    @property
    def speculation(self) -> bool:
        """Whether speculation should be on: off must beat the table over all loads together."""
        return self.table is not None and (self.gain_log is None or self.gain_log >= 0)


def choose_at(surface: Surface, batch: float) -> LoadChoice:
    """Choose the arm that is worth most at one batch; of equals off, then the smaller K."""
    worth = worth_at(surface, batch)
    arm = max(worth, key=lambda arm: (worth[arm], arm is None, -(arm or 0)))
    return LoadChoice(batch, arm, surface.estimates_at(batch), worth)


def worth_at(surface: Surface, batch: float) -> dict[Arm, float]:
    """Return ln goodput to choose by, of the arms at one batch.

    A prediction must promise more than its mean to displace a measurement: it is discounted by a
    part of its standard error, which is large where nearly all other arms were measured, and for
    an arm that was seldom measured anywhere.
    """
    estimates = surface.estimates_at(batch)
    measured = sum(estimate.measured for estimate in estimates.values()) / len(estimates)
    return {
        arm: e.log
        if e.measured
        else e.log - max(measured, 1 - surface.coverage[arm]) * e.half_width / Z_95
        for arm, e in estimates.items()
    }


def plan_offline(
    surface: Surface,
    *,
    occupancy: Mapping[float, float] | None = None,
    min_k: int = 0,
    max_row_step: int = 0,
) -> OfflinePlan:
    """Choose the best arm at each measured load and the best table over all of them.

    `occupancy` is the share of time at each batch, any unit; equal weights of the measured
    batches where None. K below `min_k` is left out of the table; adjacent rows differ by no more
    than `max_row_step` (0: no limit).
    """
    choices = tuple(choose_at(surface, batch) for batch in surface.batches)
    ks = [arm for arm in surface.arms if arm is not None and arm >= min_k]
    if not ks:
        return OfflinePlan(choices, None, None)
    weights = _normalise(occupancy or dict.fromkeys(surface.batches, 1.0))
    table = _best_table(surface, weights, ks, max_row_step)
    return OfflinePlan(choices, table, _gain_over_off(surface, weights, table))


def choose_by_bucket(
    values: Sequence[Mapping[int, float]], *, row_price: float, max_row_step: int = 0
) -> tuple[int, ...]:
    """Choose K for each bucket: the sum of values less a price for each change of K is greatest.

    Among equals the smaller K. A change is at most `max_row_step`; 0 is no limit.
    """
    paths: dict[int, tuple[float, tuple[int, ...]]] = {}
    for number, by_k in enumerate(values):
        paths = {
            k: max(
                (
                    (score + value - (row_price if before != k else 0.0), (*path, k))
                    for before, (score, path) in paths.items()
                    if not max_row_step or abs(before - k) <= max_row_step
                ),
                key=_preference,
                default=(value if number == 0 else -math.inf, (k,) * (number + 1)),
            )
            for k, value in by_k.items()
        }
    return max(paths.values(), key=_preference)[1]


def _preference(path: tuple[float, tuple[int, ...]]) -> tuple[float, tuple[int, ...]]:
    score, ks = path
    return round(score, 12), tuple(-k for k in ks)


def _best_table(
    surface: Surface, weights: Mapping[float, float], ks: Sequence[int], max_row_step: int
) -> KTable:
    loads = {*surface.batches, *weights}
    top = bucket_of(max(loads))
    bounds = [2**n for n in range(top.bit_length())]
    values = []
    for bound in bounds:
        inside = sorted(load for load in loads if bucket_of(load) == bound)
        points = inside or [_middle(bound)]
        values.append(_bucket_values(surface, weights, points, ks))
    chosen = choose_by_bucket(values, row_price=ROW_PRICE, max_row_step=max_row_step)
    starts = [
        (bucket_first(bound), k)
        for bound, k, before in zip(bounds, chosen, (None, *chosen), strict=False)
        if k != before
    ]
    return KTable.from_starts(starts, math.ceil(max(loads)))


def _bucket_values(
    surface: Surface, weights: Mapping[float, float], points: Sequence[float], ks: Sequence[int]
) -> dict[int, float]:
    """Return for each K what it is worth below the best K, the points of a bucket together."""
    values = dict.fromkeys(ks, 0.0)
    for batch in points:
        weight = max(weights.get(batch, 0.0), _NO_LOAD / len(points))
        worth = worth_at(surface, batch)
        best = max(worth[k] for k in ks)
        for k in ks:
            values[k] += weight * (worth[k] - best)
    return values


def _middle(bound: int) -> float:
    return math.sqrt(bucket_first(bound) * bound)


def _normalise(weights: Mapping[float, float]) -> dict[float, float]:
    """Scale weights to a mean of 1, which is what the price of a row is stated for."""
    scale = len(weights) / sum(weights.values())
    return {batch: weight * scale for batch, weight in weights.items()}


def _gain_over_off(surface: Surface, weights: Mapping[float, float], table: KTable) -> float | None:
    if None not in surface.arms:
        return None
    total = 0.0
    for batch, weight in weights.items():
        estimates = surface.estimates_at(batch)
        total += weight * (estimates[table.k_at(math.ceil(batch))].log - estimates[None].log)
    return total / sum(weights.values())
