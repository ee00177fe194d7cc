"""Reads a CSV file cell by cell; what is wrong is told by file, line, column and remedy."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdecode_operator.errors import PermanentError

_SHOWN_CHARACTERS = 40


class InvalidCsvError(PermanentError):
    """The file is not the table asked for; the message says where and what was expected."""


@dataclass(frozen=True)
class CsvRow:
    """One row of a file, its cells by column name, and where they stand."""

    path: Path
    line: int
    columns: tuple[str, ...]
    cells: tuple[str, ...]

    def text(self, column: str) -> str:
        """Return a cell, stripped; empty where the file has no such column."""
        return self.cells[self.columns.index(column)] if column in self.columns else ""

    def error(self, column: str, expected: str) -> InvalidCsvError:
        """Return the error that a cell is not what was expected."""
        found = self.text(column)
        shown = f'"{found[:_SHOWN_CHARACTERS]}"' if found else "nothing"
        return InvalidCsvError(
            f"{self.path}:{self.line}: column {self.columns.index(column) + 1} ({column}): "
            f"expected {expected}, found {shown}"
        )

    def number(self, column: str, expected: str, *, least: float, most: float = 1e9) -> float:
        """Return a finite number within bounds."""
        try:
            value = float(self.text(column))
        except ValueError:
            raise self.error(column, expected) from None
        if not (math.isfinite(value) and least <= value <= most):
            raise self.error(column, expected)
        return value

    def whole(self, column: str, expected: str, *, least: int, most: int = 10**9) -> int:
        """Return a whole number within bounds."""
        value = self.number(column, expected, least=least, most=most)
        if value != int(value):
            raise self.error(column, expected)
        return int(value)


def read_rows(path: Path, *, required: Sequence[str]) -> list[CsvRow]:
    """Read a file with a header line; raise InvalidCsvError where it is no such table."""
    lines = _read_lines(path)
    _, header = next(lines, (1, []))
    columns = tuple(name.strip().lower() for name in header)
    if not any(columns):
        raise InvalidCsvError(
            f"{path}:1: column 1: expected a header with {', '.join(required)}; the file is empty"
        )
    for name in required:
        if name not in columns:
            raise InvalidCsvError(
                f"{path}:1: column {len(columns)}: expected a header with {', '.join(required)}; "
                f"{name} is missing, found {', '.join(columns)}"
            )
    for number, name in enumerate(columns):
        if name in columns[:number]:
            raise InvalidCsvError(
                f"{path}:1: column {number + 1} ({name}): expected each name once; this one occurs "
                "before"
            )
    rows = [_to_row(path, line, columns, cells) for line, cells in lines]
    if not rows:
        raise InvalidCsvError(
            f"{path}:2: column 1 ({columns[0]}): expected at least one row below the header, "
            "found none"
        )
    return rows


def _to_row(path: Path, line: int, columns: tuple[str, ...], cells: list[str]) -> CsvRow:
    if len(cells) != len(columns):
        first = min(len(cells), len(columns))
        name = f" ({columns[first]})" if first < len(columns) else ""
        raise InvalidCsvError(
            f"{path}:{line}: column {first + 1}{name}: expected {len(columns)} cells as in the "
            f"header, found {len(cells)}"
        )
    return CsvRow(path, line, columns, tuple(cell.strip() for cell in cells))


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of every line that is neither empty nor a # comment."""
    text = _read_text(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    start = 1
    try:
        for cells in reader:
            line, start = start, reader.line_num + 1
            if any(cell.strip() for cell in cells) and not cells[0].lstrip().startswith("#"):
                yield line, cells
    except csv.Error as error:
        raise InvalidCsvError(
            f"{path}:{reader.line_num}: column 1: expected comma-separated values, found {error}"
        ) from error


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidCsvError(f"{path}: {error.strerror or error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = before.rpartition(b"\n")[2].count(b",") + 1
        raise InvalidCsvError(
            f"{path}:{line}: column {column}: expected UTF-8 text, found the byte "
            f"0x{data[error.start]:02x}"
        ) from error
