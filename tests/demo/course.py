"""The course that the demo shows and the end-to-end test checks: loads, fixed K, drain, fault.

Everything in the report was measured. At each load the tuner converges in mode Auto; then its
table and each fixed K are measured in turn, in drawn order, as kTable edits in mode Off, so that
all of them meet the same load and the same state of the machine. The tuner learns nothing from
that: in mode Off it keeps still, and what was measured before mode Auto came back is not used.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from specdecode_load import (
    BackgroundLoop,
    ClosedLoop,
    Lengths,
    Measurement,
    Target,
    Workload,
    probe,
)
from specdecode_operator.domain.table import bucket_of
from tests.support.lag import worst_lag
from tests.support.objects import PodWatch, reason_of
from tests.support.stack import Stack
from tests.support.waiting import wait_until

NAME = "chat"
START_TABLE = [{"minBatch": 1, "k": 3}]
START_SECONDS = 420.0


@dataclass(frozen=True)
class Plan:
    """What a course does: loads in streams a pod, fixed K, how long things may take in seconds."""

    loads: Sequence[int]
    fixed: Sequence[int]
    # Many short rounds: a shared machine changes its speed by half for seconds at a time, which
    # would fall on one arm of a long round.
    rounds: int = 6
    measure_seconds: float = 3.0
    settle_seconds: float = 0.5
    converge_seconds: float = 480.0
    pods: int = 1
    prompt_tokens: int = 32
    # A word of specdecode_load.Lengths. Equal lengths would march in step, all prefilled at once.
    output_tokens: str = "64"
    off_settle_seconds: float = 0.5
    # Requests a pod of one batch that drains, as a rollout of reinforcement learning does; 0: none.
    drain_requests: int = 0
    drain_tokens: str = "lognormal:256:0.8"
    fault_streams: int = 8
    # How the illegal memory access is provoked: a planted file, or CUDA graphs of another kind
    # asked for, which the scenario of the simulated engines does not survive.
    fault: Literal["plant", "graphs"] = "plant"
    seed: int = 1


@dataclass
class Stage:
    """One load: the table that the tuner chose, and what it and each fixed K reached, in tok/s."""

    streams: int
    table: str
    rows: list[dict[str, int]]
    converge_seconds: float
    tuned: float | None = None
    fixed: dict[int, float] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    pays: bool = True
    tried: frozenset[int] = frozenset()

    def ratio_to_best(self) -> Ratio | None:
        """Compare the tuned table with the best fixed K, round by round; None if not measured.

        The best of six noisy figures is the luckiest one, so the K to compare with in a round is
        chosen by all the other rounds. With a single round there is nothing to choose it by.
        """
        tuned = self.rounds.get("tuned", [])
        if len(tuned) < 2 or not self.fixed:
            return None
        logs = []
        for number, value in enumerate(tuned):

            def others(k: int, left_out: int = number) -> float:
                values = self.rounds[str(k)]
                return sum(values) - values[left_out]

            best = max(self.fixed, key=others)
            logs.append(math.log(value / self.rounds[str(best)][number]))
        return Ratio(math.exp(mean(logs)), stdev(logs) / math.sqrt(len(logs)))


@dataclass(frozen=True)
class Ratio:
    """A ratio of two goodputs and its relative standard error."""

    value: float
    error: float


@dataclass
class Drain:
    """One batch of requests that ended without new ones: K by batch bucket, from the counters.

    `steps` counts the engines' decode-only steps by batch bucket and K.
    """

    requests: int
    seconds: float
    steps: dict[int, dict[int, int]]
    restarts: int

    def to_json(self) -> dict[str, Any]:
        """Render as `.build/demo.json` holds it."""
        return {
            "requests": self.requests,
            "seconds": round(self.seconds, 1),
            "stepsByBatchAndK": {
                str(batch): {str(k): steps for k, steps in sorted(by_k.items())}
                for batch, by_k in sorted(self.steps.items(), reverse=True)
            },
            "engineRestarts": self.restarts,
        }


@dataclass
class Report:
    """What a course measured; None is not measured."""

    engine: str
    pods: int = 1
    drain: Drain | None = None
    lag: dict[str, float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    off: dict[int, float] = field(default_factory=dict)
    kill_switch_seconds: float | None = None
    first_spec_off_pod_seconds: float | None = None
    recovered_seconds: float | None = None
    requests: int | None = None
    errors: int | None = None
    engine_restarts: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Render as `.build/demo.json` holds it."""
        return {
            "schema": 1,
            "engine": self.engine,
            "pods": self.pods,
            "stages": [
                {
                    "streams": s.streams,
                    "tuned": _round(s.tuned),
                    "table": s.table,
                    "convergeSeconds": round(s.converge_seconds, 1),
                    **_ratio_fields(s.ratio_to_best()),
                }
                for s in self.stages
            ],
            "fixed": {
                str(s.streams): {str(k): _round(v) for k, v in sorted(s.fixed.items())}
                for s in self.stages
                if s.fixed
            },
            "rounds": {
                str(s.streams): {arm: [_round(v) for v in r] for arm, r in s.rounds.items()}
                for s in self.stages
                if s.rounds
            },
            "off": {str(streams): _round(v) for streams, v in self.off.items()},
            "fault": {
                "killSwitchSeconds": _round(self.kill_switch_seconds, 3),
                "firstSpecOffPodSeconds": _round(self.first_spec_off_pod_seconds, 3),
                "recoveredSeconds": _round(self.recovered_seconds),
            },
            "requests": self.requests,
            "errors": self.errors,
            "engineRestarts": self.engine_restarts,
            **({"drain": self.drain.to_json()} if self.drain else {}),
            **({"lag": {phase: round(v, 4) for phase, v in self.lag.items()}} if self.lag else {}),
        }

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    def geometric_means(self) -> dict[str, float]:
        """Geometric mean over the loads of the tuned table (`tuned`) and of each fixed K."""
        stages = [s for s in self.stages if s.tuned is not None and s.fixed]
        arms: dict[str, list[float]] = {"tuned": [s.tuned or 0.0 for s in stages]}
        for k in stages[0].fixed if stages else ():
            arms[str(k)] = [s.fixed[k] for s in stages]
        return {arm: math.exp(mean(math.log(v) for v in values)) for arm, values in arms.items()}


def _ratio_fields(ratio: Ratio | None) -> dict[str, float]:
    if ratio is None:
        return {}
    return {"ratioToBest": round(ratio.value, 3), "ratioError": round(ratio.error, 3)}


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


class Course:
    """Runs a plan on a running stack; `tell` gets a line at each step."""

    def __init__(self, stack: Stack, plan: Plan, *, tell: Callable[[str], None] = print) -> None:
        self._stack = stack
        self._plan = plan
        self._tell = tell
        self._chance = random.Random(plan.seed)
        self.report = Report(engine=stack.engine.name, pods=plan.pods)
        self.loop: BackgroundLoop
        self.watch = PodWatch(stack.objects, NAME)
        self._step_seconds: dict[str, tuple[float, float]] = {}

    def run(self, *, when_ready: Callable[[], None] = lambda: None) -> Report:
        """Run everything: start, loads, fault, speculation off."""
        with self.watch:
            self.start()
            when_ready()
            with self._start_load() as self.loop:
                window = self.loop.start_window()
                for number, streams in enumerate(self._plan.loads):
                    again = streams in self._plan.loads[:number]
                    self.tune(streams, measure_fixed=not again)
                    self._note_lag(str(streams))
                total = window.stop()
                self.report.requests, self.report.errors = total.requests, total.error_count
                self.report.engine_restarts = sum(self.watch.restarts.values())
            if self._plan.drain_requests:
                self.drain()
                self._note_lag("drain")
            with self._start_load() as self.loop:
                self.fall()
                self._step_seconds = self._stack.read_step_seconds(NAME)
                for streams in sorted(set(self._plan.loads)):
                    self.report.off[streams] = self._measure_off(streams)
                    self._note_lag(f"off {streams}")
        return self.report

    def _note_lag(self, phase: str) -> None:
        """Note the worst lag of a simulated engine in the phase that ends."""
        after = self._stack.read_step_seconds(NAME)
        lag = worst_lag(after, before=self._step_seconds)
        if lag is not None:
            self.report.lag[phase] = max(lag, self.report.lag.get(phase, 0.0))
        self._step_seconds = after

    def start(self) -> None:
        """Apply the object and wait until its engine serves."""
        objects = self._stack.objects
        objects.apply(NAME, self._stack.build_spec(k_table=START_TABLE))
        began = time.monotonic()
        self._tell(f"applied {NAME}: waiting for the engine")
        wait_until(self._is_ready, what=f"{NAME} Ready", seconds=START_SECONDS, pause_seconds=0.5)
        objects.wait_condition(NAME, "TableApplied", seconds=60)
        self._tell(f"Ready after {time.monotonic() - began:.0f} s")

    def _is_ready(self) -> bool:
        self._stack.operator.check_alive()
        return self._stack.objects.condition(NAME, "Ready").get("status") == "True"

    def _start_load(self) -> BackgroundLoop:
        url = self._stack.cluster.service_url("default", NAME)
        target = asyncio.run(probe(url))
        workload = Workload(
            prompt=Lengths("fixed", self._plan.prompt_tokens),
            output=Lengths.parse(self._plan.output_tokens),
            seed=7,
        )
        return BackgroundLoop(target, workload, streams=self._plan.pods * self._plan.loads[0])

    # -------------------------------------------------------------------------- loads

    def tune(self, streams: int, *, measure_fixed: bool) -> Stage:
        """Hold a load until the tuner has nothing left to try; then measure."""
        self._tell(f"load: {streams} streams a pod")
        self._hold(streams)
        began = time.time()
        status = self._wait_converged(streams, began)
        rows = [{"minBatch": first, "k": k} for first, _, k in status["active"]["kTable"]]
        stage = Stage(
            streams=streams,
            table=status["active"]["table"],
            rows=rows,
            converge_seconds=time.time() - began,
            pays=reason_of(status, "Tuned") != "SpeculationDoesNotPay",
            tried=frozenset(
                cell["k"]
                for cell in status["tuning"].get("cells", [])
                if cell["batch"] == bucket_of(streams)
            ),
        )
        reason = reason_of(status, "Tuned")
        self._tell(f"  {reason} after {stage.converge_seconds:.0f} s: table {stage.table}")
        self.report.stages.append(stage)
        if measure_fixed:
            self._measure_arms(stage)
        else:
            stage.tuned = self._measure().tokens_per_second
        return stage

    def _hold(self, streams: int) -> None:
        self.loop.set_concurrency(self._plan.pods * streams)

    def _wait_converged(self, streams: int, since: float) -> dict[str, Any]:
        bucket = bucket_of(streams)

        def is_converged(status: dict[str, Any]) -> bool:
            estimate = status.get("estimate") or {}
            fresh = _seconds(estimate.get("measuredAt")) > since + self._plan.settle_seconds
            done = reason_of(status, "Tuned") in ("Converged", "SpeculationDoesNotPay")
            return fresh and done and estimate.get("batch") == bucket and _is_applied(status)

        return self._stack.objects.wait_status(
            NAME,
            is_converged,
            what=f"converged at {streams} streams",
            seconds=self._plan.converge_seconds,
        )

    def _measure_arms(self, stage: Stage) -> None:
        """Measure the tuned table and each fixed K in turn, in mode Off, in drawn order."""
        arms: dict[str, list[dict[str, int]]] = {"tuned": stage.rows}
        arms |= {str(k): [{"minBatch": 1, "k": k}] for k in self._plan.fixed}
        figures: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(self._plan.rounds):
            for arm in self._chance.sample(sorted(arms), k=len(arms)):
                self._put_in_force(arms[arm])
                figures[arm].append(self._measure().tokens_per_second)
        stage.rounds = {arm: list(values) for arm, values in figures.items()}
        stage.tuned = mean(figures.pop("tuned"))
        stage.fixed = {int(k): mean(values) for k, values in figures.items()}
        shown = "  ".join(f"K={k} {v:.0f}" for k, v in sorted(stage.fixed.items()))
        self._tell(f"  tok/s: tuned {stage.tuned:.0f}  {shown}")
        self._stack.objects.edit(
            NAME, {"tuning": {"mode": "Auto"}, "speculation": {"kTable": START_TABLE}}
        )
        self._wait_in_force(stage.table)

    def _put_in_force(self, rows: list[dict[str, int]]) -> None:
        objects = self._stack.objects
        objects.edit(NAME, {"tuning": {"mode": "Off"}, "speculation": {"kTable": rows}})
        self._wait_in_force(_compact(rows))

    def _wait_in_force(self, table: str) -> None:
        objects = self._stack.objects
        generation = objects.read(NAME)["metadata"]["generation"]
        objects.wait_status(
            NAME,
            lambda s: (
                s.get("observedGeneration", 0) >= generation
                and s["active"]["table"] == table
                and _is_applied(s)
            ),
            what=f"table {table} in force",
        )

    def _measure(self) -> Measurement:
        """Measure for a while, after those requests that began under another table are few."""
        time.sleep(self._plan.settle_seconds)
        return self.loop.measure(self._plan.measure_seconds)

    # -------------------------------------------------------------------------- drain

    def drain(self) -> None:
        """Send one batch of long and short requests and watch it end, without new ones."""
        requests = self._plan.pods * self._plan.drain_requests
        self._tell(f"drain: {requests} requests at once, none after them")
        lengths = Lengths.parse(self._plan.drain_tokens)
        workload = Workload(Lengths("fixed", self._plan.prompt_tokens), lengths, seed=11)
        restarts = sum(self.watch.restarts.values())
        before = self._count_steps()
        began = time.monotonic()
        target = asyncio.run(probe(self._stack.cluster.service_url("default", NAME)))
        asyncio.run(_send_batch(target, workload, requests))
        seconds = time.monotonic() - began
        after = self._count_steps()
        gained = {cell: steps - before.get(cell, 0) for cell, steps in after.items()}
        by_batch: dict[int, dict[int, int]] = {}
        for (batch, k), steps in gained.items():
            if steps > 0:
                by_batch.setdefault(batch, {})[k] = steps
        self.report.drain = Drain(
            requests, seconds, by_batch, sum(self.watch.restarts.values()) - restarts
        )
        shown = "  ".join(
            f"{batch}: K={max(by_k, key=by_k.__getitem__)}"
            for batch, by_k in sorted(by_batch.items(), reverse=True)
        )
        self._tell(f"  drained in {seconds:.0f} s; most steps by batch {shown}")

    def _count_running(self) -> float:
        samples = self._stack.scrape_engines(NAME)
        return sum(s.value for s in samples if s.name == "vllm:num_requests_running")

    def _count_steps(self) -> dict[tuple[int, int], int]:
        """Sum the engines' decode-only steps by batch bucket and K."""
        counts: dict[tuple[int, int], int] = {}
        for sample in self._stack.scrape_engines(NAME):
            if sample.name == "specdecode_steps_total":
                cell = (int(sample.labels["batch"]), int(sample.labels["k"]))
                counts[cell] = counts.get(cell, 0) + int(sample.value)
        return counts

    # -------------------------------------------------------------------------- fault

    def fall(self) -> None:
        """Provoke an illegal memory access under load and wait for the answer."""
        self._hold(self._plan.fault_streams)
        seen = self.watch.seen
        ended = {key for key in seen if "terminated" in key}
        self._provoke()
        crash = wait_until(
            lambda: next((k for k in list(seen) if "terminated" in k and k not in ended), None),
            what="the engine's end in its pod's status",
            seconds=START_SECONDS,
        )
        crashed_at = seen[crash]
        speculating = set(self.watch.revisions.values())
        self._stack.paths.plant.unlink(missing_ok=True)  # the planted error takes it away itself
        switched = wait_until(
            lambda: next((t for key, t in list(seen.items()) if key[1:] == ("arm", "off")), None),
            what="the kill switch",
            seconds=30,
        )
        self.report.kill_switch_seconds = max(0.0, switched - crashed_at)
        pod = wait_until(
            lambda: next(
                (p for p, r in list(self.watch.revisions.items()) if r not in speculating), None
            ),
            what="the first pod without speculation",
            seconds=60,
        )
        self.report.first_spec_off_pod_seconds = seen[(pod, "created")] - crashed_at
        self._tell(
            f"  kill switch after {self.report.kill_switch_seconds:.2f} s, first pod without "
            f"speculation after {self.report.first_spec_off_pod_seconds:.2f} s"
        )
        self._stack.objects.wait_status(
            NAME,
            lambda s: s.get("phase") == "Quarantined",
            what="Quarantined",
            seconds=START_SECONDS,
        )
        ready = [
            seen[(p, "ready")]
            for p, revision in self.watch.revisions.items()
            if revision not in speculating and (p, "ready") in seen
        ]
        self.report.recovered_seconds = max(ready) - crashed_at
        self._tell(f"  recovered without speculation after {self.report.recovered_seconds:.0f} s")

    def _provoke(self) -> None:
        if self._plan.fault == "plant":
            self._tell("planting a CUDA illegal memory access in the engine's worker")
            self._stack.paths.plant.touch()
            return
        self._tell("asking for adaptive verification beside FULL_AND_PIECEWISE graphs")
        self._stack.objects.edit(NAME, {"speculation": {"adaptiveVerification": "Enabled"}})
        status = self._stack.objects.wait_status(
            NAME,
            lambda s: _condition(s, "Degraded").get("reason") == "InvalidSpec",
            what="the refusal of what is known to crash",
        )
        self._tell(f"  refused: {_condition(status, 'Degraded')['message']}")
        self._tell("asking for FULL graphs instead, of which nobody knows yet that they crash here")
        unknown = {"adaptiveVerification": "Disabled", "cudagraphMode": "FULL"}
        self._stack.objects.edit(NAME, {"speculation": unknown})

    def _measure_off(self, streams: int) -> float:
        self._hold(streams)
        wait_until(
            lambda: self._count_running() <= self._plan.pods * streams,
            what="the streams too many ended",
            seconds=120,
            pause_seconds=0.5,
        )
        time.sleep(self._plan.off_settle_seconds)  # a load that has just grown is all prefill
        figure = self._measure().tokens_per_second
        self._tell(f"  speculation off, {streams} streams: {figure:.0f} tok/s")
        return figure


async def _send_batch(target: Target, workload: Workload, requests: int) -> None:
    async with ClosedLoop(target, workload, streams=requests, most_requests=requests) as loop:
        while not loop.is_exhausted:
            await asyncio.sleep(0.1)


def _compact(rows: list[dict[str, int]]) -> str:
    ends = [row["minBatch"] - 1 for row in rows[1:]]
    parts = [f"{row['k']}x{end}" for row, end in zip(rows, ends, strict=False)]
    return ",".join([*parts, str(rows[-1]["k"])])


def _is_applied(status: dict[str, Any]) -> bool:
    return bool(_condition(status, "TableApplied").get("status") == "True")


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    found = (c for c in status.get("conditions") or [] if c["type"] == kind)
    return next(found, {})


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0
