"""What only a real kubelet shows: mounts, restarts, termination messages, probes, evictions.

One stack; the tests run in their order and each leaves the objects as it found them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from kubernetes import watch

from specdecode_operator.api import metadata
from specdecode_operator.manifests.pod import PRE_STOP_SECONDS
from tests.node import figures
from tests.node.objects import (
    FAULTY,
    PLANT,
    SIMULATOR,
    SLOW,
    SLOW_START_SECONDS,
    STUCK,
    EnginePod,
    build_spec,
    delete,
    find_pods,
    wait_serving,
)
from tests.node.slow_watch import SlowWatch
from tests.support.cluster import ClusterError
from tests.support.objects import reason_of
from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.node, pytest.mark.timeout(240)]

Json = dict[str, Any]

EDITS = 10
IN_FORCE_SECONDS = 3.0
# Beyond this a kubelet would have looked by itself.
KUBELET_LOOKS_SECONDS = 60.0
OFF = 2  # the arm as the metrics number it
# Memory of a file without a name: counted for the container, and for none of its processes.
EAT_MEMORY = """
import os
file = os.memfd_create("eaten")
while True:
    os.write(file, bytes(1 << 20))
"""


@pytest.fixture(scope="module", autouse=True)
def slow_starts(stack: Stack) -> None:
    """Engines that start slowly do so beside the other tests."""
    stack.objects.apply("slow", build_spec(SLOW, replicas=1, startupTimeout="2m"))
    stack.objects.apply("stuck", build_spec(STUCK, replicas=1, startupTimeout="10s"))


@pytest.fixture(scope="module")
def chat(stack: Stack) -> Iterator[str]:
    """An object that serves from two pods."""
    stack.objects.apply("chat", build_spec(SIMULATOR, replicas=2))
    wait_serving(stack, "chat", 2)
    yield "chat"
    delete(stack, "chat")


@pytest.fixture(scope="module")
def faulty(stack: Stack) -> Iterator[str]:
    """Two engines that meet an illegal memory access where a file is; which is reported only."""
    spec = build_spec(FAULTY, replicas=2)
    spec["faults"] = {"onIllegalMemoryAccess": "Report"}
    stack.objects.apply("faulty", spec)
    wait_serving(stack, "faulty", 2)
    yield "faulty"
    delete(stack, "faulty")


def set_k(stack: Stack, name: str, k: int) -> None:
    stack.objects.edit(name, {"speculation": {"kTable": [{"minBatch": 1, "k": k}]}})


def wait_on_each(pods: list[EnginePod], holds: Callable[[EnginePod], bool], *, what: str) -> float:
    """Wait until something holds for each pod; return when the last was first seen so."""
    left = list(pods)

    def look() -> bool:
        left[:] = [pod for pod in left if not holds(pod)]
        return not left

    wait_until(look, what=what, seconds=90, pause_seconds=0.02)
    return time.time()


def read_written_at(stack: Stack, name: str) -> float:
    found = stack.objects.core.read_namespaced_config_map(metadata.tables_name(name), "default")
    return datetime.fromisoformat(
        found.metadata.annotations[metadata.ANNOTATION_WRITTEN_AT]
    ).timestamp()


def change_table(stack: Stack, name: str, k: int) -> float:
    """Change K; return the seconds from the operator's write until it is in force on each pod."""
    pods = find_pods(stack, name)
    before = max(pod.gauge("generation") for pod in pods)
    set_k(stack, name, k)
    at = wait_on_each(pods, lambda p: p.gauge("generation") > before, what=f"K={k} in force")
    return at - read_written_at(stack, name)


def test_a_written_table_is_in_force_on_each_pod_within_three_seconds(
    stack: Stack, chat: str
) -> None:
    seconds = [change_table(stack, chat, (1, 5)[number % 2]) for number in range(EDITS)]
    figures.record_seconds("write-to-in-force", seconds)
    assert max(seconds) <= IN_FORCE_SECONDS
    stack.objects.wait_condition(chat, "TableApplied", seconds=10)


def test_k_drafted_is_what_the_table_says(stack: Stack, chat: str) -> None:
    pod = find_pods(stack, chat)[0]
    for k in (2, 7):
        change_table(stack, chat, k)
        before = pod.scrape().total("specdecode_steps_total", k=k)
        pod.complete(50).wait()
        assert pod.scrape().total("specdecode_steps_total", k=k) > before


def test_arm_off_stops_drafting_and_is_taken_back(stack: Stack, chat: str) -> None:
    pod = find_pods(stack, chat)[0]
    stack.operator.stop()  # it would take the arm back at once
    started = time.time()
    pod.annotate(arm="off")
    off_at = wait_on_each([pod], lambda p: p.gauge("arm") == OFF, what="the kill switch")
    figures.record("arm-off", seconds=off_at - started)
    assert pod.gauge("enabled") == 0
    pod.complete(20).wait()
    steps = pod.scrape().by_label("specdecode_steps_total", "k", arm=OFF)
    assert {k for k, count in steps.items() if count} == {"0"}
    stack.operator.start()
    wait_on_each([pod], lambda p: p.gauge("arm") == 0, what="the stable arm again")
    assert pod.gauge("enabled") == 1
    assert off_at - started <= IN_FORCE_SECONDS


def test_a_bump_that_came_before_the_table_is_repeated(stack: Stack, chat: str) -> None:
    server = json.loads((stack.cluster.directory / "cluster.json").read_text())["server"]
    with SlowWatch(server, stack.cluster.directory / "pki") as way:
        stack.cluster.start_kubelet(server=way.url)  # type: ignore[attr-defined]
        way.delay_seconds = 2.0
        try:
            seconds = change_table(stack, chat, 3)
        finally:
            stack.cluster.start_kubelet()  # type: ignore[attr-defined]
    figures.record("repeated-bump", seconds=seconds)
    assert way.delay_seconds <= seconds < KUBELET_LOOKS_SECONDS
    for pod in find_pods(stack, chat):
        bumps = int(pod.annotation(metadata.ANNOTATION_TABLE_BUMP).rpartition(".")[2])
        assert bumps > 1  # the first came before the kubelet knew the table


def test_an_engine_that_dies_with_exit_code_0_says_why(stack: Stack, faulty: str) -> None:
    pod = find_pods(stack, faulty)[0]
    pod.run("touch", PLANT)
    pod.complete(10).wait()
    ended = pod.wait_restarted(1)
    pod.run("rm", PLANT)
    assert ended["exitCode"] == 0
    message = json.loads(ended["message"])
    assert message["cause"] == "illegal-memory-access"
    assert "illegal memory access was encountered" in message["line"]
    status = stack.objects.wait_status(
        faulty, lambda s: (s.get("faults") or {}).get("last"), what="the fault", seconds=20
    )
    assert status["faults"]["counts"] == {"illegal-memory-access": 1}
    assert status["faults"]["last"]["exitCode"] == 0
    assert status["faults"]["last"]["pod"] == pod.name
    pod.wait_ready()


def test_samples_of_a_dead_engine_do_not_outlive_it(stack: Stack, faulty: str) -> None:
    pod = find_pods(stack, faulty)[1]
    pod.complete(50).wait()
    tokens = pod.scrape().total("vllm:generation_tokens_total")
    folder = pod.run("sh", "-c", "echo /tmp/specdecode-metrics-*").strip()
    written = pod.run("ls", folder).split()
    assert any(name.startswith("counter") for name in written)
    pod.run("touch", f"{folder}/counter_99.db", PLANT)
    pod.complete(10).wait()
    pod.wait_restarted(1)
    pod.run("rm", PLANT)
    pod.wait_ready()
    assert tokens >= 50
    assert pod.scrape().total("vllm:generation_tokens_total") == 0
    assert "counter_99.db" not in pod.run("ls", folder).split()
    assert pod.gauge("enabled") == 1


def test_a_fault_switches_every_pod_off_and_falls_to_speculation_off(
    stack: Stack, faulty: str
) -> None:
    stack.objects.edit(faulty, {"faults": {"onIllegalMemoryAccess": "SpecOff"}})
    wait_serving(stack, faulty, 2)
    victim, other = find_pods(stack, faulty)
    victim.run("touch", PLANT)
    started = time.time()
    victim.complete(10).wait()
    off_at = wait_on_each([other], lambda p: p.gauge("arm") == OFF, what="the kill switch")
    figures.record("fault-to-kill-switch", seconds=off_at - started)
    status = stack.objects.wait_status(
        faulty, lambda s: s.get("phase") == "Quarantined", what="speculation off", seconds=90
    )
    assert status["active"]["speculation"] == "Off"
    assert status["ready"] == "2/2"


def test_an_out_of_memory_kill_is_reported_as_one_and_never_falls(stack: Stack) -> None:
    spec = build_spec(SIMULATOR, replicas=1, resources={"limits": {"memory": "768Mi"}})
    stack.objects.apply("small", spec)
    (pod,) = wait_serving(stack, "small", 1)
    with pytest.raises(ClusterError):
        pod.run("python3", "-c", EAT_MEMORY)
    ended = pod.wait_restarted(1)
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    stack.objects.wait_status(
        "small",
        lambda s: s["faults"]["counts"] == {"oom-killed": 1},
        what="the class of the end",
        seconds=20,
    )
    pod.wait_ready()
    wait_serving(stack, "small", 1)
    status = stack.objects.status("small")
    assert reason_of(status, "SpeculationEnabled") == "Speculating"
    assert "fall" not in status
    assert pod.gauge("enabled") == 1
    delete(stack, "small")


def test_an_evicted_pod_finishes_its_requests_and_the_budget_holds_the_other(
    stack: Stack, chat: str
) -> None:
    first, second = wait_serving(stack, chat, 2)
    started = time.monotonic()
    first.complete(500).wait()
    tokens_per_second = 500 / (time.monotonic() - started)
    wanted = int(tokens_per_second * (PRE_STOP_SECONDS + 5))
    completion = first.complete(wanted)
    version = stack.objects.core.list_namespaced_pod("default").metadata.resource_version
    evicted_at = time.monotonic()
    assert first.evict()
    assert not second.evict()
    completion.wait()
    assert (completion.error, completion.finish_reason) == (None, "length")
    assert completion.tokens == wanted
    assert completion.ended_at is not None
    assert completion.ended_at - evicted_at > PRE_STOP_SECONDS
    assert find_exit_codes(stack, first, since=version) == {0}
    wait_serving(stack, chat, 2)
    wait_until(lambda: second.evict(dry_run=True), what="the budget free again", seconds=20)


def find_exit_codes(stack: Stack, pod: EnginePod, *, since: str) -> set[int]:
    """Follow a pod to its end; return the exit codes that its container was seen with."""
    codes = set()
    for event in watch.Watch().stream(
        stack.objects.core.list_namespaced_pod,
        "default",
        field_selector=f"metadata.name={pod.name}",
        resource_version=since,
        timeout_seconds=60,
    ):
        for container in event["raw_object"]["status"].get("containerStatuses", []):
            if ended := container["state"].get("terminated"):
                codes.add(ended["exitCode"])
        if event["type"] == "DELETED":
            break
    return codes


def test_a_start_longer_than_any_liveness_probe_is_waited_for(stack: Stack) -> None:
    (pod,) = wait_serving(stack, "slow", 1)
    container, read = pod.container(), pod.read()
    ready = next(c for c in read["status"]["conditions"] if c["type"] == "Ready")
    waited = parse(ready["lastTransitionTime"]) - parse(container["state"]["running"]["startedAt"])
    assert container["restartCount"] == 0
    assert waited >= SLOW_START_SECONDS
    delete(stack, "slow")


def test_a_start_longer_than_its_time_out_is_ended_and_told(stack: Stack) -> None:
    condition = stack.objects.wait_condition("stuck", "Degraded", seconds=60)
    assert condition["reason"] == "EngineStartFailed"
    status = stack.objects.status("stuck")
    assert set(status["faults"]["counts"]) == {"probe-killed"}
    assert "fall" not in status
    delete(stack, "stuck")


def parse(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
