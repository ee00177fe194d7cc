"""The first process of the namespaces: furnishes them, runs a command, and ends all with itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from tests.node import namespaces
from tests.node.place import INSIDE_VARIABLE, SCRATCH


def main() -> int:
    """Run the command of the arguments; return its exit code."""
    namespaces.furnish(SCRATCH)
    child = subprocess.Popen(sys.argv[1:], env={**os.environ, INSIDE_VARIABLE: "1"})
    while child.poll() is None:
        # Ctrl-C reaches the command too, which then tidies up.
        with contextlib.suppress(KeyboardInterrupt):
            child.wait()
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
