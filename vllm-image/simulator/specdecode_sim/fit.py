"""Fit a profile's step times to measured throughput, so that every figure in it can be redone.

In steady state a closed loop's step takes T = streams · mean acceptance length / throughput, and T
is linear in all parameters but two, the experts' and the knee's number of tokens: those come from
a grid, the rest by non-negative least squares on relative errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from specdecode_sim.acceptance import mean_acceptance_length
from specdecode_sim.cost import Cost, step_milliseconds
from specdecode_sim.profile import Profile

Floats = NDArray[np.float64]
_EXPERTS_GRID = (8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0)
_KNEE_GRID = (16.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)
_TIMES = ("weights", "experts", "token", "knee", "context", "prefill")
_DRAFTING = ("step", "draft_pass", "request", "request_pass")
_FIELDS = (*_TIMES, *("draft", "draft_pass", "draft_request", "draft_request_pass"))
_NOTHING = Cost(launch=0.0, weights=0.0)


class Measured(NamedTuple):
    """Throughput of a closed loop; K -1 is speculation off, 0 is K=0 with a drafter."""

    streams: int
    k: int
    tokens_per_second: float


class Length(NamedTuple):
    """Mean prompt and output of the requests, in tokens; without a prompt it is decode alone."""

    prompt: float = 0.0
    output: float = 1.0


def fit_profile(
    measurements: Sequence[Measured],
    start: Profile,
    *,
    length: Length = Length(),  # noqa: B008
    prior: float = 0.03,
) -> Profile:
    """Fit the step times that `start` has above 0; graphs are FULL, its launch time is known.

    What the measurements leave open is drawn towards `start`, with the weight `prior`. The result's
    `error_percent` is its largest error. Raises ValueError without measurements and for figures
    that are not positive.
    """
    if not measurements or any(m.tokens_per_second <= 0 or m.streams < 1 for m in measurements):
        raise ValueError("a fit needs measurements, each of 1 stream or more and of tokens/s > 0")
    problem = _Problem(measurements, start, length=length, prior=prior)
    experts = _EXPERTS_GRID if start.times.experts > 0 else (1.0,)
    knees = _KNEE_GRID if start.times.knee > 0 else (0.0,)
    solutions = [problem.solve(*grid) for grid in itertools.product(experts, knees)]
    found = min(solutions, key=lambda solution: solution[0])[1]
    engine = found.build_cost(graphs="FULL")
    curve = found.acceptance.curve
    errors = [
        predict(engine, curve, streams=m.streams, k=m.k, length=length) / m.tokens_per_second - 1.0
        for m in measurements
    ]
    return found.model_copy(update={"error_percent": 100.0 * max(map(abs, errors))})


def predict(
    engine: Cost,
    curve: Sequence[float],
    *,
    streams: int,
    k: int,
    length: Length = Length(),  # noqa: B008
) -> float:
    """Return tokens per second of so many streams in steady state."""
    emitted = mean_acceptance_length(curve, max(k, 0))
    milliseconds = _step_milliseconds(engine, streams, k, emitted, length)
    return 1000.0 * streams * emitted / milliseconds


def _step_milliseconds(engine: Cost, streams: int, k: int, emitted: float, length: Length) -> float:
    """Return a mean step's time: each request's prefill is spread over its decode steps."""
    tokens = streams * (max(k, 0) + 1)
    prefill = streams * length.prompt * emitted / length.output
    context = streams * (length.prompt + length.output / 2.0) if length.prompt else 0.0
    return step_milliseconds(engine, tokens, streams, prefill, context, k)


class _Problem:
    """Linear equations, one a measurement, for every choice of the two numbers of tokens."""

    def __init__(
        self, measurements: Sequence[Measured], start: Profile, *, length: Length, prior: float
    ) -> None:
        self._start = start
        self._prior = prior
        self._points = measurements
        self._length = length
        curve = start.acceptance.curve
        self._emitted = [mean_acceptance_length(curve, max(m.k, 0)) for m in measurements]
        self._measured = np.array(
            [
                1000.0 * m.streams * emitted / m.tokens_per_second
                for m, emitted in zip(measurements, self._emitted, strict=True)
            ]
        )

    def solve(self, experts_tokens: float, knee_tokens: float) -> tuple[float, Profile]:
        """Return the residual and the profile of one choice."""
        before = self._start.build_cost(graphs="FULL")
        known = np.array([getattr(before, name) for name in _FIELDS])
        base = _NOTHING._replace(experts_tokens=experts_tokens, knee_tokens=knee_tokens)
        columns = [self._times(base._replace(**{name: 1.0})) for name in _FIELDS]
        features = np.stack(columns, axis=1) / self._measured[:, None]
        chosen = (known > 0) & (features > 0).any(axis=0)
        fixed = np.where(chosen, 0.0, known)
        target = 1.0 - before.launch / self._measured - features @ fixed
        towards = self._prior * np.diag(1.0 / known[chosen])
        matrix = np.vstack([features[:, chosen], towards])
        wanted = np.concatenate([target, np.full(chosen.sum(), self._prior)])
        values, residual = optimize.nnls(matrix, wanted)
        found = known.copy()
        found[chosen] = values
        return float(residual), _with_values(self._start, found, experts_tokens, knee_tokens)

    def _times(self, engine: Cost) -> Floats:
        return np.array(
            [
                _step_milliseconds(engine, m.streams, m.k, emitted, self._length)
                for m, emitted in zip(self._points, self._emitted, strict=True)
            ]
        )


def _with_values(
    start: Profile, found: Floats, experts_tokens: float, knee_tokens: float
) -> Profile:
    values = [round(float(value), 5) for value in found]
    times = dict(zip(_TIMES, values, strict=False))
    drafting = dict(zip(_DRAFTING, values[len(_TIMES) :], strict=True))
    if start.times.experts > 0:
        times["experts_tokens"] = experts_tokens
    if start.times.knee > 0:
        times["knee_tokens"] = knee_tokens
    return start.model_copy(
        update={
            "times": start.times.model_copy(update=times),
            "drafting": start.drafting.model_copy(update=drafting),
        }
    )
