"""Two operators and one lease: one acts, and the other takes over when it dies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.loop.lease import EXPIRE_SECONDS, RENEW_SECONDS
from tests.support.cluster import LocalCluster
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

CRDS = Path(__file__).parents[2] / "crds"
START_SECONDS = 90
Start = Callable[[str], OperatorProcess]


@pytest.fixture
def start(tmp_path: Path, cluster: LocalCluster, namespace: str) -> Iterator[Start]:
    cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    with ExitStack() as stack:

        def start(identity: str) -> OperatorProcess:
            folder = tmp_path / identity
            folder.mkdir()
            settings = {
                "SPECDECODE_NAMESPACES": namespace,
                "SPECDECODE_LEASE": "on",
                "SPECDECODE_LEASE_NAMESPACE": namespace,
                "SPECDECODE_IDENTITY": identity,
            }
            return stack.enter_context(OperatorProcess(folder, cluster.kubeconfig, settings))

        yield start


def holder(cluster: LocalCluster, namespace: str) -> str:
    path = "jsonpath={.items[*].spec.holderIdentity}"
    return cluster.kubectl("get", "lease", "-n", namespace, "-o", path)


def apply_object(cluster: LocalCluster, namespace: str, name: str) -> None:
    manifest = {
        "apiVersion": metadata.API_VERSION,
        "kind": metadata.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"name": "org/model"}},
    }
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))


def wait_answered(cluster: LocalCluster, namespace: str, name: str, *, seconds: float) -> None:
    path = "jsonpath={.status.observedGeneration}"
    wait_until(
        lambda: cluster.kubectl("get", metadata.PLURAL, name, "-n", namespace, "-o", path),
        what=f"a status of {name}",
        seconds=seconds,
    )


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_the_second_takes_over_when_the_first_is(
    cluster: LocalCluster, namespace: str, start: Start, end: str
) -> None:
    first = start("one")
    first.wait_for_log("one holds the lease", seconds=START_SECONDS)
    second = start("two")
    second.wait_for_log("metrics and probes on port", seconds=START_SECONDS)
    apply_object(cluster, namespace, "before")
    wait_answered(cluster, namespace, "before", seconds=20)
    assert holder(cluster, namespace) == "one"
    assert "two holds the lease" not in second.log_path.read_text()

    wait_seconds = EXPIRE_SECONDS + 3 * RENEW_SECONDS
    if end == "killed":
        first.kill()
    else:
        first.stop()
        wait_seconds = 3 * RENEW_SECONDS
    apply_object(cluster, namespace, "after")
    wait_answered(cluster, namespace, "after", seconds=wait_seconds + 10)
    assert holder(cluster, namespace) == "two"
    second.check_alive()
