"""The operator as a process beside a real API server: what it notices, and what it leaves alone."""

from __future__ import annotations

import json
import re
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator.api import metadata
from tests.support.cluster import LocalCluster
from tests.support.operator_process import OperatorProcess
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

CRDS = Path(__file__).parents[2] / "crds"
START_SECONDS = 90
Json = dict[str, Any]


class Watched:
    """An operator of one namespace, seen through its own port."""

    def __init__(self, process: OperatorProcess, cluster: LocalCluster, namespace: str) -> None:
        self.process, self.cluster, self.namespace = process, cluster, namespace

    def wait_started(self) -> None:
        self.process.wait_for_log("metrics and probes on port", seconds=START_SECONDS)

    def get(self, path: str) -> str:
        log = self.process.log_path.read_text()
        port = re.findall(r"metrics and probes on port (\d+)", log)[-1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            text: str = reply.read().decode()
        return text

    def metric(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def passes(self, lane: str) -> float:
        return self.metric("specdecode_operator_passes_total", lane=lane)

    def expect_passes(
        self, lane: str, change: Callable[[], object], *, seconds: float = 20
    ) -> None:
        """Make a change and wait for a pass that was not there before."""
        before = self.passes(lane)
        change()
        wait_until(
            lambda: self.passes(lane) > before,
            what=f"a pass of the {lane} lane",
            seconds=seconds,
            pause_seconds=0.02,
        )

    def kubectl(self, *arguments: str, stdin: Json | None = None) -> str:
        text = None if stdin is None else json.dumps(stdin)
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=text)

    def read(self, kind: str, name: str) -> Json:
        found: Json = json.loads(
            self.kubectl("get", kind, name, "-o", "json", "--show-managed-fields")
        )
        return found

    def apply_object(self, name: str = "chat", **spec: Any) -> None:
        manifest = {
            "apiVersion": metadata.API_VERSION,
            "kind": metadata.KIND,
            "metadata": {"name": name},
            "spec": {"model": {"name": "org/model"}, **spec},
        }
        self.kubectl("apply", "--server-side", "-f", "-", stdin=manifest)

    def apply_pod(self, name: str, labels: dict[str, str]) -> None:
        """Create a pod that no node takes; the test plays its kubelet."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "nodeSelector": {"no": "such-node"},
                "containers": [{"name": "engine", "image": "none"}],
            },
        }
        self.kubectl("apply", "--server-side", "-f", "-", stdin=manifest)

    def end_container(self, pod: str, identity: str) -> None:
        status = {
            "name": "engine",
            "image": "none",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": {"terminated": {"exitCode": 0, "containerID": f"test://{identity}"}},
        }
        patch = json.dumps({"status": {"containerStatuses": [status]}})
        self.kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "--patch", patch)


def wait_watching(watched: Watched) -> None:
    """Wait until the operator has seen an object of its namespace."""
    watched.wait_started()
    watched.apply_object("first")
    wait_until(
        lambda: watched.passes("full") >= 1, what="the first full pass", seconds=START_SECONDS
    )


@pytest.fixture(scope="module")
def served(cluster: LocalCluster, core: Any) -> Iterator[str]:
    """A namespace for all tests of this module, with the resource installed."""
    cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    name = f"handlers-{uuid.uuid4().hex[:6]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)


@pytest.fixture(scope="module")
def proxy(cluster: LocalCluster) -> Iterator[TcpProxy]:
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
    server = urlsplit(kubeconfig["clusters"][0]["cluster"]["server"])
    if server.hostname != "127.0.0.1" or server.port is None:
        pytest.skip("the way to this API server cannot be cut")
    with TcpProxy(server.hostname, server.port) as running:
        yield running


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory,
    cluster: LocalCluster,
    served: str,
    proxy: TcpProxy,
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("operator")
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    settings = {"SPECDECODE_NAMESPACES": served}
    with OperatorProcess(folder, path, settings) as process:
        watched = Watched(process, cluster, served)
        wait_watching(watched)
        yield watched


def owned(name: str) -> dict[str, str]:
    return {metadata.LABEL_OBJECT: name}


def test_an_object_is_noticed_when_its_spec_changes(operator: Watched) -> None:
    operator.expect_passes("full", lambda: operator.apply_object("edited"))
    operator.expect_passes("full", lambda: operator.apply_object("edited", replicas=2))


def test_an_ended_container_is_answered_by_an_urgent_pass(operator: Watched) -> None:
    operator.apply_object("crashing")
    operator.expect_passes("full", lambda: operator.apply_pod("crash-1", owned("crashing")))
    operator.expect_passes("urgent", lambda: operator.end_container("crash-1", "1"))
    operator.expect_passes("urgent", lambda: operator.end_container("crash-1", "2"))


def test_pods_of_others_are_not_even_watched(operator: Watched) -> None:
    operator.apply_object("busy")
    operator.apply_pod("stranger", {"app": "other"})
    operator.apply_pod("own", owned("busy"))
    before = operator.passes("urgent")
    operator.end_container("stranger", "1")
    operator.expect_passes("urgent", lambda: operator.end_container("own", "1"))
    assert operator.passes("urgent") == before + 1


def test_nothing_of_kopf_is_left_on_objects_and_pods(operator: Watched) -> None:
    operator.apply_object("clean")
    operator.expect_passes("full", lambda: operator.apply_pod("clean-1", owned("clean")))
    operator.expect_passes("urgent", lambda: operator.end_container("clean-1", "1"))
    wait_until(
        lambda: operator.read(metadata.PLURAL, "clean").get("status"), what="status", seconds=20
    )
    for found in (operator.read(metadata.PLURAL, "clean"), operator.read("pod", "clean-1")):
        meta = found["metadata"]
        assert "finalizers" not in meta
        assert "kopf" not in json.dumps(meta)
        assert not [m for m in meta["managedFields"] if "kopf" in m["manager"]]


def test_a_deleted_object_goes_at_once(operator: Watched) -> None:
    operator.apply_object("leaving")
    operator.kubectl("delete", metadata.PLURAL, "leaving", "--timeout=10s")


def test_its_own_status_writes_wake_nobody(operator: Watched) -> None:
    operator.expect_passes("full", lambda: operator.apply_object("calm"))
    wait_until(
        lambda: operator.read(metadata.PLURAL, "calm").get("status"), what="status", seconds=20
    )
    patch = json.dumps({"status": {"replicas": 7}})
    before = operator.read(metadata.PLURAL, "calm")["metadata"]["resourceVersion"]
    operator.kubectl(
        "patch", metadata.PLURAL, "calm", "--subresource=status", "--type=merge", "--patch", patch
    )
    written = operator.read(metadata.PLURAL, "calm")
    assert written["metadata"]["resourceVersion"] != before
    # A later event of the same watch proves that the one before it has been through.
    operator.expect_passes("full", lambda: operator.apply_object("after-calm"))
    assert operator.read(metadata.PLURAL, "calm")["status"]["replicas"] == 7


def test_the_probe_is_well(operator: Watched) -> None:
    assert operator.get("/healthz") == "ok\n"
    assert operator.metric("specdecode_operator_leader") == 1


def test_a_crash_during_an_outage_is_noticed_after_it(operator: Watched, proxy: TcpProxy) -> None:
    operator.apply_object("outage")
    operator.expect_passes("full", lambda: operator.apply_pod("outage-1", owned("outage")))
    before = operator.passes("urgent")
    proxy.cut()
    try:
        operator.end_container("outage-1", "1")
    finally:
        proxy.mend()
    wait_until(lambda: operator.passes("urgent") > before, what="an urgent pass", seconds=10)
    operator.process.check_alive()


def test_a_connection_gone_silent_is_noticed(operator: Watched, proxy: TcpProxy) -> None:
    operator.apply_object("silent")
    operator.expect_passes("full", lambda: operator.apply_pod("silent-1", owned("silent")))
    proxy.silence()
    operator.expect_passes("urgent", lambda: operator.end_container("silent-1", "1"), seconds=30)


def test_a_crash_while_no_operator_ran_is_urgent_at_start(operator: Watched) -> None:
    operator.apply_object("missed")
    operator.expect_passes("full", lambda: operator.apply_pod("missed-1", owned("missed")))
    operator.process.kill()
    operator.end_container("missed-1", "1")
    operator.process.log_path.write_text("")
    operator.process.start()
    operator.wait_started()
    wait_until(lambda: operator.passes("urgent") >= 1, what="an urgent pass", seconds=20)
