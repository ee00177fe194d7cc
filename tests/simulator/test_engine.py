"""The simulated engine hands each request what is its own, and times it as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from specdecode_sim.arguments import ConfigRefusedError, Options
from specdecode_sim.engine import Engine, EngineDeadError, Request
from specdecode_sim.faults import Faults, Scenario
from specdecode_sim.profile import load_profile


@dataclass
class Stream:
    """What one request was given."""

    outputs: list[int] = field(default_factory=list)
    reason: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, tokens: int, reason: str | None) -> None:
        assert self.reason is None
        self.outputs.append(tokens)
        self.reason = reason
        self.begun.set()
        if reason:
            self.ended.set()


class Bench:
    """An engine of few requests, and its metrics."""

    def __init__(
        self, *, max_requests: int, max_model_tokens: int = 1024, kv_tokens: int = 1_000_000
    ) -> None:
        self.registry = CollectorRegistry()
        options = Options(
            model="m",
            served_name="chat",
            max_requests=max_requests,
            max_model_tokens=max_model_tokens,
        )
        self.engine = Engine(
            options,
            load_profile("llama8b-a100").model_copy(update={"kv_tokens": kv_tokens}),
            registry=self.registry,
            vllm_version="0.33.0",
            faults=Faults(Scenario()),
        )

    def submit(self, tokens: int) -> tuple[Request, Stream]:
        stream = Stream()
        request = self.engine.submit(
            prompt_tokens=16, max_tokens=tokens, ease=1.0, on_output=stream.take
        )
        return request, stream

    def value(self, name: str, **labels: str) -> float:
        labels = {"model_name": "chat", "engine": "0", **labels}
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running(made: Bench) -> AsyncIterator[Bench]:
    steps = asyncio.create_task(made.engine.run())
    yield made
    steps.cancel()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running(Bench(max_requests=2)) as made:
        yield made


async def test_a_request_in_the_row_of_one_given_up_gets_its_own_tokens_alone(
    bench: Bench,
) -> None:
    for _ in range(10):
        given_up, first = bench.submit(3)
        await first.begun.wait()  # a step that emits for this row is on its way
        bench.engine.abort(given_up)
        request, second = bench.submit(5)
        assert request.row == given_up.row
        await asyncio.wait_for(second.ended.wait(), 10)
        assert (sum(second.outputs), second.reason) == (5, "length")
    assert bench.value("vllm:request_success_total", finished_reason="abort") == 10
    assert bench.value("vllm:request_success_total", finished_reason="length") == 10


async def test_waiting_is_counted_as_queue_time_and_not_as_prefill(bench: Bench) -> None:
    streams = [bench.submit(30)[1] for _ in range(2)]
    _, late = bench.submit(2)
    await asyncio.wait_for(late.ended.wait(), 10)
    await asyncio.gather(*(stream.ended.wait() for stream in streams))
    queue = bench.value("vllm:request_queue_time_seconds_sum")
    prefill = bench.value("vllm:request_prefill_time_seconds_sum")
    assert queue > 30 * 0.005  # some thirty steps of more than 10 ms, less what a slow start hides
    assert prefill < queue
    total = bench.value("vllm:e2e_request_latency_seconds_sum")
    inference = bench.value("vllm:request_inference_time_seconds_sum")
    assert total == pytest.approx(queue + inference, abs=0.05)


async def test_a_dead_engine_fails_what_runs_and_takes_nothing(bench: Bench) -> None:
    _, stream = bench.submit(500)
    await stream.begun.wait()
    bench.engine.die()
    assert stream.reason == "error"
    with pytest.raises(EngineDeadError):
        bench.submit(1)
    assert bench.value("vllm:request_success_total", finished_reason="error") == 1


async def test_each_request_tells_how_often_it_was_preempted() -> None:
    small = Bench(max_requests=2, max_model_tokens=160, kv_tokens=160)
    async with running(small) as bench:
        streams = [bench.submit(100)[1] for _ in range(2)]  # 232 tokens in all
        await asyncio.wait_for(asyncio.gather(*(stream.ended.wait() for stream in streams)), 20)
    preemptions = bench.value("vllm:num_preemptions_total")
    assert preemptions > 0
    assert bench.value("vllm:request_num_preemptions_sum") == preemptions
    assert bench.value("vllm:request_num_preemptions_count") == 2


@pytest.mark.parametrize(("kv_tokens", "fits"), [(1024, True), (1023, False)])
def test_a_model_length_of_which_not_one_request_fits_is_refused(
    kv_tokens: int, fits: bool
) -> None:
    if fits:
        Bench(max_requests=2, kv_tokens=kv_tokens)
        return
    with pytest.raises(ConfigRefusedError, match="estimated maximum model length is 1008"):
        Bench(max_requests=2, kv_tokens=kv_tokens)


async def test_the_longest_request_of_the_smallest_cache_comes_to_its_end() -> None:
    async with running(Bench(max_requests=2, max_model_tokens=64, kv_tokens=64)) as bench:
        _, stream = bench.submit(64 - 16)
        await asyncio.wait_for(stream.ended.wait(), 10)
    assert sum(stream.outputs) == 64 - 16
