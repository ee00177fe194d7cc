"""`specdecode explain` on an object of a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.cli import main
from specdecode_operator.clients.kube import KubeClient
from specdecode_operator.clients.transport import Transport, load_configuration
from specdecode_operator.domain.observation import ObjectKey
from tests.support.cluster import LocalCluster

pytestmark = pytest.mark.integration

CRDS = Path(__file__).parents[2] / "crds"
SPEC = {
    "model": {"name": "org/model"},
    "speculation": {"method": "ngram", "numSpeculativeTokens": 5},
}
STATUS = {
    "phase": "Idle",
    "active": {"speculation": "On", "table": "5", "kTable": [[1, 8, 5]]},
    "tuning": {
        "cells": [
            {
                "batch": 8,
                "k": k,
                "tokensPerSecond": rate,
                "meanBatch": 7.0,
                "steps": 900,
                "measuredAt": datetime(2030, 1, 1, tzinfo=UTC).isoformat(),
            }
            for k, rate in ((1, 400.0), (5, 500.0))
        ]
    },
}


@pytest.fixture
def client(
    cluster: LocalCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubeClient]:
    cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    cluster.kubectl(
        "wait",
        "--for=condition=Established",
        f"crd/{metadata.PLURAL}.{metadata.GROUP}",
        "--timeout=30s",
    )
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    connection = Transport(load_configuration({"KUBECONFIG": str(cluster.kubeconfig)}))
    yield KubeClient(connection, namespaces=(namespace,))
    connection.close()


def test_an_object_is_explained(
    client: KubeClient, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = client.create(
        {
            "apiVersion": metadata.API_VERSION,
            "kind": metadata.KIND,
            "metadata": {"namespace": namespace, "name": "chat"},
            "spec": SPEC,
        }
    )
    client.apply_status(
        ObjectKey(namespace, "chat"),
        made["metadata"]["uid"],
        STATUS,
        resource_version=made["metadata"]["resourceVersion"],
    )
    assert main.main(["explain", "chat", "--namespace", namespace]) == 0
    assert "batch 5-8: K=5. Best of 2 measured here: K=1 is next, -20.0 %." in (
        capsys.readouterr().out
    )


def test_an_object_that_is_not_there_is_told(
    client: KubeClient, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["explain", "nobody", "--namespace", namespace]) == 1
    assert "there is no SpecDecodeDeployment nobody" in capsys.readouterr().err
