"""Completions over a real socket, from a server of known pace and planted failures."""

import contextlib
import json
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_load.acceptance import Drafting
from specdecode_load.completion import Completion, complete, read_usage
from specdecode_load.connection import Connection, build_tls
from specdecode_load.conversation import CHAT, COMPLETIONS, Ask, Sampling
from specdecode_load.lengths import Lengths
from specdecode_load.target import ErrorKind, RequestError, Target
from specdecode_load.wire import Head
from specdecode_load.workload import Workload
from tests.support.sse_server import MODEL, Failure, Pace, SseServer

Until = Callable[[Callable[[], object]], Awaitable[None]]


def target_of(server: SseServer, **options: float) -> Target:
    return Target(url=server.url, model=MODEL, **options)  # type: ignore[arg-type]


async def ask(
    target: Target, *, output_tokens: int = 31, arrivals: list[int] | None = None
) -> Completion:
    """Send one request; `arrivals` collects the tokens of each batch that came."""
    workload = Workload(output=Lengths("fixed", output_tokens))
    ask_for = Ask(COMPLETIONS, workload.request(0, model=MODEL, tokens_per_character=1.0))
    seen = [] if arrivals is None else arrivals
    with contextlib.closing(Connection(target, tls=build_tls(target))) as connection:
        return await complete(connection, ask_for, lambda tokens, _: seen.append(tokens))


async def test_tokens_are_what_the_engine_counts_and_not_chunks() -> None:
    arrivals: list[int] = []
    with SseServer(pace=Pace(tokens_per_chunk=7, chunk_seconds=0.01)) as server:
        completion = await ask(target_of(server), output_tokens=31, arrivals=arrivals)
    assert completion.tokens == sum(arrivals) == 31
    assert completion.prompt_tokens == 32
    assert len(arrivals) <= 5


async def test_without_a_count_in_each_chunk_the_one_at_the_end_puts_the_sum_right() -> None:
    arrivals: list[int] = []
    with SseServer(pace=Pace(0, 0.01, 7), continuous_usage=False) as server:
        completion = await ask(target_of(server), arrivals=arrivals)
    assert completion.tokens == sum(arrivals) == 31


async def test_without_any_count_a_chunk_is_a_token() -> None:
    with SseServer(continuous_usage=False, final_usage=False) as server:
        completion = await ask(target_of(server))
    assert (completion.tokens, completion.prompt_tokens) == (31, 0)


async def test_the_times_are_those_of_the_server() -> None:
    pace = Pace(first_seconds=0.3, chunk_seconds=0.06, tokens_per_chunk=3)
    with SseServer(pace=pace) as server:
        completion = await ask(target_of(server), output_tokens=31)
    assert completion.first_at is not None
    assert completion.first_at - completion.sent_at == pytest.approx(0.3, abs=0.1)
    # Ten chunks follow the first one and bring 28 tokens.
    assert completion.tpot_seconds == pytest.approx(10 * 0.06 / 28, rel=0.2)


async def test_an_output_that_came_at_once_has_no_time_per_token() -> None:
    with SseServer(pace=Pace(tokens_per_chunk=31)) as server:
        completion = await ask(target_of(server))
    assert completion.tokens == 31
    assert completion.tpot_seconds is None


FAILURES = {
    "server too busy": (Failure("status", status=503), ErrorKind.HTTP_5XX),
    "no such model": (Failure("status", status=404), ErrorKind.HTTP_4XX),
    "a redirect, which is not followed": (Failure("status", status=302), ErrorKind.PROTOCOL),
    "connection reset in the stream": (Failure("reset"), ErrorKind.RESET),
    "connection reset before the stream": (Failure("reset", after_chunks=0), ErrorKind.RESET),
    "connection closed in the stream": (Failure("close"), ErrorKind.RESET),
    "an error told in the stream": (Failure("error"), ErrorKind.ENGINE),
    "the engine aborts the request": (Failure("abort"), ErrorKind.ENGINE),
    "the stream ends without its end mark": (Failure("no_done"), ErrorKind.PROTOCOL),
    "an event that is no JSON": (Failure("not_json"), ErrorKind.PROTOCOL),
    "an event of the wrong shape": (Failure("wrong_shape"), ErrorKind.PROTOCOL),
    "not HTTP at all": (Failure("garbage"), ErrorKind.PROTOCOL),
    "nothing comes any more": (Failure("silence"), ErrorKind.TIMEOUT),
}


@pytest.mark.parametrize(("failure", "kind"), FAILURES.values(), ids=FAILURES.keys())
async def test_each_failure_has_its_kind(failure: Failure, kind: ErrorKind) -> None:
    with SseServer() as server:
        server.fail_next(failure)
        with pytest.raises(RequestError) as caught:
            await ask(target_of(server, idle_timeout_seconds=0.5))
        assert caught.value.kind is kind
        assert (await ask(target_of(server))).tokens == 31


async def test_the_time_out_is_for_silence_and_not_for_the_whole_request() -> None:
    with SseServer(pace=Pace(0.0, 0.1)) as server:
        completion = await ask(target_of(server, idle_timeout_seconds=0.6), output_tokens=12)
    assert completion.tokens == 12


async def test_a_server_that_is_not_there_refuses() -> None:
    with SseServer() as server:
        target = target_of(server)
    with pytest.raises(RequestError, match="nothing listens") as caught:
        await ask(target)
    assert caught.value.kind is ErrorKind.REFUSED


async def test_a_host_that_does_not_exist_is_unreachable() -> None:
    with pytest.raises(RequestError, match="cannot be reached") as caught:
        await ask(Target(url="http://no-such-host.invalid:1", model=MODEL))
    assert caught.value.kind is ErrorKind.UNREACHABLE


async def test_what_the_server_says_is_part_of_the_error() -> None:
    with SseServer() as server:
        server.fail_next(Failure("status", status=400))
        with pytest.raises(RequestError, match=r"answered 400: .*planted"):
            await ask(target_of(server))


CONNECTIONS = {"kept": (True, 1), "not kept": (False, 3)}


@pytest.mark.parametrize(("keep", "expected"), CONNECTIONS.values(), ids=CONNECTIONS.keys())
async def test_connections_are_reused_only_when_they_are_kept(keep: bool, expected: int) -> None:
    with SseServer() as server:
        target = Target(url=server.url, model=MODEL, keep_alive=keep)
        with contextlib.closing(Connection(target, tls=build_tls(target))) as connection:
            for number in range(3):
                body = Workload().request(number, model=MODEL, tokens_per_character=1.0)
                await complete(
                    connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None
                )
        assert server.connections == expected


async def test_the_server_may_close_between_two_requests() -> None:
    with SseServer() as server:
        body = Workload().request(0, model=MODEL, tokens_per_character=1.0)
        with contextlib.closing(Connection(target_of(server), tls=None)) as connection:
            await complete(connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None)
            server.say_close = True
            await complete(connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None)
            await complete(connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None)
        assert server.connections == 2


async def test_a_connection_lost_while_idle_fails_no_request(until: Until) -> None:
    with SseServer() as server:
        body = Workload().request(0, model=MODEL, tokens_per_character=1.0)
        with contextlib.closing(Connection(target_of(server), tls=None)) as connection:
            await complete(connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None)
            assert connection.is_open
            server.drop_connections()
            await until(lambda: not connection.is_open)
            await complete(connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None)
        assert server.connections == 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-noenc", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", path, "-out", path], check=True, capture_output=True)
    return path


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[SseServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with SseServer(pace=Pace(0, 0.01, 4), tls=context) as server:
        yield server


async def test_tls_is_spoken_to_a_server_whose_certificate_is_known(
    tls_server: SseServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert (await ask(target_of(tls_server))).tokens == 31


async def test_a_server_whose_certificate_is_not_known_is_not_spoken_to(
    tls_server: SseServer,
) -> None:
    with pytest.raises(RequestError, match="certificate") as caught:
        await ask(target_of(tls_server))
    assert caught.value.kind is ErrorKind.UNREACHABLE
    assert tls_server.requests == []


REFUSED = {
    "no scheme": ("localhost:8000", "no server address"),
    "another scheme": ("ftp://localhost", "no server address"),
    "no host": ("http://", "no server address"),
    "a query": ("http://h:1/?a=b", "no server address"),
    "credentials": ("http://user:word@h:1", "API key"),
    "a port out of range": ("http://h:99999", "[Pp]ort"),
    "a line break": ("http://h:1/\r\nx", "line break|no server address"),
}


@pytest.mark.parametrize(("url", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_address_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Target(url=url, model=MODEL)


def test_the_api_key_is_not_shown() -> None:
    assert "hidden" not in repr(Target(url="http://h:1", model=MODEL, api_key="hidden"))


CHAT_ASK = Ask(
    CHAT,
    Sampling(MODEL).build_body(messages=[{"role": "user", "content": "hi"}], output_tokens=9),
    needs_text=True,
)


async def send(server: SseServer, ask_for: Ask) -> Completion:
    with contextlib.closing(Connection(target_of(server), tls=None)) as connection:
        return await complete(connection, ask_for, lambda tokens, ttft_seconds: None)


@pytest.mark.parametrize("continuous_usage", [True, False])
async def test_a_chat_is_read_like_a_completion(continuous_usage: bool) -> None:
    pace = Pace(tokens_per_chunk=2)
    with SseServer(pace=pace, continuous_usage=continuous_usage, answer='é"\\n') as server:
        completion = await send(server, CHAT_ASK)
        assert server.paths == [CHAT]
    assert completion.text == ('é"\\n' * 3)[:9]
    assert (completion.tokens, completion.prompt_tokens) == (9, 2)


async def test_text_that_nobody_needs_is_not_read_in_mid_answer() -> None:
    with SseServer() as server:
        assert "x" * 9 not in (await send(server, Ask(CHAT, CHAT_ASK.body))).text


async def test_acceptance_rides_on_the_last_chunk() -> None:
    told = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
    with SseServer(metrics=[{"speculative_decoding": told}, None]) as server:
        assert (await send(server, CHAT_ASK)).drafting == Drafting(4, 12, 6)
        assert (await send(server, CHAT_ASK)).drafting is None


HEAD = Head(status=200, headers={}, keeps_alive=True)
TEXTS = st.one_of(
    st.text(),
    st.sampled_from(["error", '"error"', '],"usage":{', ',"finish_reason":null', "\\", "a\\"]),
    st.just('],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}'),
)
COUNTS = st.integers(0, 10**6)


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    counts=st.tuples(COUNTS, COUNTS),
    reason=st.sampled_from([None, None, None, "length", "abort", "error"]),
    extra=st.sampled_from([{}, {}, {"error": "x"}, {"metrics": {"x": 1}}]),
    is_chat=st.booleans(),
    escapes=st.booleans(),
    compact=st.booleans(),
)
def test_reading_the_usage_alone_comes_to_the_same_as_parsing_the_chunk(
    texts: list[str],
    counts: tuple[int, int],
    reason: str | None,
    extra: dict[str, Any],
    is_chat: bool,
    escapes: bool,
    compact: bool,
) -> None:
    text = "".join(texts)
    said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    prompt_tokens, tokens = counts
    chunk = {
        "id": text,
        **extra,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + tokens,
            "completion_tokens": tokens,
        },
    }
    separators = (",", ":") if compact else (", ", ": ")
    event = json.dumps(chunk, separators=separators, ensure_ascii=escapes).encode(
        "utf-8", "surrogatepass"
    )

    def read(keeps_text: bool) -> tuple[object, ...]:
        completion = Completion(lambda tokens, ttft_seconds: None, keeps_text=keeps_text)
        try:
            completion.receive(HEAD, b"data: " + event + b"\n\n")
        except RequestError as error:
            return (error.kind,)
        return (completion.tokens, completion.prompt_tokens)

    assert read(keeps_text=False) == read(keeps_text=True)


def test_a_chunk_as_vllm_writes_it_is_not_parsed() -> None:
    event = (
        b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,'
        b'"text":" a","logprobs":null,"finish_reason":null,"stop_reason":null}],'
        b'"usage":{"prompt_tokens":32,"total_tokens":39,"completion_tokens":7}}'
    )
    assert read_usage(event) == (32, 7)
