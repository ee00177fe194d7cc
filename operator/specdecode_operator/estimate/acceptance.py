"""Acceptance of drafts by position, right also where K varies.

Under a varying K a late position is proposed less often than an early one (it is censored), so
accepted ÷ drafts is biased. The product-limit estimator (Kaplan and Meier 1958) is not: the
hazard of a position is accepted ÷ at risk there, survival is the product of the hazards up to it.
Intervals assume independent drafts; drafts of one request are alike, so the truth is wider.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.conditions import Reason

from .counters import NoEstimate

MIN_DRAFTS: Final = 50
Z_95: Final = 1.96


@dataclass(frozen=True)
class PositionSurvival:
    """Share of drafts accepted up to and including one position, with a 95 % interval."""

    at_risk: float
    hazard: float
    survival: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Survival:
    """Survival by position, from 0, as far as it was observed."""

    positions: tuple[PositionSurvival, ...]

    def at(self, position: int) -> float:
        """Return survival at a position; beyond the observed ones the last hazard goes on."""
        if position < len(self.positions):
            return self.positions[position].survival
        last = self.positions[-1]
        return last.survival * last.hazard ** (position + 1 - len(self.positions))

    @property
    def first(self) -> float:
        """Acceptance at the first position."""
        return self.positions[0].survival


@dataclass(frozen=True)
class AcceptanceLength:
    """Tokens that one request gains per step at some K; 1 is no gain."""

    tokens: float
    extrapolated: bool


def estimate_survival(
    at_risk: Mapping[int, float], accepted: Mapping[int, float], *, min_drafts: int = MIN_DRAFTS
) -> Survival | NoEstimate:
    """Estimate survival by position from drafts at risk and accepted there.

    It ends before the first position with fewer than `min_drafts` at risk.
    """
    positions: list[PositionSurvival] = []
    survival, log_variance = 1.0, 0.0
    while True:
        risk = _finite(at_risk.get(len(positions), 0.0))
        if risk < max(min_drafts, 1):
            break
        hits = min(_finite(accepted.get(len(positions), 0.0)), risk)
        survival *= hits / risk
        log_variance += (risk - hits) / (risk * hits) if hits else 0.0
        lower, upper = _interval(survival, log_variance, risk)
        positions.append(PositionSurvival(risk, hits / risk, survival, lower, upper))
    if not positions:
        drafts = _finite(at_risk.get(0, 0.0))
        return NoEstimate(
            Reason.COLLECTING, f"{drafts:.0f} drafts are too few for acceptance ({min_drafts})."
        )
    return Survival(tuple(positions))


def mean_acceptance_length(survival: Survival, k: int) -> AcceptanceLength:
    """Return 1 + the sum of survival over the first k positions."""
    return AcceptanceLength(
        tokens=1.0 + sum(survival.at(position) for position in range(max(k, 0))),
        extrapolated=k > len(survival.positions),
    )


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share seen in `count` trials."""
    z2 = Z_95 * Z_95 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = Z_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count)) / (1 + z2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _interval(survival: float, log_variance: float, risk: float) -> tuple[float, float]:
    """Return Greenwood's interval on the log scale; Wilson's where its variance is 0."""
    if survival <= 0.0 or log_variance <= 0.0:
        return wilson_interval(survival, risk)
    spread = math.exp(min(Z_95 * math.sqrt(log_variance), 700.0))
    return survival / spread, min(survival * spread, 1.0)


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
