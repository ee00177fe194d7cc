"""The operator as a process on the real API server: objects, changes, faults, deletion.

The pods are processes that answer /health (tests/support/health_server.py): this is about
Kubernetes, not about an engine. No node has a spare GPU: three pods on three nodes with one each.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import LocalCluster
from tests.support.engine import ROOT
from tests.support.objects import Objects
from tests.support.operator_process import OperatorProcess
from tests.support.prometheus import LocalPrometheus
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

IMAGE = "health:0.33.0"
NAME = "chat"
IMA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
SECONDS = 120
Json = dict[str, Any]


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    folder = tmp_path / "plant"
    folder.mkdir()
    return folder


@pytest.fixture
def objects(cluster: LocalCluster, namespace: str, plant: Path) -> Objects:
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(ROOT / "crds"))
    server = str(ROOT / "tests" / "support" / "health_server.py")
    cluster.set_image(IMAGE, [sys.executable, server], {"SPECDECODE_PLANT": str(plant)})
    cluster.set_image("health:9.9.9", [sys.executable, server])
    refuse = [sys.executable, server, "--fail-with", "vllm serve: error: unrecognized arguments"]
    cluster.set_image("refusing:0.33.0", refuse)
    return Objects(cluster, namespace)


def settings_for(objects: Objects, **more: str) -> dict[str, str]:
    return {
        "SPECDECODE_NAMESPACES": objects.namespace,
        "SPECDECODE_SCRAPE_INTERVAL": "1s",
        "SPECDECODE_CYCLE": "4s",
        **more,
    }


@pytest.fixture
def operator(objects: Objects, tmp_path: Path) -> Iterator[OperatorProcess]:
    settings = settings_for(objects)
    with OperatorProcess(tmp_path, objects.cluster.kubeconfig, settings) as running:
        yield running
        running.check_alive()


def build_spec(**changes: Any) -> Json:
    spec: Json = {
        "model": {"name": "org/model"},
        "replicas": 1,
        "engine": {"image": IMAGE, "maxNumSeqs": 64, "drainTimeout": "1s"},
        "speculation": {"method": "eagle3", "draftModel": "org/d", "numSpeculativeTokens": 7},
    }
    for name, value in changes.items():
        spec[name] = {**spec[name], **value} if isinstance(spec.get(name), dict) else value
    return spec


def owned(objects: Objects) -> str:
    return objects.cluster.kubectl(
        "get", "deploy,pods,svc,cm,pdb", "-n", objects.namespace,
        "-l", f"specdecode.io/deployment={NAME}", "-o", "name",
    ).strip()  # fmt: skip


def images(objects: Objects) -> set[tuple[str, bool]]:
    """Each pod's image, and whether it speculates."""
    found = set()
    for pod in objects.pods(NAME):
        container = pod["spec"]["containers"][0]
        on = any(a.startswith("--speculative-config") for a in container["args"])
        found.add((container["image"], on))
    return found


class ReadyFloor:
    """Notes the smallest number of Ready pods while it runs."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.least = 99

    def __enter__(self) -> ReadyFloor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            ready = sum(
                c["type"] == "Ready" and c["status"] == "True"
                for pod in self._objects.pods(NAME)
                for c in pod["status"].get("conditions", [])
            )
            self.least = min(self.least, ready)


def test_an_object_becomes_ready_scales_and_goes(
    objects: Objects, operator: OperatorProcess
) -> None:
    objects.apply(NAME, build_spec())
    kubectl = objects.cluster.kubectl
    kubectl(
        "wait", "--for=condition=Ready", "sdd", NAME, "-n", objects.namespace,
        f"--timeout={SECONDS}s",
    )  # fmt: skip
    kubectl("scale", "sdd", NAME, "--replicas=3", "-n", objects.namespace)
    objects.wait_status(NAME, lambda s: s.get("ready") == "3/3", what="3/3", seconds=SECONDS)
    shown = kubectl("get", "sdd", NAME, "-n", objects.namespace)
    assert shown.splitlines()[0].split() == [
        "NAME", "PHASE", "MODE", "TABLE", "AV", "GRAPHS", "TOK/S", "VS-OFF", "READY", "AGE",
    ]  # fmt: skip
    assert "Idle" in shown
    kinds = {line.partition("/")[0].partition(".")[0] for line in owned(objects).splitlines()}
    assert kinds == {"deployment", "pod", "service", "configmap", "poddisruptionbudget"}
    assert "finalizers" not in objects.read(NAME)["metadata"]
    assert "annotations" not in objects.read(NAME)["metadata"] or not any(
        "kopf" in key for key in objects.read(NAME)["metadata"]["annotations"]
    )
    kubectl("scale", "sdd", NAME, "--replicas=0", "-n", objects.namespace)
    objects.wait_status(NAME, lambda s: s.get("ready") == "0/0", what="0/0", seconds=SECONDS)
    kubectl("delete", "sdd", NAME, "-n", objects.namespace, "--timeout=20s")
    wait_until(lambda: not owned(objects), what="nothing left", seconds=SECONDS)


def test_what_somebody_edits_by_hand_is_repaired(
    objects: Objects, operator: OperatorProcess
) -> None:
    objects.apply(NAME, build_spec())
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    core = objects.core
    name = f"{NAME}-spec-tables"

    def read_table() -> Json:
        data = core.read_namespaced_config_map(name, objects.namespace).data
        table: Json = json.loads(data["stable.json"])
        return table

    right = read_table()
    edited = {**right, "rows": [[1, 64, 1]]}
    patch = {"data": {"stable.json": json.dumps(edited)}}
    core.patch_namespaced_config_map(name, objects.namespace, patch)
    repaired = wait_until(
        lambda: (t := read_table()) and t["rows"] == right["rows"] and t,
        what="the table repaired",
        seconds=30,
    )
    assert repaired["generation"] > right["generation"]
    core.patch_namespaced_config_map(name, objects.namespace, {"data": {"stable.json": "{torn"}})
    wait_until(
        lambda: (
            core.read_namespaced_config_map(name, objects.namespace)
            .data["stable.json"]
            .startswith('{"schema"')
        ),
        what="the torn file repaired",
        seconds=30,
    )
    core.delete_namespaced_config_map(name, objects.namespace)
    core.delete_namespaced_service(NAME, objects.namespace)
    wait_until(lambda: owned(objects).count("/") >= 5, what="all objects back", seconds=30)
    deployment = objects.apps.list_namespaced_deployment(objects.namespace).items[0].metadata.name
    objects.apps.patch_namespaced_deployment(
        deployment, objects.namespace, {"spec": {"replicas": 3}}
    )
    wait_until(
        lambda: (
            objects.apps.read_namespaced_deployment(deployment, objects.namespace).spec.replicas
            == 1
        ),
        what="replicas repaired",
        seconds=30,
    )


def test_two_edits_roll_one_change_at_a_time_without_an_outage(
    objects: Objects, operator: OperatorProcess
) -> None:
    objects.apply(NAME, build_spec(replicas=3))
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    with ReadyFloor(objects) as floor:
        objects.edit(
            NAME,
            {"engine": {"maxNumSeqs": 32}, "speculation": {"cudagraphMode": "FULL_DECODE_ONLY"}},
        )
        changes = []
        for _ in range(2):
            status = objects.wait_status(
                NAME,
                lambda s: (s.get("rollout") or {}).get("change") not in (None, *changes),
                what="the next change",
                seconds=SECONDS,
            )
            changes.append(status["rollout"]["change"])
        objects.wait_status(
            NAME, lambda s: s.get("phase") == "Idle", what="rolled out", seconds=SECONDS
        )
    assert changes == ["CudagraphMode", "Engine"]
    assert floor.least >= 1
    arguments = objects.pods(NAME)[0]["spec"]["containers"][0]["args"]
    assert "--max-num-seqs=32" in arguments


def test_an_illegal_memory_access_ends_in_speculation_off_without_an_outage(
    objects: Objects, operator: OperatorProcess, plant: Path
) -> None:
    objects.apply(NAME, build_spec(replicas=3))
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    victim = objects.pods(NAME)[0]["metadata"]["name"]
    with ReadyFloor(objects) as floor:
        (plant / victim).write_text(IMA)
        objects.wait_status(NAME, lambda s: s.get("fall"), what="the fall", seconds=SECONDS)
        (plant / victim).unlink()  # or its next boot dies of the same
        status = objects.wait_status(
            NAME, lambda s: s.get("phase") == "Quarantined", what="the end", seconds=SECONDS
        )
    assert floor.least >= 1
    assert images(objects) == {(IMAGE, False)}
    assert status["ready"] == "3/3"
    assert status["active"]["speculation"] == "Off"
    assert [entry["fingerprint"]["method"] for entry in status["quarantine"]] == ["eagle3"]
    assert list(status["faults"]["counts"]) == ["illegal-memory-access"]
    assert status["faults"]["last"]["line"] == IMA
    condition = objects.condition(NAME, "SpeculationEnabled")
    assert (condition["status"], condition["reason"]) == ("False", "Quarantined")
    events = objects.core.list_namespaced_event(objects.namespace).items
    reasons = {event.reason for event in events if event.involved_object.name == NAME}
    assert {"EngineFault", "Quarantined", "SpeculationOff"} <= reasons


def test_an_illegal_memory_access_that_only_the_log_tells_is_found(
    objects: Objects, operator: OperatorProcess, plant: Path
) -> None:
    objects.apply(NAME, build_spec())
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    (plant / objects.pods(NAME)[0]["metadata"]["name"]).write_text(f"log:{IMA}")
    status = objects.wait_status(
        NAME, lambda s: s.get("phase") == "Quarantined", what="the fall", seconds=SECONDS
    )
    assert status["faults"]["last"]["line"] == IMA


def test_any_other_end_is_reported_and_leaves_speculation_on(
    objects: Objects, operator: OperatorProcess, plant: Path
) -> None:
    objects.apply(NAME, build_spec(replicas=2))
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    victim = objects.pods(NAME)[0]["metadata"]["name"]
    (plant / victim).write_text("")
    status = objects.wait_status(
        NAME, lambda s: (s.get("faults") or {}).get("counts"), what="a fault", seconds=SECONDS
    )
    (plant / victim).unlink()
    assert status["faults"]["last"]["exitCode"] == 0
    assert status["faults"]["last"]["class"] == "engine-crash"
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    assert objects.status(NAME)["active"]["speculation"] == "On"
    assert images(objects) == {(IMAGE, True)}


STARTS_THAT_FAIL = {
    "no image is named": ({"engine": {"image": None}}, "ImageNotSet", "spec.engine.image"),
    "the image is not there": (
        {"engine": {"image": "nowhere:0.33.0"}}, "ImagePullFailed", "nowhere:0.33.0"),
    "the engine refuses its arguments": (
        {"engine": {"image": "refusing:0.33.0"}}, "EngineStartFailed", "unrecognized arguments"),
    "the overlay cannot be merged": (
        {"engine": {"podTemplate": {"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}}},
        "InvalidSpec", "podTemplate"),
}  # fmt: skip


@pytest.mark.parametrize("situation", STARTS_THAT_FAIL)
def test_a_start_that_fails_says_why(
    situation: str, objects: Objects, operator: OperatorProcess
) -> None:
    changes, reason, words = STARTS_THAT_FAIL[situation]
    objects.apply(NAME, build_spec(**changes))
    condition = objects.wait_condition(NAME, "Degraded", reason=reason, seconds=60)
    assert words in condition["message"]


def test_an_unknown_engine_version_gets_no_live_control(
    objects: Objects, operator: OperatorProcess
) -> None:
    objects.apply(NAME, build_spec(engine={"image": "health:9.9.9"}))
    condition = objects.wait_condition(
        NAME, "TableApplied", status="False", reason="UnknownEngineVersion", seconds=60
    )
    assert "9.9.9" in condition["message"]
    (pod,) = wait_until(lambda: objects.pods(NAME), what="the pod", seconds=30)
    arguments = " ".join(pod["spec"]["containers"][0]["args"])
    assert "num_speculative_tokens_per_batch_size" not in arguments


def test_a_killed_operator_goes_on_where_it_was(
    objects: Objects, operator: OperatorProcess, plant: Path
) -> None:
    objects.apply(NAME, build_spec(replicas=2))
    objects.wait_condition(NAME, "Ready", seconds=SECONDS)
    operator.kill()
    victim = objects.pods(NAME)[0]["metadata"]["name"]
    (plant / victim).write_text(IMA)
    wait_until(
        lambda: any(
            c.get("restartCount")
            for p in objects.pods(NAME)
            for c in p["status"]["containerStatuses"]
        ),
        what="a crash that nobody watches",
        seconds=60,
    )
    (plant / victim).unlink()
    operator.start()
    status = objects.wait_status(
        NAME, lambda s: s.get("phase") == "Quarantined", what="the fall", seconds=SECONDS
    )
    assert status["faults"]["counts"] == {"illegal-memory-access": 1}


def test_without_metrics_nothing_changes_and_the_condition_says_why(
    objects: Objects, tmp_path: Path
) -> None:
    spec = build_spec(tuning={"mode": "Auto"})
    kubeconfig = objects.cluster.kubeconfig
    with LocalPrometheus(tmp_path / "prometheus") as prometheus:
        settings = settings_for(objects, SPECDECODE_PROMETHEUS_URL=prometheus.url)
        with OperatorProcess(tmp_path, kubeconfig, settings):
            objects.apply(NAME, spec)
            objects.wait_condition(NAME, "Ready", seconds=SECONDS)
            objects.wait_condition(
                NAME, "MetricsAvailable", status="False", reason="NotScraped", seconds=60
            )
            table = objects.status(NAME)["active"]["table"]
            prometheus.stop()
            condition = objects.wait_condition(
                NAME, "MetricsAvailable", status="False", reason="PrometheusUnavailable", seconds=60
            )
    assert condition["message"]
    assert objects.status(NAME)["active"]["table"] == table == "7"


def test_kopf_run_serves_too(objects: Objects, tmp_path: Path) -> None:
    kopf = str(Path(sys.executable).parent / "kopf")
    command = [kopf, "run", "-m", "specdecode_operator.handlers", "-A"]
    with OperatorProcess(
        tmp_path, objects.cluster.kubeconfig, settings_for(objects), command=command
    ) as running:
        objects.apply(NAME, build_spec())
        objects.wait_condition(NAME, "Ready", seconds=SECONDS)
        running.check_alive()
