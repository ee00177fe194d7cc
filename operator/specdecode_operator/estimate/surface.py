"""Goodput by batch and K from a table of measurements, its holes filled.

A measured cell stands as it was measured. A missing one is kriged: ln goodput is a Gaussian field
whose mean and covariance are those of the engines drawn in `surface_prior`, plus a smooth
departure from them over (log2 batch, log2 (K+1)) and a roughness of each cell. How large the
departure is, the table itself decides: the answer is the average over several sizes, weighted by
how well each explains the measured cells. Speculation off is an arm of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import stdtrit

from specdecode_operator.api.conditions import Reason

from .counters import NoEstimate
from .surface_prior import Arm, Floats, draw_log_goodput

# What is known of noise before any repeat: relative standard deviation, worth so many repeats.
_PRIOR_NOISE: Final = 0.01
_PRIOR_REPEATS: Final = 4.0

# The departure from the drawn engines: sizes that are averaged over (ln goodput), and its reach.
_DEPARTURES: Final = (0.01, 0.02, 0.04, 0.08, 0.16)
_REACH_OCTAVES: Final = 1.5
_REACH_ARMS: Final = 1.0
_ROUGHNESS: Final = 0.5
# Off and K run on servers that were started apart: what all K have in common against off.
_OFF_DEPARTURE: Final = 2.0
# Load by load the level is free to depart from the drawn engines this far (ln goodput).
_LEVEL: Final = 10.0
_LOAD_DEPARTURE: Final = 0.15
_LOAD_REACH_OCTAVES: Final = 3.0

Z_95: Final = 1.96

# What is beyond these is no batch, no K and no rate: products of it would overflow.
MOST: Final = 1e9
MAX_ARM: Final = 1024


@dataclass(frozen=True)
class Measurement:
    """One row of a table: tokens per second of one arm at one batch, the mean of n repeats."""

    batch: float
    arm: Arm
    tokens_per_second: float
    stderr: float | None = None
    n: int = 1


@dataclass(frozen=True)
class Cell:
    """All measurements of one batch and arm together; the error is relative, of the mean."""

    batch: float
    arm: Arm
    tokens_per_second: float
    relative_error: float
    freedom: float
    repeats: int


@dataclass(frozen=True)
class Estimate:
    """Goodput of one batch and arm with its 95 % interval, measured or predicted."""

    tokens_per_second: float
    lower: float
    upper: float
    measured: bool

    @property
    def log(self) -> float:
        """Natural logarithm of the goodput."""
        return math.log(self.tokens_per_second)

    @property
    def half_width(self) -> float:
        """Half the interval in ln goodput."""
        return math.log(self.upper / self.lower) / 2


def arm_order(arm: Arm) -> tuple[bool, int]:
    """Sort arms with off first: of equals the first is the one that costs least."""
    return (arm is not None, arm or 0)


def pool_measurements(rows: Iterable[Measurement]) -> tuple[Cell, ...]:
    """Pool the repeats of each batch and arm; their spread is the standard error.

    One row alone has the error it states, else that of the table's repeats.
    """
    groups: dict[tuple[float, Arm], list[Measurement]] = defaultdict(list)
    for row in rows:
        groups[(row.batch, row.arm)].append(row)
    spreads = {key: _spread(group) for key, group in groups.items() if len(group) > 1}
    freedom = sum(f for _, f in spreads.values())
    known = _PRIOR_REPEATS * _PRIOR_NOISE**2 + sum(v * f for v, f in spreads.values())
    typical = known / (_PRIOR_REPEATS + freedom)
    return tuple(
        _pool(groups[key], typical, spreads.get(key))
        for key in sorted(groups, key=lambda key: (key[0], arm_order(key[1])))
    )


def fit_surface(rows: Iterable[Measurement]) -> Surface | NoEstimate:
    """Fit the surface to a table; no estimate where a row is no measurement or there is none."""
    rows = list(rows)
    if not rows:
        return NoEstimate(Reason.COLLECTING, "The table has no measurement.")
    for row in rows:
        if not is_measurement(row):
            return NoEstimate(Reason.COLLECTING, f"{row} is no measurement.")
    return Surface(pool_measurements(rows))


def is_measurement(row: Measurement) -> bool:
    """Tell whether a row's figures are numbers that can be worked with."""
    return (
        1 <= row.batch <= MOST
        and 0 < row.tokens_per_second <= MOST
        and row.tokens_per_second > 1 / MOST
        and (row.arm is None or 0 <= row.arm <= MAX_ARM)
        and (row.stderr is None or 0 <= row.stderr <= MOST)
        and row.n >= 1
    )


@dataclass(frozen=True)
class Surface:
    """Goodput by batch and arm. `cells` are those measured, ordered by batch and arm."""

    cells: tuple[Cell, ...]

    @cached_property
    def batches(self) -> tuple[float, ...]:
        """The batches at which anything was measured, ascending."""
        return tuple(sorted({cell.batch for cell in self.cells}))

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """The arms measured anywhere: off first, then K ascending."""
        return tuple(sorted({cell.arm for cell in self.cells}, key=arm_order))

    @cached_property
    def coverage(self) -> dict[Arm, float]:
        """The share of the measured batches at which each arm was measured."""
        return {
            arm: sum(cell.arm == arm for cell in self.cells) / len(self.batches)
            for arm in self.arms
        }

    def estimates_at(self, batch: float) -> dict[Arm, Estimate]:
        """Return the goodput of every arm at one batch; between measured batches predicted."""
        found = self._found.get(batch)
        if found is None:
            found = self._found[batch] = self._estimate([batch])[batch]
        return found

    @cached_property
    def _found(self) -> dict[float, dict[Arm, Estimate]]:
        return self._estimate(self.batches)

    def _estimate(self, batches: Sequence[float]) -> dict[float, dict[Arm, Estimate]]:
        measured = {(cell.batch, cell.arm): cell for cell in self.cells}
        points = [(b, arm) for b in batches for arm in self.arms if (b, arm) not in measured]
        predicted = dict(zip(points, _krige(self.cells, points), strict=True)) if points else {}
        return {
            b: {
                arm: _as_measured(measured[(b, arm)])
                if (b, arm) in measured
                else predicted[(b, arm)]
                for arm in self.arms
            }
            for b in batches
        }


def _spread(group: Sequence[Measurement]) -> tuple[float, float]:
    """Return the variance of ln goodput among repeats of one cell, and its degrees of freedom."""
    logs = [math.log(row.tokens_per_second) for row in group]
    middle = sum(logs) / len(logs)
    freedom = len(logs) - 1.0
    return sum((x - middle) ** 2 for x in logs) / freedom, freedom


def _pool(group: Sequence[Measurement], typical: float, spread: tuple[float, float] | None) -> Cell:
    repeats = sum(row.n for row in group)
    mean = sum(row.n * row.tokens_per_second for row in group) / repeats
    if spread is not None:
        own, more = spread
        freedom = _PRIOR_REPEATS + more
        variance = (_PRIOR_REPEATS * typical + more * own) / freedom / len(group)
    else:
        freedom, variance = _PRIOR_REPEATS, typical / repeats
        if group[0].stderr is not None:
            freedom, variance = math.inf, (group[0].stderr / mean) ** 2
    return Cell(
        batch=group[0].batch,
        arm=group[0].arm,
        tokens_per_second=mean,
        relative_error=min(math.sqrt(variance), 1.0),
        freedom=freedom,
        repeats=repeats,
    )


def _as_measured(cell: Cell) -> Estimate:
    quantile = Z_95 if math.isinf(cell.freedom) else float(stdtrit(cell.freedom, 0.975))
    return _interval(
        math.log(cell.tokens_per_second), quantile * cell.relative_error, measured=True
    )


def _interval(log: float, half: float, *, measured: bool) -> Estimate:
    half = min(half, 50.0)
    return Estimate(math.exp(log), math.exp(log - half), math.exp(log + half), measured)


Point = tuple[float, Arm]


def _krige(cells: Sequence[Cell], points: Sequence[Point]) -> list[Estimate]:
    """Predict ln goodput at points from cells: an average over the sizes of the departure."""
    known = [(cell.batch, cell.arm) for cell in cells]
    target = np.array([math.log(cell.tokens_per_second) for cell in cells])
    noise = np.array([cell.relative_error**2 for cell in cells])
    field = _Field([*known, *points], len(known))
    scores, means, variances = [], [], []
    for departure in _DEPARTURES:
        score, mean, variance = field.condition(target, noise, departure)
        scores.append(score)
        means.append(mean)
        variances.append(variance)
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    variance = weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
    return [
        _interval(float(m), Z_95 * math.sqrt(max(float(v), 0.0)), measured=False)
        for m, v in zip(mean, variance, strict=True)
    ]


class _Field:
    """The prior over some points, of which the first `known` are measured."""

    def __init__(self, points: Sequence[Point], known: int) -> None:
        self._known = known
        octaves = np.log2([batch for batch, _ in points])
        depth = np.log2([1.0 + (arm or 0) for _, arm in points])
        is_off = np.array([arm is None for _, arm in points])
        draws = draw_log_goodput([b for b, _ in points], [arm for _, arm in points])
        self._mean = draws.mean(axis=0)
        away = draws - self._mean
        along = np.abs(octaves[:, None] - octaves[None, :])
        level = _LEVEL**2 + _LOAD_DEPARTURE**2 * _matern(along / _LOAD_REACH_OCTAVES)
        self._engines = away.T @ away / len(draws) + level
        alike = np.exp(-0.5 * ((depth[:, None] - depth[None, :]) / _REACH_ARMS) ** 2)
        both_off = is_off[:, None] & is_off[None, :]
        alike = np.where(is_off[:, None] ^ is_off[None, :], 0.0, alike)
        alike = np.where(both_off, _OFF_DEPARTURE**2, alike)
        self._departure = alike * (0.5 + 0.5 * _matern(along / _REACH_OCTAVES))

    def condition(
        self, target: Floats, noise: Floats, departure: float
    ) -> tuple[float, Floats, Floats]:
        """Return the log likelihood of the target, and mean and variance at the other points."""
        rough = (_ROUGHNESS * departure) ** 2
        covariance = self._engines + departure**2 * self._departure
        n = self._known
        factor = cho_factor(covariance[:n, :n] + np.diag(noise + rough + 1e-6), lower=True)
        away = target - self._mean[:n]
        solved = cho_solve(factor, away)
        score = -0.5 * away @ solved - np.log(np.diag(factor[0])).sum()
        across = covariance[n:, :n]
        variance = np.diag(covariance)[n:] - np.einsum(
            "ij,ji->i", across, cho_solve(factor, across.T)
        )
        return float(score), self._mean[n:] + across @ solved, variance + rough


def _matern(distance: Floats) -> Floats:
    """Return the Matern 3/2 correlation."""
    scaled = math.sqrt(3) * distance
    return np.asarray((1 + scaled) * np.exp(-scaled))
