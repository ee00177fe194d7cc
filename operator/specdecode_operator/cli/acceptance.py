"""`specdecode acceptance`: what each further draft token brings, the table to choose K by."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "acceptance",
        help="show what each further draft token brings",
        description="Show mean acceptance length, tokens per computed position and marginal gain "
        "by K. A further draft token pays while its marginal gain over the mean acceptance length "
        "before it is more than the share by which it lengthens a step. Nothing is changed and no "
        "cluster is asked.",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE.csv",
        help="columns position (from 1) and cumulative_acceptance, or position, at_risk and "
        "accepted (the plugin's counters); several models are told apart by source, model, k_max",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(options: argparse.Namespace) -> int:
    """Print the table of every model in the file; return the exit status."""
    # Loaded when it is asked for: its libraries would make every command wait.
    from specdecode_operator.cli import acceptance_run

    return acceptance_run.run(options)
