"""A vLLM environment that knows nothing of this project: the plugin injected, then left out.

That the image carries the plugin is what every other end-to-end test does.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api import metadata
from tests.support.carrier import lay_carrier
from tests.support.cluster import LocalCluster
from tests.support.engine import ROOT
from tests.support.objects import Objects, reason_of
from tests.support.operator_process import OperatorProcess
from tests.support.stack import RealImage
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

STOCK = "vllm-cpu:0.32.0"
CARRIER = "specdecode-operator:test"
NAME = "stock"
START_SECONDS = 900
# The first table is written live; the second is what vLLM alone follows.
LIVE = [{"minBatch": 1, "k": 5}, {"minBatch": 9, "k": 1}]
FIXED = [{"minBatch": 1, "k": 3}, {"minBatch": 9, "k": 1}]


@dataclass(frozen=True)
class Place:
    """The cluster with the object, and the engine's environment as it was found."""

    objects: Objects
    venv: Path

    def status(self) -> dict[str, Any]:
        return self.objects.status(NAME)

    def pod(self) -> dict[str, Any]:
        (pod,) = [p for p in self.objects.pods(NAME) if not p["metadata"].get("deletionTimestamp")]
        return pod

    def url(self) -> str:
        annotations = self.pod()["metadata"]["annotations"]
        return f"http://127.0.0.1:{annotations[metadata.ANNOTATION_SCRAPE_PORT]}"

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url()}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def draft(self) -> float:
        """Send one request; return the mean K that it was drafted with."""
        before = self._drafted()
        body = {
            "model": "chat",
            "prompt": "a",
            "max_tokens": 120,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url()}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        drafts, tokens = (a - b for a, b in zip(self._drafted(), before, strict=True))
        return tokens / drafts

    def _drafted(self) -> tuple[float, float]:
        names = ("num_drafts", "num_draft_tokens")
        text = self.metrics()
        found = [
            re.findall(rf"^vllm:spec_decode_{name}_total\S* (\S+)$", text, re.M) for name in names
        ]
        drafts, tokens = (sum(map(float, values)) for values in found)
        return drafts, tokens


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = ROOT / ".build" / "e2e-plugin"
    shutil.rmtree(folder, ignore_errors=True)
    made = json.loads(
        subprocess.run(
            [ROOT / "vllm-image" / "engine" / "make-engine"], stdout=subprocess.PIPE, check=True
        ).stdout
    )
    venv = Path(made["venv"])
    carrier = lay_carrier(folder / "carrier")
    with LocalCluster(folder / "cluster") as cluster:
        cluster.set_image(CARRIER, ["false"], carrier)
        cluster.set_image(
            STOCK,
            ["vllm", "serve"],
            {
                "PATH": f"{venv}/bin:/usr/bin:/bin",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
        cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        cluster.kubectl("wait", "--for=condition=Established", "-f", str(ROOT / "crds"))
        settings = {
            "SPECDECODE_PLUGIN_IMAGE": CARRIER,
            "SPECDECODE_CYCLE": "8s",
            "SPECDECODE_SCRAPE_INTERVAL": "2s",
        }
        with OperatorProcess(folder, cluster.kubeconfig, settings) as operator:
            objects = Objects(cluster)
            spec = RealImage().build_spec(k_table=FIXED)
            spec["engine"]["image"] = STOCK
            spec["engine"]["startupTimeout"] = "15m"
            spec["rollout"]["allowDowntime"] = True
            objects.apply(NAME, spec)
            yield Place(objects, venv)
            operator.check_alive()


def test_the_environment_itself_has_no_plugin(place: Place) -> None:
    asked = [place.venv / "bin" / "python", "-c", "import specdecode_vllm"]
    assert subprocess.run(asked, capture_output=True, check=False).returncode != 0


def test_injected_the_table_is_live(place: Place) -> None:
    place.objects.wait_status(
        NAME,
        lambda s: reason_of(s, "TableApplied") == "Applied",
        what="the table on the engine",
        seconds=START_SECONDS,
    )
    pod = place.pod()
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    assert "specdecode_plugin_info{" in place.metrics()
    assert place.draft() == pytest.approx(3, abs=0.3)
    place.objects.edit(NAME, {"speculation": {"kTable": LIVE}})
    place.objects.wait_status(
        NAME, lambda s: s["active"]["table"] == "5x8,1", what="the other table", seconds=30
    )
    wait_until(lambda: place.draft() > 4.5, what="K=5 at one request", seconds=60)
    assert place.pod()["metadata"]["uid"] == pod["metadata"]["uid"]


def test_left_out_vllm_follows_the_users_table_and_what_is_lost_is_told(place: Place) -> None:
    place.objects.edit(NAME, {"engine": {"plugin": "None"}, "speculation": {"kTable": FIXED}})
    status = place.objects.wait_status(
        NAME,
        lambda s: reason_of(s, "TableApplied") == "NotLive" and s["ready"] == "1/1",
        what="the engine without the plugin",
        seconds=START_SECONDS,
    )
    assert reason_of(status, "MetricsAvailable") == "NoPlugin"
    assert status["active"]["table"] == "3x8,1"
    assert place.pod()["spec"].get("initContainers") is None
    assert "specdecode_" not in place.metrics()
    assert place.draft() == pytest.approx(3, abs=0.3)
    described = place.objects.cluster.kubectl("describe", "sdd", NAME)
    assert re.search(r"Warning\s+WithoutPlugin.*no kill switch", described)
