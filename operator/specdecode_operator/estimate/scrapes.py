"""Raw samples of engines' counters cut into increments that can be trusted.

Samples come from several pods, each restarting, appearing and missing scrapes on its own. Every
series is cut into increments between adjacent scrapes, and what cannot be trusted is dropped for
the whole engine, so that the counters of a cell stay consistent: an interval in which any counter
of that engine fell or was created anew and the two beside it (a restart, or a scrape that came
late: nobody knows which of the samples is the odd one), and one in which the engine was busy for
longer than the clock ran or counted faster than any engine can. Lost data is the price, never a
number that is too large.

All series of an object are one set of arrays, for a pass is to cost about a millisecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.domain.observation import Series

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

# vLLM's own, for engines without the plugin.
OWN_DRAFTS_COUNTER: Final = "vllm:spec_decode_num_drafts_total"
OWN_DRAFT_TOKENS_COUNTER: Final = "vllm:spec_decode_num_draft_tokens_total"
OWN_ACCEPTED_COUNTER: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

_CELL_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(STEP_COUNTERS, ("batch", "k", "arm")),
    **dict.fromkeys(MIXED_COUNTERS, ("batch", "arm")),
    AT_RISK_COUNTER: ("position",),
    ACCEPTED_COUNTER: ("position",),
    ITERATIONS_COUNTER: (),
    OWN_DRAFTS_COUNTER: (),
    OWN_DRAFT_TOKENS_COUNTER: (),
    OWN_ACCEPTED_COUNTER: ("position",),
}
# A counter's companion that says when it began: a new moment is a restart that no fall betrays.
_CREATED: Final = {name.removesuffix("_total") + "_created": name for name in _CELL_LABELS}
_OWN_LABELS: Final = frozenset({"pod", "engine", "batch", "k", "arm", "position", "__name__"})
# Labels beyond these are no batch bucket, K, arm or position of any engine.
_MOST_LABEL: Final = {"batch": 2**20, "k": 256, "arm": 2, "position": 255}

# A step is counted when it ends, so an interval may hold the end of one long step before it.
_BUSY_FACTOR: Final = 1.5
_BUSY_SLACK_SECONDS: Final = 30.0
_SECONDS: Final = frozenset(
    {"specdecode_step_seconds_total", "specdecode_mixed_step_seconds_total"}
)
# No engine counts faster: far above what was ever measured, far below a corrupted sample.
_MOST_STEPS_PER_SECOND: Final = 20_000.0
_MOST_TOKENS_PER_SECOND: Final = 1e7
_MOST_CONTEXT_PER_SECOND: Final = 1e13
_MOST_PER_SECOND: Final = {
    **dict.fromkeys(_CELL_LABELS, _MOST_TOKENS_PER_SECOND),
    "specdecode_steps_total": _MOST_STEPS_PER_SECOND,
    "specdecode_mixed_steps_total": _MOST_STEPS_PER_SECOND,
    ITERATIONS_COUNTER: _MOST_STEPS_PER_SECOND,
    "specdecode_step_context_tokens_total": _MOST_CONTEXT_PER_SECOND,
}
# What lies beyond these is no moment (unix seconds) and no count.
_MOST_MOMENT: Final = 1e12
_MOST_VALUE: Final = 1e18
_ROUNDING: Final = 1e-9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Key = tuple[str, tuple[int, ...]]
_Interval = tuple[int, float, float]  # stream, begun, ended


@dataclass(frozen=True, eq=False)
class Stream:
    """One engine as one scraper saw it: its pod and the moments of its scrapes."""

    pod: str
    scrapes: Floats


class Increments(NamedTuple):
    """Growth of counters between adjacent scrapes, as parallel arrays; `key`, `stream` index."""

    key: Ints
    stream: Ints
    begun: Floats
    ended: Floats
    amount: Floats

    def where(self, kept: Flags | Ints) -> Increments:
        """Keep some, or bring them into an order."""
        key, stream, begun, ended, amount = self
        return Increments(key[kept], stream[kept], begun[kept], ended[kept], amount[kept])

    def and_also(self, other: Increments) -> Increments:
        """Join two sets."""
        return Increments(
            np.concatenate([self.key, other.key]),
            np.concatenate([self.stream, other.stream]),
            np.concatenate([self.begun, other.begun]),
            np.concatenate([self.ended, other.ended]),
            np.concatenate([self.amount, other.amount]),
        )


@dataclass(frozen=True, eq=False)
class Scrapes:
    """All engines' trusted increments; a key is a counter's name and the labels of its cell."""

    streams: tuple[Stream, ...]
    keys: tuple[Key, ...]
    increments: Increments


class _Counter(NamedTuple):
    stream: int
    key: Key
    series: Series


class _Samples(NamedTuple):
    """Valid samples in order of counter and moment; `counter` indexes."""

    counter: Ints
    moment: Floats
    value: Floats

    def where(self, kept: Flags | Ints) -> _Samples:
        return _Samples(self.counter[kept], self.moment[kept], self.value[kept])


def read_scrapes(series: Iterable[Series]) -> Scrapes:
    """Read the counters among raw series; anything else is passed over."""
    owners, counters = _find_counters(series)
    samples, first_seen = _flatten([counter.series for counter in counters])
    stream = np.array([counter.stream for counter in counters], dtype=np.int64)
    scrapes = _scrapes_by_stream(samples, stream, len(owners))
    keys = sorted({counter.key for counter in counters})
    index = {key: position for position, key in enumerate(keys)}
    table = _Table(
        keys=tuple(keys),
        key=np.array([index[counter.key] for counter in counters], dtype=np.int64),
        stream=stream,
        kept=_without_duplicates(owners, scrapes),
    )
    grown = table.increments(samples).and_also(table.late_starts(samples, first_seen, scrapes))
    broken = [*table.falls(samples), *_overfull(grown, keys), *_too_fast(grown, keys)]
    return Scrapes(
        streams=tuple(
            Stream(pod, scrapes[number])
            for number, (pod, _) in enumerate(owners)
            if table.kept[number]
        ),
        keys=table.keys,
        increments=_without_broken(grown, broken),
    )


# ---------------------------------------------------------------------------- raw samples


def _find_counters(series: Iterable[Series]) -> tuple[list[tuple[str, str]], list[_Counter]]:
    """Return (pod, engine) of each stream, and the counters in order of their stream.

    Two Prometheus jobs or replicas that scrape one engine differ in their own labels: they are
    streams of their own.
    """
    found: dict[tuple[str, str, frozenset[tuple[str, str]]], list[tuple[Key, Series]]] = {}
    for one in series:
        key = _key_of(one)
        if key is not None:
            labels = one.labels
            scraper = frozenset(item for item in labels.items() if item[0] not in _OWN_LABELS)
            stream = (labels["pod"], labels.get("engine", ""), scraper)
            found.setdefault(stream, []).append((key, one))
    ordered = sorted(found, key=lambda stream: (*stream[:2], sorted(stream[2])))
    return [stream[:2] for stream in ordered], [
        _Counter(number, key, one)
        for number, stream in enumerate(ordered)
        for key, one in found[stream]
    ]


def _key_of(series: Series) -> Key | None:
    """Read name and cell; None where it is no counter of ours or its labels make no sense."""
    names = _CELL_LABELS.get(_CREATED.get(series.name, series.name))
    if names is None or not series.labels.get("pod"):
        return None
    try:
        cell = tuple(int(series.labels[name]) for name in names)
    except (KeyError, ValueError):
        return None
    if any(not 0 <= value <= _MOST_LABEL[name] for name, value in zip(names, cell, strict=True)):
        return None
    if names and names[0] == "batch" and (cell[0] < 1 or cell[0] & (cell[0] - 1)):
        return None
    return series.name, cell


def _flatten(series: Sequence[Series]) -> tuple[_Samples, Floats]:
    """Return valid samples, once each, and the first moment of each series, valid or not.

    Invalid are Prometheus's staleness markers (NaN) and what no counter can be. Of two values at
    one moment the later one in the answer stands.
    """
    lengths = np.array([len(one.samples) for one in series], dtype=np.int64)
    numbers = chain.from_iterable(chain.from_iterable(one.samples for one in series))
    moment, value = np.fromiter(numbers, float, count=2 * int(lengths.sum())).reshape(-1, 2).T
    counter = np.repeat(np.arange(len(series)), lengths)
    dated = np.abs(moment) <= _MOST_MOMENT
    first_seen = np.full(len(series), np.inf)
    np.minimum.at(first_seen, counter[dated], moment[dated])
    valid = dated & (value >= 0) & (value <= _MOST_VALUE)
    samples = _Samples(counter, moment, value).where(valid)
    if np.any((np.diff(samples.moment) <= 0) & (np.diff(samples.counter) == 0)):
        samples = samples.where(np.lexsort((samples.moment, samples.counter)))
        again = (np.diff(samples.moment) == 0) & (np.diff(samples.counter) == 0)
        samples = samples.where(~np.append(again, False)[: samples.moment.size])
    return samples, first_seen


def _scrapes_by_stream(samples: _Samples, stream: Ints, streams: int) -> list[Floats]:
    of_sample = stream[samples.counter]
    bounds = np.searchsorted(of_sample, np.arange(streams + 1))
    return [np.unique(samples.moment[bounds[i] : bounds[i + 1]]) for i in range(streams)]


def _without_duplicates(owners: Sequence[tuple[str, str]], scrapes: Sequence[Floats]) -> Flags:
    """Keep the fullest of streams of one engine that overlap in time: they show it twice."""
    kept = np.zeros(len(owners), dtype=bool)
    for number in sorted(range(len(owners)), key=lambda n: -scrapes[n].size):
        mine = scrapes[number]
        rivals = (i for i in np.flatnonzero(kept).tolist() if owners[i] == owners[number])
        kept[number] = mine.size > 0 and all(
            mine[-1] < scrapes[i][0] or mine[0] > scrapes[i][-1] for i in rivals
        )
    return kept


# ----------------------------------------------------------------------------- increments


@dataclass(frozen=True, eq=False)
class _Table:
    """What is known of each counter (rows of `key` and `stream`) beside its samples."""

    keys: tuple[Key, ...]
    key: Ints
    stream: Ints
    kept: Flags

    def increments(self, samples: _Samples) -> Increments:
        """Cut at the samples: a series that is there at the first scrape begins at its value."""
        pairs = self._pairs(samples) & ~self._is_created(samples)[1:]
        grown = np.flatnonzero(pairs & (np.diff(samples.value) > 0))
        counter = samples.counter[grown]
        return Increments(
            self.key[counter],
            self.stream[counter],
            samples.moment[grown],
            samples.moment[grown + 1],
            samples.value[grown + 1] - samples.value[grown],
        )

    def late_starts(
        self, samples: _Samples, first_seen: Floats, scrapes: Sequence[Floats]
    ) -> Increments:
        """Count from 0 a series that appears while its engine was already being scraped.

        Labels are created late. Not so where its first samples were there but invalid.
        """
        firsts = np.flatnonzero(np.diff(samples.counter, prepend=-1))
        firsts = firsts[(samples.value[firsts] > 0) & ~self._is_created(samples)[firsts]]
        rows = []
        for i in firsts:
            counter, moment = int(samples.counter[i]), float(samples.moment[i])
            stream = int(self.stream[counter])
            before = bisect_left(scrapes[stream], moment) - 1
            if self.kept[stream] and before >= 0 and first_seen[counter] == moment:
                begun = float(scrapes[stream][before])
                rows.append((self.key[counter], stream, begun, moment, samples.value[i]))
        columns = np.array(rows, dtype=float).reshape(-1, len(Increments._fields)).T
        return Increments(columns[0].astype(int), columns[1].astype(int), *columns[2:])

    def falls(self, samples: _Samples) -> list[_Interval]:
        """List intervals that hold a restart or a late scrape.

        These are those in which a counter fell or was created anew, and the two beside them.
        """
        before, after = samples.value[:-1], samples.value[1:]
        created = self._is_created(samples)[1:]
        pairs = self._pairs(samples)
        fell = pairs & np.where(created, after != before, after < before * (1 - _ROUNDING))
        broken = fell.copy()
        broken[1:] |= fell[:-1] & pairs[1:]
        broken[:-1] |= fell[1:] & pairs[:-1]
        return [
            (int(self.stream[samples.counter[i]]), float(begun), float(ended))
            for i, begun, ended in zip(
                np.flatnonzero(broken),
                samples.moment[:-1][broken],
                samples.moment[1:][broken],
                strict=True,
            )
        ]

    def _pairs(self, samples: _Samples) -> Flags:
        """Tell which adjacent samples belong to one counter of a stream that is kept."""
        same = np.diff(samples.counter) == 0
        return np.asarray(same & self.kept[self.stream[samples.counter[1:]]])

    def _is_created(self, samples: _Samples) -> Flags:
        names = np.array([name in _CREATED for name, _ in self.keys], dtype=bool)
        return np.asarray(names[self.key[samples.counter]])


def _overfull(increments: Increments, keys: Sequence[Key]) -> list[_Interval]:
    """List intervals in which an engine claims to have worked for longer than they lasted."""
    is_seconds = np.array([name in _SECONDS for name, _ in keys], dtype=bool)
    seconds = increments.where(is_seconds[increments.key])
    busy: dict[_Interval, float] = defaultdict(float)
    for stream, begun, ended, amount in zip(
        *(column.tolist() for column in seconds[1:]), strict=True
    ):
        busy[(stream, begun, ended)] += amount
    return [
        interval
        for interval, spent in busy.items()
        if spent > _BUSY_FACTOR * (interval[2] - interval[1]) + _BUSY_SLACK_SECONDS
    ]


def _too_fast(increments: Increments, keys: Sequence[Key]) -> list[_Interval]:
    """List intervals in which a counter grew faster than any engine counts."""
    most = np.array([_MOST_PER_SECOND.get(name, np.inf) for name, _ in keys])
    duration = increments.ended - increments.begun + 1.0
    wrong = increments.where(increments.amount > most[increments.key] * duration)
    return list(zip(wrong.stream.tolist(), wrong.begun.tolist(), wrong.ended.tolist(), strict=True))


def _without_broken(increments: Increments, broken: Sequence[_Interval]) -> Increments:
    """Drop the increments of a stream that overlap any of its broken intervals."""
    by_stream: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for stream, begun, ended in broken:
        by_stream[stream].append((begun, ended))
    trusted = np.ones(increments.key.size, dtype=bool)
    for stream, intervals in by_stream.items():
        begun, ended = np.array(sorted(intervals)).T
        reach = np.maximum.accumulate(ended)
        starts = np.append(True, begun[1:] > reach[:-1])
        firsts = begun[starts]
        lasts = np.append(reach[:-1][starts[1:]], reach[-1])
        next_ = np.searchsorted(lasts, increments.begun, side="right")
        hit = np.append(firsts, np.inf)[next_] < increments.ended
        trusted &= ~(hit & (increments.stream == stream))
    return increments.where(trusted)
