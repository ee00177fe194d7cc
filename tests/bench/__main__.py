"""`make bench`: how soon a table is in force, whether a killed operator ends in the same state, and
what the plugin costs.

The demo's figures are measured by `make demo`. Printed as JSON, also written to .build/bench.json.
`python -m tests.bench NAME` runs another benchmark of this folder: decide, policies, tables, ….
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import runpy
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from statistics import median
from typing import Any

from specdecode_load import BackgroundLoop, Lengths, Workload, probe
from specdecode_operator.api import metadata
from tests.bench import plugin
from tests.demo.course import NAME, START_SECONDS, START_TABLE
from tests.support.engine import ROOT
from tests.support.objects import reason_of
from tests.support.stack import Stack
from tests.support.waiting import wait_until

EDITS = 20
KILLS = 10
SEED = 3
GENERATION = "specdecode_table_generation{"


def main() -> int:
    """Run all measurements, one engine at a time."""
    figures: dict[str, Any] = {}
    with start_stack() as stack:
        figures["tableInForce"] = measure_table(stack)
        figures["undisturbed"] = run_course(stack, kills=0)
    with start_stack() as stack:
        figures["killed"] = run_course(stack, kills=KILLS)
    same = figures["undisturbed"]["end"] == figures["killed"]["end"]
    figures["sameEndState"] = same
    figures["plugin"] = plugin.measure()
    text = json.dumps(figures, indent=2)
    (ROOT / ".build" / "bench.json").write_text(text + "\n")
    print(text)
    return 0 if same else 1


@contextlib.contextmanager
def start_stack() -> Iterator[Stack]:
    """Start all parts with one object whose engine serves."""
    with Stack(ROOT / ".build" / "bench") as stack:
        stack.objects.apply(NAME, stack.build_spec(k_table=START_TABLE))
        stack.objects.wait_condition(NAME, "TableApplied", seconds=START_SECONDS)
        yield stack


def measure_table(stack: Stack) -> dict[str, Any]:
    """Measure the seconds from the ConfigMap's write until /metrics shows its generation."""
    objects = stack.objects
    pod = objects.pods(NAME)[0]
    port = pod["metadata"]["annotations"][metadata.ANNOTATION_SCRAPE_PORT]
    url = f"http://127.0.0.1:{port}/metrics"
    seconds = []
    for number in range(EDITS):
        k = (1, 5)[number % 2]
        before = _read_generation(url)
        objects.edit(
            NAME,
            {"tuning": {"mode": "Off"}, "speculation": {"kTable": [{"minBatch": 1, "k": k}]}},
        )
        wait_until(
            lambda before=before: _read_generation(url) > before,  # type: ignore[misc]
            what="the next table in force",
            seconds=30,
            pause_seconds=0.02,
        )
        shown_at = time.time()
        found = objects.core.read_namespaced_config_map(
            metadata.tables_name(NAME), objects.namespace
        )
        written = found.metadata.annotations[metadata.ANNOTATION_WRITTEN_AT]
        seconds.append(shown_at - datetime.fromisoformat(written).timestamp())
    return {
        "edits": EDITS,
        "medianSeconds": round(median(seconds), 3),
        "maxSeconds": round(max(seconds), 3),
    }


def _read_generation(url: str) -> float:
    with urllib.request.urlopen(url, timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(GENERATION):
                return float(line.rpartition(" ")[2])
    return -1.0


def run_course(stack: Stack, *, kills: int) -> dict[str, Any]:
    """Tune and fall, killing the operator so many times meanwhile; return the end state."""
    objects = stack.objects
    objects.edit(NAME, {"tuning": {"mode": "Auto"}, "speculation": {"kTable": START_TABLE}})
    target = asyncio.run(probe(stack.cluster.service_url("default", NAME)))
    workload = Workload(prompt=Lengths("fixed", 32), output=Lengths("fixed", 64), seed=7)
    killer = Killer(stack)
    with BackgroundLoop(target, workload, streams=8):
        killer.start(kills=max(0, kills - 3), longest_pause_seconds=12.0)
        killer.join()
        tuned = objects.wait_status(
            NAME,
            lambda s: reason_of(s, "Tuned") in ("Converged", "SpeculationDoesNotPay"),
            what="converged after the kills",
            seconds=300,
        )
        killer.start(kills=min(3, kills), longest_pause_seconds=2.0)
        stack.paths.plant.touch()
        wait_until(
            lambda: any(
                c["lastState"].get("terminated") or c["state"].get("terminated")
                for pod in objects.pods(NAME)
                for c in pod["status"].get("containerStatuses", [])
            ),
            what="the crash",
            seconds=120,
        )
        stack.paths.plant.unlink(missing_ok=True)
        killer.join()
    end = objects.wait_status(
        NAME, lambda s: s.get("phase") == "Quarantined", what="the fall", seconds=START_SECONDS
    )
    return {
        "kills": killer.kills,
        "tunedTable": tuned["active"]["table"],
        "end": {
            "phase": end["phase"],
            "speculation": end["active"]["speculation"],
            "ready": end["ready"],
            "faults": end["faults"]["counts"],
            "quarantined": len(end["quarantine"]),
        },
    }


class Killer:
    """Kills the operator at random moments and starts it again."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._chance = random.Random(SEED)
        self._thread = threading.Thread()
        self.kills = 0

    def start(self, *, kills: int, longest_pause_seconds: float) -> None:
        """Begin in the background."""
        self._thread = threading.Thread(target=self._run, args=(kills, longest_pause_seconds))
        self._thread.start()

    def join(self) -> None:
        """Wait for the last kill's restart."""
        self._thread.join()

    def _run(self, kills: int, longest_pause_seconds: float) -> None:
        for _ in range(kills):
            time.sleep(self._chance.uniform(0.0, longest_pause_seconds))
            self._stack.operator.kill()
            self._stack.operator.start()
            self.kills += 1


if __name__ == "__main__":
    if sys.argv[1:]:
        del sys.argv[0]
        runpy.run_module(f"tests.bench.{sys.argv[0]}", run_name="__main__")
    else:
        sys.exit(main())
