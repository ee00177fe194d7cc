"""`python -m tests.bench tables`: the planner on published tables, whole and with half the cells.

For every table the choice at each load is compared with the best arm measured there. Tables of at
least 3 loads and 3 arms then lose half their cells at random, each load and arm keeping one, and
the choices from what is left are scored on the whole table.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdecode_operator.decide.offline_plan import OfflinePlan, plan_offline
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.surface import Measurement, fit_surface, pool_measurements
from specdecode_operator.estimate.surface_prior import Arm

TABLES = Path(__file__).parents[1] / "data" / "tables"
OUTPUT = Path(__file__).parents[2] / ".build" / "bench-tables.json"
SEEDS = 100
AIM = 0.03  # mean loss of every table
MIN_LOADS = MIN_ARMS = 3


@dataclass(frozen=True)
class PublicTable:
    """Goodput by batch and arm from one source, model and workload."""

    name: str
    rows: tuple[Measurement, ...]

    @property
    def rates(self) -> dict[float, dict[Arm, float]]:
        """Return mean tokens per second by batch and arm."""
        rates: dict[float, dict[Arm, float]] = defaultdict(dict)
        for cell in pool_measurements(self.rows):
            rates[cell.batch][cell.arm] = cell.tokens_per_second
        return dict(rates)

    @property
    def is_broad(self) -> bool:
        """Whether it has loads and arms enough to lose half its cells."""
        arms = {row.arm for row in self.rows}
        return len(self.rates) >= MIN_LOADS and len(arms) >= MIN_ARMS


@dataclass(frozen=True)
class Loss:
    """Share of goodput lost by one choice; not scored: the source never measured that arm there.

    Such a choice counts as the worst arm of its load.
    """

    share: float
    scored: bool


def main() -> int:
    """Print both figures as JSON, also written to .build/bench-tables.json."""
    tables = list(load_tables())
    whole = [loss for table in tables for loss in losses_of(table, plan(table.rows))]
    halved = {table.name: measure_halved(table) for table in tables if table.is_broad}
    every = [loss for losses in halved.values() for loss in losses]
    figures = {
        "tables": len(tables),
        "wholeTables": {
            "loads": len(whole),
            "lossPercentMax": round(100 * max(loss.share for loss in whole), 3),
        },
        "halfOfTheCellsRemoved": {
            "seeds": SEEDS,
            "all": summarise(every),
            **{name: summarise(losses) for name, losses in halved.items()},
        },
    }
    text = json.dumps(figures, indent=2, ensure_ascii=False)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(text + "\n")
    print(text)
    return 0 if all(mean_loss(losses) <= AIM for losses in halved.values()) else 1


def load_tables(folder: Path = TABLES) -> Iterator[PublicTable]:
    """Yield each group of at least two arms of the published tables."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        groups: dict[tuple[str, ...], list[Measurement]] = defaultdict(list)
        for row in rows:
            measured = _to_measurement(row)
            if measured is not None:
                groups[(row["model"], row["gpu"], row["workload"])].append(measured)
        for (model, _, workload), found in groups.items():
            if len({row.arm for row in found}) > 1:
                yield PublicTable(f"{path.stem}: {model}, {workload[:40]}", tuple(found))


def _to_measurement(row: dict[str, str]) -> Measurement | None:
    metric = row.get("metric", "")
    arm = row.get("arm")
    if arm not in ("none", "fixed") or not metric.startswith("output_throughput"):
        return None
    if not row["concurrency_or_batch"] or not (arm == "none" or row["k"].isdigit()):
        return None
    return Measurement(
        batch=float(row["concurrency_or_batch"]),
        arm=None if arm == "none" else int(row["k"]),
        tokens_per_second=float(row["value"]),
    )


def plan(rows: Sequence[Measurement]) -> OfflinePlan:
    """Plan from a table."""
    surface = fit_surface(rows)
    assert not isinstance(surface, NoEstimate), surface.message
    return plan_offline(surface)


def losses_of(table: PublicTable, planned: OfflinePlan) -> list[Loss]:
    """Return by load how far the chosen arm is below the best of the whole table."""
    losses = []
    for choice in planned.by_load:
        rates = table.rates[choice.batch]
        rate = rates.get(choice.arm, min(rates.values()))
        losses.append(Loss(1 - rate / max(rates.values()), scored=choice.arm in rates))
    return losses


def measure_halved(table: PublicTable, *, seeds: int = SEEDS) -> list[Loss]:
    """Return the losses of every load and seed with half the cells removed."""
    return [
        loss
        for seed in range(seeds)
        for loss in losses_of(table, plan(halve(table.rows, random.Random(seed))))
    ]


def halve(rows: Sequence[Measurement], chance: random.Random) -> list[Measurement]:
    """Remove half the cells at random; each load and each arm keeps one."""
    cells = sorted({(row.batch, row.arm is not None, row.arm or 0) for row in rows})
    kept = set(cells)
    for cell in chance.sample(cells, len(cells)):
        others = kept - {cell}
        if (
            len(kept) > len(cells) - len(cells) // 2
            and any(other[0] == cell[0] for other in others)
            and any(other[1:] == cell[1:] for other in others)
        ):
            kept = others
    return [row for row in rows if (row.batch, row.arm is not None, row.arm or 0) in kept]


def mean_loss(losses: Sequence[Loss]) -> float:
    """Return the mean loss of the choices that the source can score."""
    return float(np.mean([loss.share for loss in losses if loss.scored]))


def summarise(losses: Sequence[Loss]) -> dict[str, Any]:
    """Return mean and distribution in percent of the losses that the source can score.

    Beside them how many it cannot, and the mean if each of those were the worst arm.
    """
    percent = 100 * np.array([loss.share for loss in losses if loss.scored])
    marks = {f"p{mark}": round(float(np.percentile(percent, mark)), 2) for mark in (50, 75, 90, 95)}
    worst = 100 * np.mean([loss.share for loss in losses])
    return {
        "choices": len(losses),
        "notScored": len(losses) - len(percent),
        "meanPercent": round(float(percent.mean()), 2),
        "meanPercentNotScoredAsWorst": round(float(worst), 2),
        "withinOnePercent": round(float((percent <= 1).mean()), 3),
        **marks,
        "max": round(float(percent.max()), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
