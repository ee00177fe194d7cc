"""`python -m tests.bench.simulator`: scenario minutes a second and core, in both fidelities.

All profiles are measured: the shorter a profile's steps, the more of them in a minute. Each repeat
runs every cell in each fidelity, one after the other, so that a slow moment of the machine falls on
all. Time is the process's own CPU time; recording a cell, which the fidelity "by block" does once,
is told apart. Printed as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from specdecode_sim import block, profile, virtual

K_MAX = 7
ROWS = [(1, 256, 3)]
STREAMS = (1, 8, 64, 256)
LENGTHS = virtual.Lengths(64, 192, 64, 192)
REPEATS = 7
BLOCK_SECONDS = 15.0
BLOCKS = {"stepByStep": 8, "byBlock": 400}
AIMS = {"stepByStep": 10, "byBlock": 1000}


def main() -> int:
    """Measure, print, and fail below 10 and 1,000 scenario minutes a second and core."""
    profiles = {name: measure_profile(name) for name in profile.list_profiles()}
    figures = {
        "table": ROWS,
        "blockSeconds": BLOCK_SECONDS,
        "unit": "scenario minutes per second and core, by streams",
        "profiles": profiles,
    }
    print(json.dumps(figures, indent=2))
    for fidelity, aim in AIMS.items():
        slowest = min(
            cell["median"] for figures in profiles.values() for cell in figures[fidelity].values()
        )
        if slowest < aim:
            print(f"{fidelity}: the slowest reached {slowest}, the aim is {aim}", file=sys.stderr)
            return 1
    return 0


def measure_profile(name: str) -> dict[str, Any]:
    """Measure each cell of a profile in both fidelities, interleaved."""
    made = profile.load_profile(name)
    tapes = block.Tapes(made, k_max=K_MAX, lengths=LENGTHS)
    stepwise = virtual.VirtualEngine(made, k_max=K_MAX, lengths=LENGTHS)
    engines: dict[str, Any] = {"stepByStep": stepwise, "byBlock": block.BlockEngine(tapes)}
    for engine in engines.values():
        engine.run(ROWS, streams=2, seconds=1.0)  # compiles
    recording = {
        str(streams): round(measure_cpu(lambda n=streams: tapes.get((tuple(ROWS), n, 100))), 3)
        for streams in STREAMS
    }
    speeds: dict[str, dict[str, list[float]]] = {
        fidelity: {str(streams): [] for streams in STREAMS} for fidelity in engines
    }
    for _ in range(REPEATS):
        for streams in STREAMS:
            for fidelity, engine in engines.items():
                speeds[fidelity][str(streams)].append(measure_speed(engine, fidelity, streams))
    summaries: dict[str, Any] = {fidelity: summarize(cells) for fidelity, cells in speeds.items()}
    return {**summaries, "recordingSeconds": recording}


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
