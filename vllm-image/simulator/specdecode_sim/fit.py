"""Fit a profile's step times to measurements, so that every figure in a profile can be redone.

Step times are linear in all parameters but two, the experts' and the knee's number of tokens: those
come from a grid, the rest by non-negative least squares on relative errors. Measured throughput
becomes step time by the acceptance curve: T = streams · mean acceptance length / throughput.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from specdecode_sim.acceptance import mean_acceptance_length
from specdecode_sim.cost import Cost, step_milliseconds
from specdecode_sim.profile import Drafting, GraphKind, StepTimes

Floats = NDArray[np.float64]
_EXPERTS_GRID = (8.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0)
_KNEE_GRID = (16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)


class Measured(NamedTuple):
    """Throughput of a closed loop; K -1 is speculation off, 0 is K=0 with a drafter."""

    streams: int
    k: int
    tokens_per_second: float


class Timed(NamedTuple):
    """Time of one verification by its target tokens."""

    tokens: int
    milliseconds: float


@dataclass(frozen=True)
class Fit:
    """Fitted parts of a profile and the largest relative error, in percent."""

    times: StepTimes
    drafting: Drafting
    curve: tuple[float, ...]
    error_percent: float


def fit_profile(
    measurements: Sequence[Measured],
    curve: Sequence[float],
    *,
    launch_milliseconds: float = 0.0,
    graphs: GraphKind = "FULL",
    captured_tokens: int = 1024,
    has_experts: bool = False,
) -> Fit:
    """Fit step times and drafting to throughput; `curve` is cumulative acceptance by position.

    Prefill is not modelled: measure decode, or take it as part of the step. `launch_milliseconds`
    is known from elsewhere, as throughput cannot tell it from the weights; without a measurement
    of speculation off, a first drafting pass is taken to cost as much as a further one. Raises
    ValueError for no measurements and for figures that are not positive.
    """
    if not measurements or any(m.tokens_per_second <= 0 or m.streams < 1 for m in measurements):
        raise ValueError("a fit needs measurements, each of 1 stream or more and of tokens/s > 0")
    measured = np.array([_step_time(point, curve) for point in measurements])
    experts = _EXPERTS_GRID if has_experts else (1.0,)
    best: tuple[float, float, float, Floats] | None = None
    for experts_tokens, knee_tokens in itertools.product(experts, _KNEE_GRID):
        features = np.array([_features(m, experts_tokens, knee_tokens) for m in measurements])
        if not has_experts:
            features[:, 1] = 0.0
        found, residual = optimize.nnls(
            features / measured[:, None], 1.0 - launch_milliseconds / measured
        )
        if best is None or residual < best[0]:
            best = (float(residual), experts_tokens, knee_tokens, found)
    assert best is not None
    _, experts_tokens, knee_tokens, found = best
    if all(point.k >= 0 for point in measurements):
        found = _without_off(found)
    values = [round(float(value), 5) for value in found]
    times = StepTimes(
        launch={graphs: launch_milliseconds},
        weights=values[0],
        experts=values[1],
        experts_tokens=experts_tokens,
        token=values[2],
        knee=values[3],
        knee_tokens=knee_tokens,
        captured_tokens=captured_tokens,
    )
    drafting = Drafting(
        step=values[4], draft_pass=values[5], request=values[6], request_pass=values[7]
    )
    features = np.array([_features(m, experts_tokens, knee_tokens) for m in measurements])
    error = np.abs((features @ np.array(values) + launch_milliseconds) / measured - 1.0).max()
    return Fit(times, drafting, tuple(curve), 100.0 * float(error))


def fit_curve(measurements: Sequence[Measured], *, has_experts: bool = False) -> Fit:
    """Fit acceptance along with the step times, where a source says nothing of acceptance.

    Among curves whose chance per position falls by a constant factor; K alone tells acceptance
    from cost only if several K were measured at several numbers of streams.
    """
    positions = max(point.k for point in measurements)
    fits = (
        fit_profile(measurements, curve, has_experts=has_experts)
        for curve in _curves(max(1, positions))
    )
    return min(fits, key=lambda fit: fit.error_percent)


def fit_verification(points: Sequence[Timed]) -> StepTimes:
    """Fit the captured part of verification to times by tokens; drafting is not in them."""
    measurements = [Measured(p.tokens, -1, 1000.0 * p.tokens / p.milliseconds) for p in points]
    return fit_profile(measurements, (), has_experts=True).times


def predict(cost: Cost, curve: Sequence[float], *, streams: int, k: int) -> float:
    """Return tokens per second of so many streams in steady decode."""
    tokens = streams * (max(k, 0) + 1)
    milliseconds = step_milliseconds(cost, tokens, streams, 0.0, 0.0, k)
    return 1000.0 * streams * mean_acceptance_length(curve, max(k, 0)) / milliseconds


def _step_time(point: Measured, curve: Sequence[float]) -> float:
    length = mean_acceptance_length(curve, max(point.k, 0))
    return 1000.0 * point.streams * length / point.tokens_per_second


def _without_off(found: Floats) -> Floats:
    """Split the time of every step between weights and drafting: nothing measured tells them."""
    split = found.copy()
    split[0] += found[4] - found[5]
    split[4] = found[5]
    if split[0] < 0.0:
        split[4], split[0] = found[0] + found[4], 0.0
    return split


def _features(point: Measured, experts_tokens: float, knee_tokens: float) -> list[float]:
    tokens = point.streams * (max(point.k, 0) + 1)
    drafts = float(point.k >= 0)
    passes = float(max(0, point.k - 1))
    experts = 1.0 - math.exp(-tokens / experts_tokens)
    verify = [1.0, experts, float(tokens), max(0.0, tokens - knee_tokens)]
    return [*verify, drafts, passes, point.streams * drafts, point.streams * passes]


def _curves(positions: int) -> Iterator[tuple[float, ...]]:
    for first, factor in itertools.product(
        np.linspace(0.5, 0.9, 9), (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
    ):
        chances = first * factor ** np.arange(positions)
        yield tuple(round(float(value), 4) for value in np.cumprod(chances))
