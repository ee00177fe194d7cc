"""The plugin injected into an image that knows nothing of it, left out, and brought back.

The image's `vllm` answers /health and tells how it was started; what the plugin does in a real vLLM
that it was injected into is shown end to end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.carrier import lay_carrier
from tests.support.cluster import LocalCluster
from tests.support.engine import ROOT
from tests.support.objects import Objects, reason_of
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STOCK = "vllm/vllm-openai:v0.33.0"
CARRIER = "specdecode-operator:test"
NAME = "stock"
SECONDS = 120
TABLE = [{"minBatch": 1, "k": 7}, {"minBatch": 17, "k": 4}]
OTHER = [{"minBatch": 1, "k": 4}]
# As the official image's command: `vllm serve ARGUMENTS`.
VLLM = """#!/bin/sh
echo "vllm $*"
echo "PYTHONPATH=$PYTHONPATH"
shift
exec {python} {server} "$@"
"""


@pytest.fixture
def objects(cluster: LocalCluster, namespace: str, tmp_path: Path) -> Objects:
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(ROOT / "crds"))
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    server = ROOT / "tests" / "support" / "health_server.py"
    vllm.write_text(VLLM.format(python=sys.executable, server=server))
    vllm.chmod(0o755)
    cluster.set_image(STOCK, ["vllm", "serve"], {"PATH": f"{vllm.parent}:/usr/bin:/bin"})
    cluster.set_image(CARRIER, ["false"], lay_carrier(tmp_path / "carrier"))
    return Objects(cluster, namespace)


@pytest.fixture
def operator(objects: Objects, tmp_path: Path) -> Iterator[OperatorProcess]:
    settings = {
        "SPECDECODE_NAMESPACES": objects.namespace,
        "SPECDECODE_SCRAPE_INTERVAL": "1s",
        "SPECDECODE_CYCLE": "4s",
        "SPECDECODE_PLUGIN_IMAGE": CARRIER,
    }
    with OperatorProcess(tmp_path, objects.cluster.kubeconfig, settings) as running:
        yield running
        running.check_alive()


def build_spec(**engine: Any) -> dict[str, Any]:
    return {
        "model": {"name": "org/model"},
        "engine": {"image": STOCK, "maxNumSeqs": 64, "drainTimeout": "1s", **engine},
        "rollout": {"allowDowntime": True},
        "speculation": {
            "method": "eagle3",
            "draftModel": "org/d",
            "numSpeculativeTokens": 7,
            "kTable": TABLE,
        },
    }


def pod_of(objects: Objects) -> dict[str, Any]:
    (pod,) = [p for p in objects.pods(NAME) if not p["metadata"].get("deletionTimestamp")]
    return pod


def log_of(objects: Objects) -> str:
    pod = pod_of(objects)["metadata"]["name"]
    return objects.cluster.kubectl("logs", pod, "-c", "engine", "-n", objects.namespace)


def wait_revision(objects: Objects, before: str, **seen: str) -> dict[str, Any]:
    """Wait until another revision serves, with these reasons of conditions."""
    return objects.wait_status(
        NAME,
        lambda s: (
            s.get("ready") == "1/1"
            and s["active"].get("revision", before) != before
            and all(reason_of(s, kind) == reason for kind, reason in seen.items())
        ),
        what=f"another revision than {before or 'none'}",
        seconds=SECONDS,
    )


def test_the_plugin_is_injected_left_out_and_brought_back(
    objects: Objects, operator: OperatorProcess
) -> None:
    objects.apply(NAME, build_spec())
    status = wait_revision(objects, "")
    (init,) = pod_of(objects)["status"]["initContainerStatuses"]
    assert init["state"]["terminated"]["exitCode"] == 0
    log = wait_until(lambda: log_of(objects), what="the engine's log", seconds=30)
    assert log.startswith("vllm serve org/model ")
    assert "--scheduler-cls=specdecode_vllm.scheduler.make_scheduler" in log
    site = Path(log.partition("PYTHONPATH=")[2].split()[0])
    assert (site / "specdecode_vllm" / "plugin.py").is_file()

    objects.edit(NAME, {"engine": {"plugin": "None"}})
    told = {"TableApplied": "NotLive", "MetricsAvailable": "NoPlugin"}
    status = wait_revision(objects, status["active"]["revision"], **told)
    assert status["active"]["table"] == "7x16,4"
    log = wait_until(lambda: log_of(objects), what="the engine's log", seconds=30)
    assert "[[1,16,7],[17,64,4]]" in log
    assert "scheduler-cls" not in log
    assert "PYTHONPATH=\n" in log
    events = objects.cluster.kubectl(
        "get", "events", "-n", objects.namespace, "--field-selector=reason=WithoutPlugin"
    )
    assert "no kill switch" in events

    objects.edit(NAME, {"speculation": {"kTable": OTHER}})
    status = wait_revision(objects, status["active"]["revision"], **told)
    assert status["active"]["table"] == "4"

    objects.edit(NAME, {"engine": {"plugin": "Inject"}})
    wait_revision(objects, status["active"]["revision"], MetricsAvailable="PrometheusNotConfigured")
    assert pod_of(objects)["status"]["initContainerStatuses"]


def test_what_is_known_to_crash_is_refused_and_nothing_starts(
    objects: Objects, operator: OperatorProcess
) -> None:
    spec = build_spec()
    spec["speculation"] |= {"adaptiveVerification": "Enabled"}
    objects.apply(NAME, spec)
    objects.wait_status(
        NAME, lambda s: reason_of(s, "Degraded") == "InvalidSpec", what="the refusal"
    )
    message = objects.condition(NAME, "Degraded")["message"]
    assert message.count("is not known to survive adaptive verification") == 1
    assert objects.pods(NAME) == []
    objects.edit(NAME, {"speculation": {"cudagraphMode": "FULL_DECODE_ONLY"}})
    wait_revision(objects, "")
