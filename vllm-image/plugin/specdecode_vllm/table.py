"""The K-table file as the engine reads it: parsing, fingerprint, clamping, look-up.

Pure and free of vLLM, so that the same cases (tests/data/tables_contract.json) can be run
here and against the operator that writes the files. A file is taken or refused as a whole:
an engine that guesses at half a table would run something nobody decided.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

SCHEMA = 1
MAX_FILE_BYTES = 64 * 1024
REQUIRED_KEYS = frozenset({"schema", "generation", "enabled", "rows"})
OPTIONAL_KEYS = frozenset({"reason"})

# Why a file was refused: the values of the label `reason` of specdecode_table_rejects_total.
TOO_LARGE = "too-large"
NOT_JSON = "not-json"
FIELDS = "fields"
SCHEMA_VERSION = "schema"
ROWS = "rows"
OUTSIDE_ENVELOPE = "outside-envelope"
PARSE_REASONS = (TOO_LARGE, NOT_JSON, FIELDS, SCHEMA_VERSION, ROWS, OUTSIDE_ENVELOPE)


class TableRefusedError(ValueError):
    """A table file that is not taken; `reason` is one of PARSE_REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """K for the batches first..last, both inclusive, in requests per step."""

    first: int
    last: int
    k: int


@dataclass(frozen=True)
class Table:
    """One accepted table file. With `enabled` false K is 0 everywhere."""

    generation: int
    enabled: bool
    rows: tuple[Row, ...]

    @property
    def fingerprint(self) -> int:
        """Return the 48-bit identity of what the table does; generation and reason stay out."""
        content = {
            "schema": SCHEMA,
            "enabled": self.enabled,
            "rows": [[row.first, row.last, row.k] for row in self.rows],
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def parse_table(content: bytes, *, envelope: Collection[int]) -> Table:
    """Read a table file; raise TableRefusedError when any part of it is not as agreed."""
    if len(content) > MAX_FILE_BYTES:
        raise TableRefusedError(TOO_LARGE, f"{len(content)} bytes, at most {MAX_FILE_BYTES}")
    fields = _load_object(content)
    _check_keys(fields)
    if not _is_integer(fields["schema"]) or fields["schema"] != SCHEMA:
        raise TableRefusedError(SCHEMA_VERSION, f"schema {fields['schema']!r}, known: {SCHEMA}")
    if not isinstance(fields.get("reason", ""), str):
        raise TableRefusedError(FIELDS, "reason must be a string")
    return Table(
        generation=_parse_generation(fields["generation"]),
        enabled=_parse_enabled(fields["enabled"]),
        rows=_parse_rows(fields["rows"], envelope=envelope),
    )


def _load_object(content: bytes) -> dict[str, object]:
    try:
        fields = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, TableRefusedError):
            raise
        raise TableRefusedError(NOT_JSON, str(error)) from error
    if not isinstance(fields, dict):
        raise TableRefusedError(FIELDS, "the file must hold one JSON object")
    return fields


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise TableRefusedError(FIELDS, "a key occurs twice")
    return fields


def _check_keys(fields: dict[str, object]) -> None:
    missing = REQUIRED_KEYS - fields.keys()
    unknown = fields.keys() - REQUIRED_KEYS - OPTIONAL_KEYS
    if missing or unknown:
        raise TableRefusedError(FIELDS, f"missing {sorted(missing)}, unknown {sorted(unknown)}")


def _parse_generation(value: object) -> int:
    if not _is_integer(value) or value < 0:
        raise TableRefusedError(FIELDS, "generation must be an integer from 0")
    return value


def _parse_enabled(value: object) -> bool:
    if not isinstance(value, bool):
        raise TableRefusedError(FIELDS, "enabled must be true or false")
    return value


def _parse_rows(value: object, *, envelope: Collection[int]) -> tuple[Row, ...]:
    if not isinstance(value, list) or not value:
        raise TableRefusedError(ROWS, "rows must be a list with at least one row")
    rows: list[Row] = []
    for item in value:
        rows.append(_parse_row(item, expected_first=rows[-1].last + 1 if rows else 1))
    outside = sorted({row.k for row in rows} - set(envelope))
    if outside:
        raise TableRefusedError(
            OUTSIDE_ENVELOPE, f"K {outside} not in the start-up table's {sorted(envelope)}"
        )
    return tuple(rows)


def _parse_row(item: object, *, expected_first: int) -> Row:
    if not isinstance(item, list) or len(item) != 3 or not all(map(_is_integer, item)):
        raise TableRefusedError(ROWS, f"{item!r} is not [first, last, k] in integers")
    row = Row(*item)
    if row.first != expected_first:
        raise TableRefusedError(ROWS, f"a row starts at {row.first}, not at {expected_first}")
    if not is_row_start(row.first):
        raise TableRefusedError(ROWS, f"row start {row.first} is neither 1 nor 2^n + 1")
    if row.last < row.first or row.k < 0:
        raise TableRefusedError(ROWS, f"{item!r} ends before it starts, or has a negative K")
    return row


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_row_start(batch: int) -> bool:
    """Tell whether a row may start at `batch`: the lower bounds of the metric buckets."""
    return batch == 1 or (batch >= 2 and (batch - 1) & (batch - 2) == 0)


def batch_bucket(batch: int) -> int:
    """Return the upper bound of the power-of-two bucket that `batch` (from 1) falls into."""
    return 1 << (batch - 1).bit_length()


def clamp_rows(
    rows: Sequence[Row], *, envelope: Collection[int], captured_tokens: int | None
) -> tuple[tuple[Row, ...], int]:
    """Lower each row's K until batch x (K+1) fits the captured tokens.

    Returns the rows and how many were lowered; `None` means nothing was captured, so no limit.
    Where not even the smallest K fits, that one is taken: no draft makes it better.
    """
    clamped = tuple(_clamp(row, sorted(envelope), captured_tokens) for row in rows)
    return clamped, sum(old.k != new.k for old, new in zip(rows, clamped, strict=True))


def _clamp(row: Row, envelope: list[int], captured_tokens: int | None) -> Row:
    if captured_tokens is None or row.last * (row.k + 1) <= captured_tokens:
        return row
    below = [k for k in envelope if k < row.k]
    fitting = [k for k in below if row.last * (k + 1) <= captured_tokens]
    k = fitting[-1] if fitting else min([*below, row.k])
    return Row(row.first, row.last, k)


def extend_rows(rows: Sequence[Row], *, max_batch: int) -> tuple[Row, ...]:
    """Let the last row, which holds beyond its end, end at the engine's largest batch."""
    last = rows[-1]
    return (*rows[:-1], Row(last.first, max(last.last, max_batch), last.k))


def build_lookup(rows: Iterable[Row], *, max_batch: int) -> list[int]:
    """Spread rows into K by batch, index 0..max_batch; the last row holds beyond its end."""
    lookup = [0] * (max_batch + 1)
    for row in rows:
        lookup[row.first :] = [row.k] * max(0, max_batch + 1 - row.first)
    return lookup
