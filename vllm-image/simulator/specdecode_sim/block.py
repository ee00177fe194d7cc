"""The engine in virtual time, by block: steps recorded once, then drawn from many at a time.

Of the two fidelities of one model this is the fast one. A cell is a number of streams under a
table, at an ease. Nothing of its totals is derived on paper: how often prefills join, which
requests end together, and so the variance of a block, come out of the schedule. The step version
(`virtual`) therefore records each cell once, without noise, for TAPE_SECONDS of virtual time; a
block is a stretch of that tape, going on where the cell's last one ended. What fits into the block
is taken in sections, the sums of all steps in SECTION_SECONDS, and only the rest step by step: a
block ends with the same step either way.

The noise of step times is drawn afresh with the model's own code, a section's at once: what is
independent from step to step averages out in it, and one slow Ornstein-Uhlenbeck deviation runs
through all blocks whatever their cell, so neighbours are as alike as in the step version.

What is given up: a change of table or streams is in force at once, with no requests left over from
before, and a cell's long-run means carry the error of one recording (goodput about 0.1 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numba import njit

from specdecode_sim import model, virtual
from specdecode_sim.profile import Profile

TAPE_SECONDS = 1200.0
TAPE_REQUEST_STEPS = 200_000  # at few streams a longer tape, for the error of its acceptance
SECTION_SECONDS = 0.2  # at most a hundredth of the slow noise's own time
EASE_STEP = 0.01  # drift is followed in steps of this size

Rows = Sequence[tuple[int, int, int]]
Cell = tuple[tuple[tuple[int, int, int], ...], int, int]


class Tape(NamedTuple):
    """A cell's steps, and their sums by section: `sums[firsts[n]:firsts[n + 1]]` is section n."""

    steps: virtual.Lines
    sums: virtual.Lines  # a line for each kind of step in the section: bucket, K, mixed or not
    firsts: model.Ints
    section_steps: int


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
        recorded = engine.record(rows, streams=streams, steps=int(wanted))
        section_seconds = min(SECTION_SECONDS, self.profile.noise.slow_seconds / 100)
        section_steps = max(1, int(section_seconds * steps / warm.seconds))
        sums, firsts = _sum_sections(recorded, section_steps)
        return Tape(recorded, sums, firsts, section_steps)

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
            head = int(self._chance.integers(len(tape.steps)))
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
def _sum_sections(steps: virtual.Lines, section_steps: int) -> tuple[virtual.Lines, model.Ints]:
    """Sum a recording's steps by section and kind; a rest at the end is no section."""
    sections = steps.shape[0] // section_steps
    sums = np.zeros_like(steps)
    firsts = np.zeros(sections + 1, dtype=np.int64)
    used = 0
    for section in range(sections):
        firsts[section] = used
        for head in range(section * section_steps, (section + 1) * section_steps):
            line = firsts[section]
            while line < used and not _are_one_kind(sums[line], steps[head]):
                line += 1
            if line == used:
                sums[used, : virtual.STEP_COUNT] = steps[head, : virtual.STEP_COUNT]
                used += 1
            sums[line, virtual.STEP_COUNT :] += steps[head, virtual.STEP_COUNT :]
    firsts[sections] = used
    return sums[:used].copy(), firsts


@njit(cache=True)
def _are_one_kind(one: virtual.Lines, other: virtual.Lines) -> bool:
    return bool(np.all(one[: virtual.STEP_COUNT] == other[: virtual.STEP_COUNT]))


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
    """Sum the tape from step `head` on over so many seconds; returns them and the next head."""
    steps, sums, firsts, section_steps = tape
    passed = 0.0
    while passed < seconds:
        lines, first, last, taken = steps, head, head + 1, 1
        section = head // section_steps
        if head % section_steps == 0 and section + 1 < firsts.size:
            planned = 0.0
            for line in range(firsts[section], firsts[section + 1]):
                planned += sums[line, virtual.STEP_SECONDS]
            if passed + planned <= seconds:
                lines, first, last = sums, firsts[section], firsts[section + 1]
                taken = section_steps
        for line in range(first, last):
            took = _draw_seconds(lines[line], slow, conditions, chance)
            virtual.count(lines[line], took, cells, mixed, at_risk, accepted)
            passed += took
        head += taken
        if head >= steps.shape[0]:
            head = int(chance.random() * steps.shape[0])
    return passed, head


@njit(cache=True)
def _draw_seconds(
    line: virtual.Lines,
    slow: model.Floats,
    conditions: model.Conditions,
    chance: np.random.Generator,
) -> float:
    """Return a line's time with noise."""
    planned = float(line[virtual.STEP_SECONDS])
    concentration = 1.0
    if line[virtual.STEP_COUNT] > 1:
        concentration = line[virtual.STEP_SQUARES] / planned**2
    return planned * float(model.noise(slow, conditions, planned, concentration, chance))
