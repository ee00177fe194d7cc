"""Step time as a function of batch and K: a model of engines, corrected where cells were measured.

T(batch, K) = c0 + c1·n + c2·√n + c3·max(0, n − kink) + c4·K with n = batch·(K+1) tokens
verified, none below 0: a constant (weights are read once a step), a price per token, a part of
it that flattens as experts or the machine fill, the steeper side of the roofline, and one per
drafter pass. K·batch is left out: beside n it cannot be told apart, and it made the forecast of
K=0 from K>=1 far too good. Fitted by non-negative least squares to relative errors, so that the
small fast cells count as much as the slow ones.

What the model misses at a measured cell is carried over to points near it (kriging of the log
residuals): at the cell itself model and measurement are blended by their variances, far from all
cells the model stands alone and its error is the one it showed.

The end of the captured CUDA graphs is a cliff and no kink (a public curve goes from 20 to 104 ms
there): nothing beyond it is fitted or predicted. Nor is anything beyond twice the largest batch.
Cells of another GPU product, or whose mean context differs by 30 %, are another curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from specdecode_operator.api.conditions import Reason

from .counters import NoEstimate

Floats = NDArray[np.float64]

# Past this the error of a cell is the model's, not the sample's: more steps add no weight.
_MAX_WEIGHT_STEPS: Final = 500.0
# Relative error of the mean step time of that many steps: engines wander by 3 % between blocks.
_BLOCK_ERROR: Final = 0.03
# What is beyond this is no batch, no K and no step time: products of it would overflow.
_MOST: Final = 1e9
_LEAST_SECONDS: Final = 1e-6
_MAX_EXTRAPOLATION: Final = 2.0
_CONTEXT_MOVED: Final = 0.30

# A kink must lower the squared error by this factor: five cells fit any curve.
_KINK_GAIN: Final = 0.5
_MIN_CELLS_FOR_KINK: Final = 6

# The model's error before it was seen, as that of so many cells; how far an error reaches, in
# e-foldings of batch and of K+1.
_PRIOR_ERROR: Final = 0.08
_PRIOR_CELLS: Final = 3.0
_REACH_BATCH: Final = 1.0
_REACH_K: Final = 0.5

# An engine has drifted when its step time is off by so much, and by so many standard errors.
_DRIFT: Final = 0.05
_DRIFT_ERRORS: Final = 3.0
_COMMON_ERROR: Final = 0.02


@dataclass(frozen=True)
class StepTime:
    """Mean wall time of the steps at one batch and K; `steps` of them were measured.

    `context_tokens` is the mean context of a request, `product` the GPU; None where not known.
    """

    batch: float
    k: int
    seconds: float
    steps: float
    context_tokens: float | None = None
    product: str | None = None


@dataclass(frozen=True)
class PredictedStepTime:
    """A step time; `extrapolated` where batch or K lies outside what was measured."""

    seconds: float
    extrapolated: bool
    relative_error: float


@dataclass(frozen=True, eq=False)
class _Residuals:
    """What the model misses at the cells, ready to be carried over to other points."""

    points: Floats
    solved: Floats
    inverse: Floats
    variance: float

    def at(self, batch: float, k: int) -> tuple[float, float]:
        """Return the expected log residual at a point and its variance."""
        near = self.variance * _nearness(self.points, _points([batch], [k]))[:, 0]
        left = self.variance - float(near @ self.inverse @ near)
        return float(near @ self.solved), max(left, 0.0)


@dataclass(frozen=True, eq=False)
class StepCost:
    """The fitted model, the range it rests on, and what it misses at the measured cells."""

    coefficients: tuple[float, ...]
    kink_tokens: float
    smallest_batch: float
    largest_batch: float
    ks: tuple[int, ...]
    cells: int
    relative_error: float
    captured_tokens: float
    k_max: int | None
    residuals: _Residuals

    def modelled(self, batch: float, k: int) -> float:
        """Return the seconds of a step by the model alone."""
        features = _features(np.array([batch]), np.array([k]), self.kink_tokens)
        return float(features[0] @ np.array(self.coefficients))

    def predict(self, batch: float, k: int) -> PredictedStepTime | NoEstimate:
        """Predict the seconds of a step where that can be told."""
        problem = self._problem_of(batch, k)
        if problem is not None:
            return problem
        missed, variance = self.residuals.at(batch, k)
        return PredictedStepTime(
            seconds=self.modelled(batch, k) * math.exp(missed),
            extrapolated=not (
                self.smallest_batch <= batch <= self.largest_batch
                and self.ks[0] <= k <= self.ks[-1]
            ),
            relative_error=math.sqrt(variance),
        )

    def _problem_of(self, batch: float, k: int) -> NoEstimate | None:
        if not (math.isfinite(batch) and batch > 0 and 0 <= k <= _MOST):
            return NoEstimate(Reason.BAD_DATA, f"Batch {batch} with K {k} is no step.")
        if self.k_max is not None and k > self.k_max:
            return NoEstimate(
                Reason.OUT_OF_RANGE, f"K {k} is above the envelope, which ends at {self.k_max}."
            )
        if batch > _MAX_EXTRAPOLATION * self.largest_batch:
            return NoEstimate(
                Reason.OUT_OF_RANGE,
                f"Batch {batch:.0f} is beyond twice the largest one measured "
                f"({self.largest_batch:.0f}).",
            )
        if batch * (k + 1) > self.captured_tokens:
            return NoEstimate(
                Reason.OUT_OF_RANGE,
                f"Batch {batch:.0f} with K {k} verifies {batch * (k + 1):.0f} tokens; CUDA graphs "
                f"were captured for {self.captured_tokens:.0f}.",
            )
        return None


@dataclass(frozen=True)
class Drift:
    """How much slower steps are than the cells say (log), its standard error, and the verdict."""

    log_ratio: float
    error: float
    has_drifted: bool

    @property
    def percent(self) -> float:
        """The change of the step time in percent."""
        return 100.0 * math.expm1(self.log_ratio)


def is_stale(cell: StepTime, *, context_tokens: float | None, product: str | None = None) -> bool:
    """Tell whether a cell is of another curve: other GPU product, or mean context 30 % off."""
    known = product is not None and cell.product is not None
    return (known and cell.product != product) or has_context_moved(
        cell.context_tokens, context_tokens
    )


def has_context_moved(then: float | None, now: float | None) -> bool:
    """Tell whether the mean context of a request is 30 % off; not where one is not known."""
    if then is None or now is None:
        return False
    return not abs(now - then) <= _CONTEXT_MOVED * then


def fit_step_cost(
    observed: Iterable[StepTime],
    *,
    captured_tokens: float = math.inf,
    k_max: int | None = None,
    context_tokens: float | None = None,
    product: str | None = None,
) -> StepCost | NoEstimate:
    """Fit the model to the cells that are not stale and inside the captured graphs.

    `k_max` is the largest K of the envelope, `captured_tokens` the largest batch·(K+1) for which
    CUDA graphs exist; `context_tokens` and `product` are those of the present traffic.
    """
    seen = [one for one in observed if _is_usable(one)]
    cells = [
        one
        for one in seen
        if one.batch * (one.k + 1) <= captured_tokens
        and not is_stale(one, context_tokens=context_tokens, product=product)
    ]
    if not cells:
        return NoEstimate(
            Reason.COLLECTING,
            "No step time of this GPU product and context inside the captured graphs."
            if seen
            else "No step time was measured yet.",
        )
    batch = np.array([one.batch for one in cells])
    ks = np.array([one.k for one in cells])
    seconds = np.array([one.seconds for one in cells])
    weights = np.array([min(one.steps, _MAX_WEIGHT_STEPS) for one in cells])
    try:
        kink, coefficients = _fit(batch, ks, seconds, weights)
    except RuntimeError:  # scipy's nnls gives up on cells that no engine has
        return NoEstimate(Reason.BAD_DATA, "The measured step times fit no engine at all.")
    modelled = _features(batch, ks, kink) @ coefficients
    misses = modelled / seconds - 1.0
    return StepCost(
        coefficients=tuple(coefficients.tolist()),
        kink_tokens=kink,
        smallest_batch=float(batch.min()),
        largest_batch=float(batch.max()),
        ks=tuple(sorted({one.k for one in cells})),
        cells=len(cells),
        relative_error=float(np.sqrt(np.average(misses**2, weights=weights))),
        captured_tokens=captured_tokens,
        k_max=k_max,
        residuals=_carry(
            _points(batch, ks),
            np.log(seconds / np.maximum(modelled, _LEAST_SECONDS)),
            _BLOCK_ERROR**2 * _MAX_WEIGHT_STEPS / weights,
            spent=int(np.count_nonzero(coefficients)),
        ),
    )


def detect_drift(cost: StepCost, observed: Iterable[StepTime]) -> Drift | NoEstimate:
    """Compare fresh step times with what the cells say of them: has the engine itself changed?

    Then the cells are out of date altogether, also those of other batches and K.
    """
    ratios, precisions = [], []
    for one in observed:
        predicted = cost.predict(one.batch, one.k) if _is_usable(one) else None
        if isinstance(predicted, PredictedStepTime) and not predicted.extrapolated:
            noise = _BLOCK_ERROR**2 * _MAX_WEIGHT_STEPS / min(one.steps, _MAX_WEIGHT_STEPS)
            ratios.append(math.log(one.seconds / predicted.seconds))
            precisions.append(1.0 / (predicted.relative_error**2 + noise))
    if not ratios:
        return NoEstimate(Reason.COLLECTING, "No fresh step time lies within the measured cells.")
    log_ratio = float(np.average(ratios, weights=precisions))
    error = math.hypot(1.0 / math.sqrt(sum(precisions)), _COMMON_ERROR)
    return Drift(log_ratio, error, abs(log_ratio) > max(_DRIFT, _DRIFT_ERRORS * error))


def _fit(batch: Floats, ks: Floats, seconds: Floats, weights: Floats) -> tuple[float, Floats]:
    """Return the kink in tokens (inf: none) and the coefficients."""
    plain, error = _solve(batch, ks, seconds, weights, math.inf)
    best = (math.inf, plain)
    tokens = batch * (ks + 1)
    if len(seconds) < _MIN_CELLS_FOR_KINK or error <= _LEAST_SECONDS:
        return best
    least = _KINK_GAIN * error
    kink = 2.0 ** math.ceil(math.log2(max(float(tokens.min()), 1.0)) + 1)
    while kink < tokens.max() / 1.5:
        coefficients, error = _solve(batch, ks, seconds, weights, kink)
        if error < least:
            best, least = (kink, coefficients), error
        kink *= 2.0
    return best


def _solve(
    batch: Floats, ks: Floats, seconds: Floats, weights: Floats, kink: float
) -> tuple[Floats, float]:
    """Return coefficients and the weighted sum of squared relative errors."""
    root = np.sqrt(weights)
    relative = _features(batch, ks, kink) / seconds[:, None]
    scale = relative.max(axis=0)
    scale[scale <= 0] = 1.0
    scaled, error = nnls(relative / scale * root[:, None], root)
    return scaled / scale, float(error) ** 2


def _features(batch: Floats, ks: Floats, kink: float) -> Floats:
    tokens = batch * (ks + 1.0)
    beyond = np.maximum(tokens - kink, 0.0)
    return np.column_stack([np.ones_like(tokens), tokens, np.sqrt(tokens), beyond, ks])


def _points(batch: Sequence[float] | Floats, ks: Sequence[int] | Floats) -> Floats:
    """Return coordinates in units of the reach of an error."""
    return np.column_stack(
        [np.log(batch) / _REACH_BATCH, np.log1p(np.asarray(ks, dtype=float)) / _REACH_K]
    )


def _nearness(ones: Floats, others: Floats) -> Floats:
    distance = np.square(ones[:, None, :] - others[None, :, :]).sum(axis=2)
    return np.asarray(np.exp(-distance / 2.0))


def _carry(points: Floats, missed: Floats, noise: Floats, *, spent: int) -> _Residuals:
    """Estimate the model's own variance, `spent` coefficients having been fitted, and solve."""
    free = max(len(missed) - spent, 0)
    excess = max(float(np.sum(missed**2 - noise)), 0.0) if free else 0.0
    variance = (excess + _PRIOR_CELLS * _PRIOR_ERROR**2) / (free + _PRIOR_CELLS)
    inverse = np.asarray(
        np.linalg.inv(variance * _nearness(points, points) + np.diag(noise)), float
    )
    return _Residuals(points, inverse @ missed, inverse, variance)


def _is_usable(one: StepTime) -> bool:
    return (
        all(0 < x <= _MOST for x in (one.batch, one.seconds, one.steps))
        and one.seconds >= _LEAST_SECONDS
        and one.steps >= 1
        and one.batch >= 1.0 / _MOST
        and 0 <= one.k <= _MOST
    )
