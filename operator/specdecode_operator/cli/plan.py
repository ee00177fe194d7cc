"""`specdecode plan`: the K-table for a benchmark in hand, and why; asks no cluster."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "plan",
        help="choose K by batch size from a table of measurements",
        description="Choose K by batch size from a table of measurements, fill what was not "
        "measured, and say whether speculation pays. Nothing is changed and no cluster is asked.",
    )
    parser.add_argument(
        "--measurements",
        type=Path,
        required=True,
        metavar="FILE.csv",
        help="columns batch, k, tokens_per_second, optional stderr and n; k is a number of draft "
        "tokens, or off for speculation off (0 is K=0 with the drafter); repeated rows are repeats",
    )
    parser.add_argument(
        "--occupancy",
        type=Path,
        metavar="FILE.csv",
        help="columns batch, weight: the share of time at each batch; without it every measured "
        "batch weighs the same",
    )
    parser.add_argument(
        "--min-k", type=int, default=0, metavar="K", help="smallest K of the table (default: 0)"
    )
    parser.add_argument(
        "--max-row-step",
        type=int,
        default=0,
        metavar="N",
        help="largest change of K from one row to the next (default: no limit)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw goodput, choices and intervals"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--vllm",
        action="store_true",
        help="print the part of vLLM's own --speculative-config, for engines without the operator",
    )


def run(options: argparse.Namespace) -> int:
    """Print the plan; return the exit status."""
    # Loaded when it is asked for: its libraries would make every command wait.
    from specdecode_operator.cli import plan_run

    return plan_run.run(options)
