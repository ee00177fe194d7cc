"""The K-table: draft tokens by batch size, with its invariants, and the envelope of K.

The file form is a contract with the engine's plugin (design record on the table file): rows
`[first batch, last batch (inclusive), K]`, contiguous from 1, the last row holding beyond its
end; a row starts at 1 or 2^n + 1, because the engine's step metrics are bucketed so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from specdecode_operator.errors import InvalidTableError

SCHEMA: Final = 1


class Row(NamedTuple):
    """K for the batches first..last, both inclusive."""

    first: int
    last: int
    k: int


def is_row_start(batch: int) -> bool:
    """Tell whether a row may start at this batch: 1 or 2^n + 1."""
    return batch == 1 or (batch >= 2 and (batch - 1) & (batch - 2) == 0)


def bucket_of(batch: float) -> int:
    """Return the upper bound of the power-of-two bucket that holds a batch size (>= 1)."""
    bound = 1
    while bound < batch:
        bound *= 2
    return bound


def bucket_first(bound: int) -> int:
    """Return the smallest batch of the bucket with this upper bound."""
    return 1 if bound <= 1 else bound // 2 + 1


@dataclass(frozen=True)
class Envelope:
    """The K values that an engine prepared at start-up, ascending; 0 and K_max among them."""

    ks: tuple[int, ...]

    @classmethod
    def of(cls, wanted: Iterable[int], k_max: int) -> Envelope:
        """Complete the wanted K values with 0 and K_max.

        Without any wanted value: 0, 1, about half of K_max, K_max (graphs multiply with their
        number, so few).
        """
        values = set(wanted) or {1, (k_max + 1) // 2}
        return cls(tuple(sorted({k for k in values if 0 <= k <= k_max} | {0, k_max})))

    @property
    def k_max(self) -> int:
        """The largest K."""
        return self.ks[-1]

    def neighbours(self, k: int, min_k: int) -> tuple[int, ...]:
        """Return the next smaller and the next larger K that may be chosen."""
        below = [x for x in self.ks if min_k <= x < k]
        above = [x for x in self.ks if x > k and x >= min_k]
        return tuple(below[-1:] + above[:1])

    def nearest(self, k: int) -> int:
        """Return the largest K of the envelope that is not above k."""
        return max(x for x in self.ks if x <= k)


@dataclass(frozen=True)
class KTable:
    """K by batch size; every instance holds the invariants of the file."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise InvalidTableError("the table has no row: give one that starts at batch 1")
        if self.rows[0].first != 1:
            raise InvalidTableError(
                f"the first row starts at batch {self.rows[0].first}: let it start at 1"
            )
        for row in self.rows:
            if not is_row_start(row.first):
                raise InvalidTableError(
                    f"a row starts at batch {row.first}: rows start at 1 or 2^n + 1 "
                    "(2, 3, 5, 9, 17, 33, …)"
                )
            if row.last < row.first:
                raise InvalidTableError(f"a row ends at {row.last} before its start {row.first}")
            if row.k < 0:
                raise InvalidTableError(f"K is {row.k}: it must be 0 or more")
        for before, after in pairwise(self.rows):
            if after.first != before.last + 1:
                raise InvalidTableError(
                    f"a row starts at {after.first} after one that ends at {before.last}: "
                    "rows must follow on one another"
                )

    @classmethod
    def constant(cls, k: int, max_batch: int) -> KTable:
        """Make the table with the same K at every batch."""
        return cls((Row(1, max_batch, k),))

    @classmethod
    def from_starts(cls, starts: Sequence[tuple[int, int]], max_batch: int) -> KTable:
        """Make a table from (first batch, K) pairs; it ends at max_batch or its last start."""
        ends = [first - 1 for first, _ in starts[1:]]
        last = max(max_batch, starts[-1][0]) if starts else max_batch
        return cls(
            tuple(Row(first, end, k) for (first, k), end in zip(starts, [*ends, last], strict=True))
        )

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> KTable:
        """Make a table from `[first, last, K]` lists. Raises InvalidTableError."""
        try:
            return cls(tuple(Row(*row) for row in rows))
        except TypeError as error:
            raise InvalidTableError(f"a row is not [first, last, K]: {error}") from error

    def to_rows(self) -> list[list[int]]:
        """Return vLLM's own list form."""
        return [list(row) for row in self.rows]

    def k_at(self, batch: int) -> int:
        """Return K at a batch size; the last row holds beyond its end."""
        return next((row.k for row in self.rows if batch <= row.last), self.rows[-1].k)

    @property
    def ks(self) -> frozenset[int]:
        """The K values that occur."""
        return frozenset(row.k for row in self.rows)

    @property
    def max_batch(self) -> int:
        """The end of the last row."""
        return self.rows[-1].last

    def with_bucket(self, bound: int, k: int) -> KTable:
        """Set K for one power-of-two bucket and merge equal neighbours."""
        bounds = self._bounds(bound)
        pieces = [
            (bucket_first(b), k if b == bound else self.k_at(bucket_first(b))) for b in bounds
        ]
        merged: list[tuple[int, int]] = []
        for first, value in pieces:
            if not merged or merged[-1][1] != value:
                merged.append((first, value))
        return KTable.from_starts(merged, self.max_batch)

    def _bounds(self, bound: int) -> list[int]:
        top = max(bucket_of(self.max_batch), bound)
        return [2**n for n in range(top.bit_length())]

    def clamped_to(self, envelope: Envelope) -> KTable:
        """Lower every K to the largest one of the envelope that is not above it."""
        return KTable(tuple(row._replace(k=envelope.nearest(row.k)) for row in self.rows))

    def compact(self) -> str:
        """Return the short form for people: `7x16,3x64,1` (K x last batch; the rest: K)."""
        parts = [f"{row.k}x{row.last}" for row in self.rows[:-1]]
        return ",".join([*parts, str(self.rows[-1].k)])


@dataclass(frozen=True)
class TableFile:
    """What one file of the ConfigMap of tables says."""

    table: KTable
    generation: int
    enabled: bool
    reason: str

    def to_json(self) -> str:
        """Render the file's text, in one fixed key order."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "generation": self.generation,
                "enabled": self.enabled,
                "rows": self.table.to_rows(),
                "reason": self.reason,
            }
        )

    @property
    def fingerprint(self) -> int:
        """48 bits that name the content, without generation and reason."""
        return fingerprint(self.table, enabled=self.enabled)


def fingerprint(table: KTable, *, enabled: bool) -> int:
    """Return the first 6 bytes, big-endian, of SHA-256 over the canonical JSON."""
    content = {"schema": SCHEMA, "enabled": enabled, "rows": table.to_rows()}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def build_start_table(envelope: Envelope, max_num_seqs: int) -> list[list[int]]:
    """Build the table given to the engine at start-up, so that every envelope K is captured.

    vLLM captures FULL graphs for each K at sizes up to the widest batch that K has in this
    table; so each K also occurs at the top rows: `[1,N-3,7],[N-2,N-2,3],[N-1,N-1,1],[N,N,0]`.
    Its rows need not start on bucket bounds: it is never looked up, the live table is.
    """
    ks = sorted(envelope.ks, reverse=True)
    top = max(max_num_seqs, len(ks))
    widest = top - len(ks) + 1
    return [[1, widest, ks[0]]] + [[widest + i, widest + i, k] for i, k in enumerate(ks) if i]
