"""The demo's course, shorter, on the real engine: each part a process of its own."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.domain.table import KTable
from tests.demo.course import NAME, Course, Plan, Report, Stage
from tests.support.engine import ROOT
from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

PLAN = Plan(loads=(1, 32), fixed=(1, 7), rounds=1, converge_seconds=420)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    # Not below /tmp: pods have a volume there, which would hide the planted file from them.
    with Stack(ROOT / ".build" / "e2e") as running:
        yield running
        running.operator.check_alive()


@pytest.fixture(scope="module")
def report(stack: Stack) -> Report:
    course = Course(stack, PLAN)
    course.run(when_ready=lambda: tear_table(stack))
    course.report.write(ROOT / ".build" / "e2e.json")
    return course.report


def tear_table(stack: Stack) -> None:
    """Tear a table file by hand: the engine keeps the one in force and says so; it is repaired."""
    core, namespace = stack.objects.core, stack.objects.namespace
    pod = stack.objects.pods(NAME)[0]["metadata"]
    url = f"http://127.0.0.1:{pod['annotations'][metadata.ANNOTATION_SCRAPE_PORT]}/metrics"
    before = read_gauges(url)
    core.patch_namespaced_config_map(
        metadata.tables_name(NAME), namespace, {"data": {"stable.json": '{"schema": 1, "gen'}}
    )
    bump = {"metadata": {"annotations": {metadata.ANNOTATION_TABLE_BUMP: "by hand"}}}
    core.patch_namespaced_pod(pod["name"], namespace, bump)
    torn = wait_until(lambda: (g := read_gauges(url))["stale"] == 1 and g, what="stale", seconds=20)
    assert torn["fingerprint"] == before["fingerprint"]
    repaired = wait_until(
        lambda: (g := read_gauges(url))["stale"] == 0 and g, what="repaired", seconds=60
    )
    assert repaired["fingerprint"] == before["fingerprint"]
    assert repaired["generation"] > before["generation"]


def read_gauges(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    found = re.findall(r"^specdecode_table_(\w+)(?:{.*})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_k_moved_live_at_each_load_and_no_engine_restarted(report: Report) -> None:
    # Which K is best is a figure of speed, and noise decides between neighbours (benchmarks).
    for stage in report.stages:
        assert len(stage.tried) >= 2, (stage.streams, stage.tried)
    one, many = (KTable.from_rows(_rows(stage)) for stage in report.stages)
    assert one.k_at(1) >= many.k_at(32), (one.compact(), many.compact())
    assert report.engine_restarts == 0


def _rows(stage: Stage) -> list[list[int]]:
    starts = [(row["minBatch"], row["k"]) for row in stage.rows]
    return KTable.from_starts(starts, 64).to_rows()


def test_the_load_was_served_without_errors(report: Report) -> None:
    assert report.requests is not None
    assert report.requests > 100
    assert report.errors == 0


def test_tuned_and_fixed_k_were_measured_at_each_load(report: Report) -> None:
    # How they compare is a figure of speed: `make demo`, docs/benchmarks.md.
    for stage in report.stages:
        assert stage.tuned
        assert all(stage.fixed[k] > 0 for k in PLAN.fixed)


def test_the_fault_was_answered(report: Report) -> None:
    assert report.kill_switch_seconds is not None
    assert report.first_spec_off_pod_seconds is not None
    assert report.recovered_seconds is not None
    assert all(value > 0 for value in report.off.values())


def test_the_end_state_says_what_happened(report: Report, stack: Stack) -> None:
    status = stack.objects.status(NAME)
    assert status["phase"] == "Quarantined"
    assert status["faults"]["counts"] == {"illegal-memory-access": 1}
    assert "illegal memory access" in status["faults"]["last"]["line"]
    described = stack.cluster.kubectl("describe", "sdd", NAME)
    for reason in ("EngineFault", "Quarantined", "SpeculationOff", "RollingOut"):
        assert reason in described


def test_a_model_that_does_not_load_is_told_in_the_engines_own_words(
    report: Report, stack: Stack
) -> None:
    spec = stack.build_spec(k_table=[{"minBatch": 1, "k": 3}])
    spec["model"]["name"] = "/no/such/model"
    stack.objects.apply("broken", spec)
    pod = wait_until(lambda: stack.objects.pods("broken"), what="its pod", seconds=60)[0]
    wait_until(
        lambda: stack.objects.pods("broken")[0]["status"]["containerStatuses"][0]["restartCount"],
        what="its engine's end",
        seconds=300,
    )
    condition = stack.objects.wait_condition("broken", "Degraded", seconds=60)
    assert condition["reason"] == "EngineStartFailed"
    assert pod["metadata"]["name"] in condition["message"]
    assert "/no/such/model" in condition["message"]
    stack.cluster.kubectl("delete", "sdd", "broken")
