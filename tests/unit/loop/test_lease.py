"""Two operators and one lease: never two leaders, and the second follows in time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator import errors
from specdecode_operator.loop.lease import (
    EXPIRE_SECONDS,
    MARGIN_SECONDS,
    RENEW_SECONDS,
    Lease,
)

Json = dict[str, Any]


class Store:
    """One lease as an API server keeps it; `down` makes each call fail."""

    def __init__(self) -> None:
        self.record: Json | None = None
        self.version = 0
        self.down = False
        self.after_read: list[Any] = []

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Json | None:
        self._check()
        found = copy.deepcopy(self.record)
        for hook in self.after_read:
            hook()
        return found

    def create(self, manifest: Mapping[str, Any]) -> Json:
        self._check()
        if self.record is not None:
            raise errors.ConflictError("it exists")
        return self._keep(manifest)

    def replace(self, manifest: Mapping[str, Any]) -> Json:
        self._check()
        if manifest["metadata"].get("resourceVersion") != str(self.version):
            raise errors.ConflictError("it is newer")
        return self._keep(manifest)

    def _keep(self, manifest: Mapping[str, Any]) -> Json:
        self.version += 1
        self.record = copy.deepcopy(dict(manifest))
        self.record["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.record)

    def _check(self) -> None:
        if self.down:
            raise errors.TransientError("connection refused")


class World:
    """A store, and contenders whose clocks differ but run alike."""

    def __init__(self) -> None:
        self.store = Store()
        self.now = 0.0

    def contender(self, identity: str, *, clock_offset: float = 0.0) -> Lease:
        start = datetime(2030, 1, 1, tzinfo=UTC)
        return Lease(
            self.store,
            namespace="ns",
            name="operator",
            identity=identity,
            monotonic=lambda: self.now + clock_offset,
            wall=lambda: start + timedelta(seconds=self.now + clock_offset),
        )


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_takes_the_lease_and_the_second_does_not(world: World) -> None:
    first, second = world.contender("one"), world.contender("two")
    first.step()
    second.step()
    assert first.is_leader()
    assert not second.is_leader()
    assert world.store.record is not None
    assert world.store.record["spec"]["holderIdentity"] == "one"


def test_a_leader_that_renews_leads_for_ever(world: World) -> None:
    first, second = world.contender("one"), world.contender("two", clock_offset=5000)
    for _ in range(50):
        first.step()
        second.step()
        assert first.is_leader()
        assert not second.is_leader()
        world.now += RENEW_SECONDS


def test_a_silent_leader_stops_before_the_second_begins(world: World) -> None:
    first, second = world.contender("one"), world.contender("two", clock_offset=-5000)
    first.step()
    stopped_at = began_at = None
    while began_at is None:
        second.step()
        if stopped_at is None and not first.is_leader():
            stopped_at = world.now
        if second.is_leader():
            began_at = world.now
        world.now += 0.5
    assert stopped_at is not None
    assert stopped_at == pytest.approx(EXPIRE_SECONDS - MARGIN_SECONDS)
    assert began_at >= stopped_at + MARGIN_SECONDS
    assert began_at <= EXPIRE_SECONDS + 1


def test_a_leader_cut_off_from_the_api_server_loses_its_right_by_itself(world: World) -> None:
    leader = world.contender("one")
    leader.step()
    world.store.down = True
    for _ in range(4):
        world.now += RENEW_SECONDS
        leader.step()
    assert not leader.is_leader()
    world.store.down = False
    leader.step()
    assert leader.is_leader()


def test_outages_do_not_prolong_the_wait_of_the_second(world: World) -> None:
    first, second = world.contender("one"), world.contender("two")
    first.step()
    second.step()
    for _ in range(4):
        world.now += RENEW_SECONDS
        world.store.down = not world.store.down
        second.step()
    world.store.down = False
    world.now = EXPIRE_SECONDS + 0.1
    second.step()
    assert second.is_leader()


def test_a_renewal_between_the_waiters_read_and_its_write_wins(world: World) -> None:
    first, second = world.contender("one"), world.contender("two")
    first.step()
    second.step()
    world.now = EXPIRE_SECONDS + 1
    world.store.after_read.append(lambda: (world.store.after_read.clear(), first.step()))
    second.step()
    assert first.is_leader()
    assert not second.is_leader()


def test_the_same_identity_comes_back_at_once(world: World) -> None:
    world.contender("one").step()
    world.now = 1
    restarted = world.contender("one")
    restarted.step()
    assert restarted.is_leader()


def test_a_lease_that_is_given_up_is_taken_without_waiting(world: World) -> None:
    first, second = world.contender("one"), world.contender("two")
    first.step()
    first.stop()
    assert not first.is_leader()
    second.step()
    assert second.is_leader()
    assert world.store.record is not None
    assert world.store.record["spec"]["leaseTransitions"] >= 2


def test_whoever_waits_for_the_lease_is_woken(world: World) -> None:
    leader = world.contender("one")
    assert not leader.wait(0.0)
    leader.step()
    assert leader.wait(0.0)


def test_two_that_create_at_once_do_not_both_lead(world: World) -> None:
    first, second = world.contender("one"), world.contender("two")
    world.store.after_read.append(lambda: (world.store.after_read.clear(), first.step()))
    second.step()
    assert first.is_leader()
    assert not second.is_leader()
