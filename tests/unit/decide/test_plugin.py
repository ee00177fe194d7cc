"""An object whose engines run without the plugin: what works, what is lost, and that it is told."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.conditions import ConditionType, find_condition
from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.decision import EventType
from tests.support.builders import build_spec
from tests.support.world import World

TABLE = [{"minBatch": 1, "k": 7}, {"minBatch": 17, "k": 3}]
OTHER = [{"minBatch": 1, "k": 3}]


def a_spec(plugin: str | None = "None", **changes: Any) -> Spec:
    """An object in mode Auto, which would tune if it could."""
    engine = {"image": "vllm/vllm-openai:v0.33.0", "plugin": plugin}
    speculation = {"kTable": TABLE, **changes.pop("speculation", {})}
    given = {"tuning": {"mode": "Auto"}, "replicas": 2, **changes}
    return build_spec(engine=engine, speculation=speculation, **given)


def start(spec: Spec) -> World:
    world = World(spec)
    world.reconcile()
    world.run(20)
    assert len(world.ready()) == spec.replicas
    return world


def told(world: World, kind: ConditionType) -> tuple[str, str, str]:
    found = find_condition(world.status.conditions, kind)
    assert found is not None
    return found.status, found.reason, found.message


def revisions(world: World) -> set[str]:
    return {pod.revision for pod in world.alive()}


def test_what_is_lost_is_told_by_conditions_and_once_by_an_event() -> None:
    world = start(a_spec())
    status, reason, message = told(world, ConditionType.TABLE_APPLIED)
    assert (status, reason) == ("False", "NotLive")
    for lost in ("no live control", "no kill switch", "nothing is measured", "restarts the pods"):
        assert lost in message
    assert told(world, ConditionType.METRICS_AVAILABLE)[:2] == ("False", "NoPlugin")
    assert told(world, ConditionType.TUNED)[:2] == ("False", "NotLive")
    (event,) = [event for event in world.events if event.reason == "WithoutPlugin"]
    assert event.type is EventType.WARNING
    assert "no kill switch" in event.message


def test_the_table_that_vllm_runs_is_shown() -> None:
    world = start(a_spec())
    assert world.status.active.table == "7x16,3"
    assert "table 7x16,3" in told(world, ConditionType.SPECULATION_ENABLED)[2]


def test_without_a_table_and_where_the_version_takes_none_k_max_is_shown() -> None:
    assert start(a_spec(speculation={"kTable": []})).status.active.table == "7"
    unknown = a_spec().model_copy(
        update={"engine": a_spec().engine.model_copy(update={"version": "0.40.0"})}
    )
    world = start(unknown)
    assert world.status.active.table == "7"
    assert "is given no kTable" in told(world, ConditionType.TABLE_APPLIED)[2]


def test_no_pod_is_given_an_arm_that_nobody_reads() -> None:
    world = start(a_spec())
    assert all("specdecode.io/table-generation" not in pod.annotations for pod in world.pods)


def test_an_edit_of_the_table_is_a_change_with_a_restart() -> None:
    world = start(a_spec())
    before = revisions(world)
    world.edit(a_spec(speculation={"kTable": OTHER}))
    world.run(60)
    assert len(revisions(world)) == 1
    assert revisions(world) != before
    assert world.status.active.table == "3"
    assert any(event.message.startswith("KTable: revision") for event in world.events)


def test_with_the_plugin_an_edit_of_the_table_restarts_nothing() -> None:
    world = start(a_spec(plugin="Inject"))
    before = revisions(world)
    world.edit(a_spec(plugin="Inject", speculation={"kTable": OTHER}))
    world.run(60)
    assert revisions(world) == before


def test_the_plugin_comes_and_goes_in_one_restart_with_the_table() -> None:
    world = start(a_spec(plugin="Inject"))
    for plugin in ("None", "Inject"):
        there = set(world.revisions)
        spec = a_spec(plugin=plugin)
        world.edit(spec)
        world.run(60)
        assert [world.revisions[r].inputs for r in revisions(world)] == [levers.inputs_of(spec)]
        assert len(set(world.revisions) - there) <= 1


def test_speculation_without_the_plugin_starts_by_single_changes() -> None:
    world = start(a_spec(plugin="Inject").model_copy(update={"speculation": None}))
    spec = a_spec()
    world.edit(spec)
    world.run(120)
    assert [world.revisions[r].inputs for r in revisions(world)] == [levers.inputs_of(spec)]
    assert world.status.active.table == "7x16,3"


def test_a_memory_fault_goes_straight_to_speculation_off() -> None:
    world = start(a_spec())
    world.crash(world.speculating()[0])
    world.reconcile(urgent=True)
    message = told(world, ConditionType.SPECULATION_ENABLED)[2]
    assert "no kill switch here; speculation off is rolling out" in message
    world.run(60)
    assert not world.speculating()
