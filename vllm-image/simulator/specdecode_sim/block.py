"""The engine in virtual time, by block: steps recorded once, then drawn from by the thousand.

Of the two fidelities of one model this is the fast one. A cell is a number of streams under a
table, at an ease. Nothing of its totals is derived on paper: how often prefills join, which
requests end together, and so the variance of a block, come out of the schedule. The step version
(`virtual`) therefore records each cell once, without noise, for TAPE_SECONDS of virtual time; a
block is a stretch of that tape, going on where the cell's last one ended. The noise of step times
is drawn afresh with the model's own code: one slow Ornstein-Uhlenbeck deviation runs through all
blocks whatever their cell, so neighbours are as alike as in the step version.

What is given up: a change of table or streams is in force at once, with no requests left over from
before, and a cell's long-run means carry the error of one recording (goodput about 0.1 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from specdecode_sim import model, virtual
from specdecode_sim.profile import Profile

TAPE_SECONDS = 1200.0
TAPE_REQUEST_STEPS = 200_000  # at few streams a longer tape, for the error of its acceptance
EASE_STEP = 0.01  # drift is followed in steps of this size

Rows = Sequence[tuple[int, int, int]]
Tape = NDArray[np.float32]
Cell = tuple[tuple[tuple[int, int, int], ...], int, int]


class Tapes:
    """Recorded cells of one engine; to be shared by all engines of the same make."""

    def __init__(
        self,
        profile: Profile,
        *,
        k_max: int,
        graphs: str = "FULL_AND_PIECEWISE",
        adaptive: bool = False,
        speculation: bool = True,
        max_requests: int = 256,
        lengths: virtual.Lengths = virtual.ALL_ALIKE,
        seed: int = 0,
    ) -> None:
        self.profile = profile
        self.k_max = k_max
        self.max_requests = max_requests
        self._graphs = graphs
        self._adaptive = adaptive
        self._speculation = speculation
        self._lengths = lengths
        self._seed = seed
        self._tapes: dict[Cell, Tape] = {}

    def get(self, cell: Cell) -> Tape:
        """Return a cell's tape, recorded at its first use."""
        if cell not in self._tapes:
            self._tapes[cell] = self._record(cell)
        return self._tapes[cell]

    def _record(self, cell: Cell) -> Tape:
        rows, streams, ease_steps = cell
        probe = self._build_engine(ease_steps).run(rows, streams=streams, seconds=5.0)
        lifetime = streams * (self._lengths.output_first + self._lengths.output_last) / 2
        lifetime /= max(probe.goodput, 1e-9)
        engine = self._build_engine(ease_steps)
        # Streams that start at once and are all alike would stay in step for ever.
        for eighth in range(1, 9):
            engine.run(rows, streams=max(1, streams * eighth // 8), seconds=lifetime * 0.37)
        warm = engine.run(rows, streams=streams, seconds=3 * lifetime)
        steps = warm.cells[..., virtual.STEPS].sum() + warm.mixed[..., virtual.STEPS].sum()
        wanted = max(TAPE_SECONDS * steps / warm.seconds, TAPE_REQUEST_STEPS / streams)
        return engine.record(rows, streams=streams, steps=int(wanted))

    def _build_engine(self, ease_steps: int) -> virtual.VirtualEngine:
        acceptance = self.profile.acceptance.model_copy(update={"drift_per_hour": 0.0})
        classes = {
            name: kind.model_copy(update={"ease": kind.ease * ease_steps * EASE_STEP})
            for name, kind in self.profile.classes.items()
        }
        return virtual.VirtualEngine(
            self.profile.model_copy(update={"acceptance": acceptance, "classes": classes}),
            k_max=self.k_max,
            graphs=self._graphs,
            adaptive=self._adaptive,
            speculation=self._speculation,
            max_requests=self.max_requests,
            lengths=self._lengths,
            noise=False,
            seed=self._seed,
        )


class BlockEngine:
    """One engine whose time only passes in `run`, a block at a time."""

    def __init__(self, tapes: Tapes, *, noise: bool = True, seed: int = 0) -> None:
        self._tapes = tapes
        self._conditions = tapes.profile.build_conditions(noise=noise)
        self._chance = np.random.default_rng(seed)
        self._slow = np.full(1, self._conditions.slow_noise * self._chance.standard_normal())
        self._heads: dict[Cell, int] = {}
        self.now_seconds = 0.0

    def run(self, rows: Rows, *, streams: int, seconds: float) -> virtual.Totals:
        """Let `seconds` pass with so many streams under a table of (first, last, K) rows."""
        cell = (tuple(rows), streams, self._ease_steps())
        tape = self._tapes.get(cell)
        head = self._heads.get(cell)
        if head is None:
            head = int(self._chance.integers(len(tape)))
        counted = virtual.build_totals(
            max_requests=self._tapes.max_requests, k_max=self._tapes.k_max
        )
        passed, self._heads[cell] = _replay(
            tape,
            head,
            self._slow,
            self._conditions,
            self._chance,
            seconds,
            counted.cells,
            counted.mixed,
            counted.at_risk,
            counted.accepted,
        )
        self.now_seconds += passed
        return replace(counted, seconds=passed)

    def _ease_steps(self) -> int:
        drift = self._tapes.profile.acceptance.drift_per_hour * self.now_seconds / 3600.0
        return round(max(0.0, 1.0 - drift) / EASE_STEP)


@njit(cache=True)
def _replay(
    tape: Tape,
    head: int,
    slow: model.Floats,
    conditions: model.Conditions,
    chance: np.random.Generator,
    seconds: float,
    cells: model.Floats,
    mixed: model.Floats,
    at_risk: model.Ints,
    accepted: model.Ints,
) -> tuple[float, int]:
    """Sum steps from `head` on over so many seconds; returns the seconds and the next head."""
    first = virtual.TAPE_COLUMNS
    positions = at_risk.size
    passed = 0.0
    while passed < seconds:
        bucket, k = int(tape[head, virtual.STEP_BUCKET]), int(tape[head, virtual.STEP_K])
        is_mixed = tape[head, virtual.STEP_MIXED] > 0
        took = float(tape[head, virtual.STEP_SECONDS])
        took *= model.noise(slow, conditions, took, chance)
        cell = mixed[bucket] if is_mixed else cells[bucket, k]
        cell[virtual.STEPS] += 1
        cell[virtual.SECONDS] += took
        cell[virtual.TOKENS] += tape[head, virtual.STEP_TOKENS]
        cell[virtual.REQUESTS] += tape[head, virtual.STEP_BATCH]
        cell[virtual.CONTEXT] += tape[head, virtual.STEP_CONTEXT]
        for position in range(positions):
            if tape[head, first + position] == 0:
                break
            at_risk[position] += int(tape[head, first + position])
            accepted[position] += int(tape[head, first + positions + position])
        passed += took
        head += 1
        if head == tape.shape[0]:
            head = int(chance.random() * tape.shape[0])
    return passed, head
