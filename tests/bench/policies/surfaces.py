"""What each K is worth at each load: engines of the simulator's profiles, recorded cell by cell.

A closed loop of so many streams keeps the batch at that number, so one K rules and a cell is
(streams, K, ease, lengths). Its goodput is the mean over its recording: this benchmark's truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from specdecode_sim import block, profile, virtual
from specdecode_vllm import table as tables

OFF = -1  # speculation off: no drafter, as against K=0, which keeps it
MAX_REQUESTS = 256
FULL_EASE = 100  # percent: acceptance as the profile's curve says

# The block noise that the project's statistics were made for: 3 %, AR(1) 0.8 from one block of
# 30 s to the next.
NOISE = profile.Noise(step=0.02, slow=0.03, slow_seconds=134.0)

Steps = NDArray[np.float32]


@dataclass(frozen=True)
class Load:
    """What the clients do for a while; `ease` in percent scales how easily drafts are accepted."""

    streams: int
    ease: int
    lengths: virtual.Lengths


class Surface:
    """One profile's engine, with or without adaptive verification (AV)."""

    def __init__(self, name: str, *, adaptive: bool = False) -> None:
        plain = profile.load_profile(name)
        self.name = name
        self.profile = plain.model_copy(update={"noise": NOISE, "kv_tokens": 4_000_000})
        self.k_max = len(plain.acceptance.curve)
        self.ks = tuple(range(self.k_max + 1))
        self.adaptive = adaptive
        self._tapes: dict[tuple[virtual.Lengths, bool], RecentTapes] = {}
        self._goodput: dict[tuple[Load, int], float] = {}

    @property
    def captured_tokens(self) -> int:
        """Decode tokens of a step beyond which no CUDA graph was captured."""
        return self.profile.times.captured_tokens

    def clamped(self, rows: Sequence[Sequence[int]], streams: int) -> int:
        """Return K at a load as the engine plugin takes a table: within the captured graphs."""
        kept, _ = tables.clamp_rows(
            tables.extend_rows([tables.Row(*row) for row in rows], max_batch=MAX_REQUESTS),
            envelope=self.ks,
            captured_tokens=self.captured_tokens,
        )
        return tables.build_lookup(kept, max_batch=MAX_REQUESTS)[streams]

    def tapes(self, lengths: virtual.Lengths, *, speculation: bool = True) -> RecentTapes:
        """Return the recordings of engines of this make."""
        key = (lengths, speculation)
        if key not in self._tapes:
            self._tapes[key] = RecentTapes(
                self.profile,
                k_max=self.k_max,
                adaptive=self.adaptive and speculation,
                speculation=speculation,
                max_requests=MAX_REQUESTS,
                lengths=lengths,
            )
        return self._tapes[key]

    def steps(self, load: Load, k: int) -> Steps:
        """Return the recorded steps of a cell, without noise; columns as in `virtual`."""
        rows = ((1, MAX_REQUESTS, max(k, 0)),)
        tapes = self.tapes(load.lengths, speculation=k != OFF)
        return tapes.get((rows, load.streams, load.ease)).steps

    def goodput(self, load: Load, k: int) -> float:
        """Return the cell's tokens per second in the long run."""
        if (load, k) not in self._goodput:
            steps = self.steps(load, k)
            tokens = steps[:, virtual.STEP_TOKENS].sum(dtype=np.float64)
            seconds = steps[:, virtual.STEP_SECONDS].sum(dtype=np.float64)
            self._goodput[load, k] = float(tokens / seconds)
        return self._goodput[load, k]

    def best(self, load: Load) -> float:
        """Return the goodput of the oracle: the best K, 0 and speculation off among them."""
        return max(self.goodput(load, k) for k in (OFF, *self.ks))


class RecentTapes(block.Tapes):
    """Recordings of which only the latest used are kept: one is some ten megabytes."""

    KEPT = 60
    # Shorter than the simulator's own: a cell's goodput has an error of about 0.3 %, which is part
    # of the surface, as both the truth and what the arms see come from the same recording.
    SECONDS = 120.0
    REQUEST_STEPS = 30_000

    def _record(self, cell: block.Cell) -> block.Tape:
        shorter = {"TAPE_SECONDS": self.SECONDS, "TAPE_REQUEST_STEPS": self.REQUEST_STEPS}
        with mock.patch.multiple(block, **shorter):
            return super()._record(cell)

    def get(self, cell: block.Cell) -> block.Tape:
        """Return a cell's tape; one that was let go is recorded again, and comes out the same."""
        tape = super().get(cell)
        self._tapes[cell] = self._tapes.pop(cell)
        while len(self._tapes) > self.KEPT:
            self._tapes.pop(next(iter(self._tapes)))
        return tape


class NoisyEngine(block.BlockEngine):
    """One engine under changing loads; its slow noise runs on through all of them."""

    def __init__(
        self, surface: Surface, load: Load, *, seed: int, noise_factor: float = 1.0
    ) -> None:
        super().__init__(surface.tapes(load.lengths), seed=seed)
        slow = self._conditions.slow_noise * noise_factor
        self._conditions = self._conditions._replace(slow_noise=slow)
        self._slow *= noise_factor
        self._surface = surface
        self._load = load
        self._by_lengths: dict[virtual.Lengths, dict[block.Cell, int]] = {}

    def serve(self, load: Load, k: int, seconds: float) -> virtual.Totals:
        """Let time pass at one K; returns what the plugin's counters gained."""
        if k == OFF:
            raise ValueError("speculation off is another engine: a restart, not a K")
        self._load = load
        self._tapes = self._surface.tapes(load.lengths)
        self._heads = self._by_lengths.setdefault(load.lengths, {})
        return self.run(((1, MAX_REQUESTS, k),), streams=load.streams, seconds=seconds)

    def _ease_steps(self) -> int:
        return self._load.ease
