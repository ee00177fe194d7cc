"""The closed loop against a real server: streams held, windows, failures, restarts."""

import time
from collections.abc import Awaitable, Callable

import pytest

from specdecode_load import BackgroundLoop, ClosedLoop, ErrorKind, Lengths, Target, Workload
from specdecode_load.loop import run_stage
from tests.support.sse_server import MODEL, Failure, Pace, SseServer

Until = Callable[[Callable[[], object]], Awaitable[None]]

SHORT = Workload(output=Lengths("fixed", 10))
ENDLESS = Workload(output=Lengths("fixed", 100_000))


def target_of(server: SseServer) -> Target:
    return Target(url=server.url, model=MODEL, idle_timeout_seconds=5.0)


async def test_a_stage_measures_the_pace_of_the_server() -> None:
    pace = Pace(first_seconds=0.1, chunk_seconds=0.05, tokens_per_chunk=4)
    workload = Workload(output=Lengths("fixed", 20))
    with SseServer(pace=pace) as server:
        result = await run_stage(
            target_of(server), workload, streams=4, seconds=2.0, warmup_seconds=0.3
        )
    # Each stream: 20 tokens in 0.1 s + 4 × 0.05 s.
    assert result.tokens_per_second == pytest.approx(4 * 20 / 0.3, rel=0.2)
    assert result.seconds == pytest.approx(2.0, rel=0.1)
    assert result.ttft_seconds is not None
    assert result.ttft_seconds.p50 == pytest.approx(0.1, rel=0.3)
    assert result.tpot_seconds is not None
    assert result.tpot_seconds.p50 == pytest.approx(4 * 0.05 / 16, rel=0.2)
    assert result.requests == pytest.approx(4 * 2.0 / 0.3, rel=0.3)
    assert result.prompt_tokens == 32 * result.requests
    assert result.errors == {}
    assert result.streams == 4


async def test_as_many_requests_run_as_there_are_streams(until: Until) -> None:
    with SseServer(pace=Pace(0.01, 0.01)) as server:
        async with ClosedLoop(target_of(server), SHORT, streams=5):
            await until(lambda: len(server.requests) > 50)
        assert server.most_running == 5
        await until(lambda: server.running == 0)


async def test_streams_come_and_go_without_a_restart(until: Until) -> None:
    with SseServer(pace=Pace(0.02, 0.02)) as server:
        async with ClosedLoop(target_of(server), SHORT, streams=2) as loop:
            await until(lambda: server.running == 2)
            loop.set_concurrency(6)
            await until(lambda: server.running == 6)
            assert server.connections == 6
            assert server.most_running == 6
            loop.set_concurrency(1)
            await until(lambda: server.running == 1)
            server.most_running, sent = 0, len(server.requests)
            await until(lambda: len(server.requests) > sent + 8)
            assert server.most_running == 1
            loop.set_concurrency(3)
            await until(lambda: server.running == 3)
            assert loop.streams == 3
        assert server.connections <= 6 + 2


async def test_a_stream_too_many_ends_with_its_request_and_not_in_it(until: Until) -> None:
    with SseServer(pace=Pace(0.05, 0.02)) as server:
        async with ClosedLoop(target_of(server), SHORT, streams=4) as loop:
            async with loop.window() as window:
                await until(lambda: server.running == 4)
                loop.set_concurrency(1)
                await until(lambda: server.running == 1)
                await until(lambda: window.requests >= 4)
            assert window.result.errors == {}
            assert window.result.streams is None


async def test_windows_are_taken_from_running_requests(until: Until) -> None:
    with SseServer(pace=Pace(0.0, 0.01)) as server:
        async with ClosedLoop(target_of(server), ENDLESS, streams=2) as loop:
            outer = loop.start_window()
            await until(lambda: outer.output_tokens > 10)
            async with loop.window() as inner:
                await until(lambda: inner.output_tokens > 10)
            before = outer.result.output_tokens
            assert inner.result.output_tokens < before
            assert inner.result.ttft_seconds is None  # both requests began before it
            assert inner.result.requests == 0
            await until(lambda: outer.output_tokens > before)
            assert outer.stop().output_tokens > before
            frozen = inner.result.output_tokens
        assert inner.result.output_tokens == frozen


async def test_stopping_gives_up_what_runs(until: Until) -> None:
    with SseServer(pace=Pace(0.0, 0.01)) as server:
        async with ClosedLoop(target_of(server), ENDLESS, streams=3):
            await until(lambda: server.running == 3)
        await until(lambda: server.running == 0)


async def test_no_more_requests_are_sent_than_allowed(until: Until) -> None:
    with SseServer() as server:
        async with ClosedLoop(target_of(server), SHORT, streams=4, most_requests=10) as loop:
            window = loop.start_window()
            await until(lambda: loop.is_exhausted)
            assert window.stop().requests == 10
        assert len(server.requests) == 10


async def test_errors_are_counted_by_kind_and_the_loop_goes_on(until: Until) -> None:
    with SseServer() as server:
        server.fail_next(Failure("status", status=503), times=3)
        server.fail_next(Failure("reset"))
        server.fail_next(Failure("error"))
        async with ClosedLoop(target_of(server), SHORT, streams=1) as loop:
            async with loop.window() as window:
                await until(lambda: window.requests >= 5)
            assert loop.last_error is not None
    assert window.result.errors == {
        ErrorKind.HTTP_5XX: 3,
        ErrorKind.RESET: 1,
        ErrorKind.ENGINE: 1,
    }
    assert window.result.error_count == 5


RESET_BEFORE_AN_ANSWER: dict[str, tuple[list[str], dict[ErrorKind, int], int]] = {
    "a connection used before": (["", "unheard"], {}, 1),
    "a connection used before, and the new one": (
        ["", "unheard", "unheard"],
        {ErrorKind.RESET: 1},
        1,
    ),
    "a new connection": (["unheard"], {ErrorKind.RESET: 1}, 0),
    "after the first byte": (["", "reset"], {ErrorKind.RESET: 1}, 0),
    "twice, with an answer between": (["", "unheard", "", "unheard"], {}, 2),
}


@pytest.mark.parametrize("situation", RESET_BEFORE_AN_ANSWER)
async def test_a_request_lost_with_a_kept_connection_is_sent_once_more(
    situation: str, until: Until
) -> None:
    planted, errors, reconnects = RESET_BEFORE_AN_ANSWER[situation]
    with SseServer() as server:
        for kind in planted:
            if kind:
                server.fail_next(Failure(kind))
            else:
                server.pass_next()
        async with ClosedLoop(target_of(server), SHORT, most_requests=6) as loop:
            window = loop.start_window()
            await until(lambda: loop.is_exhausted)
        result = window.stop()
    assert result.errors == errors
    assert result.reconnects == reconnects
    assert result.requests == 6 - result.error_count
    assert len(server.requests) == 6 + reconnects
    prompts = [request["prompt"] for request in server.requests]
    assert len(set(prompts)) == 6  # what is sent again is the same request


async def test_an_engine_that_dies_and_comes_back_is_waited_for(until: Until) -> None:
    with SseServer(pace=Pace(0.01, 0.01)) as server:
        async with ClosedLoop(target_of(server), SHORT, streams=8) as loop:
            window = loop.start_window()
            await until(lambda: window.requests >= 8)
            server.stop()
            await until(lambda: window.errors[ErrorKind.REFUSED] >= 16)
            server.start()
            recovered = window.requests + 16
            await until(lambda: window.requests >= recovered)
            errors = window.stop().errors
    assert set(errors) <= {ErrorKind.REFUSED, ErrorKind.RESET}
    assert errors[ErrorKind.RESET] >= 1


async def test_a_dead_server_is_not_hammered(until: Until) -> None:
    with SseServer() as server:
        target = target_of(server)
    async with ClosedLoop(target, SHORT, streams=1) as loop, loop.window() as window:
        await until(lambda: window.errors[ErrorKind.REFUSED] >= 4)
    # Pauses of at least 0.05, 0.1 and 0.2 s lie between four attempts.
    assert window.result.seconds > 0.35


@pytest.mark.parametrize("streams", [0, -1, 5000])
async def test_a_number_of_streams_out_of_bounds_is_refused(streams: int) -> None:
    target = Target(url="http://127.0.0.1:1", model=MODEL)
    with pytest.raises(ValueError, match="from 1 to 4096"):
        ClosedLoop(target, SHORT, streams=streams)


def test_it_runs_in_a_thread_beside_code_without_an_event_loop() -> None:
    with SseServer(pace=Pace(0.01, 0.01)) as server:
        with BackgroundLoop(target_of(server), SHORT, streams=2) as load:
            total = load.start_window()
            first = load.measure(0.4)
            load.set_concurrency(4)
            assert load.streams == 4
            deadline = time.monotonic() + 20
            assert first.output_tokens > 0
            while server.running != 4 or total.result.output_tokens <= first.output_tokens:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(ValueError, match="from 1"):
                load.set_concurrency(0)
        load.stop()
        ended = total.stop()  # with the loop, which gave up what was running
        assert ended.output_tokens > first.output_tokens
        assert ended.streams is None
        assert ended.generator_cpu > 0


async def test_sixty_four_streams_leave_the_cores_to_the_engine() -> None:
    """At the pace of the small engine on two cores: 64 streams, 1,100 tokens a second."""
    with SseServer(pace=Pace(0.058, 0.058)) as server:
        workload = Workload(output=Lengths("fixed", 64))
        result = await run_stage(target_of(server), workload, streams=64, seconds=3.0)
    assert result.output_tokens > 1000
    assert result.generator_cpu < 0.25  # 0.09 measured; the room is for a busy machine


async def test_a_conversation_grows_by_its_answers_on_one_stream(until: Until) -> None:
    workload = Workload(output=Lengths("fixed", 10), turns=3)
    with SseServer(answer="ab") as server:
        async with ClosedLoop(target_of(server), workload, most_requests=7) as loop:
            await until(lambda: loop.is_exhausted)
    prompts = [request["prompt"] for request in server.requests]
    assert [len(prompt) for prompt in prompts] == [32, 74, 116, 32, 74, 116, 32]
    assert prompts[1].startswith(prompts[0] + "ab" * 5)
    assert prompts[2].startswith(prompts[1] + "ab" * 5)
    assert prompts[3] != prompts[0]


async def test_a_conversation_that_lost_an_answer_is_given_up(until: Until) -> None:
    workload = Workload(output=Lengths("fixed", 10), turns=3)
    with SseServer() as server:
        server.pass_next()
        server.fail_next(Failure("reset"))
        async with ClosedLoop(target_of(server), workload, most_requests=4) as loop:
            await until(lambda: loop.is_exhausted)
    assert [len(request["prompt"]) for request in server.requests] == [32, 74, 32, 74]


async def test_the_acceptance_of_each_request_is_in_the_window(until: Until) -> None:
    metrics = [
        {
            "speculative_decoding": {
                "num_spec_steps": 10,
                "num_draft_tokens": 30,
                "num_accepted_draft_tokens": accepted,
            }
        }
        for accepted in (0, 10, 20)
    ]
    with SseServer(metrics=metrics) as server:
        async with ClosedLoop(target_of(server), SHORT, most_requests=9) as loop:
            window = loop.start_window()
            await until(lambda: loop.is_exhausted)
            told = window.stop().acceptance
    assert told is not None
    assert told.requests_with_drafts == 9
    assert told.mean_length is not None
    assert told.mean_length.p50 == 2.0
    assert told.mean_length.mean == pytest.approx(2.0)
    assert told.rate is not None
    assert told.rate.mean == pytest.approx(1 / 3)
