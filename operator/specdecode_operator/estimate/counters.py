"""Deltas of the engines' counters between two moments: what every estimate starts from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.api.conditions import Reason
from specdecode_operator.domain.observation import MetricsSamples, Series

from .scrapes import (
    ACCEPTED_COUNTER,
    AT_RISK_COUNTER,
    ITERATIONS_COUNTER,
    MIXED_COUNTERS,
    OWN_ACCEPTED_COUNTER,
    OWN_DRAFT_TOKENS_COUNTER,
    OWN_DRAFTS_COUNTER,
    STEP_COUNTERS,
    Increments,
    Key,
    Stream,
    read_scrapes,
)

PLUGIN_INFO: Final = "specdecode_plugin_info"

# vLLM's own counters tell a constant K where drafts are at most this much shorter on average:
# near the end of a request they are cut.
_SHORTENED: Final = 0.05

_MAX_NAMED_PODS: Final = 3

Floats = NDArray[np.float64]


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


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafts at risk and accepted, one row per scrape interval of an engine, a column per position.

    Rows are in order of engine, then of time.
    """

    at_risk: Floats
    accepted: Floats

    def filled_from(self, other: Drafts, *, least: float) -> Drafts:
        """Take the positions with fewer than `least` drafts at risk from other intervals."""
        width = max(self.at_risk.shape[1], other.at_risk.shape[1])
        mine, others = _widened(self, width), _widened(other, width)
        lacking = mine.at_risk.sum(axis=0) < least
        return Drafts(
            np.vstack([mine.at_risk * ~lacking, others.at_risk * lacking]),
            np.vstack([mine.accepted * ~lacking, others.accepted * lacking]),
        )


_NO_DRAFTS: Final = Drafts(np.zeros((0, 1)), np.zeros((0, 1)))


@dataclass(frozen=True, eq=False)
class Window:
    """Counter deltas between two moments (unix seconds of the scrapes really used).

    `pods` are those with at least two scrapes inside; `scrapes` is the count of the pod with
    the most; `at_risk` and `accepted` are keyed by draft position, from 0; `drafts` holds the same
    by interval (empty in a part of a window).
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
    drafts: Drafts

    @property
    def seconds(self) -> float:
        """Wall time from the first scrape to the last."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Counters:
    """Samples read once, from which any number of windows can be cut.

    `adaptive` tells whether an engine trims drafts before it verifies them: what it then accepts
    says nothing about the drafts it did not verify.
    """

    streams: tuple[Stream, ...]
    keys: tuple[Key, ...]
    increments: Increments
    adaptive: bool = False

    @classmethod
    def of(cls, samples: MetricsSamples) -> Counters:
        """Read the counters out of raw samples; anything else is passed over."""
        scrapes = read_scrapes(samples.series)
        return cls(
            streams=scrapes.streams,
            keys=scrapes.keys,
            increments=scrapes.increments,
            adaptive=any(_is_adaptive(series) for series in samples.series),
        )

    def window(self, *, start: float, end: float) -> Window | NoEstimate:
        """Sum what happened between the first scrape >= start and the last <= end."""
        spans = self._spans(start, end)
        if not spans:
            return self._absent(start, end)
        inside = self._inside(start, end)
        at_risk, accepted = self._by_interval(inside, (AT_RISK_COUNTER, ACCEPTED_COUNTER))
        return self._to_window(spans, inside, Drafts(at_risk, accepted))

    def parts(self, *, start: float, end: float, count: int) -> tuple[Window, ...]:
        """Split a window into parts of equal wall time; their sums are the window's.

        An increment belongs to the part in which it ended. Empty where there is no window.
        """
        spans = self._spans(start, end)
        if not spans or count < 1:
            return ()
        first = min(scrapes[0] for _, scrapes in spans)
        length = (max(scrapes[-1] for _, scrapes in spans) - first) / count
        inside = self._inside(start, end)
        part = np.clip(np.ceil((inside.ended - first) / length) - 1, 0, count - 1)
        return tuple(
            self._to_window(spans, inside.where(part == number), _NO_DRAFTS)
            for number in range(count)
        )

    def own_drafts(self, *, start: float, end: float) -> Drafts | NoEstimate:
        """Return drafts by interval from vLLM's own counters, where K was constant.

        They count accepted tokens by position and drafts, not drafts at risk: at a constant K
        those of a position are the accepted ones of the position before. Drafts that are cut near
        the end of a request are taken for whole ones, so up to 5 % fewer tokens than K per draft
        pass, and acceptance then reads low by at most that share per position.
        """
        inside = self._inside(start, end)
        names = (OWN_DRAFTS_COUNTER, OWN_DRAFT_TOKENS_COUNTER, OWN_ACCEPTED_COUNTER)
        drafts, tokens, accepted = self._by_interval(inside, names)
        used = drafts[:, 0] > 0
        if not used.any():
            return NoEstimate(Reason.COLLECTING, "No draft was counted by vLLM itself.")
        drafts, tokens, accepted = drafts[used, 0], tokens[used, 0], accepted[used]
        lengths = tokens / drafts
        k = math.ceil(tokens.sum() / drafts.sum() - 1e-9)
        accepted = np.pad(accepted, ((0, 0), (0, max(0, min(k, 256) - accepted.shape[1]))))
        constant = bool(np.all((lengths > k * (1 - _SHORTENED)) & (lengths <= k * (1 + 1e-9))))
        if not 1 <= k <= accepted.shape[1] or not constant or accepted[:, k:].any():
            return NoEstimate(
                Reason.VARYING_K,
                f"K varied in this window ({lengths.min():.2f} to {lengths.max():.2f} tokens per "
                "draft): vLLM's own counters cannot tell acceptance then, the engine plugin can.",
            )
        at_risk = np.column_stack([drafts, accepted[:, : k - 1]])
        return Drafts(at_risk, accepted[:, :k])

    def _inside(self, start: float, end: float) -> Increments:
        return self.increments.where(
            (self.increments.begun >= start) & (self.increments.ended <= end)
        )

    def _to_window(
        self, spans: Sequence[tuple[str, Floats]], increments: Increments, drafts: Drafts
    ) -> Window:
        totals = np.bincount(increments.key, weights=increments.amount, minlength=len(self.keys))
        sums = {self.keys[i]: float(totals[i]) for i in np.flatnonzero(totals)}
        return Window(
            start=float(min(scrapes[0] for _, scrapes in spans)),
            end=float(max(scrapes[-1] for _, scrapes in spans)),
            pods=tuple(sorted({pod for pod, _ in spans})),
            cells=tuple(
                CellDelta(batch, k, arm, **fields)
                for (batch, k, arm), fields in _by_cell(sums, STEP_COUNTERS).items()
            ),
            mixed=tuple(
                MixedDelta(batch, arm, **fields)
                for (batch, arm), fields in _by_cell(sums, MIXED_COUNTERS).items()
            ),
            at_risk={cell[0]: n for (name, cell), n in sums.items() if name == AT_RISK_COUNTER},
            accepted={cell[0]: n for (name, cell), n in sums.items() if name == ACCEPTED_COUNTER},
            iterations=sums.get((ITERATIONS_COUNTER, ()), 0.0),
            scrapes=max(len(scrapes) for _, scrapes in spans),
            drafts=drafts,
        )

    def _by_interval(self, inside: Increments, names: Sequence[str]) -> list[Floats]:
        """Sum increments of each name by interval (rows) and position (columns)."""
        which = np.array([names.index(n) if n in names else -1 for n, _ in self.keys], dtype=int)
        column = np.array([cell[0] if cell else 0 for _, cell in self.keys], dtype=int)
        found = inside.where(which[inside.key] >= 0) if self.keys else inside
        if not found.key.size:
            return [np.zeros((0, 1)) for _ in names]
        found = found.where(np.lexsort((found.ended, found.stream)))
        is_next = (np.diff(found.stream) != 0) | (np.diff(found.ended) != 0)
        row = np.cumsum(np.append(False, is_next))
        width = int(column[found.key].max()) + 1
        sums = np.zeros((len(names), int(row.max()) + 1, width))
        np.add.at(sums, (which[found.key], row, column[found.key]), found.amount)
        return list(sums)

    def _spans(self, start: float, end: float) -> list[tuple[str, Floats]]:
        spans = [
            (stream.pod, stream.scrapes[(stream.scrapes >= start) & (stream.scrapes <= end)])
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
        if pod and one.name.startswith("specdecode_"):
            newest_first = (at for at, value in reversed(one.samples) if math.isfinite(at + value))
            latest[pod] = max(latest.get(pod, -math.inf), next(newest_first, -math.inf))
    return {pod: moment for pod, moment in latest.items() if moment > -math.inf}


def _is_adaptive(series: Series) -> bool:
    labelled = series.name == PLUGIN_INFO and series.labels.get("adaptive_verification") == "true"
    return labelled and any(value == 1 for _, value in series.samples)


def _widened(drafts: Drafts, width: int) -> Drafts:
    more = ((0, 0), (0, width - drafts.at_risk.shape[1]))
    return Drafts(np.pad(drafts.at_risk, more), np.pad(drafts.accepted, more))


def _by_cell(
    sums: Mapping[tuple[str, tuple[int, ...]], float], fields: Mapping[str, str]
) -> dict[tuple[int, ...], dict[str, float]]:
    cells: dict[tuple[int, ...], dict[str, float]] = {}
    for (name, cell), amount in sorted(sums.items()):
        if name in fields:
            cells.setdefault(cell, {})[fields[name]] = amount
    return cells
