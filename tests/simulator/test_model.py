"""The compiled step keeps vLLM's rules: one budget, KV blocks, K one step later, drafts, chance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_sim import acceptance, cost, model

COST = cost.Cost(launch=1.0, weights=10.0, token=0.1, draft=0.5, draft_pass=0.2)
QUIET = model.Conditions(0.0, 1024.0, 0.0, 0.0, 60.0)
CURVE = (0.8, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1)
SIGMAS = 4.5  # each comparison fails by chance less than once in 100,000


def build_limits(**changes: int | bool) -> model.Limits:
    plain = model.Limits(
        max_requests=64,
        max_batched_tokens=2048,
        max_model_tokens=4096,
        kv_blocks=10_000,
        adaptive=False,
    )
    return plain._replace(**changes)


@dataclass
class Bench:
    """An engine whose steps are looked at one by one."""

    limits: model.Limits = field(default_factory=build_limits)
    curve: tuple[float, ...] = CURVE
    spread: float = 0.0
    conditions: model.Conditions = QUIET
    costs: cost.Cost = COST
    seed: int = 1

    def __post_init__(self) -> None:
        self.survival = acceptance.build_survival(self.curve, spread=self.spread)
        self.state = model.build_state(self.limits, capacity=256)
        self.step = model.build_step(
            self.limits, positions=len(self.curve), groups=self.survival.shape[0]
        )
        self.chance = np.random.default_rng(self.seed)
        self.emitted: Counter[int] = Counter()
        self.finished: list[int] = []

    def submit(self, row: int, *, prompt: int = 16, output: int = 32, ease: float = 1.0) -> None:
        model.submit(self.state, row, prompt, output, ease)

    def advance(self, k: int | list[int], *, arm: int = 0, ease: float = 1.0) -> model.Floats:
        """Compute one step under K, or a list of K by batch; returns its numbers."""
        lookup = np.array([k, k] if isinstance(k, int) else k, dtype=np.int64)
        model.advance(
            self.state,
            self.limits,
            self.costs,
            self.conditions,
            self.survival,
            lookup,
            arm,
            ease,
            self.chance,
            self.step,
        )
        for i in range(self.emitters):
            row = int(self.step.emitted_rows[i])
            self.emitted[row] += int(self.step.emitted_tokens[i])
            if self.step.is_finished[i]:
                self.finished.append(row)
        return self.step.numbers.copy()

    @property
    def emitters(self) -> int:
        return int(self.step.numbers[model.EMITTERS])

    @property
    def running(self) -> list[int]:
        return self.state.running[: self.state.counts[model.RUNNING]].tolist()

    @property
    def blocks_used(self) -> int:
        return int(self.state.counts[model.BLOCKS_USED])

    @property
    def preemptions(self) -> int:
        return int(self.state.counts[model.PREEMPTIONS])

    def drain(self, k: int | list[int], *, steps: int = 20_000) -> list[model.Floats]:
        """Compute steps until nothing is left."""
        numbers = []
        while model.is_busy(self.state):
            numbers.append(self.advance(k))
            assert len(numbers) < steps, "the engine does not come to an end"
        return numbers


REQUESTS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 100), st.floats(0.3, 2.0)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(
    requests=REQUESTS,
    k=st.lists(st.integers(0, 7), min_size=2, max_size=12),
    budget=st.integers(16, 256),
    kv_blocks=st.integers(20, 200),
    most=st.integers(1, 16),
    adaptive=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_request_gets_its_output_and_gives_its_blocks_back(
    requests: list[tuple[int, int, float]],
    k: list[int],
    budget: int,
    kv_blocks: int,
    most: int,
    adaptive: bool,
    seed: int,
) -> None:
    limits = build_limits(
        max_batched_tokens=budget, kv_blocks=kv_blocks, max_requests=most, adaptive=adaptive
    )
    engine = Bench(limits, spread=0.8, seed=seed)
    for row, (prompt, output, ease) in enumerate(requests):
        engine.submit(row, prompt=prompt, output=output, ease=ease)
    tokens = 0
    while model.is_busy(engine.state):
        numbers = engine.advance(k)
        tokens += int(numbers[model.TOKENS])
        assert 0 <= engine.blocks_used <= kv_blocks
        assert engine.blocks_used == int(engine.state.blocks[: len(requests)].sum())
        scheduled = sum(int(engine.state.scheduled[row]) for row in engine.running)
        assert scheduled <= budget
        assert len(engine.running) <= most
        assert numbers[model.ACCEPTED_TOKENS] == engine.step.accepted.sum()
        assert numbers[model.ACCEPTED_TOKENS] <= numbers[model.DRAFT_TOKENS]
        assert numbers[model.SECONDS] > 0
    wanted = {row: output for row, (_, output, _) in enumerate(requests)}
    assert engine.emitted == wanted
    assert sorted(engine.finished) == sorted(wanted)
    assert tokens == sum(wanted.values())
    assert engine.blocks_used == 0


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    engine = Bench(build_limits(max_batched_tokens=64))
    engine.submit(0, prompt=16, output=100)
    engine.advance(0)
    engine.submit(1, prompt=200, output=10)
    steps = [engine.advance(0) for _ in range(4)]
    assert [numbers[model.PREFILL_TOKENS] for numbers in steps] == [63, 63, 63, 11]
    assert [numbers[model.BATCH] for numbers in steps] == [2, 2, 2, 2]
    assert [numbers[model.TOKENS] for numbers in steps] == [1, 1, 1, 2]


def test_drafts_are_cut_to_what_is_left_of_the_budget() -> None:
    engine = Bench(build_limits(max_batched_tokens=20, max_requests=4), curve=(1.0,) * 7)
    for row in range(4):
        engine.submit(row, prompt=4, output=400)
    engine.advance(7)
    numbers = engine.advance(7)
    assert numbers[model.DRAFT_TOKENS] == 7 + 7 + 3  # 8 + 8 + 4 tokens, none for the fourth
    assert numbers[model.BATCH] == 3


@pytest.mark.parametrize(("prompt", "is_admitted"), [(160, True), (161, False)])
def test_a_request_is_admitted_only_when_its_whole_input_fits(
    prompt: int, is_admitted: bool
) -> None:
    engine = Bench(build_limits(max_batched_tokens=64, kv_blocks=11))
    engine.submit(0, prompt=8, output=8)
    engine.advance(0)
    engine.submit(1, prompt=prompt, output=8)
    engine.advance(0)
    assert (1 in engine.running) == is_admitted


def test_the_latest_request_is_preempted_and_computed_again() -> None:
    engine = Bench(build_limits(kv_blocks=4))
    engine.submit(0, prompt=30, output=20)
    engine.submit(1, prompt=30, output=20)
    while engine.preemptions == 0:
        engine.advance(0)
    assert engine.running == [0]
    assert engine.emitted[1] == 3  # 30 + 3 tokens, the third of them not yet computed
    known = 30 + engine.emitted[1]
    steps = engine.drain(0)
    assert sum(numbers[model.PREFILL_TOKENS] for numbers in steps) == known
    assert engine.emitted == {0: 20, 1: 20}
    assert engine.finished == [0, 1]
    assert engine.state.preempted[:2].tolist() == [0, engine.preemptions]


def test_k_is_looked_up_by_the_requests_of_the_step_and_counted_one_step_later() -> None:
    engine = Bench(curve=(0.0,) * 7)
    lookup = [0, 7, 3, 1]
    engine.submit(0, output=50)
    drafts = []
    seen = []
    for step in range(6):
        if step in (2, 4):
            engine.submit(step, output=50)
        numbers = engine.advance(lookup, arm=step)
        drafts.append(numbers[model.DRAFT_TOKENS])
        seen.append((numbers[model.BATCH], numbers[model.K], numbers[model.ARM]))
    assert seen == [(1, 7, 0), (1, 7, 0), (2, 7, 1), (2, 3, 2), (3, 3, 3), (3, 1, 4)]
    assert drafts == [0, 7, 7, 6, 6, 3]


def test_after_an_idle_time_the_first_step_counts_under_its_own_k_and_arm() -> None:
    engine = Bench()
    engine.submit(0, output=3)
    engine.drain(5)
    engine.submit(1, output=30)
    numbers = engine.advance(2, arm=9)
    assert (numbers[model.K], numbers[model.ARM]) == (2, 9)


@pytest.mark.parametrize("k", [model.NO_SPECULATION, 0])
def test_without_drafts_each_step_emits_one_token_a_request(k: int) -> None:
    engine = Bench()
    for row in range(3):
        engine.submit(row, output=10)
    steps = engine.drain(k)
    assert len(steps) == 10
    assert all(numbers[model.TOKENS] == 3 for numbers in steps)
    assert all(numbers[model.DRAFTS] == 0 for numbers in steps)
    paid = 0.0 if k < 0 else COST.draft
    expected = (COST.launch + COST.weights + 3 * COST.token + paid) / 1000
    assert steps[1][model.SECONDS] == pytest.approx(expected)


def test_drafts_keep_their_length_to_the_end_of_the_output() -> None:
    engine = Bench(curve=(0.0,) * 7)
    engine.submit(0, output=6)
    drafts = [numbers[model.DRAFT_TOKENS] for numbers in engine.drain(7)]
    assert drafts == [0, 7, 7, 7, 7, 7]


def test_what_is_accepted_beyond_the_output_counts_and_is_thrown_away() -> None:
    engine = Bench(curve=(1.0,) * 7)
    engine.submit(0, output=12)
    steps = engine.drain(7)
    assert [numbers[model.TOKENS] for numbers in steps] == [1, 8, 3]
    assert [numbers[model.ACCEPTED_TOKENS] for numbers in steps] == [0, 7, 7]


def test_drafts_get_shorter_towards_the_longest_context() -> None:
    engine = Bench(build_limits(max_model_tokens=22), curve=(0.0,) * 7)
    engine.submit(0, prompt=16, output=100)
    drafts = [numbers[model.DRAFT_TOKENS] for numbers in engine.drain(7)]
    assert drafts == [0, 4, 3, 2, 1, 0]
    assert engine.emitted[0] == 22 - 16


def test_aborted_requests_leave_no_block_behind() -> None:
    engine = Bench(build_limits(max_requests=2))
    for row in range(5):
        engine.submit(row)
    engine.advance(3)
    for row in (3, 0, 4):
        model.abort(engine.state, row)
    engine.drain(3)
    assert sorted(engine.finished) == [1, 2]
    assert engine.blocks_used == 0


def measure_acceptance(
    engine: Bench, k: list[int], *, ease: float = 1.0, request_ease: float = 1.0, prompt: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    at_risk, accepted = np.zeros(7), np.zeros(7)
    for step in range(4000):
        while len(engine.running) + engine.state.counts[model.WAITING] < 32:
            row = next(row for row in range(256) if row not in engine.running)
            engine.submit(row, prompt=prompt, output=4000 - prompt, ease=request_ease)
            engine.advance(k[step % len(k)], ease=ease)
        engine.advance(k[step % len(k)], ease=ease)
        at_risk += engine.step.at_risk
        accepted += engine.step.accepted
    return at_risk, accepted


@pytest.mark.parametrize(
    ("k", "spread", "ease", "request_ease"),
    [
        pytest.param([7], 0.0, 1.0, 1.0, id="K fixed"),
        pytest.param([7], 1.0, 1.0, 1.0, id="drafts of unequal quality"),
        pytest.param([7, 2, 4, 1], 0.0, 1.0, 1.0, id="K from step to step"),
        pytest.param([7, 2, 4, 1], 1.0, 1.0, 1.0, id="K from step to step, unequal quality"),
        pytest.param([7], 0.0, 0.5, 1.0, id="an engine that accepts less"),
        pytest.param([7], 0.0, 0.8, 0.5, id="requests that accept less, on such an engine"),
        pytest.param([7], 0.0, 1.0, 2.0, id="requests that accept more"),
    ],
)
def test_acceptance_by_position_is_the_curve(
    k: list[int], spread: float, ease: float, request_ease: float
) -> None:
    engine = Bench(spread=spread)
    at_risk, accepted = measure_acceptance(engine, k, ease=ease, request_ease=request_ease)
    curve = np.array(CURVE) ** (1.0 / (ease * request_ease))
    chance = curve / np.concatenate([[1.0], curve[:-1]])
    error = np.sqrt(chance * (1 - chance) / at_risk)
    assert (at_risk > 500).all()
    assert (np.abs(accepted / at_risk - chance) < SIGMAS * error).all()


def test_acceptance_falls_with_each_doubling_of_the_context() -> None:
    conditions = QUIET._replace(context_per_doubling=0.2, context_reference=500.0)
    engine = Bench(build_limits(max_model_tokens=10_000), curve=(0.5,), conditions=conditions)
    shares = []
    for row, prompt in enumerate((500, 1000, 2000)):
        hits = drafts = 0
        for repeat in range(150):
            engine.submit(row, prompt=prompt, output=20)
            for numbers in engine.drain(1):
                hits += numbers[model.ACCEPTED_TOKENS]
                drafts += numbers[model.DRAFTS]
            assert repeat < 150
        shares.append(hits / drafts)
        error = np.sqrt(0.25 / drafts)
        assert shares[row] == pytest.approx(0.5 ** (1 / (1 - 0.2 * row)), abs=SIGMAS * error + 0.01)
    assert shares == sorted(shares, reverse=True)


def test_slow_noise_has_its_size_and_its_time_constant() -> None:
    conditions = QUIET._replace(slow_noise=0.05, slow_seconds=0.1)
    engine = Bench(build_limits(max_model_tokens=1 << 20), conditions=conditions)
    engine.submit(0, prompt=1, output=1 << 19)
    engine.advance(0)
    plain = COST.launch + COST.weights + COST.token + COST.draft
    seconds = np.array([engine.advance(0)[model.SECONDS] for _ in range(40_000)])
    logs = np.log(seconds * 1000 / plain)
    kept = np.corrcoef(logs[:-1], logs[1:])[0, 1]
    assert logs.std() == pytest.approx(0.05, rel=0.1)
    assert kept == pytest.approx(np.exp(-plain / 100), abs=0.02)


def test_a_preempted_request_waits_a_step_and_then_goes_first() -> None:
    engine = Bench(build_limits(kv_blocks=5, max_requests=2), curve=(0.0,) * 7)
    engine.submit(0, prompt=20, output=60)
    engine.submit(1, prompt=21, output=60)
    engine.submit(2, prompt=1, output=5)
    while engine.preemptions == 0:
        numbers = engine.advance(7)
    # Its drafts had taken a block ahead: with that given back it would fit at once.
    assert (engine.running, numbers[model.PREFILL_TOKENS]) == ([0], 0)
    engine.advance(7)
    assert engine.running == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.integers(1, 40),
    token=st.floats(0.0, 1.0),
    draft_pass=st.floats(0.0, 5.0),
    captured=st.integers(1, 200),
    spread=st.floats(0.0, 2.0),
    seed=st.integers(0, 1000),
)
def test_adaptive_verification_keeps_the_drafts_of_best_goodput(
    requests: int, token: float, draft_pass: float, captured: int, spread: float, seed: int
) -> None:
    costs = COST._replace(
        token=token, draft_pass=draft_pass, captured_tokens=captured, uncaptured=5.0
    )
    engine = Bench(build_limits(adaptive=True), spread=spread, costs=costs, seed=seed)
    for row in range(requests):
        engine.submit(row, output=100)
    engine.advance(7)
    chances = engine.survival[engine.state.group[:requests]]
    drafting = cost.draft_milliseconds(costs, requests, 7)

    def predict(kept: np.ndarray) -> float:
        tokens = requests + int(kept.sum())
        return (requests + chances[kept].sum()) / (
            cost.verify_milliseconds(costs, tokens) + drafting
        )

    engine.advance(7)
    depths = np.zeros(requests, dtype=int)
    depths[engine.step.emitted_rows[:requests]] = engine.step.emitted_drafted[:requests]
    kept = np.arange(7) < depths[:, None]
    # Every way to keep the likeliest tokens, none of them and all of them included.
    best = max(predict(chances >= least) for least in [2.0, *np.unique(chances)])
    assert predict(kept) >= best * (1 - 1e-9)
