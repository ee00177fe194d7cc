"""One connection to the target: requests go out one after the other, replies come back.

It sits directly on the socket's callbacks. The stream classes of asyncio wake a task and fill a
fresh buffer of 256 KiB for every chunk, which at one chunk per token was most of the cost.
Redirects are not followed and proxies not used: the load goes where the user said, nowhere else.
"""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from specdecode_load import wire
from specdecode_load.target import ErrorKind, RequestError, Target

_BUFFER_BYTES = 16 * 1024

Receiver = Callable[[wire.Head, bytes], None]
"""Called with the reply's head and the next bytes of its body; may raise RequestError."""


class Connection:
    """A connection to a target, opened at the first request and reused while both sides agree.

    A server may close a connection between two requests, and the next one then meets a reset: what
    was lost on a reused connection before any byte of its answer is sent once more, on a new one,
    and `on_reconnect` is called. `tls` comes from `build_tls`: loading the certificates takes too
    long for each connection.
    """

    def __init__(
        self,
        target: Target,
        *,
        tls: ssl.SSLContext | None,
        on_reconnect: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._on_reconnect = on_reconnect
        parts = urlsplit(target.url)
        self._host = parts.hostname or ""
        self._tls = tls
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = _render_headers(target, parts.netloc)
        self._link: _Link | None = None

    @property
    def is_open(self) -> bool:
        """Tell whether the next request goes over a connection that is there already."""
        return self._link is not None and self._link.is_open

    async def exchange(
        self, method: str, path: str, *, receive: Receiver, body: bytes = b""
    ) -> wire.Head:
        """Send a request, hand its reply to `receive` as it comes, and return when it has ended.

        Raises RequestError; the connection is then closed, and opened again for the next request.
        """
        request = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        request += f"content-length: {len(body)}\r\n\r\n"
        content = request.encode() + body
        link = self._link
        if link is not None and self.is_open:
            try:
                return await self._send(link, content, receive)
            except RequestError as error:
                if error.kind is not ErrorKind.RESET or link.has_heard:
                    raise
            self._on_reconnect()
        self._link = link = await self._open()
        return await self._send(link, content, receive)

    async def _send(self, link: "_Link", content: bytes, receive: Receiver) -> wire.Head:
        reusable = False
        try:
            head = await link.exchange(
                content,
                receive=receive,
                idle_timeout_seconds=self._target.idle_timeout_seconds,
            )
            reusable = self._target.keep_alive and head.keeps_alive
        finally:
            if not reusable:
                self.close()
        return head

    def close(self) -> None:
        """Close the connection; the engine gives up a request that was running on it."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _open(self) -> "_Link":
        url, events = self._target.url, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._target.connect_timeout_seconds):
                _, link = await events.create_connection(
                    _Link, self._host, self._port, ssl=self._tls
                )
        except ConnectionRefusedError as error:
            raise RequestError(ErrorKind.REFUSED, f"nothing listens at {url}") from error
        except TimeoutError as error:
            raise RequestError(ErrorKind.TIMEOUT, f"{url} does not answer") from error
        except ConnectionResetError as error:
            raise RequestError(ErrorKind.RESET, f"{url} broke the connection off") from error
        except OSError as error:
            message = f"{url} cannot be reached: {error}"
            raise RequestError(ErrorKind.UNREACHABLE, message) from error
        return link


def build_tls(target: Target) -> ssl.SSLContext | None:
    """Load the certificates of the system for an https target; None for http."""
    return ssl.create_default_context() if urlsplit(target.url).scheme == "https" else None


class _Link(asyncio.BufferedProtocol):
    """One TCP or TLS connection, from when it was made until it is lost."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_heard = False  # whether anything came of the present or last reply
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._reply = wire.ResponseReader()
        self._receive: Receiver | None = None
        self._ended: asyncio.Future[wire.Head] | None = None
        self._clock = asyncio.get_running_loop().time
        self._heard_at = 0.0

    async def exchange(
        self, request: bytes, *, receive: Receiver, idle_timeout_seconds: float
    ) -> wire.Head:
        """Send a request and wait until its reply has ended; raises RequestError."""
        assert self._transport is not None
        events = asyncio.get_running_loop()
        self._reply, self._receive = wire.ResponseReader(), receive
        self._ended = events.create_future()
        self.has_heard = False
        self._heard_at = events.time()
        watch = _Watch(self, idle_timeout_seconds)
        self._transport.write(request)
        try:
            return await self._ended
        finally:
            watch.cancel()
            self._ended = self._receive = None

    def close(self) -> None:
        """Close at once, dropping what was not sent yet."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def silent_seconds(self, now: float) -> float:
        """Tell how long nothing has come, at the event loop's time `now`."""
        return now - self._heard_at

    def fail(self, kind: ErrorKind, message: str) -> None:
        """End the exchange that is under way with an error."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RequestError(kind, message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport (asyncio calls this)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes shall go (asyncio calls this)."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that have come (asyncio calls this)."""
        self._heard_at = self._clock()
        self.has_heard = True
        self._take(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> None:
        """Take note that the other side sends no more (asyncio calls this)."""
        self.is_open = False
        self._take(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Take note that the connection is gone (asyncio calls this)."""
        self.is_open = False
        self.fail(ErrorKind.RESET, "the connection was lost in the middle of a request")

    def _take(self, data: bytes | None) -> None:
        """Decode what has come (None: the end) and hand it over."""
        if self._ended is None or self._ended.done():
            self.close()  # nothing was asked: whatever this is, it answers no later request
            return
        try:
            self._hand_over(self._reply.feed_end() if data is None else self._reply.feed(data))
        except wire.CutShort as error:
            self.fail(ErrorKind.RESET, str(error))
        except wire.WireError as error:
            self.fail(ErrorKind.PROTOCOL, str(error))
        except RequestError as error:
            self.fail(error.kind, str(error))

    def _hand_over(self, body: bytes) -> None:
        assert self._receive is not None
        assert self._ended is not None
        head = self._reply.head
        if head is not None and body:
            self._receive(head, body)
        if head is not None and self._reply.complete:
            self._ended.set_result(head)


class _Watch:
    """Fails an exchange once nothing has come for too long; costs nothing per chunk."""

    def __init__(self, link: _Link, limit_seconds: float) -> None:
        self._link = link
        self._limit_seconds = limit_seconds
        self._events = asyncio.get_running_loop()
        self._timer = self._events.call_later(limit_seconds, self._look)

    def cancel(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        left_seconds = self._limit_seconds - self._link.silent_seconds(self._events.time())
        if left_seconds > 0:
            self._timer = self._events.call_later(left_seconds, self._look)
        else:
            self._link.fail(ErrorKind.TIMEOUT, f"nothing came for {self._limit_seconds:g} s")


def _render_headers(target: Target, host: str) -> str:
    lines = [
        f"host: {host}",
        "user-agent: specdecode-load",
        "accept: text/event-stream, application/json",
        "content-type: application/json",
        f"connection: {'keep-alive' if target.keep_alive else 'close'}",
    ]
    if target.api_key is not None:
        lines.append(f"authorization: Bearer {target.api_key}")
    return "".join(f"{line}\r\n" for line in lines)
