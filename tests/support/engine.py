"""The real vLLM engine on the CPU: made once, then described as an image of the local cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANT_VARIABLE = "SPECDECODE_PLANT_IMA"


class EngineError(Exception):
    """The engine's environment could not be made; what it printed says why."""


@dataclass(frozen=True)
class ModelPair:
    """Paths of a target model and its drafter."""

    target: Path
    draft: Path


@dataclass(frozen=True)
class Engine:
    """Where the engine is, and which models there are: `high` and `low` acceptance."""

    entrypoint: Path
    python: Path
    models: dict[str, ModelPair]


def make_engine(*, with_plant: bool = False) -> Engine:
    """Return the engine, made first where needed (6 GB; progress on stderr).

    `with_plant` adds the test-only plugin whose worker fails once a planted file is there.
    """
    command = [sys.executable, str(ROOT / "vllm-image" / "engine" / "make-engine")]
    answer = subprocess.run(
        [*command, *(["--with-plant"] if with_plant else [])],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise EngineError("the engine could not be made, see above")
    made = json.loads(answer.stdout.splitlines()[-1])
    pairs = {
        name: ModelPair(Path(pair["target"]), Path(pair["draft"]))
        for name, pair in made["models"].items()
    }
    return Engine(Path(made["entrypoint"]), Path(made["venv"]) / "bin" / "python", pairs)
