"""All parts at once, each a process of its own: cluster, Prometheus, engine image, operator."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.cluster import LocalCluster
from tests.support.engine import PLANT_VARIABLE, ROOT, Engine, make_engine
from tests.support.objects import Objects
from tests.support.operator_process import OperatorProcess
from tests.support.prometheus import LocalPrometheus

IMAGE = "specdecode-vllm-cpu:0.32.0"
SCRAPE_INTERVAL = "2s"
CYCLE = "8s"


@dataclass(frozen=True)
class StackPaths:
    """Files of a running stack."""

    directory: Path

    @property
    def plant(self) -> Path:
        """When this file is there, the engine's worker meets an illegal memory access."""
        return self.directory / "plant-illegal-memory-access"


class Stack:
    """Start everything but the load; stop exactly what was started."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.paths = StackPaths(directory)
        self._exits = contextlib.ExitStack()
        self.engine: Engine
        self.cluster: LocalCluster
        self.prometheus: LocalPrometheus
        self.operator: OperatorProcess
        self.objects: Objects

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            self._start(exits)
            self._exits = exits.pop_all()
        return self

    def _start(self, exits: contextlib.ExitStack) -> None:
        self.engine = make_engine(with_plant=True)
        directory = self.paths.directory
        shutil.rmtree(directory / "cluster", ignore_errors=True)
        self.paths.plant.unlink(missing_ok=True)
        self.cluster = exits.enter_context(LocalCluster(directory / "cluster"))
        self.cluster.set_image(
            IMAGE,
            [str(self.engine.entrypoint)],
            {
                PLANT_VARIABLE: str(self.paths.plant),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # vLLM would bind a thread to each core, one of which all else shares here: its
                # threads then wait for the one that was pushed aside, and figures swing by 40 %.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
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

    def build_spec(self, pair: str, *, k_table: list[dict[str, int]]) -> dict[str, Any]:
        """Build the spec of an object that serves one of the model pairs."""
        models = self.engine.models[pair]
        return {
            "model": {
                "name": str(models.target),
                "servedName": "chat",
                "maxModelLen": 1024,
            },
            "replicas": 1,
            "engine": {
                "image": IMAGE,
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
