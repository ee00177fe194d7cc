"""The stack on a real node, started once; its figures are printed at the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.cluster import NodeCluster
from tests.node.objects import IMAGES, SIMULATOR, NodeImage
from tests.node.place import CLUSTER, FIGURES, FOLDER, INSIDE_VARIABLE, SKIP_VARIABLE
from tests.support.stack import Stack


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these tests to `make test-node`: others choose by what a test is not."""
    marks = config.getoption("markexpr")
    return True if marks and "node" not in marks else None


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The whole stack with one real node, in namespaces of its own."""
    if INSIDE_VARIABLE not in os.environ:
        pytest.skip(os.environ.get(SKIP_VARIABLE) or "run by `make test-node`, in namespaces")
    shutil.rmtree(FIGURES, ignore_errors=True)
    cluster = NodeCluster(CLUSTER, images=IMAGES)
    with Stack(FOLDER, NodeImage(SIMULATOR), cluster=cluster) as running:
        yield running
        running.operator.check_alive()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was measured."""
    figures = sorted(FIGURES.glob("*.json")) if INSIDE_VARIABLE in os.environ else []
    for path in figures:
        terminalreporter.write_line(f"{path.stem}: {json.dumps(json.loads(path.read_text()))}")
