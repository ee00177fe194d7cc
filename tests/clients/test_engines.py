"""The engine client against engines that answer, do not, or answer nonsense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from specdecode_operator.clients.engines import (
    MAX_BODY_BYTES,
    EngineClient,
    parse_acknowledgement,
)
from specdecode_operator.domain.observation import Acknowledgement

PLUGIN = """\
# HELP specdecode_table_generation Generation of the table in force
# TYPE specdecode_table_generation gauge
specdecode_table_generation{engine="0",model_name="m"} 12.0
specdecode_table_fingerprint{engine="0",model_name="m"} 2.4548378834477e+014
specdecode_table_arm{engine="0",model_name="m"} 1.0
specdecode_table_stale{engine="0",model_name="m"} 0.0
specdecode_table_enabled{engine="0",model_name="m"} 1.0
specdecode_table_clamped_rows{engine="0",model_name="m"} 0.0
specdecode_table_reloads_total{engine="0",model_name="m",reason="changed"} 4.0
specdecode_plugin_info{adaptive_verification="false",cudagraph_mode="FULL_AND_PIECEWISE",\
engine="0",k_max="7",live_table="true",method="eagle3",model_name="m",runner="v2",\
version="0.1.0",vllm_version="0.33.0"} 1.0
"""
VLLM = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
ACKNOWLEDGED = Acknowledgement(
    generation=12,
    fingerprint=245483788344770,
    stale=False,
    arm=1,
    enabled=True,
    live=True,
    engine_version="0.33.0",
    method="eagle3",
    cudagraph_mode="FULL_AND_PIECEWISE",
)


def serve(text: str, status: int = 200) -> bytes:
    body = text.encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


Behaviour = Callable[[socket.socket], None]


def answer(data: bytes) -> Behaviour:
    return lambda connection: connection.sendall(data)


def say_nothing(connection: socket.socket) -> None:
    connection.settimeout(10)
    connection.recv(65536)
    connection.recv(65536)


def trickle(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"#")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    size = 64 * MAX_BODY_BYTES
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
    connection.sendall(PLUGIN.encode())
    line = b"x" * 65535 + b"\n"
    for _ in range(size // len(line)):
        connection.sendall(line)


def break_off(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nspecdecode_table_gen")


class Engines:
    """Listening sockets, each with a behaviour."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, behaviour: Behaviour) -> str:
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def work() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.recv(65536)
                        behaviour(connection)
                    except OSError:
                        pass

        threading.Thread(target=work, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def engines() -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(stack)


@pytest.fixture
def client() -> Iterator[EngineClient]:
    made = EngineClient()
    yield made
    made.close()


def test_the_table_in_force_is_read(engines: Engines, client: EngineClient) -> None:
    address = engines.start(answer(serve(VLLM + PLUGIN)))
    assert client.read_acknowledgements({"chat-1": address}) == {"chat-1": ACKNOWLEDGED}


SILENT: dict[str, Behaviour] = {
    "an engine without the plugin": answer(serve(VLLM)),
    "an engine that is starting": answer(serve("loading", status=503)),
    "a redirect elsewhere": answer(
        b"HTTP/1.1 302 X\r\nLocation: http://example.com/\r\nContent-Length: 0\r\n\r\n"
    ),
    "another protocol": answer(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "an answer that breaks off": break_off,
    "an answer that is no metrics text": answer(serve('specdecode_plugin_info{version="')),
    "a number that is none": answer(serve(PLUGIN.replace("12.0", "NaN"))),
    "no answer": say_nothing,
    "an answer in drops": trickle,
}


@pytest.mark.parametrize("situation", SILENT)
def test_a_pod_that_gives_no_table_is_absent(
    engines: Engines, client: EngineClient, situation: str
) -> None:
    good = engines.start(answer(serve(PLUGIN)))
    bad = engines.start(SILENT[situation])
    started = time.monotonic()
    assert client.read_acknowledgements({"good": good, "bad": bad}) == {"good": ACKNOWLEDGED}
    assert time.monotonic() - started < 1.5


def test_a_flood_is_cut_off(engines: Engines, client: EngineClient) -> None:
    address = engines.start(flood)
    assert client.read_acknowledgements({"chat-1": address}) == {"chat-1": ACKNOWLEDGED}


def test_pods_are_asked_side_by_side(engines: Engines, client: EngineClient) -> None:
    slow = {f"pod-{i}": engines.start(say_nothing) for i in range(20)}
    started = time.monotonic()
    assert client.read_acknowledgements(slow) == {}
    assert time.monotonic() - started < 1.5


def test_an_engine_without_a_live_table_says_so() -> None:
    text = PLUGIN.replace('live_table="true"', 'live_table="false"')
    parsed = parse_acknowledgement("\n".join(text.splitlines()[-1:]) + "\n")
    assert parsed is not None
    assert not parsed.live
    assert parsed.generation == 0
