"""Holds K at the edges of a table's rows, so that one joining request does not flip it.

vLLM looks K up by all requests of a step, prefills among them: a stream that joins at a row's
edge moves the whole batch to the next row, and back when another ends. With a margin a row is
left only when the batch is beyond it by more than that many requests. Off unless asked for.
"""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SPECDECODE_EDGE_MARGIN"

Lookup = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Batches first..last for which one K is held, and the look-up while it is held."""

    first: int
    last: int
    lookup: Lookup


def read_margin(environment: Mapping[str, str] = os.environ) -> int:
    """Return the margin in requests, 0 when none is asked for; ValueError when it is no number."""
    text = environment.get(VARIABLE) or "0"
    if not text.isdecimal():
        raise ValueError(f"{VARIABLE} must be a number of requests from 0, not {text!r}")
    return int(text)


class Edges:
    """Chooses the look-up of the next step by the batches of those before it."""

    def __init__(self, *, margin: int, captured_tokens: int | None) -> None:
        self._margin = margin
        self._captured_tokens = captured_tokens
        self._plain: Lookup = ()
        self._runs: list[Run] = []
        self._run: Run | None = None

    def choose(self, plain: Lookup) -> Lookup:
        """Return the look-up for a step; a new table begins without anything held."""
        if plain is not self._plain:
            self._plain = plain
            self._run = None
            self._runs = widen_runs(
                plain, margin=self._margin, captured_tokens=self._captured_tokens
            )
        return self._run.lookup if self._run else plain

    def note(self, batch: int) -> None:
        """Take in the batch of a step that was scheduled."""
        run = self._run
        if batch and not (run and run.first <= batch <= run.last):
            # The plain row decides which run that is; widened ones overlap.
            self._run = self._runs[self._row_of(batch)] if self._runs else None

    def _row_of(self, batch: int) -> int:
        edges = range(2, min(batch, len(self._plain) - 1) + 1)
        return sum(self._plain[n] != self._plain[n - 1] for n in edges)


def widen_runs(plain: Lookup, *, margin: int, captured_tokens: int | None) -> list[Run]:
    """List the runs of equal K, each widened by `margin`; none where the margin is 0.

    A K is never held where the batch's tokens would pass those captured: that is a hard limit.
    """
    if not margin:
        return []
    starts = [1, *(n for n in range(2, len(plain)) if plain[n] != plain[n - 1]), len(plain)]
    runs = []
    for start, end in itertools.pairwise(starts):
        first, last = max(1, start - margin), min(len(plain) - 1, end - 1 + margin)
        k = plain[start]
        lookup = list(plain)
        for batch in range(first, last + 1):
            if captured_tokens is None or k < plain[batch] or batch * (k + 1) <= captured_tokens:
                lookup[batch] = k
        runs.append(Run(first, last, tuple(lookup)))
    return runs
