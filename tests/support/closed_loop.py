"""A closed-loop engine in virtual time, for tests of the tuner: its counters as scraped.

Goodput by batch and K was measured on the real engine with the two demo pairs (tok/s, two CPU
cores, 64 output tokens a request); between the measured batches it is interpolated. Noise is a
slow wander of the machine's speed, about 3 % from block to block.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from specdecode_operator.api.v1alpha1 import ExperimentStatus, TuningMode, TuningStatus
from specdecode_operator.decide.experiment import TuningInput, TuningOutcome, advance_tuning
from specdecode_operator.domain.decision import Event
from specdecode_operator.domain.observation import MetricsSamples, Series
from specdecode_operator.domain.table import Envelope, KTable, bucket_of

KS = (0, 1, 2, 3, 5, 7)
OUTPUT_TOKENS = 64
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Landscape:
    """Goodput by streams and K of one model pair, and the acceptance of its drafts."""

    hazard: float
    goodput: dict[int, tuple[float, ...]]

    def at(self, streams: int, k: int) -> float:
        """Return tokens per second without noise."""
        column = KS.index(k)
        below = max((b for b in self.goodput if b <= streams), default=1)
        above = min((b for b in self.goodput if b >= streams), default=below)
        low, high = self.goodput[below][column], self.goodput[above][column]
        if below == above:
            return low
        share = math.log(streams / below) / math.log(above / below)
        return math.exp(math.log(low) * (1 - share) + math.log(high) * share)

    def best(self, streams: int, *, min_k: int = 0) -> float:
        """Return the goodput of the best fixed K."""
        return max(self.at(streams, k) for k in KS if k >= min_k)


HIGH_ACCEPTANCE = Landscape(
    hazard=0.75,
    goodput={
        1: (78, 134, 154, 158, 163, 194),
        8: (457, 568, 553, 561, 489, 462),
        32: (758, 935, 915, 744, 710, 567),
        64: (1013, 1111, 991, 956, 816, 703),
    },
)
LOW_ACCEPTANCE = Landscape(
    hazard=0.47,
    goodput={
        1: (78, 115, 120, 119, 107, 90),
        8: (446, 529, 462, 444, 354, 300),
        16: (669, 614, 588, 575, 439, 326),
        32: (859, 791, 613, 638, 482, 376),
        64: (981, 864, 695, 641, 501, 419),
    },
)


@dataclass
class SimulatedEngine:
    """One pod. `noise` is the standard deviation of the speed's wander, which has `memory`."""

    landscape: Landscape
    seed: int
    table: KTable
    noise: float = 0.0375
    memory_seconds: float = 10.0
    scrape_seconds: float = 2.0
    kept_seconds: float = 90.0
    now: float = 0.0
    _wander: float = 0.0
    _next_scrape: float = 0.0
    _values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    _scrapes: dict[tuple[str, tuple[tuple[str, str], ...]], deque[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._wander = self._random.gauss(0, self.noise)

    def run(self, seconds: float, streams: int, tick: float = 0.25) -> float:
        """Serve `streams` for some seconds of virtual time; return the tokens."""
        until, served = self.now + seconds, 0.0
        while self.now < until - 1e-9:
            served += self._serve(tick, streams)
            self.now += tick
            if self.now >= self._next_scrape:
                self._scrape()
                self._next_scrape += self.scrape_seconds
        return served

    def samples(self) -> MetricsSamples:
        """Return what Prometheus holds."""
        start = STARTED.timestamp() + self.now - self.kept_seconds
        return MetricsSamples(
            start=start,
            end=STARTED.timestamp() + self.now,
            series=tuple(
                Series(
                    name,
                    {"pod": "chat-0", "engine": "0", "model_name": "chat", **dict(labels)},
                    tuple((t, v) for t, v in samples if t >= start),
                )
                for (name, labels), samples in self._scrapes.items()
            ),
        )

    def _serve(self, tick: float, streams: int) -> float:
        if streams <= 0:
            return 0.0
        keep = math.exp(-tick / self.memory_seconds)
        step = self._random.gauss(0, self.noise * math.sqrt(1 - keep * keep))
        self._wander = keep * self._wander + step
        k = self.table.k_at(streams)
        hazard = self.landscape.hazard
        length = sum(hazard**i for i in range(k + 1))
        rate = self.landscape.at(streams, k) * math.exp(self._wander)
        steps = tick * rate / (streams * length)
        mixed = 1 - math.exp(-streams * length / OUTPUT_TOKENS)
        cell = {"batch": str(bucket_of(streams)), "k": str(k), "arm": "0"}
        joint = {"batch": cell["batch"], "arm": "0"}
        for prefix, labels, share in (("", cell, 1 - mixed), ("mixed_", joint, mixed)):
            self._count(f"specdecode_{prefix}steps_total", labels, share * steps)
            self._count(f"specdecode_{prefix}step_seconds_total", labels, share * tick)
            self._count(f"specdecode_{prefix}step_tokens_total", labels, share * tick * rate)
            self._count(f"specdecode_{prefix}step_requests_total", labels, share * steps * streams)
        for position in range(k):
            at_risk = steps * streams * hazard**position
            labels = {"position": str(position)}
            self._count("specdecode_at_risk_per_position_total", labels, at_risk)
            self._count("specdecode_accepted_per_position_total", labels, at_risk * hazard)
        self._count("specdecode_engine_iterations_total", {}, steps)
        return tick * rate

    def _count(self, name: str, labels: dict[str, str], amount: float) -> None:
        self._values[(name, tuple(sorted(labels.items())))] += amount

    def _scrape(self) -> None:
        for key, value in self._values.items():
            samples = self._scrapes[key]
            samples.append((STARTED.timestamp() + self.now, value))
            while samples[0][0] < STARTED.timestamp() + self.now - 600:
                samples.popleft()


@dataclass
class Course:
    """The tuner and the engine under a course of loads."""

    engine: SimulatedEngine
    spec_table: KTable
    mode: TuningMode = TuningMode.AUTO
    min_k: int = 1
    min_gain_percent: float = 2.0
    min_steps: int = 50
    block_seconds: float = 15.0
    cooldown_seconds: float = 0.0
    delivery_seconds: float = 0.5
    tuning: TuningStatus = field(default_factory=TuningStatus)
    experiment: ExperimentStatus | None = None
    events: list[Event] = field(default_factory=list)
    outcome: TuningOutcome | None = None

    @property
    def now(self) -> datetime:
        return STARTED + timedelta(seconds=self.engine.now)

    def run(
        self, streams: int, seconds: float, done: Callable[[TuningOutcome], bool] | None = None
    ) -> list[TuningOutcome]:
        """Run a load for some seconds, or until `done`; return every pass's outcome."""
        until, outcomes = self.engine.now + seconds, []
        while self.engine.now < until:
            outcome = self.step(streams)
            outcomes.append(outcome)
            if done is not None and done(outcome):
                break
        return outcomes

    def step(self, streams: int) -> TuningOutcome:
        """Make one pass, bring its table to the engine, and serve until the next."""
        outcome = advance_tuning(
            TuningInput(
                now=self.now,
                mode=self.mode,
                tuning=self.tuning,
                experiment=self.experiment,
                spec_table=self.spec_table,
                envelope=Envelope(KS),
                min_k=self.min_k,
                min_gain_percent=self.min_gain_percent,
                min_steps=self.min_steps,
                min_block=timedelta(seconds=self.block_seconds),
                cooldown=timedelta(seconds=self.cooldown_seconds),
                samples=self.engine.samples(),
                acknowledged=self.outcome is None or self.outcome.table == self.engine.table,
            )
        )
        self.outcome = outcome
        # Through JSON, as the API server keeps it.
        self.tuning = TuningStatus.model_validate(outcome.tuning.to_json())
        if outcome.experiment is None:
            self.experiment = None
        else:
            self.experiment = ExperimentStatus.model_validate(outcome.experiment.to_json())
        self.events.extend(outcome.events)
        pause = outcome.requeue_after.total_seconds()
        if outcome.table != self.engine.table:
            self.engine.run(self.delivery_seconds, streams)
            self.engine.table = outcome.table
        self.engine.run(max(pause, 0.5), streams)
        return outcome
