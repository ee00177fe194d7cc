"""Step time as a function of batch and K, from the cells that were measured.

T(batch, K) = c0 + c1·n + c2·√n + c3·K with n = batch·(K+1) tokens verified and no coefficient
below 0: a constant (weights are read once a step), a price per token, a part of it that flattens
as the machine fills, and one per drafter pass. K·batch is left out: beside n it cannot be told
apart, and it made the forecast of K=0 from K>=1 far too good. Fitted to relative errors, so that
the small fast cells count as much as the slow ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from specdecode_operator.api.conditions import Reason

from .counters import NoEstimate

# Past this the error of a cell is the model's, not the sample's: more steps add no weight.
_MAX_WEIGHT_STEPS: Final = 500.0
# What is beyond this is no batch, no K and no step time: products of it would overflow.
_MOST: Final = 1e9
_MAX_EXTRAPOLATION: Final = 2.0


@dataclass(frozen=True)
class StepTime:
    """Mean wall time of the steps at one batch and K; `steps` of them were measured."""

    batch: float
    k: int
    seconds: float
    steps: float


@dataclass(frozen=True)
class PredictedStepTime:
    """A step time by the model; `extrapolated` where batch or K lies outside what was measured."""

    seconds: float
    extrapolated: bool


@dataclass(frozen=True)
class StepCost:
    """The fitted model and the range it rests on."""

    coefficients: tuple[float, float, float, float]
    smallest_batch: float
    largest_batch: float
    ks: tuple[int, ...]
    cells: int
    relative_error: float

    def predict(self, batch: float, k: int) -> PredictedStepTime | NoEstimate:
        """Predict the seconds of a step; not beyond twice the largest batch that was measured."""
        if not (math.isfinite(batch) and batch > 0 and k >= 0):
            return NoEstimate(Reason.COLLECTING, f"Batch {batch} with K {k} is no step.")
        if batch > _MAX_EXTRAPOLATION * self.largest_batch:
            return NoEstimate(
                Reason.COLLECTING,
                f"Batch {batch:.0f} is beyond twice the largest one measured "
                f"({self.largest_batch:.0f}).",
            )
        seconds = sum(c * x for c, x in zip(self.coefficients, _features(batch, k), strict=True))
        return PredictedStepTime(
            seconds=seconds,
            extrapolated=not (
                self.smallest_batch <= batch <= self.largest_batch
                and self.ks[0] <= k <= self.ks[-1]
            ),
        )


def fit_step_cost(observed: Iterable[StepTime]) -> StepCost | NoEstimate:
    """Fit the model by non-negative least squares, weighted by steps."""
    cells = [one for one in observed if _is_usable(one)]
    if not cells:
        return NoEstimate(Reason.COLLECTING, "No step time was measured yet.")
    design = np.array([_features(one.batch, one.k) for one in cells])
    seconds = np.array([one.seconds for one in cells])
    weights = np.sqrt([min(one.steps, _MAX_WEIGHT_STEPS) for one in cells])
    relative = design / seconds[:, None]
    scale = relative.max(axis=0)
    scale[scale <= 0] = 1.0
    scaled, _ = nnls(relative / scale * weights[:, None], weights)
    coefficients = scaled / scale
    residuals = relative @ coefficients - 1.0
    batches = [one.batch for one in cells]
    return StepCost(
        coefficients=tuple(float(c) for c in coefficients),  # type: ignore[arg-type]
        smallest_batch=min(batches),
        largest_batch=max(batches),
        ks=tuple(sorted({one.k for one in cells})),
        cells=len(cells),
        relative_error=float(np.sqrt(np.average(residuals**2, weights=weights**2))),
    )


def _features(batch: float, k: int) -> tuple[float, float, float, float]:
    tokens = batch * (k + 1)
    return (1.0, tokens, math.sqrt(tokens), float(k))


def _is_usable(one: StepTime) -> bool:
    return (
        all(0 < x <= _MOST for x in (one.batch, one.seconds))
        and one.steps > 0
        and math.isfinite(one.steps)
        and one.seconds > 1e-9
        and 0 <= one.k <= _MOST
    )
