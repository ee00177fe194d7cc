"""A small OpenAI-compatible server of known pace, for tests of what reads its streams.

It speaks real HTTP over a real socket, in a thread of its own: `SseServer(pace=…)` as a context
gives `url`. Its tokenizer makes one token of each `characters_per_token` characters; its answers
repeat the characters of `answer`, a token each. Failures are planted with `fail_next`; stopping and
starting again keeps the port.
"""

import asyncio
import json
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

MODEL = "paced-model"


@dataclass(frozen=True)
class Pace:
    """The first chunk comes after `first_seconds`, the next ones `chunk_seconds` apart."""

    first_seconds: float = 0.0
    chunk_seconds: float = 0.0
    tokens_per_chunk: int = 1


@dataclass(frozen=True)
class Failure:
    """A planted failure: an HTTP status, a broken stream after `after_chunks`, or an odd reply.

    `kind` is status, unheard (the connection is aborted before any answer), reset (it is aborted in
    mid-answer), close (ended without the last chunk), error (an error event in the stream), abort
    (finish_reason abort), no_done, not_json, wrong_shape, garbage (no HTTP) or silence.
    """

    kind: str
    status: int = 503
    after_chunks: int = 1


class SseServer:
    """The server; `requests` are the bodies it got, `connections` how many it accepted.

    `metrics` are what its answers carry as `metrics`, one after the other, as vLLM does with
    --per-request-spec-decode-metrics: on the chunk with the usage. None: nothing is carried.
    """

    def __init__(
        self,
        *,
        pace: Pace | None = None,
        continuous_usage: bool = True,
        final_usage: bool = True,
        characters_per_token: int = 1,
        answer: str = "x",
        metrics: Sequence[object] = (None,),
        api_key: str | None = None,
        models: tuple[str, ...] = (MODEL,),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []  # of the requests
        self.say_close = False  # answer, and close the connection afterwards
        self.connections = 0
        self.running = 0
        self.most_running = 0
        self._continuous_usage = continuous_usage
        self._final_usage = final_usage
        self._characters_per_token = characters_per_token
        self._answer = answer
        self._metrics = metrics
        self._api_key = api_key
        self._models = models
        self._tls = tls
        self._failures: deque[Failure | None] = deque()
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def __enter__(self) -> "SseServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def fail_next(self, failure: Failure, times: int = 1) -> None:
        """Let the next completions fail."""
        self._failures.extend([failure] * times)

    def pass_next(self) -> None:
        """Let one completion pass between planted failures."""
        self._failures.append(None)

    def start(self) -> None:
        """Listen on loopback; the port is kept over a stop."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(listener)), name="sse-server", daemon=True
        )
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        """Abort every connection and stop listening, as an engine that is killed does."""
        if self._thread is not None:
            self._events.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            self._thread = None

    def drop_connections(self) -> None:
        """Abort every connection and go on listening."""

        def drop() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._events.call_soon_threadsafe(drop)

    async def _main(self, listener: socket.socket) -> None:
        self._events = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._serve, sock=listener, backlog=1024, ssl=self._tls)
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (li.partition(": ") for li in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        goes_on = headers.get("connection") != "close" and not self.say_close  # as answered
        if self._api_key and headers.get("authorization") != f"Bearer {self._api_key}":
            _reply(writer, 401, {"error": {"message": "wrong key"}})
        elif request_line.startswith("GET /v1/models "):
            _reply(writer, 200, {"data": [{"id": name} for name in self._models]})
        elif request_line.startswith(("POST /v1/completions ", "POST /v1/chat/completions ")):
            self.paths.append(request_line.split()[1])
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await self._complete(json.loads(body), writer)
            finally:
                self.running -= 1
        else:
            _reply(writer, 404, {"error": {"message": "no such path"}})
        await writer.drain()
        return goes_on

    async def _complete(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        metrics = self._metrics[len(self.requests) % len(self._metrics)]
        self.requests.append(request)
        failure = self._failures.popleft() if self._failures else None
        if failure is not None and failure.kind == "status":
            _reply(writer, failure.status, {"error": {"message": "planted"}})
            return
        if failure is not None and failure.kind == "garbage":
            writer.write(b"SSH-2.0-not-http\r\n\r\n")
            return
        if failure is not None and failure.kind == "unheard":
            writer.transport.abort()
            raise ConnectionResetError
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\nconnection: %b\r\n\r\n"
            % (b"close" if self.say_close else b"keep-alive")
        )
        prompt_tokens = len(_prompt_of(request)) // self._characters_per_token
        if "messages" in request and self._continuous_usage:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            _event(writer, {"choices": [opening], "usage": _usage(prompt_tokens, 0)})
        total, sent, chunks = request["max_tokens"], 0, 0
        due = asyncio.get_running_loop().time() + self.pace.first_seconds
        while sent < total:
            await _sleep_until(due)
            due += self.pace.chunk_seconds
            if failure is not None and chunks >= failure.after_chunks:
                await _fail(failure, writer)
                return
            count = min(self.pace.tokens_per_chunk, total - sent)
            text = "".join(self._answer[n % len(self._answer)] for n in range(sent, sent + count))
            sent, chunks = sent + count, chunks + 1
            said = {"delta": {"content": text}} if "messages" in request else {"text": text}
            finish = "length" if sent == total else None
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
            usage = {"usage": _usage(prompt_tokens, sent)} if self._continuous_usage else {}
            _event(writer, {"choices": [choice], **usage})
            await writer.drain()  # raises once the client has gone
        if self._final_usage:
            told = {} if metrics is None else {"metrics": metrics}
            _event(writer, {"choices": [], "usage": _usage(prompt_tokens, sent), **told})
        if failure is None:
            _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")


def _prompt_of(request: dict[str, Any]) -> str:
    if "messages" in request:
        return "".join(message["content"] for message in request["messages"])
    return str(request["prompt"])


async def _sleep_until(due: float) -> None:
    left = due - asyncio.get_running_loop().time()
    if left > 0:
        await asyncio.sleep(left)


async def _fail(failure: Failure, writer: asyncio.StreamWriter) -> None:
    if failure.kind == "silence":
        await asyncio.sleep(3600)
    if failure.kind == "error":
        _event(writer, {"error": {"message": "EngineCore died", "code": 500}})
    if failure.kind == "abort":
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
    if failure.kind == "not_json":
        _chunk(writer, b"data: {torn\n\n")
    if failure.kind == "wrong_shape":
        _event(writer, {"choices": ["a choice that is no object"]})
    if failure.kind in ("error", "abort", "not_json", "wrong_shape"):
        _chunk(writer, b"data: [DONE]\n\n")
    if failure.kind in ("error", "abort", "not_json", "wrong_shape", "no_done"):
        _chunk(writer, b"")
        return
    await writer.drain()
    if failure.kind == "reset":
        writer.transport.abort()
    raise ConnectionResetError


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {  # in vLLM's order
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)  # as vLLM writes it
    _chunk(writer, b"data: " + text.encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    writer.write(
        f"HTTP/1.1 {status} Planted\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def main() -> None:
    """Serve at a given pace in the foreground: `python -m tests.support.sse_server SECONDS [N]`."""
    import sys

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.02
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with SseServer(pace=Pace(seconds, seconds, tokens)) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
