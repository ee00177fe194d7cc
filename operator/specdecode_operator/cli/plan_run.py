"""Runs `specdecode plan`: from the table in a file to the plan on paper."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from specdecode_operator.cli import measurements, plan_text
from specdecode_operator.decide.offline_plan import OfflinePlan, plan_offline
from specdecode_operator.errors import PermanentError
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.surface import Surface, fit_surface
from specdecode_operator.estimate.surface_prior import Arm


class PlanError(PermanentError):
    """The command cannot do what it was asked; the message says what to change."""


def run(options: argparse.Namespace) -> int:
    """Print the plan; return the exit status."""
    if options.min_k < 0 or options.max_row_step < 0:
        raise PlanError("--min-k and --max-row-step take a whole number from 0 on")
    rows, unused = measurements.load_measurements(options.measurements)
    if unused:
        print(f"{options.measurements}: not used: column {', '.join(unused)}", file=sys.stderr)
    surface = fit_surface(rows)
    if isinstance(surface, NoEstimate):
        raise PlanError(f"{options.measurements}: {surface.message}")
    occupancy = options.occupancy and measurements.load_occupancy(
        options.occupancy, largest_batch=surface.batches[-1]
    )
    plan = plan_offline(
        surface, occupancy=occupancy, min_k=options.min_k, max_row_step=options.max_row_step
    )
    if options.plot is not None:
        _draw(surface, plan, options.plot)
    if options.json:
        print(json.dumps(_as_json(plan)))
    elif options.vllm:
        print(json.dumps(_as_vllm(plan)))
    else:
        print(plan_text.describe(plan, surface))
    return 0


def _draw(surface: Surface, plan: OfflinePlan, path: Path) -> None:
    try:
        from specdecode_operator.cli import plan_plot
    except ModuleNotFoundError as error:
        raise PlanError(
            "--plot needs matplotlib: pip install 'specdecode-operator[plot]'"
        ) from error
    try:
        plan_plot.draw(surface, plan, path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: the picture cannot be written: {error}") from error


def _as_json(plan: OfflinePlan) -> dict[str, Any]:
    return {
        "rows": plan.table.to_rows() if plan.table is not None else [],
        "by_batch": [
            {
                "batch": _plain(choice.batch),
                "choice": _name(choice.arm),
                "expected": _rounded(choice.expected.tokens_per_second),
                "interval": [_rounded(choice.expected.lower), _rounded(choice.expected.upper)],
            }
            for choice in plan.by_load
        ],
        "speculation": "on" if plan.speculation else "off",
    }


def _as_vllm(plan: OfflinePlan) -> dict[str, Any]:
    """Return what vLLM's configuration takes: K_max, and K by batch size."""
    table = plan.table
    if table is None or max(table.ks) == 0:
        raise PlanError(
            "no K above 0 pays or was measured: start vLLM without --speculative-config"
        )
    if not plan.speculation:
        print(plan_text.describe_speculation(plan), file=sys.stderr)
    return {
        "num_speculative_tokens": max(table.ks),
        "num_speculative_tokens_per_batch_size": table.to_rows(),
    }


def _name(arm: Arm) -> int | str:
    return "off" if arm is None else arm


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")
