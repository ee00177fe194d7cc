"""`make test-node`: fetch what a node is made of, then run pytest in namespaces of its own.

Where that cannot be done the tests are skipped, with the reason.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from tests.node import image, namespaces, packages
from tests.node.cluster import build_kubelet
from tests.node.objects import IMAGES
from tests.node.place import CLUSTER, SCRATCH, SKIP_VARIABLE
from tests.support import prometheus
from tests.support.cluster import build_binary


def main(arguments: Sequence[str]) -> int:
    """Run the tests with these arguments of pytest; return its exit code."""
    pytest = [sys.executable, "-m", "pytest", *(arguments or ["-v", "tests/node"]), "-m", "node"]
    obstacle = namespaces.find_obstacle() or _fetch()
    if obstacle is not None:
        os.execve(pytest[0], pytest, {**os.environ, SKIP_VARIABLE: obstacle})
    SCRATCH.mkdir(parents=True, exist_ok=True)
    try:
        command = [sys.executable, "-m", "tests.node.inside", *pytest]
        return namespaces.run_inside(command, os.environ)
    finally:
        for folder in ("containerd", "kubelet"):
            shutil.rmtree(CLUSTER / "node" / folder, ignore_errors=True)


def _fetch() -> str | None:
    """Fetch and build everything while there is a network; say what cannot be had."""
    try:
        packages.fetch_runtime()
        image.make_archive(IMAGES)
    except packages.PackagesError as error:
        return f"apt cannot give what a node needs: {error}"
    build_binary()
    build_kubelet()
    prometheus.fetch_binaries(kubernetes=True)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
