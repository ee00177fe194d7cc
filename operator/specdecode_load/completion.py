"""One streamed completion as its chunks come in: how many tokens, and when.

Tokens are what the engine counts, not chunks: under speculation one chunk carries several.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from specdecode_load import wire
from specdecode_load.connection import Connection
from specdecode_load.target import ErrorKind, RequestError

_ERROR_TEXT_BYTES = 300

TokenListener = Callable[[int, float | None], None]
"""Called with the number of new tokens, and the TTFT in seconds if they are a request's first."""


class Completion:
    """A completion under way; `sent_at` and the other times are of time.perf_counter."""

    def __init__(self, on_tokens: TokenListener) -> None:
        self.sent_at = time.perf_counter()
        self.tokens = 0
        self.prompt_tokens = 0
        self.first_at: float | None = None
        self._on_tokens = on_tokens
        self._events = wire.EventReader()
        self._first_tokens = 0
        self._last_at = self.sent_at
        self._has_ended = False
        self._error_body = b""

    @property
    def tpot_seconds(self) -> float | None:
        """Time per token after the first chunk; None if nothing came after it."""
        later_tokens = self.tokens - self._first_tokens
        if self.first_at is None or later_tokens <= 0:
            return None
        return (self._last_at - self.first_at) / later_tokens

    def receive(self, head: wire.Head, body: bytes) -> None:
        """Take the next bytes of the reply; raises RequestError if they tell of a failure."""
        if head.status != 200:
            self._error_body += body[: _ERROR_TEXT_BYTES - len(self._error_body)]
            return
        now = time.perf_counter()
        is_first = self.first_at is None
        new_tokens = sum(self._absorb(event, now) for event in self._events.feed(body))
        if new_tokens:
            self._on_tokens(new_tokens, now - self.sent_at if is_first else None)

    def check_end(self, head: wire.Head) -> None:
        """Raise RequestError unless the reply that has ended was a whole completion."""
        if head.status != 200:
            raise http_error(head.status, self._error_body)
        if not self._has_ended:
            raise RequestError(ErrorKind.PROTOCOL, "the stream ended without [DONE]")

    def _absorb(self, event: bytes, now: float) -> int:
        if event == b"[DONE]":
            self._has_ended = True
            return 0
        chunk = parse_object(event)
        try:
            _raise_engine_error(chunk)
            return self._count(self._read_total(chunk), now)
        except (AttributeError, TypeError, ValueError) as error:
            message = f"this is no completion chunk: {event[:80]!r}"
            raise RequestError(ErrorKind.PROTOCOL, message) from error

    def _read_total(self, chunk: dict[str, Any]) -> int:
        """Read how many tokens there are by now.

        The engine's own count is used where it comes with each chunk. Without it a chunk with text
        counts as one token, and the count sent at the end puts that right, also downwards.
        """
        usage = chunk.get("usage")
        if usage:
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            return int(usage.get("completion_tokens") or 0)
        return self.tokens + any(choice.get("text") for choice in chunk.get("choices") or ())

    def _count(self, total: int, now: float) -> int:
        new_tokens = total - self.tokens
        self.tokens = total
        if new_tokens > 0:
            self._last_at = now
            if self.first_at is None:
                self.first_at = now
                self._first_tokens = total
        return new_tokens


async def complete(connection: Connection, body: bytes, on_tokens: TokenListener) -> Completion:
    """Send one completion request and return it when it has ended; raises RequestError."""
    completion = Completion(on_tokens)
    head = await connection.exchange(
        "POST", "/v1/completions", body=body, receive=completion.receive
    )
    completion.check_end(head)
    return completion


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; raises RequestError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(ErrorKind.PROTOCOL, f"this is no JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise RequestError(ErrorKind.PROTOCOL, f"this is no JSON object: {text[:80]!r}")
    return value


def http_error(status: int, body: bytes) -> RequestError:
    """Make the error of a reply that is not 200."""
    kind = ErrorKind.PROTOCOL
    if status >= 400:
        kind = ErrorKind.HTTP_5XX if status >= 500 else ErrorKind.HTTP_4XX
    text = body[:_ERROR_TEXT_BYTES].decode("utf-8", "replace").strip()
    return RequestError(kind, f"the server answered {status}: {text}")


def _raise_engine_error(chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        message = str(chunk["error"])[:_ERROR_TEXT_BYTES]
        raise RequestError(ErrorKind.ENGINE, f"the engine failed: {message}")
    for choice in chunk.get("choices") or ():
        if choice.get("finish_reason") in ("abort", "error"):
            raise RequestError(ErrorKind.ENGINE, "the engine aborted the request")
