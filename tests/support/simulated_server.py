"""The simulated engine as a process of a test: its files, its load, its metrics, its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.image.running_engine import RunningServer
from tests.support.simulator import Simulator


class SimulatedServer(RunningServer):
    """`specdecode-sim serve` with the arguments that follow `vllm serve` in a pod."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        port: int,
        scenario: Mapping[str, Any] | None = None,
        profile: str = "llama8b-a100",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        simulator = Simulator(profile=profile, scenario=scenario or {})
        super().__init__(
            folder,
            [*simulator.entrypoint(), *arguments],
            {**simulator.environment(folder), **(environment or {})},
            port=port,
        )
