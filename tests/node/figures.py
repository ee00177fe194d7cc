"""Figures that the tests measure, kept as JSON and printed at the end of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from tests.node.place import FIGURES


def record(name: str, **values: float) -> None:
    """Keep the figures of one name, rounded to milliseconds."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    rounded = {key: round(value, 3) for key, value in values.items()}
    (FIGURES / f"{name}.json").write_text(json.dumps(rounded))


def record_seconds(name: str, seconds: Sequence[float]) -> None:
    """Keep count, median and maximum of durations."""
    record(name, count=len(seconds), medianSeconds=median(seconds), maxSeconds=max(seconds))
