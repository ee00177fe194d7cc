"""Acceptance of draft tokens: a published curve, split into easy and hard drafts.

A curve says which share of drafts survives to each position. Two models with the same curve can
differ in why: every draft alike, or a few very good ones among many bad. Adaptive verification
lives on that difference, so drafts come in GROUPS of equal probability, each with a survival of
its own, whose mean is the curve. `spread` 0 makes all groups alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

GROUPS = 8
# Mid-quantiles of the standard normal: one latent value of draft quality per group.
_LATENT = special.ndtri((np.arange(GROUPS) + 0.5) / GROUPS)

Survival = NDArray[np.float64]


def build_survival(curve: Sequence[float], *, spread: float = 0.0) -> Survival:
    """Split a curve into groups; returns shape (GROUPS, positions), mean over groups = curve.

    `curve` is the cumulative acceptance by position: the share of drafts whose tokens up to that
    position were all accepted. A group's chance at position j, given it got there, is
    Phi(mu_j + spread * z_group); mu_j is solved for, position by position. Raises ValueError for
    a curve that rises or leaves [0, 1].
    """
    before = 1.0
    for value in curve:
        if not 0.0 <= value <= before:
            raise ValueError(f"cumulative acceptance must fall from at most 1 to 0, not {curve}")
        before = value
    columns: list[Survival] = []
    reached: Survival = np.ones(GROUPS)
    for value in curve:
        reached = _split(reached, value, spread)
        columns.append(reached)
    return np.stack(columns, axis=1) if columns else np.zeros((GROUPS, 0))


def _split(reached: Survival, value: float, spread: float) -> Survival:
    """Return each group's survival one position on, with mean `value`."""
    mean = float(reached.mean())
    if value <= 0.0 or mean <= 0.0:
        return np.zeros(GROUPS)
    if value >= mean:
        return reached

    def excess(mu: float) -> float:
        return float((reached * special.ndtr(mu + spread * _LATENT)).mean()) - value

    mu = float(optimize.brentq(excess, -40.0, 40.0, xtol=1e-12))
    return np.asarray(reached * special.ndtr(mu + spread * _LATENT))


def mean_acceptance_length(curve: Sequence[float], k: int) -> float:
    """Return 1 + the accepted tokens of a draft of K tokens, in tokens per step and request."""
    return 1.0 + float(sum(curve[:k]))
