"""`specdecode explain`: why this K at this batch, read from the live object."""

from __future__ import annotations

import argparse

from specdecode_operator.api.metadata import KIND


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "explain",
        help="say why an object runs this K at this batch",
        description=f"Say why a {KIND} runs this K at this batch, from its status. The API server "
        "is found as kubectl finds it (KUBECONFIG, KUBECONTEXT). Nothing is changed.",
    )
    parser.add_argument("name", metavar="NAME", help=f"name of the {KIND}")
    parser.add_argument("-n", "--namespace", default="default", metavar="NAMESPACE")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="explain only the batch sizes alike to this one"
    )


def run(options: argparse.Namespace) -> int:
    """Print the explanation; return the exit status."""
    # Loaded when it is asked for: its libraries would make every command wait.
    from specdecode_operator.cli import explain_run

    return explain_run.run(options)
