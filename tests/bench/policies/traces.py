"""The traces: families of loads over a day, from a seed.

A trace is a list of phases of constant load, each a whole number of scrapes long. Every family
runs under the noise of `surfaces.NOISE`; the family "noise" under twice that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from specdecode_sim.virtual import Lengths
from tests.bench.policies.surfaces import FULL_EASE, Load

SCRAPE_SECONDS: Final = 15
MINUTE: Final = 60
HOUR: Final = 3600

# Streams keep to this grid, so that the number of recordings stays small.
GRID: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHORT: Final = Lengths(128, 384, 128, 384)
LONG: Final = Lengths(3072, 5120, 256, 768)


@dataclass(frozen=True)
class Phase:
    """A load for a while."""

    seconds: int
    load: Load


@dataclass(frozen=True)
class Family:
    """One kind of trace. `noise_factor` scales the slow noise of step times."""

    name: str
    build: Callable[[random.Random, int], list[Phase]]
    noise_factor: float = 1.0


def build_trace(family: Family, *, seed: int, hours: float) -> list[Phase]:
    """Draw a trace of about so many hours."""
    seconds = int(hours * HOUR)
    phases = family.build(random.Random(f"{family.name}/{seed}"), seconds)
    kept, passed = [], 0
    for phase in phases:
        left = min(phase.seconds, seconds - passed)
        if left >= SCRAPE_SECONDS:
            kept.append(Phase(left - left % SCRAPE_SECONDS, phase.load))
        passed += left
    return kept


def _load(streams: int, *, ease: int = FULL_EASE, lengths: Lengths = SHORT) -> Load:
    return Load(streams, ease, lengths)


def _on_grid(streams: float) -> int:
    return min(GRID, key=lambda level: abs(math.log(level / streams)))


def steady(chance: random.Random, seconds: int) -> list[Phase]:
    """One load all day."""
    return [Phase(seconds, _load(chance.choice(GRID[3:14])))]


def diurnal(chance: random.Random, seconds: int) -> list[Phase]:
    """2 to 128 streams and back, in a day; each ten minutes are off the curve by up to 20 %."""
    start = chance.random()
    phases = []
    for passed in range(0, seconds, 10 * MINUTE):
        height = 0.5 - 0.5 * math.cos(2 * math.pi * (passed / (24 * HOUR) + start))
        streams = 2 * 64**height * math.exp(chance.uniform(-0.2, 0.2))
        phases.append(Phase(10 * MINUTE, _load(_on_grid(streams))))
    return phases


def bursts(chance: random.Random, seconds: int) -> list[Phase]:
    """A low load, broken by bursts of two to six minutes about every twenty."""
    low, high = chance.choice((4, 6, 8)), chance.choice((64, 96, 128))
    phases, passed = [], 0
    while passed < seconds:
        calm, burst = chance.randint(8, 26) * MINUTE, chance.randint(2, 6) * MINUTE
        phases += [Phase(calm, _load(low)), Phase(burst, _load(high))]
        passed += calm + burst
    return phases


def long_tail(chance: random.Random, seconds: int) -> list[Phase]:
    """Batches of rollouts that drain from 256 streams to one, half an hour each."""
    minutes = {256: 8, 128: 6, 64: 4, 32: 3, 16: 3, 8: 2, 4: 2, 2: 1, 1: 1}
    phases: list[Phase] = []
    while sum(phase.seconds for phase in phases) < seconds:
        for streams, length in minutes.items():
            drawn = length * MINUTE * chance.uniform(0.8, 1.2) // SCRAPE_SECONDS
            phases.append(Phase(int(drawn) * SCRAPE_SECONDS, _load(streams)))
    return phases


def drift(chance: random.Random, seconds: int) -> list[Phase]:
    """Acceptance falls to half its ease and comes back, over eight hours, in steps of 5 %."""
    streams, start = chance.choice((8, 16, 32, 64)), chance.random()
    phases = []
    for passed in range(0, seconds, 10 * MINUTE):
        depth = 0.5 - 0.5 * math.cos(2 * math.pi * (passed / (8 * HOUR) + start))
        ease = 5 * round((FULL_EASE - 50 * depth) / 5)
        phases.append(Phase(10 * MINUTE, _load(streams, ease=ease)))
    return phases


def context(chance: random.Random, seconds: int) -> list[Phase]:
    """Short prompts and prompts of 4,000 tokens by turns, two hours or so each."""
    streams = chance.choice((8, 16, 32, 64))
    phases, passed = [], 0
    while passed < seconds:
        for lengths in (SHORT, LONG):
            length = chance.randint(90, 150) * MINUTE
            phases.append(Phase(length, _load(streams, lengths=lengths)))
            passed += length
    return phases


def noise(chance: random.Random, seconds: int) -> list[Phase]:
    """Two loads by the hour, under twice the noise."""
    low, high = chance.choice((4, 8, 16)), chance.choice((32, 64, 96))
    return [Phase(HOUR, _load((low, high)[i % 2])) for i in range(seconds // HOUR + 1)]


def censoring(chance: random.Random, seconds: int) -> list[Phase]:
    """Loads that change every few minutes, so that late positions are drafted now and then only."""
    levels = chance.sample((4, 12, 32, 96), 3)
    phases, passed = [], 0
    while passed < seconds:
        length = chance.randint(3, 7) * MINUTE
        phases.append(Phase(length, _load(chance.choice(levels))))
        passed += length
    return phases


FAMILIES: Final = {
    family.name: family
    for family in (
        Family("steady", steady),
        Family("diurnal", diurnal),
        Family("bursts", bursts),
        Family("long tail", long_tail),
        Family("drift", drift),
        Family("context", context),
        Family("noise", noise, noise_factor=2.0),
        Family("censoring", censoring),
    )
}
