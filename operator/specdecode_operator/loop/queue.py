"""Which object is due when: one entry per object, at most one pass of it at a time.

`Schedule` is the arithmetic and knows no clock; `WorkQueue` adds the lock and the waiting.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from specdecode_operator.domain.observation import ObjectKey

# Replaced entries stay in the heap until they come up; it is rebuilt when they are the most.
_MIN_REBUILD = 64


@dataclass(frozen=True)
class Due:
    """One object whose pass may begin; times are those given, in seconds."""

    key: ObjectKey
    due: float
    asked_at: float


class Schedule:
    """Due times with de-duplication: the earliest wish wins."""

    def __init__(self) -> None:
        self._waiting: dict[ObjectKey, Due] = {}
        self._running: dict[ObjectKey, Due] = {}
        self._wishes: dict[ObjectKey, Due] = {}  # those that came during a pass
        self._heap: list[tuple[float, int, Due]] = []
        self._order = itertools.count()

    def put(self, key: ObjectKey, *, due: float, now: float) -> None:
        """Wish for a pass at `due`; a later wish than a waiting one changes nothing.

        During a pass of the object the wish waits for its end: what it was asked for may have
        happened after the pass has read.
        """
        wish = Due(key, due, now)
        if key in self._running:
            self._wishes[key] = _merge(self._wishes.get(key), wish)
            return
        known = self._waiting.get(key)
        if known is None or due < known.due:
            self._push(_merge(known, wish))

    def take(self, now: float) -> Due | None:
        """Begin the pass that is due longest, None when none is due."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)[2]
            if self._waiting.get(entry.key) is entry:
                del self._waiting[entry.key]
                self._running[entry.key] = entry
                return entry
        return None

    def done(
        self, key: ObjectKey, *, again: float | None, now: float, failed: bool = False
    ) -> None:
        """End a pass; `again` is when the next is due, None for not at all.

        A wish that came during the pass stands in either case; what a failed pass was asked for
        stays asked for since then.
        """
        ended = self._running.pop(key)
        wish = self._wishes.pop(key, None)
        if again is not None:
            wish = _merge(wish, Due(key, again, ended.asked_at if failed else now))
        if wish is not None:
            self._push(wish)

    def next_due(self) -> float | None:
        """When the next pass may begin, None when nothing waits."""
        while self._heap and self._waiting.get(self._heap[0][2].key) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def count_due(self, now: float) -> int:
        """How many objects wait for a worker."""
        return sum(1 for entry in self._waiting.values() if entry.due <= now)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def _push(self, entry: Due) -> None:
        self._waiting[entry.key] = entry
        heapq.heappush(self._heap, (entry.due, next(self._order), entry))
        if len(self._heap) > _MIN_REBUILD + 2 * len(self._waiting):
            self._heap = [(e.due, next(self._order), e) for e in self._waiting.values()]
            heapq.heapify(self._heap)


def _merge(one: Due | None, other: Due) -> Due:
    if one is None:
        return other
    return Due(one.key, min(one.due, other.due), min(one.asked_at, other.asked_at))


class WorkQueue:
    """A schedule shared by threads; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._schedule = Schedule()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: ObjectKey, *, delay_seconds: float = 0.0) -> None:
        """Wish for a pass after a delay; never blocks for long."""
        with self._changed:
            now = self._clock()
            self._schedule.put(key, due=now + delay_seconds, now=now)
            self._changed.notify()

    def take(self, *, timeout_seconds: float) -> Due | None:
        """Wait for an object that is due; None after the time-out or when closed."""
        with self._changed:
            end = self._clock() + timeout_seconds
            while not self._closed:
                now = self._clock()
                if (entry := self._schedule.take(now)) is not None:
                    return entry
                if now >= end:
                    return None
                due = self._schedule.next_due()
                self._changed.wait((end if due is None else min(due, end)) - now)
            return None

    def done(self, key: ObjectKey, *, again_seconds: float | None, failed: bool = False) -> None:
        """End the pass of an object and say in how many seconds the next one is due."""
        with self._changed:
            now = self._clock()
            again = None if again_seconds is None else now + again_seconds
            self._schedule.done(key, again=again, now=now, failed=failed)
            self._changed.notify()

    def count_due(self) -> int:
        """How many objects wait for a worker now."""
        with self._changed:
            return self._schedule.count_due(self._clock())

    def close(self) -> None:
        """Give out nothing any more and wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self._closed
