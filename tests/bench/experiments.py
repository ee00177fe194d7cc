"""How often experiments give a wrong verdict: `python -m tests.bench experiments`.

Virtual time: blocks are drawn, and judged by the operator's own code (pairs, intervals, verdict).
Synthetic noise as stated in the design: every pod's block is off by 3 %, which carries over to the
next block with 0.8; pods differ by 1 %; the load swings fourfold. An effect is one at equal batch.
Closed loop: the batch is the load. Open loop: goodput is the load, and the batch is what it takes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specdecode_operator.decide.crossover import choose_canaries
from specdecode_operator.decide.verdict import Evidence, Verdict, judge
from specdecode_operator.domain.table import bucket_of
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.goodput import BETA
from specdecode_operator.estimate.pairs import Difference, Stratum, compare_arms, join
from tests.support.engine import ROOT

Floats = npt.NDArray[np.float64]

MIN_GAIN_PERCENT: Final = 2.0
MAX_MINUTES: Final = 30.0
LEAST_MINUTES: Final = 2.0
SWING: Final = 4.0
_PARTS: Final = 6  # of a block, in which the batch stands still
_STEP_SECONDS: Final = 0.02


@dataclass(frozen=True)
class Cell:
    """One kind of experiment: effect in percent at equal batch, block in seconds, noise."""

    effect: float
    block: float = 30.0
    pods: int = 4
    loop: str = "closed"
    noise: float = 0.03
    carry_over: float = 0.8
    pod_spread: float = 0.01
    rhythm_blocks: float | None = None  # None: drawn

    @property
    def name(self) -> str:
        """Name the cell for people."""
        return f"{self.effect:+g} %, {self.pods} pods, blocks {self.block:g} s, {self.loop} loop"


@dataclass
class Tally:
    """How the runs of a cell ended; minutes until the verdict."""

    runs: int = 0
    promoted: int = 0
    failed: int = 0
    inconclusive: int = 0
    spread: list[float] = field(default_factory=list)
    minutes: list[float] = field(default_factory=list)

    def note(self, verdict: Verdict, *, minutes: float, spread: float) -> None:
        """Count one run."""
        self.runs += 1
        self.promoted += verdict is Verdict.SUCCESSFUL
        self.failed += verdict is Verdict.FAILED
        self.inconclusive += verdict is Verdict.INCONCLUSIVE
        self.minutes.append(minutes)
        self.spread.append(spread)

    def figures(self) -> dict[str, Any]:
        """Give shares in percent and medians."""
        return {
            "runs": self.runs,
            "promotedPercent": round(100 * self.promoted / self.runs, 2),
            "failedPercent": round(100 * self.failed / self.runs, 2),
            "inconclusivePercent": round(100 * self.inconclusive / self.runs, 2),
            "medianMinutes": round(median(self.minutes), 1),
            "pairSpreadPercent": round(100 * median(self.spread), 2),
        }


LIVE: Final = tuple(
    Cell(effect, block, loop=loop)
    for effect in (0.0, 5.0, -5.0)
    for block in (20.0, 30.0, 60.0)
    for loop in ("closed", "open")
)
ONE_POD: Final = tuple(Cell(effect, 30.0, pods=1) for effect in (0.0, 5.0, -5.0))
UNLIKE_PODS: Final = tuple(Cell(effect, 30.0, pod_spread=0.02) for effect in (0.0, 5.0))


def run_live(cell: Cell, runs: int, *, seed: int) -> Tally:
    """Run experiments of one kind to their verdict."""
    tally = Tally()
    chance = np.random.default_rng(seed)
    for number in range(runs):
        _run_one(cell, tally, chance, seed=seed * 1_000_003 + number)
    return tally


def _run_one(cell: Cell, tally: Tally, chance: np.random.Generator, *, seed: int) -> None:
    pairs: list[Difference] = []
    blocks = _draw_blocks(cell, chance, seed)
    most = int(max(MAX_MINUTES * 60, 40 * cell.block) / (2 * cell.block))
    for number in range(1, most + 1):
        candidate, baseline = next(blocks)
        pair = compare_arms(candidate, baseline)
        if not isinstance(pair, NoEstimate):
            pairs.append(pair)
        minutes = number * 2 * cell.block / 60
        evidence = Evidence(pairs, soaked=minutes >= LEAST_MINUTES, out_of_time=number == most)
        judged = judge(evidence, min_gain_percent=MIN_GAIN_PERCENT)
        if judged.verdict is not None:
            tally.note(judged.verdict, minutes=minutes, spread=judged.interval.spread)
            return


def _draw_blocks(
    cell: Cell, chance: np.random.Generator, seed: int
) -> Iterator[tuple[dict[int, Stratum], dict[int, Stratum]]]:
    """Draw pair after pair: what the change and what the baseline did in both blocks."""
    names = [f"pod-{n}" for n in range(cell.pods)]
    own = chance.normal(0.0, cell.pod_spread, cell.pods)
    rhythm = cell.rhythm_blocks or chance.uniform(3.0, 60.0)
    phase = chance.uniform(0.0, 2 * math.pi)
    noise = chance.normal(0.0, cell.noise, cell.pods)
    block = 0
    while True:
        arms: tuple[list[dict[int, Stratum]], list[dict[int, Stratum]]] = ([], [])
        for _ in range(2):
            canaries = choose_canaries(names, seed=seed, block=block)
            load = _load(block, rhythm, phase)
            for at, name in enumerate(names):
                is_canary = name in canaries
                effect = math.log1p(cell.effect / 100) if is_canary else 0.0
                done = _work(cell, load, effect + own[at] + noise[at])
                arms[0 if is_canary else 1].append(done)
            fresh = chance.normal(0.0, cell.noise, cell.pods)
            noise = cell.carry_over * noise + math.sqrt(1 - cell.carry_over**2) * fresh
            block += 1
        yield join(arms[0]), join(arms[1])


def _load(block: int, rhythm: float, phase: float) -> Floats:
    """Return the load in each part of a block: it swings fourfold around 32."""
    at = block + (np.arange(_PARTS) + 0.5) / _PARTS
    swing = np.sin(2 * math.pi * at / rhythm + phase)
    loads: Floats = 32.0 * SWING ** (swing / 2)
    return loads


def _work(cell: Cell, load: Floats, log_speed: float) -> dict[int, Stratum]:
    """Return by bucket what one pod did in a block: 60 · batch^beta · speed tokens a second."""
    speed = 60.0 * math.exp(log_speed)
    if cell.loop == "closed":
        batches = load
        rates = speed * load**BETA
    else:
        rates = 60.0 * load**BETA
        batches = (rates / speed) ** (1 / BETA)
    seconds = cell.block / _PARTS
    strata: dict[int, Stratum] = {}
    for batch, rate in zip(batches.tolist(), rates.tolist(), strict=True):
        bucket = bucket_of(max(1, math.ceil(batch)))
        steps = seconds / _STEP_SECONDS
        part = Stratum(rate * seconds, seconds, batch * steps, steps)
        strata[bucket] = strata.get(bucket, Stratum()) + part
    return strata


def main(arguments: list[str]) -> int:
    """Print the table, and write it to .build/bench-experiments.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench experiments")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    found = []
    for cell in (*LIVE, *ONE_POD, *UNLIKE_PODS):
        figures = run_live(cell, options.runs, seed=options.seed).figures()
        found.append({"cell": asdict(cell), **figures})
        print(f"{cell.name:45} {json.dumps(figures)}", flush=True)
    path = ROOT / ".build" / "bench-experiments.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
