"""Runs every arm over a trace: static ones by their table, the others by what they decide.

An arm inside the engine is given the recorded steps of the cell that it chose, one decision after
another. Of each minute its first WATCHED_STEPS steps are played, transient included; the K that
it held in them stand for the minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdecode_sim import virtual
from tests.bench.policies import peers
from tests.bench.policies.surfaces import Load, Surface
from tests.bench.policies.traces import Phase
from tests.bench.policies.tuned import Settings, Stretch, Tuned

WATCHED_STEPS = 100
TICK_SECONDS = 60

TUNED = "ours"


@dataclass(frozen=True)
class Run:
    """What one arm did on one trace; `first_verdict` in seconds, for ours alone."""

    arm: str
    stretches: tuple[Stretch, ...]
    is_adaptive: bool
    first_verdict: float | None = None
    verdicts: int = 0


def run_peers(surface: Surface, trace: list[Phase], *, seed: int) -> Iterator[Run]:
    """Run each fixed K and every peer."""
    for k in surface.ks[1:]:
        yield Run(f"K={k}", run_policy(surface, trace, peers.FixedK(k)), is_adaptive=False)
    for name, build in ADAPTIVE.items():
        policy = build(surface, seed)
        yield Run(name, run_policy(surface, trace, policy), is_adaptive=True)


def run_tuned(
    surface: Surface,
    trace: list[Phase],
    *,
    seed: int,
    noise_factor: float = 1.0,
    settings: Settings | None = None,
) -> Run:
    """Run our arm."""
    tuned = Tuned(surface, seed=seed, noise_factor=noise_factor, settings=settings or Settings())
    tuned.run(trace)
    return Run(
        TUNED,
        tuple(tuned.stretches),
        is_adaptive=True,
        first_verdict=tuned.first_verdict(),
        verdicts=sum(event.reason == "KExplored" for _, event in tuned.events),
    )


def run_policy(surface: Surface, trace: list[Phase], policy: peers.Policy) -> tuple[Stretch, ...]:
    """Run an arm that decides inside the engine."""
    if policy.every == 0:
        return tuple(
            Stretch(phase.load, policy.choose(phase.load.streams), phase.seconds) for phase in trace
        )
    player = _Player(surface, policy)
    return tuple(
        stretch
        for phase in trace
        for begun in range(0, phase.seconds, TICK_SECONDS)
        for stretch in player.play(phase.load, min(TICK_SECONDS, phase.seconds - begun))
    )


class _Player:
    """Plays recorded steps to a policy; each cell goes on where it was left."""

    def __init__(self, surface: Surface, policy: peers.Policy) -> None:
        self._surface = surface
        self._policy = policy
        self._heads: dict[tuple[Load, int], int] = defaultdict(int)

    def play(self, load: Load, seconds: float) -> list[Stretch]:
        """Play a minute or less of one load."""
        held: dict[int, float] = defaultdict(float)
        played, passed = 0, 0.0
        while played < WATCHED_STEPS and passed < seconds:
            k = self._policy.choose(load.streams)
            tape = self._surface.steps(load, k)
            head = self._heads[load, k]
            steps = tape[head : head + self._policy.every]
            self._heads[load, k] = (head + len(steps)) % len(tape)
            self._policy.observe(load.streams, steps)
            took = float(steps[:, virtual.STEP_SECONDS].sum())
            held[k] += took
            passed += took
            played += len(steps)
        return [Stretch(load, k, seconds * took / passed) for k, took in held.items()]


def _build_vllm(surface: Surface, seed: int) -> peers.Policy:
    return peers.VllmTable(peers.profile_offline(surface, seed=seed))


def _build_goodput(surface: Surface, seed: int) -> peers.Policy:
    del seed  # fitted to step times without noise
    return peers.GoodputArgmax(peers.fit_linear_times(surface), k_max=surface.k_max)


ADAPTIVE: dict[str, Callable[[Surface, int], peers.Policy]] = {
    "SGLang": lambda surface, _: peers.SglangAdaptive(k_max=surface.k_max),
    "TensorRT-LLM": lambda surface, _: peers.TensorRtSchedule(),
    "vLLM table": _build_vllm,
    "TurboSpec": _build_goodput,
}
