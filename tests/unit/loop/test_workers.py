"""The lanes: urgent passes never wait for full ones, failures back off, nothing is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator import errors
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.loop.lease import Alone
from specdecode_operator.loop.pods import Urgency
from specdecode_operator.loop.progress import Progress
from specdecode_operator.loop.workers import (
    FULL_BACKOFF,
    URGENT_BACKOFF,
    URGENT_WORKERS,
    Backoff,
    Leadership,
    Workers,
)
from specdecode_operator.telemetry import Telemetry
from tests.support.waiting import wait_until

A, B = ObjectKey("ns", "a"), ObjectKey("ns", "b")
HOUR = timedelta(hours=1)


class Passes:
    """Records what is run; `behave` decides how each pass ends."""

    def __init__(self) -> None:
        self.ran: list[tuple[ObjectKey, bool]] = []
        self.behave: Callable[[ObjectKey, bool], timedelta | None] = lambda key, urgent: HOUR

    def run(self, key: ObjectKey, *, urgent: bool) -> timedelta | None:
        self.ran.append((key, urgent))
        return self.behave(key, urgent)

    def count(self, key: ObjectKey, *, urgent: bool) -> int:
        return self.ran.count((key, urgent))


class Follower:
    """Leadership that a test switches."""

    def __init__(self) -> None:
        self.leads = threading.Event()

    def is_leader(self) -> bool:
        return self.leads.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        return self.leads.wait(timeout_seconds)

    def leading_since(self) -> float:
        return time.monotonic()


class Running:
    def __init__(self, leadership: Leadership) -> None:
        self.passes = Passes()
        self.telemetry = Telemetry()
        self.progress = Progress(time.monotonic)
        self.workers = Workers(
            self.passes,
            cycle_workers=2,
            leadership=leadership,
            progress=self.progress,
            telemetry=self.telemetry,
        )
        self.workers.start()

    def wait_for(self, key: ObjectKey, *, urgent: bool, times: int = 1) -> None:
        wait_until(
            lambda: self.passes.count(key, urgent=urgent) >= times,
            what=f"pass {times} of {key}",
            seconds=10,
            pause_seconds=0.01,
        )

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.telemetry.to_text().decode()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0


@pytest.fixture
def running() -> Iterator[Running]:
    started = Running(Alone())
    yield started
    started.workers.stop()


def test_an_urgent_pass_is_run_while_all_full_ones_hang(running: Running) -> None:
    release = threading.Event()
    running.passes.behave = lambda key, urgent: HOUR if urgent or release.wait(20) else None
    for i in range(4):
        running.workers.ask(ObjectKey("ns", f"slow-{i}"), Urgency.SOON)
    wait_until(lambda: len(running.passes.ran) >= 2, what="two hanging passes", seconds=10)
    running.workers.ask(A, Urgency.NOW)
    running.wait_for(A, urgent=True)
    release.set()


def test_an_urgent_pass_is_followed_by_a_full_one(running: Running) -> None:
    running.passes.behave = lambda key, urgent: timedelta(0) if urgent else HOUR
    running.workers.ask(A, Urgency.NOW)
    running.wait_for(A, urgent=True)
    running.wait_for(A, urgent=False)
    assert running.metric("specdecode_operator_fast_path_seconds_count") == 1


def test_an_object_comes_round_by_itself(running: Running) -> None:
    running.passes.behave = lambda key, urgent: timedelta(seconds=0.05)
    running.workers.ask(A, Urgency.SOON)
    running.wait_for(A, urgent=False, times=3)


def test_an_object_that_is_gone_does_not_come_round(running: Running) -> None:
    running.passes.behave = lambda key, urgent: None if key == A else timedelta(0)
    running.workers.ask(A, Urgency.SOON)
    running.workers.ask(B, Urgency.SOON)
    running.wait_for(B, urgent=False, times=4)
    assert running.passes.count(A, urgent=False) == 1


def test_one_object_never_has_two_passes_of_a_lane_at_a_time(running: Running) -> None:
    inside: Counter[bool] = Counter()
    most: Counter[bool] = Counter()
    guard = threading.Lock()
    pause = threading.Event()

    def behave(key: ObjectKey, urgent: bool) -> timedelta | None:
        with guard:
            inside[urgent] += 1
            most[urgent] = max(most[urgent], inside[urgent])
        pause.wait(0.02)
        with guard:
            inside[urgent] -= 1
        return timedelta(0)

    running.passes.behave = behave
    for _ in range(40):
        running.workers.ask(A, Urgency.NOW)
        running.workers.ask(A, Urgency.SOON)
        pause.wait(0.005)
    running.wait_for(A, urgent=False, times=3)
    assert most[True] == 1
    assert most[False] == 1


@pytest.mark.parametrize(
    ("error", "outcome", "level"),
    [
        (errors.TransientError("the API server is away"), "transient", logging.WARNING),
        (errors.ForbiddenError("pods is forbidden"), "permanent", logging.ERROR),
        (ZeroDivisionError("a bug"), "bug", logging.ERROR),
    ],
    ids=["passing", "lasting", "a bug of ours"],
)
def test_a_failing_pass_is_tried_again_and_logged_once(
    running: Running,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    outcome: str,
    level: int,
) -> None:
    quick = Backoff(first_seconds=0.01, last_seconds=0.01, permanent_seconds=0.01)
    monkeypatch.setattr(running.workers._full, "_backoff", quick)

    def behave(key: ObjectKey, urgent: bool) -> timedelta | None:
        if running.passes.count(A, urgent=False) <= 3:
            raise error
        return HOUR

    running.passes.behave = behave
    with caplog.at_level(logging.INFO, "specdecode_operator"):
        running.workers.ask(A, Urgency.SOON)
        running.wait_for(A, urgent=False, times=4)
        wait_until(lambda: "works again" in caplog.text, what="the good news", seconds=5)
    told = [record for record in caplog.records if "failed" in record.message]
    assert [record.levelno for record in told] == [level]
    assert running.metric("specdecode_operator_passes_total", outcome=outcome) == 3


def test_a_conflict_is_worth_no_line_until_it_comes_again_and_again(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Backoff(first_seconds=0.01, last_seconds=0.01, permanent_seconds=0.01)
    monkeypatch.setattr(running.workers._full, "_backoff", quick)
    conflicts = {A: 2, B: 3}

    def behave(key: ObjectKey, urgent: bool) -> timedelta | None:
        if running.passes.count(key, urgent=False) <= conflicts[key]:
            raise errors.ConflictError("the object changed")
        return HOUR

    running.passes.behave = behave
    with caplog.at_level(logging.INFO, "specdecode_operator"):
        for key in conflicts:
            running.workers.ask(key, Urgency.SOON)
            running.wait_for(key, urgent=False, times=conflicts[key] + 1)
        wait_until(lambda: "works again" in caplog.text, what="the good news", seconds=5)
    assert "ns/a" not in caplog.text
    assert caplog.text.count("ns/b: the full pass failed") == 1


def test_a_follower_runs_nothing_and_begins_with_all_that_is_due() -> None:
    leadership = Follower()
    running = Running(leadership)
    try:
        running.workers.ask(A, Urgency.NOW)
        running.workers.ask(B, Urgency.SOON)
        wait_until(
            lambda: running.metric("specdecode_operator_queue_depth", lane="full") == 1,
            what="an object that is due",
            seconds=5,
        )
        assert running.passes.ran == []
        leadership.leads.set()
        running.wait_for(A, urgent=True)
        running.wait_for(B, urgent=False)
        wait_until(
            lambda: running.metric("specdecode_operator_fast_path_seconds_count") == 1,
            what="the latency",
            seconds=5,
        )
        assert running.metric("specdecode_operator_fast_path_seconds_sum") < 0.25
    finally:
        running.workers.stop()


def test_a_refused_write_after_the_lease_is_lost_is_no_failure(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def behave(key: ObjectKey, urgent: bool) -> timedelta | None:
        raise errors.NotLeaderError("the lease is not held")

    running.passes.behave = behave
    running.workers.ask(A, Urgency.SOON)
    running.wait_for(A, urgent=False)
    wait_until(
        lambda: running.metric("specdecode_operator_passes_total", outcome="not-leader") >= 1,
        what="the outcome",
        seconds=5,
    )
    assert not caplog.records


def test_stopping_waits_for_the_pass_that_runs(running: Running) -> None:
    entered, release = threading.Event(), threading.Event()

    def behave(key: ObjectKey, urgent: bool) -> timedelta | None:
        entered.set()
        release.wait(10)
        return HOUR

    running.passes.behave = behave
    running.workers.ask(A, Urgency.SOON)
    assert entered.wait(5)
    stopper = threading.Thread(target=running.workers.stop)
    stopper.start()
    assert stopper.is_alive()
    release.set()
    stopper.join(5)
    assert not stopper.is_alive()


def test_every_thread_is_watched(running: Running) -> None:
    assert len(running.progress._limits) == URGENT_WORKERS + 2
    assert running.progress.stalled() == ()


@pytest.mark.parametrize("backoff", [URGENT_BACKOFF, FULL_BACKOFF])
def test_waits_double_up_to_a_limit_and_are_spread(backoff: Backoff) -> None:
    waits = [backoff.wait_seconds(n, permanent=False, chance=1.0) for n in range(1, 40)]
    assert waits[0] == backoff.first_seconds
    assert waits == sorted(waits)
    assert waits[-1] == backoff.last_seconds
    assert backoff.wait_seconds(1, permanent=False, chance=0.0) == backoff.first_seconds / 2
    assert backoff.wait_seconds(1, permanent=True, chance=1.0) == backoff.permanent_seconds
