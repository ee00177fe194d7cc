"""What the plugin costs and how soon it acts: per step in vLLM's scheduler, and on a real engine.

`python -m tests.bench.plugin`, also a part of `make bench`. Printed as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.image.running_engine import K_MAX, START_TABLE, RunningEngine
from tests.support.engine import ROOT, Engine, make_engine

BATCHES = (64, 256)
CHANGES = 30
STREAMS = 8
STEP_COST = Path(__file__).with_name("step_cost.py")


def main() -> int:
    """Measure and print."""
    print(json.dumps(measure(), indent=2))
    return 0


def measure() -> dict[str, Any]:
    """Measure both, the engine last."""
    engine = make_engine()
    return {
        "stepCost": [measure_step_cost(engine, batch) for batch in BATCHES],
        "tableChange": measure_changes(engine),
    }


def measure_step_cost(engine: Engine, batch: int) -> dict[str, Any]:
    """Time vLLM's scheduler with and without the hooks, in turn."""
    pair = engine.models["high"]
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder) / "tables"
        metrics = Path(folder) / "metrics"
        tables.mkdir()
        metrics.mkdir()
        (tables / "stable.json").write_text(
            json.dumps({"schema": 1, "generation": 1, "enabled": True, "rows": [[1, 512, K_MAX]]})
        )
        answer = subprocess.run(
            [engine.python, STEP_COST, pair.target, pair.draft, str(batch)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "vllm-image" / "plugin"),
                "PROMETHEUS_MULTIPROC_DIR": str(metrics),
                "SPECDECODE_TABLES": str(tables),
                "SPECDECODE_ARM": str(Path(folder) / "arm"),
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def measure_changes(engine: Engine) -> dict[str, Any]:
    """Measure from the file's change until /metrics says it is in force, idle and under load."""
    pair = engine.models["high"]
    config = {
        "method": "draft_model",
        "model": str(pair.draft),
        "num_speculative_tokens": K_MAX,
        "num_speculative_tokens_per_batch_size": START_TABLE,
    }
    with tempfile.TemporaryDirectory() as folder:
        running = RunningEngine(
            engine,
            Path(folder) / "engine",
            f"--speculative-config={json.dumps(config)}",
            model=pair.target,
        )
        try:
            running.wait_until_ready()
            idle = [running.apply([[1, 64, (1, 7)[n % 2]]]) for n in range(CHANGES)]
            with running.load(STREAMS):
                loaded = [running.apply([[1, 64, (1, 7)[n % 2]]]) for n in range(CHANGES)]
                seen = running.observe(200)
        finally:
            running.stop()
    step_seconds = seen.total("specdecode_step_seconds_total")
    return {
        "changes": CHANGES,
        "idle": _summarise(idle),
        f"at{STREAMS}Streams": _summarise(loaded),
        "millisecondsPerStep": round(1e3 * step_seconds / seen.total("specdecode_steps_total"), 2),
    }


def _summarise(seconds: list[float]) -> dict[str, float]:
    return {"medianSeconds": round(median(seconds), 3), "maxSeconds": round(max(seconds), 3)}


if __name__ == "__main__":
    sys.exit(main())
