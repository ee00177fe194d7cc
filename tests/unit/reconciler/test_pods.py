"""What is read from a pod: which boot ended, whether it was Ready, why another does not start."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.domain.observation import ObservedPod
from specdecode_operator.reconciler import pods

Json = dict[str, Any]

CREATED, BOOT, READY, LOST, NEXT = (f"2026-11-30T12:0{minute}:00Z" for minute in range(5))


def observe(
    engine: Json | None = None, *, ready: Json | None = None, **changes: Any
) -> ObservedPod:
    conditions = [{"type": "Ready", **ready}] if ready else []
    containers = [{"name": "engine", **engine}] if engine else []
    status = {"conditions": conditions, "containerStatuses": containers}
    return pods.observe_pod(
        {
            "metadata": {
                "name": "p",
                "uid": "u",
                "creationTimestamp": CREATED,
                **changes.pop("metadata", {}),
            },
            "spec": {"nodeName": "node-1"},
            "status": {**status, **changes},
        }
    )


def end(message: str = "", **changes: Any) -> Json:
    fields = {"exitCode": 0, "reason": "Completed", "startedAt": BOOT, "finishedAt": LOST}
    return {"terminated": {**fields, "message": message, **changes}}


RUNNING = {"running": {"startedAt": NEXT}}
NEVER_READY = {"status": "False", "lastTransitionTime": CREATED}
NO_MORE_READY = {"status": "False", "lastTransitionTime": LOST}

# situation: (engine container, Ready condition, boot that ended, whether that boot was ever Ready)
ENDS: dict[str, tuple[Json, Json, int, bool]] = {
    "the first boot just ended": (
        {"restartCount": 0, "state": end()}, NO_MORE_READY, 0, True),
    "it waits for its restart": (
        {"restartCount": 0, "state": {"waiting": {}}, "lastState": end()}, NO_MORE_READY, 0, True),
    "the second boot runs": (
        {"restartCount": 1, "state": RUNNING, "lastState": end()}, NO_MORE_READY, 0, True),
    "it died before it was Ready": (
        {"restartCount": 0, "state": end()}, NEVER_READY, 0, False),
    "the boot before was Ready, this one never": (
        {"restartCount": 1, "state": end(startedAt=NEXT)}, NO_MORE_READY, 1, False),
}  # fmt: skip


@pytest.mark.parametrize("situation", ENDS)
def test_which_boot_ended(situation: str) -> None:
    engine, ready, boot, ever_ready = ENDS[situation]
    ended = observe(engine, ready=ready).termination
    assert ended is not None
    assert (ended.restart_count, ended.evidence.ever_ready) == (boot, ever_ready)


def test_a_pod_that_runs_for_the_first_time_has_no_end() -> None:
    pod = observe({"restartCount": 0, "state": {"running": {"startedAt": BOOT}}})
    assert pod.termination is None
    assert pod.container_running


def test_the_evidence_is_taken_whole() -> None:
    state = end("illegal memory access", exitCode=137, signal=9, reason="Error")
    pod = observe({"state": state}, reason="Evicted", metadata={"deletionTimestamp": LOST})
    assert pod.termination is not None
    evidence = pod.termination.evidence
    assert evidence.termination is not None
    assert evidence.termination.message == "illegal memory access"
    assert (evidence.termination.exit_code, evidence.termination.signal) == (137, 9)
    assert (evidence.pod_reason, evidence.deletion_requested) == ("Evicted", True)


def test_other_containers_do_not_count() -> None:
    sidecar = {"name": "proxy", "restartCount": 3, "state": end("illegal memory access")}
    assert observe(containerStatuses=[sidecar]).termination is None


def test_the_port_is_the_one_that_the_annotation_gives() -> None:
    annotations = {"annotations": {"prometheus.io/port": "20123"}}
    assert observe(podIP="10.0.0.7").metrics_address == "10.0.0.7:8000"
    assert observe(podIP="10.0.0.7", metadata=annotations).metrics_address == "10.0.0.7:20123"
    assert observe().metrics_address is None


def test_why_it_does_not_start_is_kept_in_the_words_of_who_says_so() -> None:
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    seen = observe(waiting).waiting
    assert seen is not None
    assert (seen.reason, seen.message) == ("ErrImagePull", "not found")
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    assert observe(conditions=[{**scheduled, "message": "no GPU"}]).unschedulable == "no GPU"


def test_a_pod_that_was_just_made_has_nothing_yet() -> None:
    bare = {"metadata": {"name": "p", "uid": "u", "creationTimestamp": CREATED}}
    pod = pods.observe_pod(bare)
    assert (pod.ready, pod.ever_ready, pod.node, pod.revision) == (False, False, "", "")
