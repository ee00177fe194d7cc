"""HTTP bodies and events are the same however the network cuts them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_load.wire import CutShort, EventReader, Head, ResponseReader, WireError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(bounds)]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def read(pieces: list[bytes]) -> tuple[bytes, ResponseReader]:
    reader = ResponseReader()
    return b"".join(reader.feed(piece) for piece in pieces), reader


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 500), max_size=12))
def test_a_chunked_body_is_the_same_however_the_bytes_are_cut(
    parts: list[bytes], places: list[int]
) -> None:
    body, reader = read(cut(HEAD + chunked(parts), places))
    assert body == b"".join(parts)
    assert reader.complete


@given(st.binary(max_size=60), st.lists(st.integers(0, 500), max_size=8))
def test_a_body_of_known_length_is_the_same_however_the_bytes_are_cut(
    content: bytes, places: list[int]
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content)
    body, reader = read(cut(head + content, places))
    assert (body, reader.complete) == (content, True)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_and_nothing_else_happens(data: bytes) -> None:
    for start in (b"", HEAD, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"):
        reader = ResponseReader()
        try:
            reader.feed(start + data)
            reader.feed_end()
        except WireError:
            continue


@given(st.lists(st.text(alphabet="ab{}: ", max_size=8)), st.lists(st.integers(0, 300), max_size=9))
def test_events_are_the_same_however_the_bytes_are_cut(
    values: list[str], places: list[int]
) -> None:
    data = "".join(f"data: {value}\n\n" for value in values).encode()
    reader = EventReader()
    events = [event for piece in cut(data, places) for event in reader.feed(piece)]
    assert events == [value.strip().encode() for value in values]


def test_comments_and_other_fields_are_no_events_and_crlf_ends_a_line_too() -> None:
    text = b": ping\r\nevent: x\r\ndata:1\r\n\r\nid: 3\ndata: 2\n\n"
    assert EventReader().feed(text) == [b"1", b"2"]


def test_chunk_extensions_and_trailers_are_passed_over() -> None:
    body, reader = read([HEAD + b"3;x=y\r\nabc\r\n0\r\nTrailer: 1\r\nOther: 2\r\n\r\n"])
    assert (body, reader.complete) == (b"abc", True)


def test_an_interim_reply_only_announces_the_real_one() -> None:
    body, reader = read([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunked([b"x"])])
    assert reader.head is not None
    assert (reader.head.status, body) == (200, b"x")


def test_without_a_length_the_body_ends_with_the_connection() -> None:
    body, reader = read([b"HTTP/1.0 200 OK\r\n\r\nabc", b"def"])
    assert (body, reader.complete) == (b"abcdef", False)
    reader.feed_end()
    assert reader.complete


KEEP_ALIVE = {
    "HTTP/1.1 by default": (b"HTTP/1.1 200 OK", True),
    "HTTP/1.1 that closes": (b"HTTP/1.1 200 OK\r\nConnection: Close", False),
    "HTTP/1.0 by default": (b"HTTP/1.0 200 OK", False),
    "HTTP/1.0 that stays": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive", True),
}


@pytest.mark.parametrize(("start", "keeps"), KEEP_ALIVE.values(), ids=KEEP_ALIVE.keys())
def test_whether_a_connection_goes_on(start: bytes, keeps: bool) -> None:
    _, reader = read([start + b"\r\ncontent-length: 0\r\n\r\n"])
    assert isinstance(reader.head, Head)
    assert reader.head.keeps_alive is keeps
    assert reader.complete


REFUSED = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a chunk size that int() would take": HEAD + b"+1\r\na\r\n",
    "an underscore in a chunk size": HEAD + b"1_0\r\n",
    "a chunk size out of bounds": HEAD + b"fffffff\r\n",
    "a chunk longer than its size": HEAD + b"2\r\nabc\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_http_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        ResponseReader().feed(data)


CUT_SHORT = {
    "before the reply": b"",
    "in the headers": b"HTTP/1.1 200",
    "in a chunked body": HEAD + b"3\r\nabc\r\n",
    "in a body of known length": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
}


@pytest.mark.parametrize("data", CUT_SHORT.values(), ids=CUT_SHORT.keys())
def test_a_reply_that_ends_too_early_is_cut_short(data: bytes) -> None:
    reader = ResponseReader()
    reader.feed(data)
    with pytest.raises(CutShort):
        reader.feed_end()
