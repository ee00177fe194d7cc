"""The simulated engine as an image of the local cluster: GPU-like, ready in seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

COMMAND = Path(sys.executable).parent / "specdecode-sim"


@dataclass(frozen=True)
class Simulator:
    """How pods of the image behave.

    `scenario` is the content of a scenario file, `time_scale` how many times slower than the
    profile everything runs.
    """

    profile: str = "llama8b-a100"
    scenario: Mapping[str, Any] = field(default_factory=dict)
    time_scale: float = 1.0

    name = "specdecode-sim 0.33.0"

    def entrypoint(self) -> list[str]:
        """Return the command of the image, before a pod's arguments."""
        return [str(COMMAND), "serve"]

    def environment(self, directory: Path) -> dict[str, str]:
        """Return the image's environment; the scenario is written into `directory`."""
        scenario = directory / "scenario.yaml"
        scenario.write_text(yaml.safe_dump(dict(self.scenario)))
        return {
            "SPECDECODE_SIM_PROFILE": self.profile,
            "SPECDECODE_SIM_SCENARIO": str(scenario),
            "SPECDECODE_SIM_TIME_SCALE": str(self.time_scale),
        }
