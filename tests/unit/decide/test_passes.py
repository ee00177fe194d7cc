"""One whole pass: what a situation leads to, in which order, and what the status says of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import ActiveStatus, Condition, Spec, Status, TuningStatus
from specdecode_operator.decide import cycle
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.decision import (
    AnnotatePod,
    Decision,
    EnsureService,
    SetRevision,
    WriteTables,
)
from specdecode_operator.domain.evidence import Evidence, Termination
from specdecode_operator.domain.observation import (
    Acknowledgement,
    ContainerWaiting,
    InvalidSpec,
    MetricsAbsent,
    ObservedRevision,
    ObservedTables,
    ObservedTermination,
)
from specdecode_operator.domain.table import KTable, TableFile
from tests.support.builders import (
    NOT_ASKED,
    NOW,
    build_observation,
    build_pod,
    build_revision,
    build_spec,
)
from tests.support.samples import heartbeat, samples_of

CYCLE = timedelta(seconds=60)
IMA = "CUDA error: an illegal memory access was encountered"
TUNED = KTable.from_rows([[1, 64, 3]])


def decide(spec: Spec, **changes: Any) -> Decision:
    return cycle.decide(build_observation(spec, **changes), cycle=CYCLE)


def condition(decision: Decision, kind: str) -> Condition:
    return next(c for c in decision.status.conditions if c.type == kind)


def ended(message: str, *, exit_code: int = 0) -> ObservedTermination:
    end = Termination(exit_code, None, "Completed", message, NOW, NOW + timedelta(minutes=5))
    return ObservedTermination("engine", 1, Evidence(end, ever_ready=True))


def serving(spec: Spec, pods: int = 2) -> dict[str, Any]:
    """Build what is there when an object has tuned its table to K=3 and all its pods are Ready."""
    revision = build_revision(levers.inputs_of(spec), pods)
    users = levers.spec_table(spec.speculation, 64) if spec.speculation else TUNED
    return {
        "revisions": (revision,),
        "pods": tuple(build_pod(f"p{n}", revision.revision) for n in range(pods)),
        "tables": ObservedTables(TableFile(TUNED, 4, True, "in force"), None, 4, NOW),
        "status": Status(
            mode="Auto",
            active=ActiveStatus(revision=revision.revision),
            tuning=TuningStatus(rows=TUNED.to_rows(), spec_table=users.compact()),
        ),
        "now": NOW + timedelta(minutes=1),
    }


AUTO = build_spec(replicas=2, tuning={"mode": "Auto"})
SECONDS = NOW.timestamp() + 60


def scraped(*pods: str, until: float = SECONDS) -> Any:
    moments = [until - 20, until - 10, until]
    return samples_of(*(heartbeat(moments, pod=pod) for pod in pods))


WITHOUT_METRICS = {
    "Prometheus is down": (
        MetricsAbsent("PrometheusUnavailable", "connection refused"),
        "PrometheusUnavailable",
    ),
    "no Prometheus was named": (
        MetricsAbsent("PrometheusNotConfigured", "no address"),
        "PrometheusNotConfigured",
    ),
    "Prometheus is empty": (samples_of(), "NotScraped"),
    "other pods are scraped": (scraped("somebody"), "NotScraped"),
    "the samples are old": (scraped("p0", "p1", until=SECONDS - 300), "Stale"),
    "one pod of two is scraped": (scraped("p0"), "PartiallyScraped"),
}


@pytest.mark.parametrize("situation", WITHOUT_METRICS)
def test_without_sound_metrics_nothing_changes_and_the_condition_says_why(situation: str) -> None:
    metrics, reason = WITHOUT_METRICS[situation]
    decided = decide(AUTO, **serving(AUTO), metrics=metrics)
    told = condition(decided, "MetricsAvailable")
    assert (told.status, told.reason) == ("False", reason)
    assert decided.status.active.table == "3"
    assert not any(isinstance(action, WriteTables) for action in decided.actions)
    assert decided.status.tuning.rows == TUNED.to_rows()
    assert decided.events == ()


def test_sound_metrics_are_said_to_be_there() -> None:
    decided = decide(AUTO, **serving(AUTO), metrics=scraped("p0", "p1"))
    assert condition(decided, "MetricsAvailable").status == "True"


def test_an_urgent_pass_leaves_what_it_did_not_ask_for_as_it_was() -> None:
    there = serving(AUTO)
    before = decide(AUTO, **there, metrics=scraped("p0", "p1")).status
    after = decide(AUTO, **{**there, "status": before}, metrics=NOT_ASKED).status
    assert after == before


def test_the_first_pass_makes_the_service_the_revision_and_the_table() -> None:
    decided = decide(AUTO)
    kinds = [type(action) for action in decided.actions]
    assert kinds == [EnsureService, SetRevision]
    decided = decide(AUTO, metrics=MetricsAbsent("NoReadyPods", "no engine is there yet"))
    assert WriteTables in [type(action) for action in decided.actions]
    assert decided.status.phase == "Pending"


def crashing(spec: Spec, message: str, **changes: Any) -> Decision:
    there = serving(spec)
    first, second = there["pods"]
    there["pods"] = (
        build_pod(first.name, first.revision, ready=False, termination=ended(message)),
        second,
    )
    return decide(spec, **{**there, **changes})


def test_an_illegal_memory_access_switches_every_pod_off_before_anything_else() -> None:
    decided = crashing(AUTO, IMA)
    *annotated, written = decided.urgent
    assert {a.pod for a in annotated if isinstance(a, AnnotatePod)} == {"p0", "p1"}
    assert all(
        a.annotations["specdecode.io/arm"] == "off" for a in annotated if isinstance(a, AnnotatePod)
    )
    assert isinstance(written, WriteTables)
    assert not written.stable.enabled
    off = [
        a for a in decided.actions if isinstance(a, SetRevision) and a.inputs.speculation is None
    ]
    assert [a.replicas for a in off] == [1]  # the crashed pod's GPU, at once
    assert decided.status.phase == "Fault"
    assert [q.revision for q in decided.status.quarantine] == [decided.status.active.revision]
    assert [event.reason for event in decided.events] == [
        "EngineFault", "Quarantined", "SpeculationOff", "RollingOut",
    ]  # fmt: skip
    assert decided.faults == ("illegal-memory-access",)


def test_the_same_end_is_answered_once() -> None:
    first = crashing(AUTO, IMA)
    again = crashing(AUTO, IMA, status=first.status)
    assert again.status.faults.counts == {"illegal-memory-access": 1}
    assert again.faults == ()


def test_who_only_wants_a_report_keeps_speculation_on() -> None:
    spec = build_spec(
        replicas=2, tuning={"mode": "Auto"}, faults={"onIllegalMemoryAccess": "Report"}
    )
    decided = crashing(spec, IMA)
    assert decided.urgent == ()
    assert decided.status.fall is None
    assert decided.status.faults.counts == {"illegal-memory-access": 1}


OTHER_ENDS = {
    "exit 0 without a word": "",
    "out of GPU memory": '{"schema": 1, "cause": "gpu-out-of-memory", "line": "out of memory"}',
    "a bug of the engine": "AssertionError: seq_lens",
}


@pytest.mark.parametrize("situation", OTHER_ENDS)
def test_any_other_end_is_reported_and_never_turns_speculation_off(situation: str) -> None:
    decided = crashing(AUTO, OTHER_ENDS[situation])
    assert decided.urgent == ()
    assert decided.status.fall is None
    assert decided.status.quarantine == []
    assert decided.status.active.speculation == "On"
    assert sum(decided.status.faults.counts.values()) == 1
    assert condition(decided, "Degraded").reason == "EngineCrashed"
    assert [event.reason for event in decided.events] == ["EngineFault"]


def without_speculation(spec: Spec) -> ObservedRevision:
    inputs = levers.inputs_of(spec).model_copy(update={"speculation": None})
    return build_revision(inputs, 1)


def test_an_illegal_memory_access_without_speculation_is_said_not_to_be_its_fault() -> None:
    fallen = crashing(AUTO, IMA).status
    old = build_revision(levers.inputs_of(AUTO), 1)
    off = without_speculation(AUTO)
    pods = (
        build_pod("p1", old.revision, arm="off"),
        build_pod("q0", off.revision, ready=False, termination=ended(IMA)),
    )
    decided = decide(AUTO, status=fallen, revisions=(old, off), pods=pods)
    told = condition(decided, "Degraded")
    assert (told.status, told.reason) == ("True", "NotSpeculation")


WAITING = {
    "the image is not there": ("ErrImagePull", "not found", "ImagePullFailed"),
    "a Secret is missing": (
        "CreateContainerConfigError", 'secret "hf" not found', "EngineStartFailed"),
    "its program is missing": ("RunContainerError", "exec: vllm", "EngineStartFailed"),
}  # fmt: skip


@pytest.mark.parametrize("situation", WAITING)
def test_a_container_that_cannot_start_says_so_in_the_kubelets_words(situation: str) -> None:
    reason, message, expected = WAITING[situation]
    there = serving(AUTO, pods=1)
    (pod,) = there["pods"]
    waiting = ContainerWaiting(reason, message)
    there["pods"] = (
        build_pod(pod.name, pod.revision, ready=False, ever_ready=False, waiting=waiting),
    )
    told = condition(decide(AUTO, **there), "Degraded")
    assert (told.status, told.reason) == ("True", expected)
    assert message in told.message


UNTOUCHED = {
    "no image is named": (build_spec(engine={"image": None}), "ImageNotSet"),
    "a managed flag in another spelling": (
        build_spec(engine={"extraArgs": ["--max_num_seqs=4"]}), "InvalidSpec"),
}  # fmt: skip


@pytest.mark.parametrize("situation", UNTOUCHED)
def test_nothing_is_started_from_a_spec_that_is_refused(situation: str) -> None:
    spec, reason = UNTOUCHED[situation]
    decided = decide(spec)
    assert decided.actions == ()
    assert condition(decided, "Degraded").reason == reason
    assert condition(decided, "Ready").status == "False"


def test_a_spec_that_cannot_be_read_is_told_and_leaves_everything() -> None:
    seen = build_observation(InvalidSpec(("spec.model: give a model",)))  # type: ignore[arg-type]
    decided = cycle.decide(seen, cycle=CYCLE)
    assert (decided.urgent, decided.actions) == ((), ())
    assert "give a model" in condition(decided, "Degraded").message


def test_an_unknown_engine_version_gets_no_live_control() -> None:
    spec = build_spec(replicas=2, engine={"image": "r/vllm:9.9.9"}, tuning={"mode": "Auto"})
    decided = decide(spec, **serving(spec), metrics=scraped("p0", "p1"))
    for kind in ("TableApplied", "Tuned"):
        told = condition(decided, kind)
        assert (told.status, told.reason) == ("False", "UnknownEngineVersion")
    assert "9.9.9" in condition(decided, "TableApplied").message


def test_the_generation_wanted_and_the_one_in_force_are_told_apart() -> None:
    there = serving(AUTO)
    edited = TableFile(KTable.constant(1, 64), 9, True, "by hand")
    engine = Acknowledgement(4, 1, False, 0, True, True, "0.33.0", "eagle3", "FULL_AND_PIECEWISE")
    decided = decide(
        AUTO,
        **{**there, "tables": ObservedTables(edited, None, 9, NOW)},
        acknowledgements={"p0": engine, "p1": replace(engine, generation=3)},
        metrics=scraped("p0", "p1"),
    )
    assert decided.status.active.table_generation == 10
    assert decided.status.effective.table_generation == 3
    gone = decide(
        AUTO,
        **{**there, "tables": None, "status": decided.status},
        metrics=scraped("p0", "p1"),
    )
    (written,) = [action for action in gone.actions if isinstance(action, WriteTables)]
    assert written.stable.generation == 11
