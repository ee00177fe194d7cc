"""One streamed completion as its chunks come in: how many tokens, and when.

Tokens are what the engine counts, not chunks: under speculation one chunk carries several.
"""

import json
import re
import time
from collections.abc import Callable
from typing import Any

from specdecode_load import acceptance, wire
from specdecode_load.connection import Connection
from specdecode_load.conversation import Ask
from specdecode_load.target import ErrorKind, RequestError

_ERROR_TEXT_BYTES = 300

# The end of a chunk as vLLM writes it. Its quotes follow a comma, not a backslash, so in valid JSON
# they are no part of a text, and with the chunk's end they pin the usage to the outermost object.
_USAGE = re.compile(
    rb'\],"usage":\{"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9},"completion_tokens":(\d{1,9})\}\}'
)

TokenListener = Callable[[int, float | None], None]
"""Called with the number of new tokens, and the TTFT in seconds if they are a request's first."""


class Completion:
    """A completion under way; `sent_at` and the other times are of time.perf_counter."""

    def __init__(self, on_tokens: TokenListener, *, keeps_text: bool = False) -> None:
        self.sent_at = time.perf_counter()
        self.tokens = 0
        self.prompt_tokens = 0
        self.first_at: float | None = None
        self.drafting: acceptance.Report = None
        self._keeps_text = keeps_text
        self._texts: list[str] = []
        self._on_tokens = on_tokens
        self._events = wire.EventReader()
        self._first_tokens = 0
        self._last_at = self.sent_at
        self._has_ended = False
        self._error_body = b""

    @property
    def text(self) -> str:
        """The answer so far, if it is kept."""
        return "".join(self._texts)

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
        new_tokens = 0
        for event in self._events.feed(body):
            new_tokens += self._absorb(event, now)
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
        usage = None if self._keeps_text else read_usage(event)
        if usage is not None:
            self.prompt_tokens, total = usage
            return self._count(total, now)
        chunk = parse_object(event)
        try:
            _raise_engine_error(chunk)
            text = _read_text(chunk)
            if self._keeps_text:
                self._texts.append(text)
            self.drafting = acceptance.read_report(chunk) or self.drafting
            return self._count(self._read_total(chunk, text), now)
        except (AttributeError, TypeError, ValueError) as error:
            message = f"this is no completion chunk: {event[:80]!r}"
            raise RequestError(ErrorKind.PROTOCOL, message) from error

    def _read_total(self, chunk: dict[str, Any], text: str) -> int:
        """Read how many tokens there are by now.

        The engine's own count is used where it comes with each chunk. Without it a chunk with text
        counts as one token, and the count sent at the end puts that right, also downwards.
        """
        usage = chunk.get("usage")
        if usage:
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            return int(usage.get("completion_tokens") or 0)
        return self.tokens + bool(text)

    def _count(self, total: int, now: float) -> int:
        new_tokens = total - self.tokens
        self.tokens = total
        if new_tokens > 0:
            self._last_at = now
            if self.first_at is None:
                self.first_at = now
                self._first_tokens = total
        return new_tokens


async def complete(connection: Connection, ask: Ask, on_tokens: TokenListener) -> Completion:
    """Send one completion request and return it when it has ended; raises RequestError."""
    completion = Completion(on_tokens, keeps_text=ask.needs_text)
    head = await connection.exchange("POST", ask.path, body=ask.body, receive=completion.receive)
    completion.check_end(head)
    return completion


def read_usage(event: bytes) -> tuple[int, int] | None:
    """Read prompt and completion tokens off a chunk in mid-answer as vLLM writes it.

    This is a third of the cost of parsing JSON. None: it is another kind of chunk, parse it.
    """
    if b',"finish_reason":null' not in event or b'"error"' in event:
        return None
    match = _USAGE.fullmatch(event, event.rfind(b'],"usage":{'))
    return (int(match[1]), int(match[2])) if match else None


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


def _read_text(chunk: dict[str, Any]) -> str:
    """Read the new text of a completion, or of a chat."""
    return "".join(
        choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        for choice in chunk.get("choices") or ()
    )
