"""The tables that `specdecode plan` reads: measured goodput, and how often each batch occurs."""

from __future__ import annotations

from pathlib import Path

from specdecode_operator.cli.csv_file import CsvRow, InvalidCsvError, read_rows
from specdecode_operator.estimate.surface import MAX_ARM, Measurement
from specdecode_operator.estimate.surface_prior import Arm

_OFF = ("off", "none")
_LEAST_RATE = 1e-6

_BATCH = "a batch size of at least 1"
_K = f"a whole number from 0 to {MAX_ARM}, or off"
_RATE = "a number above 0"
_STDERR = "a number of at least 0, or nothing"
_N = "a whole number of at least 1, or nothing"
_WEIGHT = "a number of at least 0"

COLUMNS = ("batch", "k", "tokens_per_second")
OPTIONAL_COLUMNS = ("stderr", "n")


def load_measurements(path: Path) -> tuple[list[Measurement], tuple[str, ...]]:
    """Read a table of measurements; return its rows and the columns that were not used."""
    rows = read_rows(path, required=COLUMNS)
    known = (*COLUMNS, *OPTIONAL_COLUMNS)
    unused = tuple(name for name in rows[0].columns if name not in known)
    return [_to_measurement(row) for row in rows], unused


def load_occupancy(path: Path, *, largest_batch: float) -> dict[float, float]:
    """Read the share of time spent at each batch, in any unit; repeated batches add up.

    A batch may be twice the largest one measured, no more: there the surface ends.
    """
    most = 2 * largest_batch
    expected = f"a batch size from 1 to {most:g}, twice the largest that was measured"
    weights: dict[float, float] = {}
    rows = read_rows(path, required=("batch",))
    column = _weight_column(rows[0])
    for row in rows:
        batch = row.number("batch", expected, least=1, most=most)
        weights[batch] = weights.get(batch, 0.0) + row.number(column, _WEIGHT, least=0)
    if not sum(weights.values()) > 0:
        raise rows[0].error(column, "at least one weight above 0")
    return {batch: weight for batch, weight in weights.items() if weight > 0}


def _weight_column(row: CsvRow) -> str:
    """Return `weight`, or the one column beside batch, whatever its name."""
    others = [name for name in row.columns if name != "batch"]
    if "weight" in others:
        return "weight"
    if len(others) != 1:
        raise InvalidCsvError(
            f"{row.path}:1: column {len(row.columns)}: expected a header with batch, weight; "
            f"weight is missing, found {', '.join(row.columns)}"
        )
    return others[0]


def _to_measurement(row: CsvRow) -> Measurement:
    return Measurement(
        batch=row.number("batch", _BATCH, least=1),
        arm=_arm(row),
        tokens_per_second=row.number("tokens_per_second", _RATE, least=_LEAST_RATE),
        stderr=row.number("stderr", _STDERR, least=0) if row.text("stderr") else None,
        n=row.whole("n", _N, least=1) if row.text("n") else 1,
    )


def _arm(row: CsvRow) -> Arm:
    if row.text("k").lower() in _OFF:
        return None
    return row.whole("k", _K, least=0, most=MAX_ARM)
