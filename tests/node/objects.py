"""Objects on the node as a test handles them: their engines' images, and one engine's pod."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import Any, Self

from kubernetes import client

from specdecode_operator.api import metadata
from tests.image.running_engine import Scrape
from tests.node.image import Image
from tests.support.cluster import ClusterError, LocalCluster
from tests.support.simulator import Simulator
from tests.support.stack import SimulatedImage, Stack, StackPaths
from tests.support.waiting import wait_until

Json = dict[str, Any]

PLANT = "/tmp/plant-illegal-memory-access"
# Longer than a liveness probe of the template would wait: 6 failures, 10 s apart.
SLOW_START_SECONDS = 70

SIMULATOR = Image("sim")
FAULTY = Image(
    "sim-faulty",
    scenario={
        "faults": [{"kind": "illegal-memory-access", "when": {"file": PLANT, "speculation": True}}]
    },
)
SLOW = Image("sim-slow", scenario={"slowStartSeconds": SLOW_START_SECONDS})
STUCK = Image("sim-stuck", scenario={"slowStartSeconds": 3600})
IMAGES = (SIMULATOR, FAULTY, SLOW, STUCK)


class NodeImage(SimulatedImage):
    """An image of the archive, which the node has from its start."""

    def __init__(self, image: Image, *, replicas: int = 2) -> None:
        super().__init__(Simulator(), replicas=replicas)
        self.image = image.reference

    def register(self, cluster: LocalCluster, paths: StackPaths) -> None:
        """Do nothing: images come with the node."""


def build_spec(image: Image, *, replicas: int, **engine: Any) -> Json:
    """Build a spec whose table is the user's: nothing moves but by a test."""
    spec = NodeImage(image, replicas=replicas).build_spec(k_table=[{"minBatch": 1, "k": 3}])
    spec["engine"] |= {"drainTimeout": "20s", **engine}
    spec["tuning"] = {"mode": "Off"}
    return spec


@dataclass(frozen=True)
class EnginePod:
    """One pod, reached as the operator and Prometheus reach it: at its own address."""

    stack: Stack
    name: str

    def read(self) -> Json:
        """Read the pod as plain JSON."""
        found = self.stack.objects.core.read_namespaced_pod(self.name, "default")
        plain: Json = self.stack.objects.api.sanitize_for_serialization(found)
        return plain

    @property
    def url(self) -> str:
        """The engine's address."""
        return f"http://{self.read()['status']['podIP']}:{metadata.ENGINE_PORT}"

    def container(self) -> Json:
        """Return the status of the engine's container."""
        status: Json = self.read()["status"]["containerStatuses"][0]
        return status

    def scrape(self) -> Scrape:
        """Look at /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            return Scrape(answer.read().decode())

    def gauge(self, name: str) -> float:
        """Return a gauge of the table, -1 while the engine does not answer."""
        try:
            return self.scrape().total(f"specdecode_table_{name}")
        except (OSError, KeyError):
            return -1.0

    def run(self, *command: str) -> str:
        """Run a command in the container."""
        return self.stack.cluster.kubectl("exec", self.name, "--", *command)

    def annotate(self, **annotations: str) -> None:
        """Merge annotations into the pod, `_` for `-` in names of ours."""
        named = {f"{metadata.GROUP}/{k.replace('_', '-')}": v for k, v in annotations.items()}
        body = {"metadata": {"annotations": named}}
        self.stack.objects.core.patch_namespaced_pod(self.name, "default", body)

    def annotation(self, name: str) -> str:
        """Return one of our annotations."""
        return str(self.read()["metadata"]["annotations"].get(name, ""))

    def complete(self, tokens: int) -> Completion:
        """Start a completion of exactly so many tokens."""
        return Completion(self.url, tokens)

    def evict(self, *, dry_run: bool = False) -> bool:
        """Ask for its eviction; False where the disruption budget refuses it."""
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=self.name, namespace="default"))
        try:
            self.stack.objects.core.create_namespaced_pod_eviction(
                self.name, "default", body, **({"dry_run": "All"} if dry_run else {})
            )
        except client.ApiException as error:
            if error.status != 429:
                raise
            return False
        return True

    def wait_restarted(self, times: int) -> Json:
        """Wait until the container runs again after so many ends; return its last end."""

        def look() -> Json | None:
            container = self.container()
            runs = container["restartCount"] >= times and "running" in container["state"]
            return container["lastState"]["terminated"] if runs else None

        return wait_until(look, what=f"restart {times} of {self.name}", seconds=60)

    def wait_ready(self, *, seconds: float = 60) -> None:
        """Wait until the container is Ready."""
        wait_until(lambda: self.container()["ready"], what=f"{self.name} Ready", seconds=seconds)


class Completion:
    """A streamed completion that runs in a thread."""

    def __init__(self, url: str, tokens: int) -> None:
        self.tokens = 0
        self.finish_reason: str | None = None
        self.ended_at: float | None = None
        self.error: Exception | None = None
        body = {"model": "chat", "prompt": "a b c", "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        self._request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=30) as answer:
                for line in answer:
                    self._take(line.decode().strip())
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()

    def _take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        chunk = json.loads(line.removeprefix("data: "))
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk.get("choices", []):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def wait(self, *, seconds: float = 60) -> Self:
        """Wait for its end, whatever it is."""
        self._thread.join(seconds)
        assert self.ended_at is not None, f"no end within {seconds:.0f} s"
        return self


def find_pods(stack: Stack, name: str) -> list[EnginePod]:
    """List an object's pods that are not being deleted."""
    return [
        EnginePod(stack, pod["metadata"]["name"])
        for pod in stack.objects.pods(name)
        if "deletionTimestamp" not in pod["metadata"]
    ]


def start(stack: Stack, name: str, spec: Json) -> None:
    """Apply an object; return at once."""
    stack.objects.apply(name, spec)


def wait_serving(stack: Stack, name: str, replicas: int) -> list[EnginePod]:
    """Wait until all pods are Ready with the table in force; return them."""
    stack.objects.wait_status(
        name,
        lambda s: s.get("ready") == f"{replicas}/{replicas}" and s.get("replicas") == replicas,
        what=f"{replicas} pods Ready",
        seconds=90,
    )
    stack.objects.wait_condition(name, "TableApplied", seconds=30)
    return find_pods(stack, name)


def delete(stack: Stack, name: str) -> None:
    """Delete an object and its pods at once."""
    pods = find_pods(stack, name)
    stack.cluster.kubectl("delete", "sdd", name)
    for pod in pods:
        try:
            stack.cluster.kubectl("delete", "pod", pod.name, "--force", "--grace-period=0")
        except ClusterError:
            continue  # gone already
