"""`python -m tests.bench.simulator`: scenario minutes a second and core, in both fidelities.

Each repeat runs every cell in each fidelity, one after the other, so that a slow moment of the
machine falls on all. Time is the process's own CPU time; recording a cell, which the fidelity
"by block" does once, is told apart. Printed as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from specdecode_sim import block, profile, virtual

PROFILE = "llama8b-a100"
K_MAX = 7
ROWS = [(1, 256, 3)]
STREAMS = (1, 8, 64, 256)
LENGTHS = virtual.Lengths(64, 192, 64, 192)
REPEATS = 7
BLOCK_SECONDS = 15.0
BLOCKS = {"step by step": 8, "by block": 200}


def main() -> int:
    """Measure, print, and fail below 10 and 1,000 scenario minutes a second and core."""
    made = profile.load_profile(PROFILE)
    tapes = block.Tapes(made, k_max=K_MAX, lengths=LENGTHS)
    stepwise = virtual.VirtualEngine(made, k_max=K_MAX, lengths=LENGTHS)
    engines: dict[str, Any] = {"step by step": stepwise, "by block": block.BlockEngine(tapes)}
    for engine in engines.values():
        engine.run(ROWS, streams=2, seconds=1.0)  # compiles
    recording = {
        str(streams): measure_cpu(lambda n=streams: tapes.get((tuple(ROWS), n, 100)))
        for streams in STREAMS
    }
    speeds: dict[str, dict[str, list[float]]] = {
        fidelity: {str(streams): [] for streams in STREAMS} for fidelity in engines
    }
    for _ in range(REPEATS):
        for streams in STREAMS:
            for fidelity, engine in engines.items():
                speeds[fidelity][str(streams)].append(measure_speed(engine, fidelity, streams))
    figures = {
        "profile": PROFILE,
        "table": ROWS,
        "blockSeconds": BLOCK_SECONDS,
        "unit": "scenario minutes per second and core, by streams",
        "stepByStep": summarize(speeds["step by step"]),
        "byBlock": summarize(speeds["by block"]),
        "recordingSeconds": {streams: round(took, 3) for streams, took in recording.items()},
    }
    print(json.dumps(figures, indent=2))
    slowest = {name: min(map(median, cells.values())) for name, cells in speeds.items()}
    return 0 if slowest["step by step"] >= 10 and slowest["by block"] >= 1000 else 1


def measure_cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    before = time.process_time()
    work()
    return time.process_time() - before


def measure_speed(engine: Any, fidelity: str, streams: int) -> float:
    """Return scenario minutes per CPU second, once the requests of other cells have ended."""
    engine.run(ROWS, streams=streams, seconds=BLOCK_SECONDS)
    before = engine.now_seconds

    def run() -> None:
        for _ in range(BLOCKS[fidelity]):
            engine.run(ROWS, streams=streams, seconds=BLOCK_SECONDS)

    took = measure_cpu(run)
    return float((engine.now_seconds - before) / 60 / took)


def summarize(speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median, least and most over the repeats, by streams."""
    return {
        streams: {
            "median": round(median(values), 1),
            "least": round(min(values), 1),
            "most": round(max(values), 1),
        }
        for streams, values in speeds.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
