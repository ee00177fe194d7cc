"""Which change of a pod is urgent, which can wait, which means nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.loop.pods import Urgency, compare, owner_name, to_record

Json = dict[str, Any]


def make_pod() -> Json:
    return {
        "metadata": {
            "namespace": "ns",
            "name": "chat-1",
            "labels": {metadata.LABEL_OBJECT: "chat"},
            "annotations": {metadata.ANNOTATION_ARM: "stable"},
        },
        "spec": {"nodeName": "node-1"},
        "status": {
            "podIP": "10.0.0.7",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {"name": "engine", "restartCount": 0, "state": {"running": {}}, "lastState": {}}
            ],
        },
    }


def engine(pod: Json) -> Json:
    status: Json = pod["status"]["containerStatuses"][0]
    return status


def end(pod: Json, identity: str = "cri://1", exit_code: int = 0) -> None:
    engine(pod)["state"] = {"terminated": {"containerID": identity, "exitCode": exit_code}}


def restart(pod: Json) -> None:
    status = engine(pod)
    status["lastState"], status["state"] = status["state"], {"running": {}}
    status["restartCount"] += 1


def crash_between_two_statuses(pod: Json) -> None:
    end(pod)
    restart(pod)


def lose_readiness(pod: Json) -> None:
    pod["status"]["conditions"][0]["status"] = "False"


def begin_deletion(pod: Json) -> None:
    pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"


def change_arm(pod: Json) -> None:
    pod["metadata"]["annotations"][metadata.ANNOTATION_ARM] = "off"


def beat_of_the_kubelet(pod: Json) -> None:
    pod["metadata"]["resourceVersion"] = "2"
    pod["status"]["conditions"][0]["lastProbeTime"] = "2030-01-01T00:00:00Z"


def finish_init(pod: Json) -> None:
    pod["status"]["initContainerStatuses"] = [
        {"name": "plugin", "state": {"terminated": {"containerID": "cri://9", "exitCode": 0}}}
    ]


def fail_init(pod: Json) -> None:
    finish_init(pod)
    pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] = 1


def count_restarts_without_their_end(pod: Json) -> None:
    engine(pod)["restartCount"] = 1


CHANGES: dict[str, tuple[Callable[[Json], None], Urgency]] = {
    "the engine ended, with exit code 0 too": (end, Urgency.NOW),
    "it crashed and runs again": (crash_between_two_statuses, Urgency.NOW),
    "restarts rose, the end is not shown": (count_restarts_without_their_end, Urgency.NOW),
    "an init container failed": (fail_init, Urgency.NOW),
    "an init container did its work": (finish_init, Urgency.SOON),
    "it is not ready any more": (lose_readiness, Urgency.SOON),
    "it is being deleted": (begin_deletion, Urgency.SOON),
    "its arm was changed": (change_arm, Urgency.SOON),
    "only its times moved": (beat_of_the_kubelet, Urgency.NONE),
}


@pytest.mark.parametrize("situation", CHANGES)
def test_a_change_of_a_pod(situation: str) -> None:
    change, urgency = CHANGES[situation]
    before, after = make_pod(), copy.deepcopy(make_pod())
    change(after)
    assert compare(to_record(before), to_record(after)) is urgency


def test_the_same_end_is_urgent_once() -> None:
    pod = make_pod()
    end(pod)
    ended = to_record(pod)
    restart(pod)
    assert compare(ended, to_record(pod)) is Urgency.SOON


def test_a_second_end_is_urgent_again() -> None:
    pod = make_pod()
    crash_between_two_statuses(pod)
    once = to_record(pod)
    end(pod, "cri://2")
    assert compare(once, to_record(pod)) is Urgency.NOW


def test_an_end_that_nobody_saw_is_found_at_start() -> None:
    pod = make_pod()
    assert compare(None, to_record(pod)) is Urgency.SOON
    crash_between_two_statuses(pod)
    assert compare(None, to_record(pod)) is Urgency.NOW


def test_a_pod_without_status_has_a_record() -> None:
    record = to_record({"metadata": {"name": "x", "namespace": "ns"}})
    assert record.ends == ()
    assert not record.ready


def test_a_pod_belongs_to_the_object_that_its_label_names() -> None:
    assert owner_name(make_pod()) == "chat"
    assert owner_name({"metadata": {}}) is None
