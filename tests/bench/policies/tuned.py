"""Our arm: the tuner that ships, fed from a simulated engine as Prometheus would hold its counters.

`decide.experiment.advance_tuning` is called as the operator's passes call it: at the moments that
it asks for, with the samples of the window that the operator would query, scraped every 15 s; its
table reaches the engine after the plugin's delay, within the captured graphs as the plugin takes
it. The settings are the custom resource's defaults.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import (
    ExperimentStatus,
    LiveSoak,
    Rollout,
    Tuning,
    TuningMode,
    TuningStatus,
)
from specdecode_operator.decide.experiment import (
    TuningInput,
    TuningOutcome,
    advance_tuning,
    reach,
)
from specdecode_operator.domain.decision import Event
from specdecode_operator.domain.observation import MetricsSamples, Series
from specdecode_operator.domain.table import Envelope, KTable
from specdecode_operator.durations import parse_duration
from specdecode_sim import virtual
from tests.bench.policies.surfaces import MAX_REQUESTS, Load, NoisyEngine, Surface
from tests.bench.policies.traces import SCRAPE_SECONDS, Phase

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
DELIVERY_SECONDS = 0.5  # from the write of a table until every engine reports it
KEPT_SECONDS = 3600 + 4 * SCRAPE_SECONDS
CYCLE_SECONDS = 60.0
BLOCK = parse_duration(LiveSoak().min_duration)
COOLDOWN = parse_duration(Rollout().cooldown)
START_K = 3  # what EAGLE's guides start with

# In the order of `virtual`'s columns: steps, seconds, tokens, requests, context or prefill tokens.
STEP_COUNTERS = tuple(
    f"specdecode_{name}_total"
    for name in ("steps", "step_seconds", "step_tokens", "step_requests", "step_context_tokens")
)
MIXED_COUNTERS = tuple(
    f"specdecode_mixed_{name}_total"
    for name in ("steps", "step_seconds", "step_tokens", "step_requests", "step_prefill_tokens")
)

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Stretch:
    """So many seconds at one load under one K."""

    load: Load
    k: int
    seconds: float


@dataclass(frozen=True)
class Settings:
    """What the user may set; the custom resource's defaults."""

    block: timedelta = BLOCK
    min_steps: int = LiveSoak().min_steps
    cooldown: timedelta = COOLDOWN
    min_gain_percent: float = Tuning().min_gain_percent
    min_k: int = Tuning().min_k
    start_k: int = START_K


class Scraped:
    """The plugin's counters of one pod, and the samples of them that Prometheus holds."""

    def __init__(self) -> None:
        self._values: dict[Key, float] = defaultdict(float)
        self._samples: dict[Key, deque[tuple[float, float]]] = defaultdict(deque)

    def count(self, totals: virtual.Totals) -> None:
        """Let the counters gain what an engine did."""
        for bucket, k in np.argwhere(totals.cells[..., virtual.STEPS] > 0):
            labels = {"batch": str(1 << int(bucket)), "k": str(int(k)), "arm": "0"}
            self._add(STEP_COUNTERS, labels, totals.cells[bucket, k])
        for (bucket,) in np.argwhere(totals.mixed[..., virtual.STEPS] > 0):
            labels = {"batch": str(1 << int(bucket)), "arm": "0"}
            self._add(MIXED_COUNTERS, labels, totals.mixed[bucket])
        for position, at_risk in enumerate(totals.at_risk):
            if at_risk:
                labels = {"position": str(position)}
                self._gain("specdecode_at_risk_per_position_total", labels, float(at_risk))
                accepted = float(totals.accepted[position])
                self._gain("specdecode_accepted_per_position_total", labels, accepted)
        steps = totals.cells[..., virtual.STEPS].sum() + totals.mixed[..., virtual.STEPS].sum()
        self._gain("specdecode_engine_iterations_total", {}, float(steps))

    def scrape(self, now: float) -> None:
        """Keep a sample of every counter."""
        for key, value in self._values.items():
            samples = self._samples[key]
            samples.append((now, value))
            while samples[0][0] < now - KEPT_SECONDS:
                samples.popleft()

    def query(self, *, start: float, end: float) -> MetricsSamples:
        """Return the raw samples of a window."""
        found = []
        for (name, labels), samples in self._samples.items():
            inside = tuple(one for one in samples if one[0] >= start)
            if inside:
                named = {"pod": "chat-0", "engine": "0", "model_name": "chat", **dict(labels)}
                found.append(Series(name, named, inside))
        return MetricsSamples(start=start, end=end, series=tuple(found))

    def _add(
        self, names: tuple[str, ...], labels: dict[str, str], row: NDArray[np.float64]
    ) -> None:
        for name, amount in zip(names, row, strict=True):
            self._gain(name, labels, float(amount))

    def _gain(self, name: str, labels: dict[str, str], amount: float) -> None:
        self._values[name, tuple(sorted(labels.items()))] += amount


@dataclass
class Tuned:
    """The tuner, its memory and its engine through one trace."""

    surface: Surface
    seed: int
    noise_factor: float = 1.0
    settings: Settings = field(default_factory=Settings)
    stretches: list[Stretch] = field(default_factory=list)
    events: list[tuple[float, Event]] = field(default_factory=list)
    rests: list[tuple[float, Reason]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = 0.0
        self._scraped = Scraped()
        self._tuning = TuningStatus()
        self._experiment: ExperimentStatus | None = None
        self._users = KTable.constant(min(self.settings.start_k, self.surface.k_max), MAX_REQUESTS)
        self._in_force = self._users
        self._wanted = self._users
        self._delivered_at = math.inf
        self._due = 0.0

    def run(self, trace: list[Phase]) -> None:
        """Serve a whole trace."""
        engine = NoisyEngine(
            self.surface, trace[0].load, seed=self.seed, noise_factor=self.noise_factor
        )
        for phase in trace:
            until = self.now + phase.seconds
            while self.now < until - 1e-6:
                if self._due <= self.now + 1e-9:
                    self._pass()
                next_scrape = (self.now // SCRAPE_SECONDS + 1) * SCRAPE_SECONDS
                stop = min(until, next_scrape, max(self._due, self.now + 0.05), self._delivered_at)
                self._serve(engine, phase.load, stop)
                if self.now >= next_scrape - 1e-6:
                    self._scraped.scrape(STARTED.timestamp() + self.now)

    def first_verdict(self) -> float | None:
        """Return when the first experiment was judged, None where none was."""
        return next((at for at, event in self.events if event.reason == "KExplored"), None)

    def _serve(self, engine: NoisyEngine, load: Load, stop: float) -> None:
        k = self.surface.clamped(self._in_force.to_rows(), load.streams)
        self._scraped.count(engine.serve(load, k, stop - self.now))
        self._note(Stretch(load, k, stop - self.now))
        self.now = stop
        if self.now >= self._delivered_at - 1e-9:
            self._in_force, self._delivered_at = self._wanted, math.inf

    def _note(self, new: Stretch) -> None:
        last = self.stretches[-1] if self.stretches else None
        # A stretch ends with each minute, so that the score can be told by the minute.
        if last is not None and (last.load, last.k) == (new.load, new.k) and self.now % 60 > 1e-6:
            self.stretches[-1] = Stretch(new.load, new.k, last.seconds + new.seconds)
        else:
            self.stretches.append(new)

    def _pass(self) -> None:
        outcome = advance_tuning(self._input())
        # Through JSON, as the API server keeps it.
        self._tuning = TuningStatus.model_validate(outcome.tuning.to_json())
        self._experiment = (
            None
            if outcome.experiment is None
            else ExperimentStatus.model_validate(outcome.experiment.to_json())
        )
        self.events.extend((self.now, event) for event in outcome.events)
        self.rests.append((self.now, outcome.reason))
        self._write(outcome)
        self._due = self.now + max(outcome.requeue_after.total_seconds(), 0.5)

    def _write(self, outcome: TuningOutcome) -> None:
        if outcome.table != self._wanted:
            self._wanted = outcome.table
            self._delivered_at = self.now + DELIVERY_SECONDS

    def _input(self) -> TuningInput:
        now = STARTED + timedelta(seconds=self.now)
        settings = self.settings
        return TuningInput(
            now=now,
            mode=TuningMode.AUTO,
            tuning=self._tuning,
            experiment=self._experiment,
            spec_table=self._users,
            envelope=Envelope(self.surface.ks),
            min_k=settings.min_k,
            min_gain_percent=settings.min_gain_percent,
            min_steps=settings.min_steps,
            min_block=settings.block,
            cooldown=settings.cooldown,
            samples=self._query(now),
            acknowledged=self._in_force == self._wanted,
        )

    def _query(self, now: datetime) -> MetricsSamples:
        """Ask for the window that the operator's observer asks for."""
        back = max(timedelta(seconds=CYCLE_SECONDS), reach(self.settings.block))
        if self._experiment is not None:
            begun = self._experiment.judged_from or self._experiment.started_at
            back = max(back, now - begun)
        back = min(timedelta(hours=1), back + timedelta(seconds=2 * SCRAPE_SECONDS))
        end = now.timestamp()
        return self._scraped.query(start=end - back.total_seconds(), end=end)
