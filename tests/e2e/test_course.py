"""The demo's course, shorter, on the real engine: each part a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.demo.course import NAME, Course, Plan, Report
from tests.support.engine import ROOT
from tests.support.stack import Stack

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
    course.run()
    course.report.write(ROOT / ".build" / "e2e.json")
    return course.report


def test_the_table_moved_with_the_load_and_no_engine_restarted(report: Report) -> None:
    tables = [stage.table for stage in report.stages]
    assert len(set(tables)) == 2, tables
    assert report.engine_restarts == 0


def test_the_load_was_served_without_errors(report: Report) -> None:
    assert report.requests > 100
    assert report.errors == 0


def test_the_best_k_depends_on_the_load_and_the_tuner_found_it(report: Report) -> None:
    one, many = report.stages
    assert one.fixed[7] > one.fixed[1]
    assert many.fixed[1] > many.fixed[7]
    # One short block each on a busy machine: a wide margin; the figures are in the benchmarks.
    for streams, ratio in report.ratios().items():
        assert ratio > 0.8, (streams, ratio)


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
