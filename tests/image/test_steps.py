"""Steps as they pass through a scheduler: which cell they count in, and what of them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_vllm import steps
from specdecode_vllm.metrics import Step


@dataclass
class Sink:
    """Keeps what was counted."""

    steps: list[Step] = field(default_factory=list)
    positions: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def count_step(self, step: Step) -> None:
        self.steps.append(step)

    def count_positions(self, at_risk: list[int], accepted: list[int]) -> None:
        self.positions.append((at_risk, accepted))


@dataclass
class FakeRequest:
    """The attributes of vLLM's Request that the observer reads."""

    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = False
    finished: bool = False
    drop_stale_output: bool = False
    num_stale_output_tokens: int = 0

    def is_finished(self) -> bool:
        return self.finished


class Engine:
    """Plays the order of calls of vLLM's engine core, with times and lengths given."""

    def __init__(self, *, counts_positions: bool = True) -> None:
        self.sink = Sink()
        self.now = 100.0
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.log_stats = True
        self.observer = steps.StepObserver(
            self.sink, counts_positions=counts_positions, clock=lambda: self.now
        )

    def add(self, name: str, *, prompt: int) -> None:
        self.requests[name] = FakeRequest(num_prompt_tokens=prompt, num_tokens=prompt)
        self.running.append(self.requests[name])

    def schedule(
        self,
        tokens: dict[str, int],
        *,
        drafts: dict[str, int] | None = None,
        new: tuple[str, ...] = (),
        resumed: tuple[str, ...] = (),
        k: int = 0,
        arm: int = 0,
    ) -> Any:
        spec = {name: [-1] * count for name, count in (drafts or {}).items()}
        computed = [self.requests[name].num_computed_tokens for name in tokens if name not in new]
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=spec,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=set(resumed), num_computed_tokens=computed
            ),
            num_invalid_spec_tokens=None,
        )
        for name, count in tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        self.observer.after_schedule(self, output, k=k, arm=arm)
        return output

    def update(self, output: Any, emitted: dict[str, int], *, trimmed_to: int = 99) -> None:
        names = list(output.num_scheduled_tokens)
        runner = SimpleNamespace(
            sampled_token_ids=[[5] * emitted.get(name, 0) for name in names],
            req_id_to_index={name: index for index, name in enumerate(names)},
        )
        self.observer.before_update(self, output, runner)
        stats = self._count_as_vllm(output, emitted) if self.log_stats else None
        outputs = []
        for name in names:
            kept = min(emitted.get(name, 0), trimmed_to)
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if name in self.requests:
                request = self.requests[name]
                request.num_tokens += kept
                request.num_computed_tokens -= drafted - max(emitted.get(name, 0) - 1, 0)
            outputs.append(SimpleNamespace(new_token_ids=[5] * kept))
        scheduler_stats = SimpleNamespace(spec_decoding_stats=stats)
        result = SimpleNamespace(outputs=outputs, scheduler_stats=scheduler_stats)
        self.observer.after_update(self, output, {0: result})

    def _count_as_vllm(self, output: Any, emitted: dict[str, int]) -> Any:
        hits = [
            emitted[name] - 1
            for name in output.scheduled_spec_decode_tokens
            if emitted.get(name) and name in self.requests and not self.requests[name].finished
        ]
        accepted = [sum(one > position for one in hits) for position in range(7)]
        stats = SimpleNamespace(num_drafts=len(hits), num_accepted_tokens_per_pos=accepted)
        return stats if hits else None


def prefilled(*names: str, prompt: int = 10, k: int = 0, arm: int = 0) -> Engine:
    """Return an engine whose requests have just been prefilled; the sink starts empty."""
    engine = Engine()
    for name in names:
        engine.add(name, prompt=prompt)
    output = engine.schedule(dict.fromkeys(names, prompt), new=names, k=k, arm=arm)
    engine.now += 1.0
    engine.update(output, dict.fromkeys(names, 1))
    engine.sink.steps.clear()
    return engine


def test_a_step_counts_under_the_k_and_arm_that_drafted_for_it() -> None:
    engine = prefilled("a", "b", k=3, arm=1)
    output = engine.schedule({"a": 4, "b": 4}, drafts={"a": 3, "b": 3}, k=7, arm=0)
    engine.now += 0.5
    engine.update(output, {"a": 4, "b": 2})
    assert engine.sink.steps == [
        Step(batch=2, k=3, arm=1, seconds=0.5, tokens=6, context_tokens=20, prefill_tokens=0)
    ]


def test_with_a_step_scheduled_ahead_each_keeps_its_own_k() -> None:
    engine = prefilled("a", k=1)
    first = engine.schedule({"a": 2}, drafts={"a": 1}, k=3)
    second = engine.schedule({"a": 4}, drafts={"a": 3}, k=7)
    engine.now += 0.5
    engine.update(first, {"a": 2})
    third = engine.schedule({"a": 8}, drafts={"a": 7})
    engine.now += 0.25
    engine.update(second, {"a": 1})
    engine.now += 0.25
    engine.update(third, {"a": 1})
    assert [(step.k, step.seconds) for step in engine.sink.steps] == [
        (1, 0.5),
        (3, 0.25),
        (7, 0.25),
    ]


def test_step_time_starts_at_the_step_before_while_the_engine_is_busy() -> None:
    engine = prefilled("a")
    engine.now += 0.125  # the engine's own work between two steps is part of the step
    output = engine.schedule({"a": 1})
    engine.now += 0.5
    engine.update(output, {"a": 1})
    assert engine.sink.steps[0].seconds == 0.625


def test_step_time_starts_at_schedule_after_idleness() -> None:
    engine = prefilled("a")
    engine.running.clear()
    output = engine.schedule({"a": 1})
    engine.update(output, {"a": 1})
    engine.add("b", prompt=5)
    engine.now += 3600
    output = engine.schedule({"b": 5}, new=("b",))
    engine.now += 0.5
    engine.update(output, {"b": 1})
    assert engine.sink.steps[-1].seconds == 0.5


def test_after_idleness_the_arm_is_the_present_one() -> None:
    engine = prefilled("a", arm=0)
    engine.running.clear()
    output = engine.schedule({"a": 1}, arm=0)
    engine.update(output, {"a": 1})
    engine.add("b", prompt=5)
    output = engine.schedule({"b": 5}, new=("b",), arm=1)
    engine.update(output, {"b": 1})
    assert engine.sink.steps[-1].arm == 1


def test_tokens_are_those_emitted_after_trimming() -> None:
    engine = prefilled("a", k=3)
    output = engine.schedule({"a": 4}, drafts={"a": 3})
    engine.update(output, {"a": 4}, trimmed_to=2)
    assert engine.sink.steps[0].tokens == 2


def join(engine: Engine) -> Any:
    engine.add("b", prompt=6)
    return engine.schedule({"a": 4, "b": 6}, drafts={"a": 3}, new=("b",))


def join_with_one_token(engine: Engine) -> Any:
    engine.add("b", prompt=1)
    return engine.schedule({"a": 4, "b": 1}, drafts={"a": 3}, new=("b",))


def resume(engine: Engine) -> Any:
    engine.add("b", prompt=6)
    engine.requests["b"].num_tokens = 8
    return engine.schedule({"a": 1, "b": 8}, resumed=("b",))


def end_a_chunked_prefill_with_one_token(engine: Engine) -> Any:
    engine.add("b", prompt=7)
    output = engine.schedule({"a": 1, "b": 6}, new=("b",))
    engine.update(output, {"a": 1})
    engine.sink.steps.clear()
    return engine.schedule({"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("situation", "prefill_tokens"),
    [
        (join, 6),
        (join_with_one_token, 1),
        (resume, 8),
        (end_a_chunked_prefill_with_one_token, 1),
    ],
)
def test_a_step_with_any_prefill_token_is_mixed(situation: Any, prefill_tokens: int) -> None:
    engine = prefilled("a", k=3)
    output = situation(engine)
    engine.update(output, {"a": 1, "b": 1})
    assert engine.sink.steps[0].is_mixed
    assert engine.sink.steps[0].prefill_tokens == prefill_tokens


def test_the_step_after_a_prefill_is_decode_only() -> None:
    engine = prefilled("a", k=3)
    engine.update(join(engine), {"a": 1, "b": 1})
    output = engine.schedule({"a": 4, "b": 4}, drafts={"a": 3, "b": 3})
    engine.update(output, {"a": 1, "b": 1})
    assert not engine.sink.steps[-1].is_mixed


def test_an_empty_pass_is_no_step() -> None:
    engine = prefilled("a")
    engine.update(engine.schedule({}), {})
    assert engine.sink.steps == []


@pytest.mark.parametrize("log_stats", [True, False])
def test_drafts_of_one_length_are_counted_alike_by_vllms_sums_and_one_by_one(
    log_stats: bool,
) -> None:
    engine = prefilled("a", "b", "c", k=3)
    engine.log_stats = log_stats
    output = engine.schedule(dict.fromkeys("abc", 4), drafts=dict.fromkeys("abc", 3))
    engine.update(output, {"a": 4, "b": 1, "c": 3})
    assert engine.sink.positions == [([3, 2, 2], [2, 2, 1])]


def test_drafts_of_unequal_length_are_counted_one_by_one() -> None:
    engine = prefilled("a", "b", k=3)
    output = engine.schedule({"a": 4, "b": 2}, drafts={"a": 3, "b": 1})
    engine.update(output, {"a": 3, "b": 2})
    assert engine.sink.positions == [([2, 1, 1], [2, 1, 0])]


@pytest.mark.parametrize(("log_stats", "positions"), [(True, []), (False, [([], [])])])
def test_requests_that_are_gone_count_no_positions(log_stats: bool, positions: Any) -> None:
    engine = prefilled("a", "b", k=3)
    engine.log_stats = log_stats
    output = engine.schedule({"a": 4, "b": 4}, drafts={"a": 3, "b": 3})
    engine.requests["b"].finished = True
    del engine.requests["a"]
    engine.update(output, {"a": 4, "b": 4})
    assert engine.sink.positions == positions


def test_what_a_preempted_request_sampled_and_vllm_drops_counts_no_positions() -> None:
    engine = prefilled("a", "b", k=3)
    output = engine.schedule({"a": 4, "b": 2}, drafts={"a": 3, "b": 1})
    engine.requests["a"].drop_stale_output = True
    engine.requests["a"].num_stale_output_tokens = 4
    engine.update(output, {"a": 4, "b": 2})
    assert engine.sink.positions == [([1], [1])]


def test_drafts_voided_by_a_grammar_are_not_at_risk() -> None:
    engine = prefilled("a", k=3)
    output = engine.schedule({"a": 4}, drafts={"a": 3})
    output.num_invalid_spec_tokens = {"a": 2}
    engine.update(output, {"a": 2})
    assert engine.sink.positions == [([1], [1])]


@pytest.mark.parametrize(("log_stats", "positions"), [(True, []), (False, [([], [])])])
def test_a_step_that_samples_nothing_puts_no_draft_at_risk(log_stats: bool, positions: Any) -> None:
    engine = prefilled("a", k=3)
    engine.log_stats = log_stats
    engine.update(engine.schedule({"a": 4}, drafts={"a": 3}), {})
    assert engine.sink.positions == positions


def test_positions_are_not_counted_where_drafts_are_trimmed_unseen() -> None:
    engine = Engine(counts_positions=False)
    engine.add("a", prompt=5)
    engine.update(engine.schedule({"a": 5}, new=("a",), k=3), {"a": 1})
    engine.update(engine.schedule({"a": 4}, drafts={"a": 3}), {"a": 2})
    assert engine.sink.positions == []


@pytest.mark.parametrize(
    ("situation", "lengths", "at_risk", "accepted"),
    [
        ("nothing drafted", [], [], []),
        ("all rejected", [(3, 0)], [1, 0, 0], [0, 0, 0]),
        ("one accepted", [(3, 1)], [1, 1, 0], [1, 0, 0]),
        ("all accepted", [(3, 3)], [1, 1, 1], [1, 1, 1]),
        (
            "a shortened draft is at risk where it had positions",
            [(3, 3), (1, 1)],
            [2, 1, 1],
            [2, 1, 1],
        ),
        ("a longer draft after a shorter one", [(1, 0), (3, 2)], [2, 1, 1], [1, 1, 0]),
        ("wholly voided", [(0, 0)], [], []),
    ],
)
def test_positions(
    situation: str, lengths: list[tuple[int, int]], at_risk: list[int], accepted: list[int]
) -> None:
    assert steps.count_positions(lengths) == (at_risk, accepted), situation


def test_records_of_steps_that_never_end_do_not_pile_up() -> None:
    engine = prefilled("a")
    for _ in range(1000):
        engine.schedule({"a": 1})
    assert len(engine.observer._in_flight) <= steps.MAX_RECORDS_IN_FLIGHT
