"""`python -m tests.bench decide`: what one pure decision costs, for one object and for 500.

The whole of `decide.cycle.decide` on raw samples as Prometheus hands them over: each pod with the
series of an engine that has been through several batch sizes, scraped every 15 s over the window
that the operator asks for. Each repeat measures every case once, so that a slow moment of the
machine falls on all; time is the process's own CPU time. Printed as JSON; fails above the aims.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median, quantiles
from typing import Any

from specdecode_operator.decide import cycle
from specdecode_operator.domain.observation import MetricsSamples, Observation, Series
from tests.support.builders import build_spec
from tests.support.samples import cell, mixed_cell, samples_of, series
from tests.support.world import CYCLE, World

REPEATS = 15
OBJECTS = 500
AIM_ONE_SECONDS = 0.005
AIM_ALL_SECONDS = 1.0
SCRAPE_SECONDS = 15
WINDOW_SECONDS = 360 + 2 * SCRAPE_SECONDS  # three blocks of two minutes
BUCKETS = (1, 2, 4, 8, 16, 32)
POSITIONS = 7


@dataclass(frozen=True)
class Case:
    """So many objects of so many pods each."""

    name: str
    objects: int
    pods: int
    aim_seconds: float


CASES = (
    Case("one object, 1 pod", 1, 1, AIM_ONE_SECONDS),
    Case("one object, 8 pods", 1, 8, AIM_ONE_SECONDS),
    Case("500 objects, 1 pod each", OBJECTS, 1, AIM_ALL_SECONDS),
)


def main(repeats: int = REPEATS) -> int:
    """Measure, print, and fail above the aims."""
    observations = {case: build_observation(pods=case.pods) for case in CASES}
    for seen in observations.values():
        cycle.decide(seen, cycle=CYCLE)  # imports and first calls
    seconds: dict[Case, list[float]] = {case: [] for case in CASES}
    for _ in range(repeats):
        for case, seen in observations.items():
            seconds[case].append(measure(seen, case.objects))
    figures = {case.name: summarize(case, seconds[case], observations[case]) for case in CASES}
    print(json.dumps(figures, indent=2))
    return 0 if all(median(took) <= case.aim_seconds for case, took in seconds.items()) else 1


def measure(seen: Observation, objects: int) -> float:
    """Return the CPU seconds of deciding for so many objects alike."""
    begun = time.process_time()
    for _ in range(objects):
        cycle.decide(seen, cycle=CYCLE)
    return time.process_time() - begun


def summarize(case: Case, took: Sequence[float], seen: Observation) -> dict[str, Any]:
    """Return the figures of one case."""
    assert isinstance(seen.metrics, MetricsSamples)
    return {
        "series": len(seen.metrics.series),
        "samples": sum(len(one.samples) for one in seen.metrics.series),
        "medianMilliseconds": round(1000 * median(took), 2),
        "p95Milliseconds": round(1000 * quantiles(took, n=20)[-1], 2),
        "aimMilliseconds": round(1000 * case.aim_seconds, 1),
    }


def build_observation(*, pods: int) -> Observation:
    """Build what the operator sees of an object in mode Auto whose engines serve under load."""
    spec = build_spec(
        replicas=pods,
        engine={"maxNumSeqs": 256},
        tuning={"mode": "Auto"},
        rollout={"cooldown": "0s"},
    )
    world = World(spec)
    world.reconcile()
    world.run(30)
    seen = world.observe()
    names = [pod.name for pod in seen.pods]
    assert len(names) == pods
    end = seen.now.timestamp()
    found = tuple(one for name in names for one in build_series(name, end))
    samples = replace(samples_of(*found), start=end - WINDOW_SECONDS, end=end)
    seen = replace(seen, metrics=samples)
    # The pass before has seen the table in force, so that this one measures.
    status = cycle.decide(seen, cycle=CYCLE).status
    tuning = status.tuning.model_copy(
        update={"last_change_at": seen.now - timedelta(seconds=WINDOW_SECONDS)}
    )
    status = status.model_copy(update={"tuning": tuning})
    return replace(seen, target=replace(seen.target, status=status))


def build_series(pod: str, end: float) -> tuple[Series, ...]:
    """Build the plugin's counters of one pod."""
    moments = [end - WINDOW_SECONDS + SCRAPE_SECONDS * i for i in range(27)]
    drafts = tuple(
        series(
            f"specdecode_{name}_per_position_total",
            [
                (moment, index * 1000 * 0.7 ** (position + gone))
                for index, moment in enumerate(moments)
            ],
            position=position,
            pod=pod,
        )
        for position in range(POSITIONS)
        for name, gone in (("at_risk", 0), ("accepted", 1))
    )
    cells = tuple(
        one for batch in BUCKETS for k in (3, 7) for one in cell(moments, batch=batch, k=k, pod=pod)
    )
    mixed = tuple(
        replace(one, labels={**one.labels, "pod": pod})
        for batch in BUCKETS
        for one in mixed_cell(moments, batch=batch, steps=1.0)
    )
    beat = series(
        "specdecode_engine_iterations_total",
        [(moment, 100.0 * index) for index, moment in enumerate(moments)],
        pod=pod,
    )
    return (*cells, *mixed, *drafts, beat)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
