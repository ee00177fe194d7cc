"""Scrapes of the engine plugin's counters turned into deltas that can be trusted.

Raw samples come from several pods, each restarting, appearing and missing scrapes on its own.
Here every series is cut into increments between adjacent scrapes; what cannot be trusted (an
interval in which any counter of that engine fell, or in which an engine was busy for longer than
the clock ran) is dropped for the whole engine, so the counters of a cell stay consistent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from specdecode_operator.api.conditions import Reason
from specdecode_operator.domain.observation import MetricsSamples, Series

# Counter → the field of its delta. These names are a contract with the plugin.
STEP_COUNTERS: Final = {
    "specdecode_steps_total": "steps",
    "specdecode_step_seconds_total": "seconds",
    "specdecode_step_tokens_total": "tokens",
    "specdecode_step_requests_total": "requests",
    "specdecode_step_context_tokens_total": "context_tokens",
}
MIXED_COUNTERS: Final = {
    "specdecode_mixed_steps_total": "steps",
    "specdecode_mixed_step_seconds_total": "seconds",
    "specdecode_mixed_step_tokens_total": "tokens",
    "specdecode_mixed_step_requests_total": "requests",
    "specdecode_mixed_step_prefill_tokens_total": "prefill_tokens",
}
AT_RISK_COUNTER: Final = "specdecode_at_risk_per_position_total"
ACCEPTED_COUNTER: Final = "specdecode_accepted_per_position_total"
ITERATIONS_COUNTER: Final = "specdecode_engine_iterations_total"

_SECONDS: Final = frozenset(
    {"specdecode_step_seconds_total", "specdecode_mixed_step_seconds_total"}
)
_CELL_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(STEP_COUNTERS, ("batch", "k", "arm")),
    **dict.fromkeys(MIXED_COUNTERS, ("batch", "arm")),
    AT_RISK_COUNTER: ("position",),
    ACCEPTED_COUNTER: ("position",),
    ITERATIONS_COUNTER: (),
}
_OWN_LABELS: Final = frozenset({"pod", "engine", "batch", "k", "arm", "position", "__name__"})

# A step is counted when it ends, so an interval may hold the end of one long step before it.
_BUSY_FACTOR: Final = 1.5
_BUSY_SLACK_SECONDS: Final = 30.0

_MAX_NAMED_PODS: Final = 3

Sample = tuple[float, float]


@dataclass(frozen=True)
class NoEstimate:
    """There is no number, and why: "no data" is a value of its own, never a zero."""

    reason: str
    message: str


@dataclass(frozen=True)
class CellDelta:
    """What decode-only steps of one batch bucket, K and arm did, over all pods of a window."""

    batch: int
    k: int
    arm: int
    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    context_tokens: float = 0.0


@dataclass(frozen=True)
class MixedDelta:
    """What steps with prefill tokens of one batch bucket and arm did; their K is not known."""

    batch: int
    arm: int
    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    prefill_tokens: float = 0.0


@dataclass(frozen=True)
class Window:
    """Counter deltas between two moments (unix seconds of the scrapes really used).

    `pods` are those with at least two scrapes inside; `scrapes` is the count of the pod with
    the most; `at_risk` and `accepted` are keyed by draft position, from 0.
    """

    start: float
    end: float
    pods: tuple[str, ...]
    cells: tuple[CellDelta, ...]
    mixed: tuple[MixedDelta, ...]
    at_risk: Mapping[int, float]
    accepted: Mapping[int, float]
    iterations: float
    scrapes: int

    @property
    def seconds(self) -> float:
        """Wall time from the first scrape to the last."""
        return self.end - self.start


class _Increment(NamedTuple):
    name: str
    cell: tuple[int, ...]
    begun: float
    ended: float
    amount: float


@dataclass(frozen=True)
class _Counter:
    name: str
    cell: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class _Stream:
    """The counters of one engine as one scraper saw them."""

    pod: str
    scrapes: tuple[float, ...]
    increments: tuple[_Increment, ...]


@dataclass(frozen=True)
class Counters:
    """Samples read once, from which any number of windows can be cut."""

    streams: tuple[_Stream, ...]

    @classmethod
    def of(cls, samples: MetricsSamples) -> Counters:
        """Read the plugin's counters out of raw samples; anything else is passed over."""
        by_engine: dict[tuple[str, str], dict[tuple[str, ...], list[_Counter]]] = {}
        for series in samples.series:
            counter = _to_counter(series)
            if counter is not None:
                engine = (series.labels["pod"], series.labels.get("engine", ""))
                scrapers = by_engine.setdefault(engine, {})
                scrapers.setdefault(_scraper_of(series), []).append(counter)
        return cls(
            tuple(
                stream
                for (pod, _), scrapers in sorted(by_engine.items())
                for stream in _without_duplicates(
                    [_to_stream(pod, scrapers[key]) for key in sorted(scrapers)]
                )
            )
        )

    def window(self, *, start: float, end: float) -> Window | NoEstimate:
        """Sum what happened between the first scrape >= start and the last <= end."""
        spans = self._spans(start, end)
        if not spans:
            return self._absent(start, end)
        return _to_window(
            spans,
            [
                increment
                for stream in self.streams
                for increment in stream.increments
                if increment.begun >= start and increment.ended <= end
            ],
        )

    def parts(self, *, start: float, end: float, count: int) -> tuple[Window, ...]:
        """Split a window into parts of equal wall time; their sums are the window's.

        An increment belongs to the part in which it ended. Empty where there is no window.
        """
        spans = self._spans(start, end)
        if not spans or count < 1:
            return ()
        first = min(scrapes[0] for _, scrapes in spans)
        length = (max(scrapes[-1] for _, scrapes in spans) - first) / count
        split: list[list[_Increment]] = [[] for _ in range(count)]
        for stream in self.streams:
            for increment in stream.increments:
                if increment.begun >= start and increment.ended <= end:
                    index = math.ceil((increment.ended - first) / length) - 1
                    split[min(max(index, 0), count - 1)].append(increment)
        return tuple(_to_window(spans, part) for part in split)

    def _spans(self, start: float, end: float) -> list[tuple[str, list[float]]]:
        spans = [
            (stream.pod, [moment for moment in stream.scrapes if start <= moment <= end])
            for stream in self.streams
        ]
        return [(pod, scrapes) for pod, scrapes in spans if len(scrapes) >= 2]

    def _absent(self, start: float, end: float) -> NoEstimate:
        if not self.streams:
            return NoEstimate(Reason.NOT_SCRAPED, "Prometheus holds no counter of the plugin.")
        return NoEstimate(
            Reason.COLLECTING,
            f"No pod was scraped twice in the last {max(end - start, 0.0):.0f} s.",
        )


def to_window(samples: MetricsSamples, *, start: float, end: float) -> Window | NoEstimate:
    """Turn raw samples into the deltas between the first scrape >= start and the last <= end."""
    return Counters.of(samples).window(start=start, end=end)


def metrics_health(
    samples: MetricsSamples,
    ready_pods: Collection[str],
    *,
    now: float,
    max_age_seconds: float,
) -> NoEstimate | None:
    """Tell why the samples cannot be relied on, or None where every ready pod is fresh.

    `now` is in unix seconds; the reasons are those of the condition MetricsAvailable.
    """
    if not ready_pods:
        return NoEstimate(Reason.NO_READY_PODS, "No engine pod is ready, so none is measured.")
    latest = _latest_by_pod(samples.series)
    ages = {pod: now - latest[pod] for pod in ready_pods if pod in latest}
    if not ages:
        return NoEstimate(
            Reason.NOT_SCRAPED,
            f"Prometheus holds no metric of the plugin for any of {len(ready_pods)} ready pods: "
            "check that it discovers them (PodMonitor or prometheus.io annotations), that no "
            "NetworkPolicy bars it, and that the image carries the plugin.",
        )
    youngest = min(ages.values())
    if youngest > max_age_seconds:
        return NoEstimate(
            Reason.STALE,
            f"The newest sample is {youngest:.0f} s old, the limit is {max_age_seconds:.0f} s.",
        )
    missing = sorted(pod for pod in ready_pods if ages.get(pod, math.inf) > max_age_seconds)
    if missing:
        named = ", ".join(missing[:_MAX_NAMED_PODS])
        more = f" and {len(missing) - _MAX_NAMED_PODS} more" if missing[_MAX_NAMED_PODS:] else ""
        return NoEstimate(
            Reason.PARTIAL,
            f"{len(missing)} of {len(ready_pods)} ready pods have no sample in the last "
            f"{max_age_seconds:.0f} s: {named}{more}.",
        )
    return None


def _latest_by_pod(series: Iterable[Series]) -> dict[str, float]:
    latest: dict[str, float] = {}
    for one in series:
        pod = one.labels.get("pod")
        moments = [moment for moment, value in one.samples if math.isfinite(moment + value)]
        if pod and one.name.startswith("specdecode_") and moments:
            latest[pod] = max(latest.get(pod, -math.inf), *moments)
    return latest


def _to_counter(series: Series) -> _Counter | None:
    """Read one series; None where it is none of ours or its labels or samples make no sense."""
    names = _CELL_LABELS.get(series.name)
    if names is None or not series.labels.get("pod"):
        return None
    try:
        cell = tuple(int(series.labels[name]) for name in names)
    except (KeyError, ValueError):
        return None
    # Also drops Prometheus's staleness markers (NaN) and, through the dict, repeated samples.
    samples = {
        moment: value
        for moment, value in series.samples
        if math.isfinite(moment) and math.isfinite(value) and value >= 0
    }
    return _Counter(series.name, cell, tuple(sorted(samples.items()))) if samples else None


def _scraper_of(series: Series) -> tuple[str, ...]:
    """Name who scraped a series: two Prometheus jobs or replicas differ in their own labels."""
    return tuple(
        f"{name}={value}"
        for name, value in sorted(series.labels.items())
        if name not in _OWN_LABELS
    )


def _without_duplicates(streams: Sequence[_Stream]) -> list[_Stream]:
    """Keep the fullest of streams that overlap in time: they show the same engine twice."""
    kept: list[_Stream] = []
    for stream in sorted(streams, key=lambda s: len(s.scrapes), reverse=True):
        first, last = stream.scrapes[0], stream.scrapes[-1]
        if all(last < other.scrapes[0] or first > other.scrapes[-1] for other in kept):
            kept.append(stream)
    return kept


def _to_stream(pod: str, counters: Sequence[_Counter]) -> _Stream:
    scrapes = tuple(sorted({moment for one in counters for moment, _ in one.samples}))
    increments = [one for counter in counters for one in _increments(counter, scrapes)]
    broken = [*_falls(counters), *_overfull(increments)]
    trusted = [one for one in increments if not _overlaps(one, broken)] if broken else increments
    return _Stream(pod, scrapes, tuple(trusted))


def _increments(counter: _Counter, scrapes: tuple[float, ...]) -> list[_Increment]:
    """Cut a series at its samples.

    A series that appears while its engine was already being scraped began at 0 (labels are
    created late); one that is there at the first scrape begins at its first value.
    """
    samples = counter.samples
    appeared = bisect_left(scrapes, samples[0][0])
    if appeared > 0:
        samples = ((scrapes[appeared - 1], 0.0), *samples)
    return [
        _Increment(counter.name, counter.cell, begun, ended, after - before)
        for (begun, before), (ended, after) in pairwise(samples)
        if after > before
    ]


def _falls(counters: Iterable[_Counter]) -> list[tuple[float, float]]:
    """List intervals in which a counter fell: the engine restarted, or the scrape lied."""
    return [
        (begun, ended)
        for counter in counters
        for (begun, before), (ended, after) in pairwise(counter.samples)
        if after < before * (1 - 1e-9)
    ]


def _overfull(increments: Iterable[_Increment]) -> list[tuple[float, float]]:
    """List intervals in which an engine claims to have worked for longer than they lasted."""
    busy: dict[tuple[float, float], float] = defaultdict(float)
    for one in increments:
        if one.name in _SECONDS:
            busy[(one.begun, one.ended)] += one.amount
    return [
        (begun, ended)
        for (begun, ended), seconds in busy.items()
        if seconds > _BUSY_FACTOR * (ended - begun) + _BUSY_SLACK_SECONDS
    ]


def _overlaps(one: _Increment, broken: Iterable[tuple[float, float]]) -> bool:
    return any(begun < one.ended and ended > one.begun for begun, ended in broken)


def _to_window(
    spans: Sequence[tuple[str, Sequence[float]]], increments: Iterable[_Increment]
) -> Window:
    sums: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for one in increments:
        sums[(one.name, one.cell)] += one.amount
    return Window(
        start=min(scrapes[0] for _, scrapes in spans),
        end=max(scrapes[-1] for _, scrapes in spans),
        pods=tuple(sorted({pod for pod, _ in spans})),
        cells=tuple(
            CellDelta(batch, k, arm, **fields)
            for (batch, k, arm), fields in _by_cell(sums, STEP_COUNTERS).items()
        ),
        mixed=tuple(
            MixedDelta(batch, arm, **fields)
            for (batch, arm), fields in _by_cell(sums, MIXED_COUNTERS).items()
        ),
        at_risk={cell[0]: sum_ for (name, cell), sum_ in sums.items() if name == AT_RISK_COUNTER},
        accepted={cell[0]: sum_ for (name, cell), sum_ in sums.items() if name == ACCEPTED_COUNTER},
        iterations=sums.get((ITERATIONS_COUNTER, ()), 0.0),
        scrapes=max(len(scrapes) for _, scrapes in spans),
    )


def _by_cell(
    sums: Mapping[tuple[str, tuple[int, ...]], float], fields: Mapping[str, str]
) -> dict[tuple[int, ...], dict[str, float]]:
    cells: dict[tuple[int, ...], dict[str, float]] = {}
    for (name, cell), amount in sorted(sums.items()):
        if name in fields:
            cells.setdefault(cell, {})[fields[name]] = amount
    return cells
