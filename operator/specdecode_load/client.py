"""One connection to the engine, and one streamed completion over it.

Everything that can go wrong on the way is told as a `RequestError` with its kind; the loop counts
kinds and goes on. Redirects are not followed and proxies not used: the load goes where the user
said and nowhere else.
"""

import asyncio
import contextlib
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from specdecode_load import wire, workload

_READ_BYTES = 256 * 1024
_PROBE_CHARACTERS = 64
_ERROR_TEXT_CHARACTERS = 300


TokenListener = Callable[[int, float | None], None]
"""Called with the number of new tokens, and the TTFT in seconds if they are a request's first."""


class ErrorKind(StrEnum):
    """Why a request failed."""

    REFUSED = "refused"  # nothing listens there
    UNREACHABLE = "unreachable"  # no such host, no route, no TLS
    RESET = "reset"  # the connection ended before the reply did
    TIMEOUT = "timeout"  # nothing came for as long as the target allows
    HTTP_4XX = "http4xx"
    HTTP_5XX = "http5xx"
    ENGINE = "engine"  # the stream itself told of an error, or that the request was aborted
    PROTOCOL = "protocol"  # the reply is not what an OpenAI-compatible server sends


class RequestError(Exception):
    """A request that failed, and why."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Target:
    """The server to load; `probe` fills in what only the server knows.

    `idle_timeout_seconds` is the longest wait for the next bytes, the first token among them.
    """

    url: str
    model: str
    tokens_per_character: float = 1.0
    keep_alive: bool = True
    api_key: str | None = field(default=None, repr=False)
    idle_timeout_seconds: float = 120.0
    connect_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                f"{self.url!r} is no server address: give http://HOST:PORT or https://HOST:PORT"
            )
        if parts.username is not None:
            raise ValueError("credentials do not belong into the address: use an API key")
        if any(character in (self.api_key or "") for character in "\r\n"):
            raise ValueError("the API key contains a line break")
        parts.port  # noqa: B018 - raises ValueError for a port out of range


class Connection:
    """A connection to a target, opened at the first request and reused while both sides agree."""

    def __init__(self, target: Target) -> None:
        self._target = target
        parts = urlsplit(target.url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = self._render_headers(parts.netloc)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._response = wire.ResponseReader()
        self._early_body = b""

    async def send(self, method: str, path: str, body: bytes = b"") -> wire.Head:
        """Send a request and return the head of its reply; connect first where needed."""
        try:
            reader, writer = self._streams or await self._open()
            self._response, self._early_body = wire.ResponseReader(), b""
            writer.write(
                f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            await writer.drain()
            while self._response.head is None:
                self._early_body = self._feed(await reader.read(_READ_BYTES))
        except (OSError, wire.WireError) as error:
            raise self._fail(error) from error
        return self._response.head

    async def read(self) -> bytes | None:
        """Return the next bytes of the reply's body, or None at its end."""
        if self._early_body:
            body, self._early_body = self._early_body, b""
            return body
        if self._response.complete:
            self._finish()
            return None
        assert self._streams is not None
        try:
            return self._feed(await self._streams[0].read(_READ_BYTES))
        except (OSError, wire.WireError) as error:
            raise self._fail(error) from error

    async def read_all(self) -> bytes:
        """Return the whole body of the reply."""
        body = bytearray()
        while (part := await self.read()) is not None:
            body += part
        return bytes(body)

    def close(self) -> None:
        """Close the connection; the engine gives up a request that was running on it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(self._target.connect_timeout_seconds):
                self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except ConnectionRefusedError as error:
            message = f"nothing listens at {self._target.url}"
            raise RequestError(ErrorKind.REFUSED, message) from error
        except TimeoutError as error:
            message = f"{self._target.url} does not answer"
            raise RequestError(ErrorKind.TIMEOUT, message) from error
        except OSError as error:
            message = f"{self._target.url} cannot be reached: {error}"
            raise RequestError(ErrorKind.UNREACHABLE, message) from error
        return self._streams

    def _feed(self, data: bytes) -> bytes:
        if data:
            return self._response.feed(data)
        self._response.feed_end()
        return b""

    def _finish(self) -> None:
        head = self._response.head
        if not self._target.keep_alive or head is None or not head.keeps_alive:
            self.close()

    def _fail(self, error: Exception) -> RequestError:
        self.close()
        broken = isinstance(error, wire.WireError) and not isinstance(error, wire.CutShort)
        return RequestError(ErrorKind.PROTOCOL if broken else ErrorKind.RESET, str(error))

    def _render_headers(self, host: str) -> str:
        lines = [
            f"host: {host}",
            "user-agent: specdecode-load",
            "accept: text/event-stream, application/json",
            "content-type: application/json",
            f"connection: {'keep-alive' if self._target.keep_alive else 'close'}",
        ]
        if self._target.api_key is not None:
            lines.append(f"authorization: Bearer {self._target.api_key}")
        return "".join(f"{line}\r\n" for line in lines)


class Completion:
    """One completion as its chunks come in: tokens, and when the first and the last came."""

    def __init__(self) -> None:
        self.sent_at = time.perf_counter()
        self.tokens = 0
        self.prompt_tokens = 0
        self.first_at: float | None = None
        self.ended = False
        self._first_tokens = 0
        self._last_at = self.sent_at

    @property
    def ttft_seconds(self) -> float | None:
        """Time from sending to the first token; None before it."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tpot_seconds(self) -> float | None:
        """Time per token after the first chunk; None if nothing came after it."""
        later_tokens = self.tokens - self._first_tokens
        if self.first_at is None or later_tokens <= 0:
            return None
        return (self._last_at - self.first_at) / later_tokens

    def absorb(self, event: bytes, now: float) -> int:
        """Take one event of the stream and return how many tokens it brought.

        The engine's own count is used where it is sent with each chunk. Without it a chunk with
        text counts as one token, and the count sent at the end puts that right (also downwards).
        """
        if event == b"[DONE]":
            self.ended = True
            return 0
        chunk = _parse_object(event)
        _raise_engine_error(chunk)
        usage = chunk.get("usage")
        if usage:
            total = int(usage.get("completion_tokens") or 0)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        else:
            total = self.tokens + any(choice.get("text") for choice in chunk.get("choices") or ())
        return self._count(total, now)

    def _count(self, total: int, now: float) -> int:
        new_tokens = total - self.tokens
        if new_tokens == 0:
            return 0
        self.tokens = total
        if self.first_at is None:
            self.first_at = now
            self._first_tokens = total
        if new_tokens > 0:
            self._last_at = now
        return new_tokens


class CompletionStream:
    """Sends completions over one connection, one after the other."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection = Connection(target)

    def close(self) -> None:
        """Close the connection; a running completion is given up."""
        self._connection.close()

    async def run(self, body: bytes, on_tokens: TokenListener) -> Completion:
        """Send one completion, tell of its tokens as they arrive; raises RequestError."""
        completion = Completion()
        try:
            async with asyncio.timeout(self._target.idle_timeout_seconds) as patience:
                await self._read(completion, body=body, on_tokens=on_tokens, patience=patience)
        except TimeoutError as error:
            waited = self._target.idle_timeout_seconds
            message = f"nothing came for {waited:g} s"
            raise RequestError(ErrorKind.TIMEOUT, message) from error
        finally:
            if not completion.ended:
                self._connection.close()
        return completion

    async def _read(
        self,
        completion: Completion,
        *,
        body: bytes,
        on_tokens: TokenListener,
        patience: asyncio.Timeout,
    ) -> None:
        connection, events = self._connection, wire.EventReader()
        head = await connection.send("POST", "/v1/completions", body)
        if head.status != 200:
            raise _http_error(head.status, await connection.read_all())
        clock = asyncio.get_running_loop().time
        while (part := await connection.read()) is not None:
            now = time.perf_counter()
            patience.reschedule(clock() + self._target.idle_timeout_seconds)
            had_first = completion.first_at is not None
            new_tokens = sum(completion.absorb(event, now) for event in events.feed(part))
            if new_tokens:
                first = None if had_first else completion.ttft_seconds
                on_tokens(new_tokens, first)
        if not completion.ended:
            raise RequestError(ErrorKind.PROTOCOL, "the stream ended without [DONE]")


async def probe(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    keep_alive: bool = True,
    idle_timeout_seconds: float = 120.0,
) -> Target:
    """Ask the server for its model and how many tokens its tokenizer makes of random text.

    Raises RequestError with a sentence for the user if the server cannot be loaded.
    """
    target = Target(
        url=url,
        model=model or "",
        api_key=api_key,
        keep_alive=keep_alive,
        idle_timeout_seconds=idle_timeout_seconds,
    )
    if model is None:
        target = replace(target, model=await _first_model(target))
    return replace(target, tokens_per_character=await _tokens_per_character(target))


async def _first_model(target: Target) -> str:
    connection = Connection(target)
    with contextlib.closing(connection):
        async with _patience(target):
            head = await connection.send("GET", "/v1/models")
            body = await connection.read_all()
    if head.status != 200:
        raise _http_error(head.status, body)
    models = _parse_object(body).get("data")
    if not isinstance(models, list) or not models:
        raise RequestError(ErrorKind.PROTOCOL, f"{target.url} lists no model: name one")
    return str(models[0]["id"])


async def _tokens_per_character(target: Target) -> float:
    """Measure the tokenizer with one request of one output token; the rest is in its usage."""
    stream = CompletionStream(target)
    text = workload.random_text(random.Random(0), _PROBE_CHARACTERS)
    body = workload.completion_body(
        target.model, prompt=text, output_tokens=1, temperature=0.0, ignore_eos=True
    )
    with contextlib.closing(stream):
        completion = await stream.run(body, lambda tokens, ttft_seconds: None)
    return max(completion.prompt_tokens, 1) / len(text) if completion.prompt_tokens else 1.0


@contextlib.asynccontextmanager
async def _patience(target: Target) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(target.idle_timeout_seconds):
            yield
    except TimeoutError as error:
        raise RequestError(ErrorKind.TIMEOUT, f"{target.url} does not answer") from error


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(ErrorKind.PROTOCOL, f"this is no JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise RequestError(ErrorKind.PROTOCOL, f"this is no JSON object: {text[:80]!r}")
    return value


def _raise_engine_error(chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise RequestError(ErrorKind.ENGINE, str(chunk["error"])[:_ERROR_TEXT_CHARACTERS])
    for choice in chunk.get("choices") or ():
        if choice.get("finish_reason") in ("abort", "error"):
            raise RequestError(ErrorKind.ENGINE, "the engine aborted the request")


def _http_error(status: int, body: bytes) -> RequestError:
    kind = ErrorKind.HTTP_5XX if status >= 500 else ErrorKind.HTTP_4XX
    if status < 400:
        kind = ErrorKind.PROTOCOL
    text = body.decode("utf-8", "replace").strip()[:_ERROR_TEXT_CHARACTERS]
    return RequestError(kind, f"the server answered {status}: {text}")
