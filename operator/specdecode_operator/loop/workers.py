"""The threads that run passes: a lane for urgent ones, a lane for full ones, never shared.

A full pass waits for Prometheus and engines; an urgent one must find a free thread at any time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from specdecode_operator import errors, telemetry
from specdecode_operator.domain.observation import ObjectKey

from .lease import Leadership
from .pods import Urgency
from .progress import Progress
from .queue import Due, WorkQueue

logger = logging.getLogger(__name__)

URGENT_WORKERS = 8
# Several pods of one object often change together: one pass for all of them.
SOON_SECONDS = 0.3
_IDLE_SECONDS = 1.0
_STUCK_SECONDS = 120.0
_LEAST_WAIT_SECONDS = 0.1
_JITTER = 0.05
_STOP_SECONDS = 10.0


class Passes(Protocol):
    """What is run; see reconciler.reconciler.Reconciler."""

    def run(self, key: ObjectKey, *, urgent: bool) -> timedelta | None:
        """Make one pass; return when to run again, None when the object is gone."""
        ...


@dataclass(frozen=True)
class Backoff:
    """How long to wait after failures in a row: transient ones doubling, permanent ones fixed."""

    first_seconds: float
    last_seconds: float
    permanent_seconds: float

    def wait_seconds(self, failures: int, *, permanent: bool, chance: float) -> float:
        """Wait after this many failures; `chance` from 0 to 1 spreads the waits by half."""
        if permanent:
            full = self.permanent_seconds
        else:
            full = min(self.first_seconds * 2.0 ** min(failures - 1, 30), self.last_seconds)
        return full * (0.5 + 0.5 * chance)


URGENT_BACKOFF = Backoff(first_seconds=0.1, last_seconds=5.0, permanent_seconds=30.0)
FULL_BACKOFF = Backoff(first_seconds=1.0, last_seconds=60.0, permanent_seconds=300.0)


@dataclass(frozen=True)
class _Failure:
    """Failures in a row of one object, and what was last said of them."""

    count: int = 0
    told: str = ""


class Lane:
    """A queue and the threads that work it. `run` makes one pass and returns when the next is."""

    def __init__(
        self,
        name: str,
        *,
        size: int,
        queue: WorkQueue,
        run: Callable[[Due], timedelta | None],
        backoff: Backoff,
        leadership: Leadership,
        progress: Progress,
        telemetry: telemetry.Telemetry,
    ) -> None:
        self.queue = queue
        self._name, self._run, self._backoff = name, run, backoff
        self._leadership, self._progress, self._telemetry = leadership, progress, telemetry
        self._failures: dict[ObjectKey, _Failure] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(f"{name}-{i}",), name=f"{name}-{i}")
            for i in range(size)
        ]
        for thread in self._threads:
            thread.daemon = True  # a read that hangs must not hold the process
        telemetry.watch_queue(name, queue.count_due)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            self._progress.expect(thread.name, every_seconds=_STUCK_SECONDS)
            thread.start()

    def stop(self, *, deadline: float) -> None:
        """Take nothing new and wait for the passes that run, at most until `deadline`."""
        self.queue.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, part: str) -> None:
        while not self.queue.closed:
            self._progress.beat(part)
            if not self._leadership.wait(_IDLE_SECONDS):
                continue
            entry = self.queue.take(timeout_seconds=_IDLE_SECONDS)
            if entry is not None:
                self._progress.beat(part)
                self._pass(entry)

    def _pass(self, entry: Due) -> None:
        started = time.monotonic()
        again, outcome = self._attempt(entry)
        self._telemetry.record_pass(self._name, outcome, seconds=time.monotonic() - started)
        self.queue.done(entry.key, again_seconds=again, failed=outcome != "done")

    def _attempt(self, entry: Due) -> tuple[float | None, str]:
        key = entry.key
        try:
            again = self._run(entry)
        except errors.NotLeaderError:
            return _IDLE_SECONDS, "not-leader"
        except errors.ConflictError as error:
            return self._fail(key, error, level=logging.WARNING, patience=3), "conflict"
        except errors.TransientError as error:
            return self._fail(key, error, level=logging.WARNING), "transient"
        except errors.PermanentError as error:
            return self._fail(key, error, level=logging.ERROR, permanent=True), "permanent"
        except Exception as error:  # a bug in one pass must not end the thread
            return self._fail(key, error, level=logging.ERROR, trace=True), "bug"
        failure = self._failures.pop(key, None)
        if failure is not None and failure.told:
            logger.info("%s: the %s pass works again", key, self._name)
        if again is None:
            return None, "done"
        wait = max(again.total_seconds(), _LEAST_WAIT_SECONDS)
        return wait * (1 + _JITTER * random.random()), "done"

    def _fail(
        self,
        key: ObjectKey,
        error: Exception,
        *,
        level: int,
        permanent: bool = False,
        trace: bool = False,
        patience: int = 1,
    ) -> float:
        """Count a failure and say how long to wait; log each wording once.

        `patience` failures in a row are needed before anything is said.
        """
        known = self._failures.get(key, _Failure())
        count = known.count + 1
        wait = self._backoff.wait_seconds(count, permanent=permanent, chance=random.random())
        is_new = count >= patience and str(error) != known.told
        if is_new:
            text = "%s: the %s pass failed, next try in %.1f s: %s"
            logger.log(level, text, key, self._name, wait, error, exc_info=trace)
        self._failures[key] = _Failure(count, str(error) if is_new else known.told)
        return wait


class Workers:
    """Both lanes. Whoever sees a change says so here and returns at once."""

    def __init__(
        self,
        passes: Passes,
        *,
        cycle_workers: int,
        leadership: Leadership,
        progress: Progress,
        telemetry: telemetry.Telemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._passes, self._clock, self._telemetry = passes, clock, telemetry
        self._leadership = leadership
        self._urgent = Lane(
            "urgent",
            size=URGENT_WORKERS,
            queue=WorkQueue(clock),
            run=self._run_urgent,
            backoff=URGENT_BACKOFF,
            leadership=leadership,
            progress=progress,
            telemetry=telemetry,
        )
        self._full = Lane(
            "full",
            size=cycle_workers,
            queue=WorkQueue(clock),
            run=self._run_full,
            backoff=FULL_BACKOFF,
            leadership=leadership,
            progress=progress,
            telemetry=telemetry,
        )

    def start(self) -> None:
        """Start all threads."""
        for lane in self._lanes():
            lane.start()

    def stop(self) -> None:
        """Let the passes that run come to their end, for a few seconds."""
        deadline = time.monotonic() + _STOP_SECONDS
        for lane in self._lanes():
            lane.queue.close()
        for lane in self._lanes():
            lane.stop(deadline=deadline)

    def ask(self, key: ObjectKey, urgency: Urgency) -> None:
        """Wish for a pass of an object; returns at once."""
        if urgency is Urgency.NOW:
            self._urgent.queue.put(key)
        elif urgency is Urgency.SOON:
            self._full.queue.put(key, delay_seconds=SOON_SECONDS)

    def _run_urgent(self, entry: Due) -> timedelta | None:
        """Answer a fault; all later passes of the object are full ones."""
        again = self._passes.run(entry.key, urgent=True)
        # What was asked while another operator led was that one's to answer.
        begun = max(entry.asked_at, self._leadership.leading_since())
        self._telemetry.record_fast_path(self._clock() - begun)
        if again is not None:
            self._full.queue.put(entry.key, delay_seconds=again.total_seconds())
        return None

    def _run_full(self, entry: Due) -> timedelta | None:
        return self._passes.run(entry.key, urgent=False)

    def _lanes(self) -> Sequence[Lane]:
        return self._urgent, self._full
