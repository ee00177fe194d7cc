"""The queue: what is due when, de-duplicated, and never two passes of one object at a time."""

import threading
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.loop.queue import Schedule, WorkQueue

A, B, C = (ObjectKey("ns", name) for name in "abc")


def take_all(schedule: Schedule, now: float) -> list[ObjectKey]:
    taken = []
    while (entry := schedule.take(now)) is not None:
        taken.append(entry.key)
    return taken


def test_objects_come_in_the_order_of_their_due_times() -> None:
    schedule = Schedule()
    schedule.put(A, due=3, now=0)
    schedule.put(B, due=1, now=0)
    schedule.put(C, due=9, now=0)
    assert take_all(schedule, now=5) == [B, A]
    assert schedule.next_due() == 9


def test_many_wishes_for_one_object_become_one_pass_at_the_earliest_time() -> None:
    schedule = Schedule()
    for due in (7, 2, 5):
        schedule.put(A, due=due, now=0)
    assert schedule.next_due() == 2
    assert take_all(schedule, now=10) == [A]


def test_a_wish_during_a_pass_waits_for_its_end_and_is_not_lost() -> None:
    schedule = Schedule()
    schedule.put(A, due=0, now=0)
    assert schedule.take(0)
    schedule.put(A, due=1, now=1)
    assert schedule.take(100) is None
    schedule.done(A, again=60, now=2)
    assert schedule.next_due() == 1


def test_a_wish_during_the_last_pass_of_an_object_stands() -> None:
    schedule = Schedule()
    schedule.put(A, due=0, now=0)
    assert schedule.take(0)
    schedule.put(A, due=1, now=1)
    schedule.done(A, again=None, now=2)
    assert take_all(schedule, now=2) == [A]


def test_an_object_that_is_gone_leaves_nothing_behind() -> None:
    schedule = Schedule()
    schedule.put(A, due=0, now=0)
    assert schedule.take(0)
    schedule.done(A, again=None, now=1)
    assert schedule.next_due() is None
    assert len(schedule) == 0


def test_the_time_of_the_first_wish_is_kept_for_the_latency() -> None:
    schedule = Schedule()
    schedule.put(A, due=10, now=1)
    schedule.put(A, due=5, now=4)
    entry = schedule.take(5)
    assert entry is not None
    assert entry.asked_at == 1


@pytest.mark.parametrize(("failed", "asked_at"), [(True, 1), (False, 6)])
def test_what_a_failed_pass_was_asked_for_stays_asked_for(failed: bool, asked_at: float) -> None:
    schedule = Schedule()
    schedule.put(A, due=1, now=1)
    assert schedule.take(2)
    schedule.put(A, due=9, now=7)
    schedule.done(A, again=8, now=6, failed=failed)
    entry = schedule.take(10)
    assert entry is not None
    assert (entry.due, entry.asked_at) == (8, asked_at)


def test_wishes_renewed_for_ever_do_not_grow_the_heap() -> None:
    schedule = Schedule()
    for i in range(10_000):
        schedule.put(A, due=10_000 - i, now=0)
    assert len(schedule._heap) < 200


class ScheduleMachine(RuleBasedStateMachine):
    """Compared with the plainest model: a wish for each object, a set of running ones."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.now = 0.0
        self.wishes: dict[ObjectKey, float] = {}
        self.running: set[ObjectKey] = set()

    @rule(key=st.sampled_from([A, B, C]), delay=st.integers(0, 20))
    def put(self, key: ObjectKey, delay: int) -> None:
        due = self.now + delay
        self.schedule.put(key, due=due, now=self.now)
        self.wishes[key] = min(due, self.wishes.get(key, due))

    @rule(seconds=st.integers(1, 10))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        ready = {k: d for k, d in self.wishes.items() if k not in self.running and d <= self.now}
        entry = self.schedule.take(self.now)
        if not ready:
            assert entry is None
            return
        assert entry is not None
        assert entry.due == min(ready.values()) == self.wishes.pop(entry.key)
        self.running.add(entry.key)

    @precondition(lambda self: self.running)
    @rule(again=st.none() | st.integers(0, 20))
    def done(self, again: int | None) -> None:
        key = min(self.running)
        self.running.remove(key)
        due = None if again is None else self.now + again
        self.schedule.done(key, again=due, now=self.now)
        if due is not None:
            self.wishes[key] = min(due, self.wishes.get(key, due))

    @invariant()
    def next_is_the_earliest_that_may_run(self) -> None:
        waiting = [due for key, due in self.wishes.items() if key not in self.running]
        assert self.schedule.next_due() == min(waiting, default=None)
        assert len(self.schedule) == len(self.running) + len(waiting)


TestSchedule = ScheduleMachine.TestCase


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_waiting_thread_is_woken_by_a_new_wish() -> None:
    queue = WorkQueue(time.monotonic)
    taken: list[ObjectKey | None] = []

    def work() -> None:
        entry = queue.take(timeout_seconds=30)
        taken.append(entry.key if entry else None)

    thread = threading.Thread(target=work)
    thread.start()
    queue.put(A)
    thread.join(5)
    assert taken == [A]


def test_nothing_due_is_none_after_the_time_out() -> None:
    queue = WorkQueue(time.monotonic)
    queue.put(A, delay_seconds=60)
    assert queue.take(timeout_seconds=0.01) is None


def test_a_closed_queue_wakes_everybody_and_gives_nothing() -> None:
    queue = WorkQueue(time.monotonic)
    queue.put(B, delay_seconds=60)
    threads = [threading.Thread(target=queue.take, kwargs={"timeout_seconds": 60})]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    queue.put(A)
    assert queue.take(timeout_seconds=0) is None


@pytest.mark.parametrize(("delay", "due_now"), [(0.0, 1), (5.0, 0)])
def test_the_depth_counts_what_waits_for_a_worker(delay: float, due_now: int) -> None:
    queue = WorkQueue(Clock())
    queue.put(A, delay_seconds=delay)
    assert queue.count_due() == due_now
