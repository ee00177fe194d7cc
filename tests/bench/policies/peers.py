"""The peers: policies of other engines and papers, written anew from their public descriptions.

Each decides inside the engine, as often as its source says, from what its own last steps showed.
Where a source leaves a constant open, the choice and its reason stand beside it; where two readings
are possible, the kinder one is taken. `tests/unit/bench/test_peers.py` checks each against its own
published behaviour.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from specdecode_sim import virtual
from tests.bench.policies.surfaces import OFF, Load, NoisyEngine, Steps, Surface
from tests.bench.policies.traces import SHORT


class Policy(Protocol):
    """One arm that decides in the engine; `every` is the steps from decision to decision."""

    every: int

    def choose(self, streams: int) -> int:
        """Return K for the next steps at this batch."""

    def observe(self, streams: int, steps: Steps) -> None:
        """Take in what the last steps showed."""


@dataclass
class FixedK:
    """One K for all loads."""

    k: int
    every: int = 0

    def choose(self, streams: int) -> int:
        return self.k

    def observe(self, streams: int, steps: Steps) -> None:
        return


# ------------------------------------------------------------------------------- SGLang


@dataclass
class StepSlot:
    """SGLang's adaptive number of steps for one range of batch sizes.

    A smoothed accepted length decides between candidate lengths: below the next smaller candidate
    less a half (and a hysteresis) it goes down, above the present one less a half it goes up.
    """

    candidates: tuple[int, ...]
    down_hysteresis: float
    current: int
    weight: float = 0.2
    interval: int = 5
    warmup: int = 10
    smoothed: float = field(init=False)
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.current not in self.candidates:
            self.current = self.candidates[len(self.candidates) // 2]
        self.smoothed = self.current - 1.0

    def update(self, accepted_length: float) -> None:
        """Take one step's mean accepted length; decide when an interval is over."""
        if self.current > 0:
            self.smoothed += self.weight * (accepted_length - self.smoothed)
        self.seen += 1
        if self.seen > self.warmup and (self.seen - self.warmup) % self.interval == 0:
            self.current = self._decide()

    def _decide(self) -> int:
        index = self.candidates.index(self.current)
        if self.current == 0:  # nothing is known while it does not draft: it probes
            target = self.candidates[min(1, len(self.candidates) - 1)]
            if self.smoothed < 0:
                self.smoothed = target - 1.0
            return target
        start = index
        while index > 0:
            below = self.candidates[index - 1]
            if self.smoothed > max(below - 0.5, 0.5) + self.down_hysteresis:
                break
            index -= 1
        while index >= start and index < len(self.candidates) - 1:
            if self.smoothed <= self.candidates[index] - 0.5:
                break
            index += 1
        return self.candidates[index]


class SglangAdaptive:
    """SGLang's adaptive speculative steps with the defaults of its main branch.

    Source: sgl-project/sglang, python/sglang/srt/speculative/adaptive_spec_params.py (commit
    015c872, strategy "ema"): slots from batch 1, 8, 32 and 64 with candidates 1/3/5/7, 0/1/3, 0/1
    and 0; smoothing 0.2, warm-up 10 batches, a decision every 5; a batch goes to the nearest slot.
    Zero steps is plain decoding there, without the drafter: the kinder reading, speculation off.
    """

    SLOTS: Final = {
        1: ((1, 3, 5, 7), -0.25),
        8: ((0, 1, 3), 0.0),
        32: ((0, 1), 0.0),
        64: ((0,), 0.0),
    }

    def __init__(self, *, k_max: int, initial: int = 3) -> None:
        self.every = 5
        self._slots = {
            batch: StepSlot(tuple(k for k in ks if k <= k_max), hysteresis, initial)
            for batch, (ks, hysteresis) in self.SLOTS.items()
        }

    def _slot(self, streams: int) -> StepSlot:
        return self._slots[min(self._slots, key=lambda batch: (abs(batch - streams), batch))]

    def choose(self, streams: int) -> int:
        return self._slot(streams).current or OFF

    def observe(self, streams: int, steps: Steps) -> None:
        slot = self._slot(streams)
        for drafts, accepted in zip(*_drafts_and_accepted(steps), strict=True):
            if drafts > 0 or slot.current == 0:
                slot.update(accepted / max(drafts, 1.0))


# ------------------------------------------------------------------------- TensorRT-LLM


class TensorRtSchedule:
    """TensorRT-LLM's `draft_len_schedule` with its acceptance gate.

    Source: NVIDIA/TensorRT-LLM, llm_args.py and _torch/speculative/speculation_gate.py, and the
    LLM API reference of 1.3.0rc29. The schedule is the documented example {4: 4, 8: 2, 32: 1}: up
    to batch 4 four tokens, up to 8 two, up to 32 one, beyond none. Once the mean of accepted ÷
    drafted over the last `window` iterations with speculation falls below the threshold,
    speculation is off for good. Window and threshold have no defaults there: 1,000 iterations and
    0.1, so that only useless drafting trips it.
    """

    EXAMPLE: Final = {4: 4, 8: 2, 32: 1}

    def __init__(
        self,
        schedule: Mapping[int, int] = EXAMPLE,
        *,
        window: int = 1000,
        threshold: float = 0.1,
    ) -> None:
        self.every = 50
        self.is_disabled = False
        self._schedule = dict(sorted(schedule.items()))
        self._threshold = threshold
        self._rates: deque[float] = deque(maxlen=window)

    def choose(self, streams: int) -> int:
        if self.is_disabled:
            return OFF
        return next((k for last, k in self._schedule.items() if streams <= last), 0) or OFF

    def observe(self, streams: int, steps: Steps) -> None:
        k = self.choose(streams)
        if k == OFF:
            return
        drafts, accepted = _drafts_and_accepted(steps)
        self._rates.extend((accepted / np.maximum(k * drafts, 1))[drafts > 0].tolist())
        full = len(self._rates) == self._rates.maxlen
        self.is_disabled = full and sum(self._rates) / len(self._rates) < self._threshold


# --------------------------------------------------------------------------------- vLLM


@dataclass(frozen=True)
class OfflineProfile:
    """Inter-token times by batch and K as a benchmark measured them, and acceptance by position.

    `engine_seconds`: how long the benchmark kept an engine from serving, without its starts.
    """

    seconds: Mapping[int, Mapping[int, float]]
    survival: Sequence[float]
    engine_seconds: float = 0.0

    def best_k(self, batch: int) -> int:
        """Return the K of the highest mean acceptance length ÷ inter-token time."""
        ks = range(len(self.survival) + 1)
        return max(ks, key=lambda k: (1 + sum(self.survival[:k])) / self._at(batch, k))

    def _at(self, batch: int, k: int) -> float:
        batches = sorted(self.seconds)
        below = max((b for b in batches if b <= batch), default=batches[0])
        above = min((b for b in batches if b >= batch), default=batches[-1])
        low, high = self._between(below, k), self._between(above, k)
        return low if below == above else low + (high - low) * (batch - below) / (above - below)

    def _between(self, batch: int, k: int) -> float:
        return float(np.interp(k, list(self.seconds[batch]), list(self.seconds[batch].values())))


class VllmTable:
    """vLLM's `num_speculative_tokens_per_batch_size`, made from an offline profile.

    Source: vllm-project/vllm, docs/features/speculative_decoding/dynamic_speculative_decoding.md
    and PR 32374's generate_config.py and manager.py: concurrency 1, 4, 16, 64 and 256 at K 1, 3 and
    5 and without speculation, 20 waves of requests each; acceptance by position from one run at the
    largest K; K by batch is the argmax of goodput with both axes interpolated. Fixed afterwards.
    K=0 comes from the profile of an engine without drafter, but the table's K=0 keeps it.
    """

    BATCHES: Final = (1, 4, 16, 64, 256)
    KS: Final = (1, 3, 5)

    def __init__(self, profiled: OfflineProfile) -> None:
        self.every = 0
        self._profile = profiled
        self._known: dict[int, int] = {}

    def choose(self, streams: int) -> int:
        if streams not in self._known:
            self._known[streams] = self._profile.best_k(streams)
        return self._known[streams]

    def observe(self, streams: int, steps: Steps) -> None:
        return


def profile_offline(surface: Surface, *, seed: int, waves: int = 20) -> OfflineProfile:
    """Benchmark a surface as PR 32374's script does, under the noise of its engines."""
    seconds: dict[int, dict[int, float]] = {}
    spent = 0.0
    for batch in VllmTable.BATCHES:
        load = Load(batch, 100, SHORT)
        tokens = waves * batch * (SHORT.output_first + SHORT.output_last) / 2
        spent += tokens / surface.goodput(load, OFF)
        seconds[batch] = {0: _mean_step(surface.steps(load, OFF))}
        for k in VllmTable.KS:
            engine = NoisyEngine(surface, load, seed=hash((seed, batch, k)) & 0xFFFF)
            length = tokens / surface.goodput(load, k)
            spent += length
            seconds[batch][k] = _step_seconds(engine.serve(load, k, length))
    top = surface.steps(Load(1, 100, SHORT), max(VllmTable.KS))
    survival = _survival(top, surface.k_max)[: max(VllmTable.KS)]
    return OfflineProfile(seconds, survival, spent)


def _step_seconds(totals: virtual.Totals) -> float:
    return float(totals.cells[..., virtual.SECONDS].sum() / totals.cells[..., virtual.STEPS].sum())


# ----------------------------------------------------------------- SmartSpec / TurboSpec


class GoodputArgmax:
    """SmartSpec's (TurboSpec's) argmax of predicted goodput, anew at every step.

    Source: arXiv 2406.14066 (v1 SmartSpec, v3 TurboSpec): goodput = expected tokens ÷ time of the
    batch; a request is expected to gain (1 - a^(k+1)) / (1 - a) tokens, a being a moving average
    of token acceptance; the time of a forward pass is linear in context tokens and batched tokens
    plus a constant, fitted once offline, for target and drafter; k from 0, which is no speculation.
    The window is not given: the drafts of the last 100 steps. Acceptance is accepted ÷ tested
    tokens, the unbiased reading. While k is 0 nothing is learned about acceptance.
    """

    WINDOW: Final = 100

    def __init__(self, seconds: Callable[[int, int], float], *, k_max: int) -> None:
        self.every = 1
        self._seconds = seconds
        self._k_max = k_max
        self._times: dict[int, NDArray[np.float64]] = {}
        self._recent: deque[tuple[float, float]] = deque()
        self._tested = self._accepted = 0.0

    @property
    def acceptance(self) -> float:
        """The moving average; 0.7 before the first draft, as in the paper's examples."""
        return self._accepted / self._tested if self._tested > 0 else 0.7

    def choose(self, streams: int) -> int:
        if streams not in self._times:
            self._times[streams] = np.array(
                [self._seconds(streams, k) for k in range(self._k_max + 1)]
            )
        a = self.acceptance
        tokens = np.cumsum(a ** np.arange(self._k_max + 1))
        return int(np.argmax(tokens / self._times[streams])) or OFF

    def observe(self, streams: int, steps: Steps) -> None:
        at_risk, accepted = _by_position(steps)
        for tested, hits in zip(at_risk.sum(axis=1), accepted.sum(axis=1), strict=True):
            if tested > 0:
                self._recent.append((float(tested), float(hits)))
                self._tested += float(tested)
                self._accepted += float(hits)
        while len(self._recent) > self.WINDOW:
            tested, hits = self._recent.popleft()
            self._tested -= tested
            self._accepted -= hits


def fit_linear_times(surface: Surface) -> Callable[[int, int], float]:
    """Fit SmartSpec's linear model to step times measured offline, without noise.

    Target: constant, batched tokens, context tokens; drafter: k passes of a constant and a price
    per request. Context is that of the profiled requests.
    """
    context = (SHORT.prompt_first + SHORT.prompt_last + SHORT.output_last / 2) / 2

    def features(batch: int, k: int) -> list[float]:
        verified = batch * (k + 1)
        return [1.0, verified, batch * context, k, k * batch]

    design, measured = [], []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for k in (OFF, 1, 3, 5, surface.k_max):
            design.append(features(batch, max(k, 0)))
            measured.append(_mean_step(surface.steps(Load(batch, 100, SHORT), k)))
    weights, *_ = np.linalg.lstsq(np.array(design), np.array(measured), rcond=None)

    def seconds(batch: int, k: int) -> float:
        return max(float(np.dot(weights, features(batch, k))), 1e-4)

    return seconds


# ---------------------------------------------------------------------- what steps showed


def _by_position(steps: Steps) -> tuple[Steps, Steps]:
    first = virtual.TAPE_COLUMNS
    positions = (steps.shape[1] - first) // 2
    return steps[:, first : first + positions], steps[:, first + positions :]


def _drafts_and_accepted(steps: Steps) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return drafts and accepted tokens of each step."""
    at_risk, accepted = _by_position(steps)
    return at_risk[:, 0], accepted.sum(axis=1)


def _survival(steps: Steps, k_max: int) -> list[float]:
    at_risk, accepted = (side.sum(axis=0, dtype=np.float64) for side in _by_position(steps))
    drafts = max(float(at_risk[0]), 1.0)
    return [float(hits) / drafts for hits in accepted[:k_max]]


def _mean_step(steps: Steps) -> float:
    """Return the mean seconds of decode-only steps."""
    plain = steps[steps[:, virtual.STEP_MIXED] == 0]
    return float(plain[:, virtual.STEP_SECONDS].mean(dtype=np.float64)) if len(plain) else math.nan
