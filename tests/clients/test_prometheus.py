"""The Prometheus client against a server that misbehaves in each way; the real one is next door."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specdecode_operator import errors
from specdecode_operator.clients.prometheus import PrometheusClient

AT = datetime(2030, 1, 1, tzinfo=UTC)
SECRET = "s3cret"
Answer = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://user:{SECRET}@127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.server.paths.append(self.path)
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


def reply(status: int, body: str, content_type: str = "application/json") -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


def success(result: object) -> Answer:
    return reply(200, json.dumps({"status": "success", "data": {"result": result}}))


def hang(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.settimeout(10)
    handler.rfile.read(1)


def break_off(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    thread = threading.Thread(target=started.serve_forever)
    thread.start()
    yield started
    started.shutdown()
    started.server_close()
    thread.join()


def make_client(server: Server, **more: object) -> PrometheusClient:
    return PrometheusClient(server.url, timeout=1, **more)  # type: ignore[arg-type]


def test_samples_keep_their_times_names_and_labels(server: Server) -> None:
    metric = {"__name__": "specdecode_steps_total", "pod": "chat-1", "batch": "16"}
    server.answers = [success([{"metric": metric, "values": [[1.5, "3"], [16.5, "NaN"]]}])]
    (series,) = make_client(server).query_range_vector("x[60s]", AT)
    assert series.name == "specdecode_steps_total"
    assert series.labels == {"pod": "chat-1", "batch": "16"}
    assert series.samples[0] == (1.5, 3.0)
    assert series.samples[1][1] != series.samples[1][1]
    assert "time=1893456000.000" in server.paths[0]


def test_no_series_is_an_answer_and_no_error(server: Server) -> None:
    server.answers = [success([])]
    assert make_client(server).query_range_vector("x[60s]", AT) == ()


def test_configured_headers_are_sent(server: Server) -> None:
    server.answers = [success([])]
    headers = {"Authorization": "Bearer abc", "X-Scope-OrgID": "team"}
    make_client(server, headers=headers).check_health()
    assert server.headers[0]["Authorization"] == "Bearer abc"
    assert server.headers[0]["X-Scope-OrgID"] == "team"


FAULTS: dict[str, tuple[Answer, str]] = {
    "a wrong query": (
        reply(400, json.dumps({"status": "error", "error": "parse error: unexpected end"})),
        "answered 400: parse error: unexpected end",
    ),
    "not authenticated": (reply(401, SECRET), "401.*HEADERS_FILE"),
    "not allowed": (reply(403, SECRET), "403.*HEADERS_FILE"),
    "another server at the address": (reply(404, "<html>"), "no Prometheus API"),
    "overload": (reply(503, "busy", "text/plain"), "answered 503"),
    "a page instead of JSON": (reply(200, "<html>", "text/html"), "no valid answer"),
    "JSON of another kind": (reply(200, "[]"), "no valid answer"),
    "a vector instead of samples": (
        success([{"metric": {}, "value": [1, "2"]}]),
        "series without samples",
    ),
    "a number that is none": (
        success([{"metric": {}, "values": [[1, "many"]]}]),
        "series without samples",
    ),
    "no answer in time": (hang, "did not answer within 1 s"),
    "a broken connection": (break_off, "the connection broke"),
}


@pytest.mark.parametrize("situation", FAULTS)
def test_a_fault_is_one_short_sentence_without_secrets(server: Server, situation: str) -> None:
    answer, sentence = FAULTS[situation]
    server.answers = [answer]
    client = make_client(server, headers={"Authorization": f"Bearer {SECRET}"})
    with pytest.raises(errors.MetricsUnavailableError, match=sentence) as caught:
        client.query_range_vector("x[60s]", AT)
    assert len(str(caught.value)) <= 200
    assert SECRET not in str(caught.value)


def test_a_passing_overload_is_asked_once_more(server: Server) -> None:
    server.answers = [reply(503, "busy"), success([])]
    make_client(server).check_health()
    assert len(server.paths) == 2


def test_a_silent_prometheus_is_left_alone_for_a_while(server: Server) -> None:
    now = [0.0]
    server.answers = [hang, success([])]
    client = make_client(server, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(errors.MetricsUnavailableError, match="did not answer"):
            client.check_health()
    assert len(server.paths) == 1
    now[0] = 1.5
    client.check_health()
    assert len(server.paths) == 2


def test_nobody_at_the_address_is_said_so() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = PrometheusClient(f"http://u:{SECRET}@127.0.0.1:{port}", timeout=1)
    with pytest.raises(errors.MetricsUnavailableError, match="refused") as caught:
        client.check_health()
    assert SECRET not in str(caught.value)


def test_an_unknown_name_is_said_so() -> None:
    client = PrometheusClient("http://no-such-host.invalid:9090", timeout=1)
    with pytest.raises(errors.MetricsUnavailableError, match="name cannot be resolved"):
        client.check_health()
