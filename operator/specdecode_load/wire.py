"""HTTP/1.1 responses and server-sent events, decoded from bytes alone.

A general HTTP client costs more CPU per token than a small engine spends on it, and would take the
cores that it measures. What an engine sends is a narrow part of HTTP, decoded here without any
input or output, so that it can be tested with every way of cutting the bytes.
"""

import re
from dataclasses import dataclass

HEAD_LIMIT_BYTES = 64 * 1024
CHUNK_LIMIT_BYTES = 16 * 1024 * 1024

# int() alone would also take "+1", "1_0" and " 1".
_HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{1,8}")
_FIRST_LINE = re.compile(rb"([1-9a-fA-F][0-9a-fA-F]{0,7})\r\n")
_DECIMAL = re.compile(rb"[0-9]{1,18}")


class WireError(Exception):
    """The bytes are not HTTP/1.1 as this decoder knows it."""


class CutShort(WireError):
    """The connection was closed before the response was complete."""


@dataclass(frozen=True)
class Head:
    """Status line and headers; header names in lower case."""

    status: int
    headers: dict[bytes, bytes]
    keeps_alive: bool


class ResponseReader:
    """One response: feed it bytes, take body bytes out, until `complete`."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.complete = False
        self._buffer = bytearray()
        self._chunked = False
        self._in_trailers = False
        self._left_bytes: int | None = None  # None: the body ends where the connection ends

    def feed(self, data: bytes) -> bytes:
        """Take bytes off the wire; return the body bytes that they complete."""
        if self._chunked and not self._buffer and not (self._in_trailers or self.complete):
            content = _read_lone_chunk(data)
            if content is not None:
                return content
        self._buffer += data
        if self.head is None and not self._read_head():
            return b""
        if self.complete:
            return b""
        return self._read_chunks() if self._chunked else self._read_plain()

    def feed_end(self) -> bytes:
        """Take note that the other side closed; raises CutShort if more was promised."""
        if self.complete:
            return b""
        if self.head is None or self._chunked or self._left_bytes is not None:
            raise CutShort("the server closed the connection in the middle of its reply")
        self.complete = True
        return b""

    def _read_head(self) -> bool:
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = _parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            if head.status >= 200:  # 1xx replies only announce the one that counts
                self._start_body(head)
                return True
        if len(self._buffer) > HEAD_LIMIT_BYTES:
            raise WireError("the reply's headers do not end")
        return False

    def _start_body(self, head: Head) -> None:
        self.head = head
        self._chunked = b"chunked" in head.headers.get(b"transfer-encoding", b"").lower()
        if self._chunked:
            return
        length = head.headers.get(b"content-length")
        if head.status in (204, 304):
            length = b"0"
        if length is not None:
            if not _DECIMAL.fullmatch(length):
                raise WireError(f"content-length is {length!r}")
            self._left_bytes = int(length)
            self.complete = self._left_bytes == 0

    def _read_plain(self) -> bytes:
        if self._left_bytes is None:
            body = bytes(self._buffer)
            self._buffer.clear()
            return body
        body = bytes(self._buffer[: self._left_bytes])
        del self._buffer[: len(body)]
        self._left_bytes -= len(body)
        self.complete = self._left_bytes == 0
        return body

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while not self.complete and (end := self._buffer.find(b"\r\n")) >= 0:
            if self._in_trailers:
                self.complete = end == 0
                del self._buffer[: end + 2]
                continue
            size = _chunk_size(bytes(self._buffer[:end]))
            if size == 0:
                self._in_trailers = True
                del self._buffer[: end + 2]
                continue
            start, stop = end + 2, end + 2 + size
            if len(self._buffer) < stop + 2:
                break
            if self._buffer[stop : stop + 2] != b"\r\n":
                raise WireError("a chunk does not end where its size says")
            body += self._buffer[start:stop]
            del self._buffer[: stop + 2]
        return bytes(body)


class EventReader:
    """Server-sent events: feed it body bytes, take the `data` fields out.

    Each data line is one event: OpenAI-compatible servers write an event's JSON on a single line.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take body bytes; return the data of every line that they complete."""
        if not self._rest and _is_lone_event(data):
            return [data[5:].strip()]
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _parse_head(raw: bytes) -> Head:
    status_line, *lines = raw.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not re.fullmatch(rb"[1-5][0-9]{2}", status):
        raise WireError(f"this is no HTTP/1.1 reply: {status_line[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    connection = headers.get(b"connection", b"").lower()
    keeps_alive = b"close" not in connection and (
        version == b"HTTP/1.1" or b"keep-alive" in connection
    )
    return Head(status=int(status), headers=headers, keeps_alive=keeps_alive)


def _read_lone_chunk(data: bytes) -> bytes | None:
    """Read data that is one whole chunk, as most is that an engine streams; None if it is not.

    The last chunk, of size 0, is left to the slow way.
    """
    line = _FIRST_LINE.match(data)
    if line is None or line.end() + int(line[1], 16) + 2 != len(data):
        return None
    return data[line.end() : -2] if data.endswith(b"\r\n") else None


def _is_lone_event(data: bytes) -> bool:
    """Tell whether data is one whole event, as most is that an engine streams."""
    return (
        data.startswith(b"data:") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2
    )


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not _HEXADECIMAL.fullmatch(digits) or int(digits, 16) > CHUNK_LIMIT_BYTES:
        raise WireError(f"this is no chunk size: {line[:40]!r}")
    return int(digits, 16)
