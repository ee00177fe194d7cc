"""The command `specdecode`, also `kubectl specdecode`: a table of commands and nothing else.

Exit status: 0 done, 1 the command failed and says why, 2 wrong options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from specdecode_operator.cli import acceptance, classify, explain, plan
from specdecode_operator.errors import OperatorError

# Each is a module with add_parser(subparsers) and run(options) -> int.
COMMANDS = (plan, acceptance, explain, classify)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except OperatorError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command of the table."""
    parser = argparse.ArgumentParser(
        prog=_program(), description="Speculative decoding on Kubernetes, tuned live."
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        known = set(subparsers.choices)
        command.add_parser(subparsers)
        for name in set(subparsers.choices) - known:
            subparsers.choices[name].set_defaults(run=command.run)
    return parser


def _program() -> str:
    """Return the name under which the user called us: kubectl finds plugins by their file name."""
    name = os.path.basename(sys.argv[0])
    return "kubectl specdecode" if name.startswith("kubectl-") else "specdecode"


if __name__ == "__main__":
    sys.exit(main())
