"""What goodput surfaces engines can have: draws of a small engine model, before any measurement.

A table with holes is filled from what its measured cells say about all engines that could have
given them. The draws differ in everything that decides where speculation pays: acceptance and how
it changes with depth, a dense or an expert model, where the machine turns from memory-bound to
compute-bound, what drafting costs and how that grows with the batch. They take no side: K may
fall, stay or rise with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Arm = int | None  # K, or None for speculation off
Floats = NDArray[np.float64]

DRAWS: Final = 2000
_SEED: Final = 6


def draw_log_goodput(batches: Sequence[float], arms: Sequence[Arm]) -> Floats:
    """Return ln goodput of each draw (rows) at each point (columns), up to a constant per draw."""
    draws = _engines()
    batch = np.asarray(batches, dtype=float)
    drafted = np.array([arm or 0 for arm in arms])
    speculating = np.array([arm is not None for arm in arms])
    lengths = _acceptance_lengths(int(drafted.max(initial=0)))[:, drafted]
    seconds = _verify_seconds(draws, batch, drafted) + speculating * _draft_seconds(
        draws, batch, drafted
    )
    return np.asarray(np.log(batch) + np.log(lengths) - np.log(seconds))


class _Engines:
    """Parameters of every draw as columns; times are in units of one read of the weights."""

    def __init__(self) -> None:
        chance = np.random.default_rng(_SEED)

        def uniform(low: float, high: float) -> Floats:
            return chance.uniform(low, high, (DRAWS, 1))

        def spread(low: float, high: float) -> Floats:
            return np.exp(uniform(np.log(low), np.log(high)))

        self.first_logit = np.log(1 / uniform(0.03, 0.7) - 1)
        self.logit_per_position = chance.normal(0.0, 0.12, (DRAWS, 1))
        self.knee_tokens = spread(24, 3000)
        self.knee_sharpness = uniform(1, 4)
        self.expert_seconds = uniform(0.3, 5) * (uniform(0, 1) < 0.5)
        self.expert_tokens = spread(2, 256)
        self.request_seconds = spread(1 / 3000, 1 / 30)
        self.pass_seconds = spread(0.004, 0.15)
        self.pass_power = uniform(0.2, 1)
        self.pass_batch = spread(16, 2000)
        self.fixed_seconds = spread(0.01, 0.25)
        self.fixed_batch = spread(64, 2000)


@lru_cache(maxsize=1)
def _engines() -> _Engines:
    return _Engines()


@lru_cache(maxsize=8)
def _acceptance_lengths(k_max: int) -> Floats:
    draws = _engines()
    hazard = 1 / (1 + np.exp(-draws.first_logit - draws.logit_per_position * np.arange(k_max)))
    accepted = np.cumsum(np.cumprod(hazard, axis=1), axis=1)
    return np.hstack([np.ones((DRAWS, 1)), 1 + accepted])


def _verify_seconds(draws: _Engines, batch: Floats, drafted: NDArray[np.int_]) -> Floats:
    tokens = batch * (drafted + 1)
    busy = (tokens / draws.knee_tokens) ** draws.knee_sharpness
    weights = (1 + busy) ** (1 / draws.knee_sharpness)
    experts = draws.expert_seconds * -np.expm1(-tokens / draws.expert_tokens)
    return np.asarray(weights + experts + draws.request_seconds * batch)


def _draft_seconds(draws: _Engines, batch: Floats, drafted: NDArray[np.int_]) -> Floats:
    passes = draws.pass_seconds * drafted**draws.pass_power * (1 + batch / draws.pass_batch)
    return np.asarray(passes + draws.fixed_seconds * (1 + batch / draws.fixed_batch))
