"""The command `specdecode-operator`: configuration, log, and Kopf around the handlers."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

import kopf

# Importing the package registers the handlers.
from specdecode_operator import __version__, errors, factory, handlers, logs
from specdecode_operator.config import OperatorConfig

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until it is told to stop; return the exit status."""
    chosen = parse_arguments(arguments)
    try:
        config = OperatorConfig.from_environment(os.environ)
        if chosen.namespace:
            config = dataclasses.replace(config, namespaces=tuple(chosen.namespace))
        if chosen.no_lease:
            config = dataclasses.replace(config, lease=False)
        logs.configure(log_format=config.log_format, level=config.log_level)
        application = factory.build(config)
    except errors.ConfigurationError as error:
        print(f"specdecode-operator: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    try:
        kopf.run(
            registry=kopf.get_default_registry(),
            memo=kopf.Memo(application=application),
            standalone=True,
            clusterwide=not config.namespaces,
            namespaces=config.namespaces,
        )
    except Exception as error:  # Kopf has logged where; whoever restarts us needs the status
        logger.critical("the operator ends, to be started again: %s", error)
        return EXIT_FAILURE
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; all else comes from SPECDECODE_ variables."""
    parser = argparse.ArgumentParser(
        prog="specdecode-operator",
        description="Tunes vLLM's speculative decoding. Settings are SPECDECODE_ variables.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--namespace",
        action="append",
        help="serve this namespace only; may be repeated; all namespaces otherwise",
    )
    parser.add_argument(
        "--no-lease",
        action="store_true",
        help="act without a Lease: only where no second operator runs",
    )
    return parser.parse_args(arguments)


__all__ = ["handlers", "main"]

if __name__ == "__main__":
    sys.exit(main())
