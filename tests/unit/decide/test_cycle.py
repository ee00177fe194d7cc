"""Whole courses of one object in a cluster in memory: changes, falls, edits, killed operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api import metadata
from specdecode_operator.api.conditions import ConditionType, Reason, find_condition
from specdecode_operator.api.v1alpha1 import Phase, RevisionInputs, Spec, Status
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.observation import InvalidSpec, ObservedTables
from tests.support.builders import build_spec
from tests.support.world import (
    World,
    changes,
    with_arm,
    without_speculation,
)

FULL = {"cudagraphMode": "FULL_DECODE_ONLY"}


def start(spec: Spec, **facts: Any) -> World:
    """Run a new object until it serves."""
    world = World(spec, **facts)
    world.reconcile()
    world.run(20)
    assert len(world.ready()) == spec.replicas
    return world


def crash_all_speculation(world: World, number: int = 1) -> None:
    for pod in world.speculating()[:number]:
        world.crash(pod)
    world.reconcile(urgent=True)


def never_dark(world: World) -> Callable[[], None]:
    def check() -> None:
        assert world.ready(), "no pod serves"

    return check


def revisions_of(world: World) -> dict[str, int]:
    return {name: len(world.alive(name)) for name in world.revisions if world.alive(name)}


def assert_runs(world: World, spec: Spec, *, number: int | None = None) -> None:
    """The cluster runs exactly this, all Ready."""
    number = spec.replicas if number is None else number
    pods = world.ready()
    assert len(pods) == len(world.alive()) == number
    for pod in pods:
        assert world.revisions[pod.revision].inputs == levers.inputs_of(spec)


def condition(world: World, kind: ConditionType) -> tuple[str, str]:
    found = find_condition(world.status.conditions, kind)
    assert found is not None
    return found.status, found.reason


def assert_steady(world: World) -> None:
    world.run(20)
    before = world.status_writes
    for urgent in (False, True, False):
        decision = world.reconcile(urgent=urgent)
        assert changes(decision, world) == []
        assert decision.events == ()
    assert world.status_writes == before


# ------------------------------------------------------------------------- changes


def test_a_new_object_comes_up_and_is_left_alone() -> None:
    world = start(build_spec(replicas=3))
    assert_runs(world, build_spec(replicas=3))
    assert condition(world, ConditionType.TABLE_APPLIED) == ("True", "Applied")
    assert_steady(world)


@settings(max_examples=25)
@given(
    replicas=st.integers(2, 5),
    canaries=st.integers(1, 4),
    strategy=st.sampled_from(["Replace", "Surge"]),
    ready_after=st.integers(1, 4),
    drains=st.integers(1, 3),
    scaled=st.integers(2, 5),
    at=st.integers(0, 12),
)
def test_a_change_arrives_and_serves_throughout_even_when_scaled(
    replicas: int, canaries: int, strategy: str, ready_after: int, drains: int, scaled: int, at: int
) -> None:
    rollout = {"canaryReplicas": canaries, "strategy": strategy}
    world = start(
        build_spec(replicas=replicas, rollout=rollout), ready_after=ready_after, drains=drains
    )
    wish = {"rollout": rollout, "speculation": FULL, "engine": {"maxNumSeqs": 32}}
    world.edit(build_spec(replicas=replicas, **wish))
    world.run(at, check=never_dark(world))
    world.edit(build_spec(replicas=scaled, **wish))
    world.run(120, check=never_dark(world))
    assert_runs(world, build_spec(replicas=scaled, **wish))
    assert_steady(world)


def test_a_change_needs_no_spare_gpu() -> None:
    world = start(build_spec(replicas=2), gpus=2)
    world.edit(build_spec(replicas=2, speculation=FULL))
    world.run(60, check=never_dark(world))
    assert_runs(world, build_spec(replicas=2, speculation=FULL))


def test_a_canary_of_speculation_drafts_as_it_will_when_it_serves() -> None:
    world = start(build_spec(replicas=2, speculation=None))
    world.edit(build_spec(replicas=2))
    drafts: list[int] = []

    def watch() -> None:
        if world.tables and world.tables.canary:
            drafts.append(world.tables.canary.table.k_at(1))

    world.run(60, check=watch)
    assert drafts
    assert set(drafts) == {7}


@pytest.mark.parametrize("ready", [False, True])
def test_a_pause_in_mid_change_leaves_a_cluster_that_serves(ready: bool) -> None:
    world = start(build_spec(replicas=3))
    world.edit(build_spec(replicas=3, speculation=FULL))
    world.run(3 if ready else 1)
    world.edit(build_spec(replicas=3, speculation=FULL, rollout={"paused": True}))
    before = {name: revision.replicas for name, revision in world.revisions.items()}
    assert len(before) == 2
    world.run(30, check=never_dark(world))
    assert {name: len(world.ready(name)) for name in before} == before
    assert condition(world, ConditionType.PROGRESSING)[1] == Reason.PAUSED
    assert_steady(world)
    world.edit(build_spec(replicas=3, speculation=FULL))
    world.run(60, check=never_dark(world))
    assert_runs(world, build_spec(replicas=3, speculation=FULL))


def test_scaled_to_zero_in_mid_change_and_back() -> None:
    world = start(build_spec(replicas=2))
    world.edit(build_spec(replicas=2, speculation=FULL))
    world.run(1)
    world.edit(build_spec(replicas=0, speculation=FULL))
    world.run(10)
    assert not world.alive()
    world.edit(build_spec(replicas=2, speculation=FULL))
    world.run(30)
    assert_runs(world, build_spec(replicas=2, speculation=FULL))


def test_speculation_removed_and_added_back() -> None:
    spec = build_spec(replicas=2)
    world = start(spec)
    world.edit(without_speculation(spec))
    world.run(60, check=never_dark(world))
    assert_runs(world, without_speculation(spec))
    world.edit(spec)
    world.run(60, check=never_dark(world))
    assert_runs(world, spec)
    assert_steady(world)


TABLES_HARM: dict[str, Callable[[World], ObservedTables | None]] = {
    "deleted": lambda world: None,
    "emptied": lambda world: ObservedTables(None, None, 0, None),
    "switched off by hand": lambda world: _with_enabled(world, False),
}


def _with_enabled(world: World, enabled: bool) -> ObservedTables:
    there = world.tables
    assert there is not None
    assert there.stable is not None
    stable = type(there.stable)(there.stable.table, there.stable.generation, enabled, "by hand")
    return ObservedTables(stable, there.canary, there.generation, there.written_at)


@pytest.mark.parametrize("harm", TABLES_HARM)
def test_tables_that_somebody_harmed_are_written_again(harm: str) -> None:
    world = start(build_spec(replicas=2))
    before = world.tables
    assert before is not None
    world.tables = TABLES_HARM[harm](world)
    world.run(20)
    assert world.tables is not None
    assert world.tables.stable is not None
    assert world.tables.stable.enabled
    assert world.tables.generation > before.generation
    assert condition(world, ConditionType.TABLE_APPLIED) == ("True", "Applied")
    assert_steady(world)


# --------------------------------------------------------------------------- falls


@settings(max_examples=25)
@given(
    replicas=st.integers(1, 4),
    spare=st.integers(0, 1),
    crashes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    ready_after=st.integers(1, 3),
    scaled=st.none() | st.integers(1, 4),
    strategy=st.sampled_from(["Replace", "Surge"]),
)
def test_a_fall_ends_without_speculation_and_answers_each_end_once(
    replicas: int,
    spare: int,
    crashes: list[int],
    ready_after: int,
    scaled: int | None,
    strategy: str,
) -> None:
    rollout = {"strategy": strategy}
    spec = build_spec(replicas=replicas, rollout=rollout)
    world = start(spec, gpus=max(replicas, scaled or 0) + spare, ready_after=ready_after)
    started = set(world.revisions)
    number = 0
    for at in sorted(crashes):
        ended = next((pod for pod in world.speculating() if pod.placed), None)
        if ended is None:
            break
        world.crash(ended)
        number += 1
        world.reconcile(urgent=True)
        assert all(with_arm(pod, "off") for pod in world.speculating())
        assert world.tables is not None
        assert world.tables.stable is not None
        assert not world.tables.stable.enabled
        most = {name: world.revisions[name].replicas for name in started}
        if scaled:
            spec = build_spec(replicas=scaled, rollout=rollout)
            world.edit(spec)
        world.run(at)
        assert all(world.revisions[name].replicas <= most[name] for name in started)
    world.run(80)
    assert_runs(world, without_speculation(spec))
    assert world.status.phase is Phase.QUARANTINED
    assert world.status.fall is not None
    assert world.status.fall.recovered_at is not None
    assert world.status.faults.counts == {"illegal-memory-access": number}
    assert world.tables is not None
    assert world.tables.stable is not None
    assert not world.tables.stable.enabled
    assert sum(e.reason == "EngineFault" for e in world.events) == number
    assert sum(e.reason == "SpeculationOff" for e in world.events) == 1
    assert_steady(world)


@settings(max_examples=25)
@given(
    replicas=st.integers(2, 4),
    crashed=st.integers(1, 3),
    writes=st.lists(st.integers(0, 8), min_size=1, max_size=6),
)
def test_an_operator_killed_after_any_write_goes_on(
    replicas: int, crashed: int, writes: list[int]
) -> None:
    spec = build_spec(replicas=replicas)
    world = start(spec, gpus=replicas)
    crashed = min(crashed, replicas - 1)
    for pod in world.speculating()[:crashed]:
        world.crash(pod)
    for number in writes:
        world.reconcile(urgent=True, writes=number)
        world.step()
        assert world.ready()
        world.reconcile(writes=number)
    world.run(80, check=never_dark(world))
    assert_runs(world, without_speculation(spec))
    assert world.status.faults.counts == {"illegal-memory-access": crashed}
    assert len(world.status.quarantine) == 1
    assert_steady(world)


@settings(max_examples=15)
@given(kills=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=10))
def test_a_change_survives_killed_operators(kills: list[tuple[int, int]]) -> None:
    wish = build_spec(replicas=3, speculation=FULL)
    world = start(build_spec(replicas=3))
    world.edit(wish)
    for writes, steps in kills:
        world.reconcile(writes=writes)
        for _ in range(steps):
            world.step()
            assert world.ready()
    world.run(80, check=never_dark(world))
    assert_runs(world, wish)


ENDS = {
    "out of memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "device assert": "CUDA error: device-side assert triggered",
    "nothing said": "",
    "words about it": "ValueError: do not say illegal memory access",
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_of_another_kind_never_turns_speculation_off(end: str) -> None:
    spec = build_spec(replicas=2)
    world = start(spec)
    world.crash(world.ready()[0], ENDS[end])
    world.run(30, check=never_dark(world))
    assert_runs(world, spec)
    assert world.status.fall is None
    assert world.status.quarantine == []
    assert_steady(world)


def crashes_with(mode: str) -> Callable[[RevisionInputs], bool]:
    return lambda inputs: bool(
        inputs.speculation and inputs.speculation.cudagraph_mode.value == mode
    )


def test_a_canary_that_crashes_before_it_is_ready_is_taken_back() -> None:
    world = start(build_spec(replicas=2), gpus=2, crashes_at_start=crashes_with("FULL_DECODE_ONLY"))
    (stable,) = world.revisions
    world.edit(build_spec(replicas=2, speculation=FULL))
    world.run(60, check=never_dark(world))
    assert revisions_of(world) == {stable: 2}
    assert world.status.fall is None
    assert [q.fingerprint.cudagraph_mode for q in world.status.quarantine] == ["FULL_DECODE_ONLY"]
    assert all(with_arm(pod, "stable") for pod in world.alive())
    assert world.status.faults.last is not None
    assert world.status.faults.last.action == "RevertChange"
    assert_steady(world)


def test_a_canary_that_cannot_start_waits_beside_what_serves_and_is_reported() -> None:
    world = start(build_spec(replicas=2), ready_after=5)
    (stable,) = world.revisions
    world.edit(build_spec(replicas=2, engine={"extraArgs": ["--no-such-flag"]}))
    world.run(3)
    (canary,) = [pod for pod in world.alive() if pod.revision != stable]
    world.crash(canary, "vllm serve: error: unrecognized arguments: --no-such-flag")
    world.reconcile(urgent=True)
    assert world.status.faults.last is not None
    assert world.status.faults.last.action == "Report"
    assert condition(world, ConditionType.DEGRADED)[0] == "True"
    assert [pod.revision for pod in world.ready()] == [stable]


def test_a_canary_of_another_envelope_that_crashes_leaves_stable_untouched() -> None:
    """Its fingerprint is stable's own: quarantine does not tell envelopes apart."""
    world = start(
        build_spec(replicas=2),
        crashes_at_start=lambda inputs: inputs.engine.max_num_seqs == 32,
    )
    (stable,) = world.revisions
    world.edit(build_spec(replicas=2, engine={"maxNumSeqs": 32}))
    world.run(60, check=never_dark(world))
    assert revisions_of(world) == {stable: 2}
    assert world.status.fall is None
    assert_steady(world)


def test_a_canary_that_crashes_after_it_was_ready_takes_the_object_down_to_off() -> None:
    spec = build_spec(replicas=3)
    world = start(spec, gpus=3)
    world.edit(build_spec(replicas=3, speculation=FULL))
    (stable,) = world.revisions
    world.reconcile()
    while not (canary := [pod for pod in world.ready() if pod.revision != stable]):
        world.step()
    world.crash(canary[0])
    world.run(80, check=never_dark(world))
    assert_runs(world, without_speculation(spec))
    assert [q.fingerprint.cudagraph_mode for q in world.status.quarantine] == ["FULL_DECODE_ONLY"]
    assert_steady(world)


def test_a_quarantined_step_on_the_way_is_gone_round() -> None:
    """Only the step between crashes: graphs FULL_DECODE_ONLY on the old image."""
    world = start(
        build_spec(replicas=2),
        crashes_at_start=lambda inputs: (
            crashes_with("FULL_DECODE_ONLY")(inputs) and str(inputs.engine.image).endswith("0.33.0")
        ),
    )
    wish = build_spec(
        replicas=2, engine={"image": "registry/specdecode-vllm:0.33.1"}, speculation=FULL
    )
    world.edit(wish)
    world.run(120, check=never_dark(world))
    assert_runs(world, wish)
    assert world.status.faults.counts == {"illegal-memory-access": 1}


def test_a_first_start_that_crashes_goes_to_speculation_off() -> None:
    spec = build_spec(replicas=2)
    world = World(spec, gpus=2, crashes_at_start=lambda inputs: inputs.speculation is not None)
    world.reconcile()
    world.run(60)
    assert_runs(world, without_speculation(spec))
    assert_steady(world)


def test_an_edit_of_a_lever_ends_a_fall_through_a_canary() -> None:
    spec = build_spec(replicas=2)
    world = start(spec)
    crash_all_speculation(world)
    world.run(60)
    wish = build_spec(replicas=2, speculation=FULL)
    world.edit(wish)
    world.run(80, check=never_dark(world))
    assert_runs(world, wish)
    assert world.status.fall is None
    # Back to what crashed: it is not started again.
    world.edit(spec)
    world.run(80, check=never_dark(world))
    assert_runs(world, wish)


@settings(max_examples=15)
@given(at=st.integers(0, 10), valid=st.booleans(), crashed=st.integers(1, 2))
def test_an_edit_in_mid_fall_never_starts_what_crashed(at: int, valid: bool, crashed: int) -> None:
    spec = build_spec(replicas=3)
    world = start(spec, gpus=3)
    (guilty,) = world.revisions
    crash_all_speculation(world, crashed)
    world.run(at)
    most = world.revisions[guilty].replicas
    refused = {"engine": {"extraArgs": ["--speculative-config={}"]}}
    world.edit(build_spec(replicas=3, speculation=FULL, **({} if valid else refused)))

    def check() -> None:
        assert world.ready()
        assert world.revisions[guilty].replicas <= most
        assert all(with_arm(pod, "off") for pod in world.alive(guilty) if pod.annotations)

    world.run(80, check=check)
    assert_runs(
        world,
        build_spec(replicas=3, speculation=FULL) if valid else without_speculation(spec),
    )


SPECS_IN_MID_FALL: dict[str, Spec | InvalidSpec] = {
    "unreadable": InvalidSpec(("spec.model: must be set",)),
    "a kTable out of order": build_spec(
        replicas=3, speculation={"kTable": [{"minBatch": 1, "k": 7}, {"minBatch": 1, "k": 3}]}
    ),
    "paused": build_spec(replicas=3, rollout={"paused": True}),
    "no image": build_spec(replicas=3, engine={"image": None}),
    "answers switched off": build_spec(replicas=3, faults={"onIllegalMemoryAccess": "Report"}),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("edit", SPECS_IN_MID_FALL)
def test_a_fall_goes_on_whatever_the_spec_becomes(edit: str, before: bool) -> None:
    """Also where the spec was harmed before the crash: what serves is still protected."""
    spec = build_spec(replicas=3)
    world = start(spec, gpus=3)
    if before and edit == "answers switched off":
        pytest.skip("then there is no fall")
    if before:
        world.edit(SPECS_IN_MID_FALL[edit])
        world.run(5)
    crash_all_speculation(world)
    if not before:
        world.edit(SPECS_IN_MID_FALL[edit])
    world.run(80, check=never_dark(world))
    assert_runs(world, without_speculation(spec))
    world.edit(spec)
    world.run(30)
    assert_runs(world, without_speculation(spec))
    if not before:
        assert world.status.fall is not None, "an edit that was refused and undone is no release"
    assert_steady(world)


def test_an_unreadable_spec_changes_nothing_else() -> None:
    spec = build_spec(replicas=2, speculation={"kTable": [{"minBatch": 1, "k": 3}]})
    world = start(spec)
    tables = world.tables
    world.edit(InvalidSpec(("spec.model: must be set",)))
    world.run(20, check=never_dark(world))
    assert_runs(world, spec)
    assert world.tables == tables
    assert condition(world, ConditionType.DEGRADED) == ("True", Reason.INVALID_SPEC)
    assert_steady(world)


def test_scaled_to_zero_in_mid_fall_and_back() -> None:
    spec = build_spec(replicas=2)
    world = start(spec, gpus=2)
    crash_all_speculation(world)
    world.run(1)
    world.edit(build_spec(replicas=0))
    world.run(10)
    assert not world.alive()
    world.edit(spec)
    world.run(30)
    assert_runs(world, without_speculation(spec))


def test_speculation_removed_and_added_back_after_a_fall() -> None:
    spec = build_spec(replicas=2)
    world = start(spec)
    crash_all_speculation(world)
    world.run(60)
    for wish in (without_speculation(spec), spec):
        world.edit(wish)
        world.run(40, check=never_dark(world))
        assert_runs(world, without_speculation(spec))
    assert condition(world, ConditionType.SPECULATION_ENABLED)[1] == Reason.QUARANTINED
    assert_steady(world)


@settings(max_examples=15)
@given(at=st.integers(0, 8), fall=st.booleans())
def test_a_lost_status_is_made_anew(at: int, fall: bool) -> None:
    spec = build_spec(replicas=3)
    world = start(spec, gpus=3)
    if fall:
        crash_all_speculation(world)
    else:
        world.edit(spec := build_spec(replicas=3, speculation=FULL))
    world.run(at)
    world.status = Status()
    world.run(100, check=never_dark(world))
    pods = world.ready()
    assert len(pods) == len(world.alive()) == 3
    assert len({pod.revision for pod in pods}) == 1
    if not fall:
        assert_runs(world, spec)
    assert_steady(world)


def test_the_kill_switch_stays_on_a_pod_until_it_is_gone() -> None:
    world = start(build_spec(replicas=2), drains=30)
    crash_all_speculation(world)

    def check() -> None:
        old = [pod for pod in world.pods if world.revisions[pod.revision].inputs.speculation]
        assert all(pod.annotations[metadata.ANNOTATION_ARM] == "off" for pod in old)

    world.run(20, check=check)
    world.edit(build_spec(replicas=2, speculation={"numSpeculativeTokens": 7, **FULL}))
    old = [pod.name for pod in world.pods if pod.deleting]
    world.run(8)
    assert all(with_arm(pod, "off") for pod in world.pods if pod.name in old)


def test_engines_that_die_without_speculation_too_are_no_second_fall() -> None:
    spec = build_spec(replicas=2)
    world = start(spec)
    crash_all_speculation(world)
    world.run(60)
    world.crash(world.ready()[0])
    world.reconcile(urgent=True)
    assert condition(world, ConditionType.DEGRADED) == ("True", Reason.NOT_SPECULATION)
    world.run(30, check=never_dark(world))
    assert_runs(world, without_speculation(spec))
    assert world.status.faults.last is not None
    assert world.status.faults.last.action == "Report"
