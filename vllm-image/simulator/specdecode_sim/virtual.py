"""The engine in virtual time, step by step: the same compiled step, no sockets, no clock.

A closed loop of streams keeps so many requests in the engine; what a Prometheus would see of the
plugin's counters comes out as totals by cell. For benchmarks and for studies of the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from specdecode_sim import cost as costs
from specdecode_sim import model
from specdecode_sim.profile import Profile
from specdecode_vllm.table import Row, batch_bucket, build_lookup

# Columns of a cell's totals.
STEPS, SECONDS, TOKENS, REQUESTS, CONTEXT, COLUMNS = range(6)
# Columns of a tape's line: one step, or the sum of several of one cell. The first three name the
# cell; drafts at risk by position and accepted by position follow the last.
(
    STEP_BUCKET,
    STEP_K,
    STEP_MIXED,
    STEP_COUNT,
    STEP_SECONDS,
    STEP_SQUARES,  # of seconds
    STEP_TOKENS,
    STEP_BATCH,
    STEP_CONTEXT,
    TAPE_COLUMNS,
) = range(10)
_ANY_STEPS = 1 << 62

Lines = NDArray[np.float32]


class Lengths(NamedTuple):
    """Prompt and output of a stream's requests in tokens; drawn evenly from first to last."""

    prompt_first: int = 128
    prompt_last: int = 128
    output_first: int = 128
    output_last: int = 128


ALL_ALIKE = Lengths()


@dataclass(frozen=True)
class Totals:
    """What the plugin's counters gained over some virtual time.

    `cells` has the shape (bucket exponent, K, COLUMNS), decode-only steps; `mixed` (bucket
    exponent, COLUMNS), with prefill tokens in place of context. `at_risk` and `accepted` are by
    position. `seconds` is the virtual time that passed.
    """

    cells: model.Floats
    mixed: model.Floats
    at_risk: model.Ints
    accepted: model.Ints
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens per second of busy time, in a closed loop of all time."""
        tokens = self.cells[..., TOKENS].sum() + self.mixed[..., TOKENS].sum()
        busy = self.cells[..., SECONDS].sum() + self.mixed[..., SECONDS].sum()
        return float(tokens / busy) if busy else 0.0


def build_totals(*, max_requests: int, k_max: int) -> Totals:
    """Make totals of nothing."""
    buckets = batch_bucket(max_requests).bit_length()
    return Totals(
        cells=np.zeros((buckets, k_max + 1, COLUMNS)),
        mixed=np.zeros((buckets, COLUMNS)),
        at_risk=np.zeros(k_max, dtype=np.int64),
        accepted=np.zeros(k_max, dtype=np.int64),
        seconds=0.0,
    )


class VirtualEngine:
    """One engine whose time only passes in `run`."""

    def __init__(
        self,
        profile: Profile,
        *,
        k_max: int,
        graphs: str = "FULL_AND_PIECEWISE",
        adaptive: bool = False,
        speculation: bool = True,
        max_requests: int = 256,
        lengths: Lengths = ALL_ALIKE,
        noise: bool = True,
        seed: int = 0,
    ) -> None:
        longest = lengths.prompt_last + lengths.output_last
        kv_blocks = profile.kv_tokens // model.BLOCK_TOKENS
        kv_tokens = kv_blocks * model.BLOCK_TOKENS
        if longest > kv_tokens:
            raise ValueError(
                f"a request of {longest} tokens never fits into {kv_tokens} KV tokens: "
                "give shorter lengths or a larger kv_tokens"
            )
        self._cost = profile.build_cost(graphs=graphs)
        self._conditions = profile.build_conditions(noise=noise)
        self._survival = profile.build_survival(positions=k_max)
        self._limits = model.Limits(
            max_requests=max_requests,
            max_batched_tokens=8192,
            max_model_tokens=kv_tokens,
            kv_blocks=kv_blocks,
            adaptive=adaptive,
        )
        self._state = model.build_state(self._limits, capacity=4 * max_requests)
        self._step = model.build_step(self._limits, positions=k_max, groups=self._survival.shape[0])
        self._speculation = speculation
        self._lengths = lengths
        self._drift_per_hour = profile.acceptance.drift_per_hour
        self._chance = np.random.default_rng(seed)
        self._k_max = k_max
        self._ease = np.array([kind.ease for kind in profile.classes.values()])
        self._shares = np.cumsum([kind.share for kind in profile.classes.values()])
        self._streams = np.zeros(1, dtype=np.int64)
        self.now_seconds = 0.0

    def run(self, rows: Sequence[tuple[int, int, int]], *, streams: int, seconds: float) -> Totals:
        """Let `seconds` pass with so many streams under a table of (first, last, K) rows."""
        counted = build_totals(max_requests=self._limits.max_requests, k_max=self._k_max)
        last = self._build_tape(lines=1)
        passed = self._run(rows, streams, seconds, _ANY_STEPS, last, counted)
        self.now_seconds += passed
        return replace(counted, seconds=passed)

    def record(self, rows: Sequence[tuple[int, int, int]], *, streams: int, steps: int) -> Lines:
        """Let so many steps pass; returns a line for each, see the columns above."""
        tape = self._build_tape(lines=steps)
        counted = build_totals(max_requests=self._limits.max_requests, k_max=self._k_max)
        self.now_seconds += self._run(rows, streams, math.inf, steps, tape, counted)
        return tape

    def _build_tape(self, *, lines: int) -> Lines:
        return np.zeros((lines, TAPE_COLUMNS + 2 * self._k_max), dtype=np.float32)

    def _run(
        self,
        rows: Sequence[tuple[int, int, int]],
        streams: int,
        seconds: float,
        steps: int,
        tape: Lines,
        counted: Totals,
    ) -> float:
        return float(
            _run(
                self._state,
                self._limits,
                self._cost,
                self._conditions,
                self._survival,
                self._build_lookup(rows),
                self._chance,
                self._step,
                self._lengths,
                self._ease,
                self._shares,
                self._streams,
                streams,
                max(0.0, 1.0 - self._drift_per_hour * self.now_seconds / 3600.0),
                seconds,
                steps,
                tape,
                counted.cells,
                counted.mixed,
                counted.at_risk,
                counted.accepted,
            )
        )

    def _build_lookup(self, rows: Sequence[tuple[int, int, int]]) -> model.Ints:
        if not self._speculation:
            return np.full(2, model.NO_SPECULATION, dtype=np.int64)
        table = [Row(*row) for row in rows]
        lookup = build_lookup(table, max_batch=self._limits.max_requests)
        return np.array(lookup, dtype=np.int64)


@njit(cache=True)
def _run(
    state: model.State,
    limits: model.Limits,
    cost: costs.Cost,
    conditions: model.Conditions,
    survival: model.Floats,
    lookup: model.Ints,
    chance: np.random.Generator,
    step: model.Step,
    lengths: Lengths,
    ease: model.Floats,
    shares: model.Floats,
    held: model.Ints,
    streams: int,
    engine_ease: float,
    seconds: float,
    steps: int,
    tape: Lines,
    cells: model.Floats,
    mixed: model.Floats,
    at_risk: model.Ints,
    accepted: model.Ints,
) -> float:
    """Run for so many seconds, but at most so many steps; returns the seconds.

    The tape keeps the last steps, as many as it has lines. `held` is the number of streams now,
    changed as they end.
    """
    passed = 0.0
    taken = 0
    while passed < seconds and taken < steps:
        while held[0] < streams:
            _submit(state, lengths, ease, shares, chance, int(_free_row(state)))
            held[0] += 1
        model.advance(
            state, limits, cost, conditions, survival, lookup, 0, engine_ease, chance, step
        )
        line = tape[taken % tape.shape[0]]
        _note(line, step)
        count(line, step.numbers[model.SECONDS], cells, mixed, at_risk, accepted)
        passed += step.numbers[model.SECONDS]
        taken += 1
        for i in range(int(step.numbers[model.EMITTERS])):
            if not step.is_finished[i]:
                continue
            if held[0] > streams:
                held[0] -= 1
            else:
                _submit(state, lengths, ease, shares, chance, int(step.emitted_rows[i]))
    return passed


@njit(cache=True)
def _note(line: Lines, step: model.Step) -> None:
    """Write a step as a line."""
    numbers = step.numbers
    bucket = 0
    while (1 << bucket) < numbers[model.BATCH]:
        bucket += 1
    is_mixed = numbers[model.PREFILL_TOKENS] > 0
    line[STEP_BUCKET] = bucket
    line[STEP_K] = numbers[model.K]
    line[STEP_MIXED] = is_mixed
    line[STEP_COUNT] = 1
    line[STEP_SECONDS] = numbers[model.SECONDS]
    line[STEP_SQUARES] = numbers[model.SECONDS] ** 2
    line[STEP_TOKENS] = numbers[model.TOKENS]
    line[STEP_BATCH] = numbers[model.BATCH]
    line[STEP_CONTEXT] = numbers[model.PREFILL_TOKENS if is_mixed else model.CONTEXT_TOKENS]
    positions = (line.size - TAPE_COLUMNS) // 2
    line[TAPE_COLUMNS : TAPE_COLUMNS + positions] = step.at_risk[:positions]
    line[TAPE_COLUMNS + positions :] = step.accepted[:positions]


@njit(cache=True)
def count(
    line: Lines,
    seconds: float,
    cells: model.Floats,
    mixed: model.Floats,
    at_risk: model.Ints,
    accepted: model.Ints,
) -> None:
    """Add a line to the totals of its cell, its time as `seconds`."""
    bucket = int(line[STEP_BUCKET])
    cell = mixed[bucket] if line[STEP_MIXED] > 0 else cells[bucket, int(line[STEP_K])]
    cell[STEPS] += line[STEP_COUNT]
    cell[SECONDS] += seconds
    cell[TOKENS] += line[STEP_TOKENS]
    cell[REQUESTS] += line[STEP_BATCH]
    cell[CONTEXT] += line[STEP_CONTEXT]
    positions = at_risk.size
    for position in range(positions):
        drafts = int(line[TAPE_COLUMNS + position])
        if drafts == 0:
            break  # no draft got beyond
        at_risk[position] += drafts
        accepted[position] += int(line[TAPE_COLUMNS + positions + position])


@njit(cache=True)
def _submit(
    state: model.State,
    lengths: Lengths,
    ease: model.Floats,
    shares: model.Floats,
    chance: np.random.Generator,
    row: int,
) -> None:
    point = chance.random() * shares[-1]
    kind = 0
    while kind < shares.size - 1 and shares[kind] <= point:
        kind += 1
    prompt = chance.integers(lengths.prompt_first, lengths.prompt_last + 1)
    output = chance.integers(lengths.output_first, lengths.output_last + 1)
    model.submit(state, row, int(prompt), int(output), float(ease[kind]))


@njit(cache=True)
def _free_row(state: model.State) -> int:
    """Return a row that no request holds."""
    taken = np.zeros(state.prompt.size, dtype=np.bool_)
    for i in range(state.counts[model.RUNNING]):
        taken[state.running[i]] = True
    first = state.counts[model.WAITING_FIRST]
    for i in range(state.counts[model.WAITING]):
        taken[state.waiting[(first + i) % state.waiting.size]] = True
    row = 0
    while taken[row]:
        row += 1
    return row
