"""How an API server is found, and what its faults become."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specdecode_operator import errors
from specdecode_operator.clients.transport import Transport, load_configuration

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: one
contexts:
- {name: one, context: {cluster: one, user: me}}
- {name: two, context: {cluster: two, user: me}}
clusters:
- {name: one, cluster: {server: "http://one.example:1"}}
- {name: two, cluster: {server: "http://two.example:2"}}
users:
- {name: me, user: {token: abc}}
"""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return path


def test_the_kubeconfig_says_where_the_api_server_is(kubeconfig: Path) -> None:
    configuration = load_configuration({"KUBECONFIG": str(kubeconfig)})
    credentials = Transport(configuration).credentials()
    assert credentials.server == "http://one.example:1"
    assert (credentials.scheme, credentials.token) == ("Bearer", "abc")


def test_another_context_can_be_chosen(kubeconfig: Path) -> None:
    environ = {"KUBECONFIG": str(kubeconfig), "KUBECONTEXT": "two"}
    assert load_configuration(environ).host == "http://two.example:2"


def test_a_kubeconfig_that_is_set_wins_over_the_pods_account(kubeconfig: Path) -> None:
    environ = {"KUBECONFIG": str(kubeconfig), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert load_configuration(environ).host == "http://one.example:1"


@pytest.mark.parametrize(
    "environ",
    [
        {"KUBECONFIG": "/nowhere/config"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"},
    ],
    ids=["no such file", "a pod without an account"],
)
def test_no_way_to_an_api_server_is_said_so(environ: dict[str, str]) -> None:
    with pytest.raises(errors.ConfigurationError, match="set KUBECONFIG"):
        load_configuration(environ)


def test_an_unknown_context_is_said_so(kubeconfig: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="three"):
        load_configuration({"KUBECONFIG": str(kubeconfig), "KUBECONTEXT": "three"})


class Faulty(ThreadingHTTPServer):
    """Answers with what the path asks for: /STATUS, /hang, /drops, /html, /list."""

    daemon_threads = True
    requests = 0


class Handler(BaseHTTPRequestHandler):
    server: Faulty

    def do_GET(self) -> None:
        self.server.requests += 1
        match self.path.partition("?")[0].strip("/"):
            case "hang":
                time.sleep(1)
            case "drops":
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b"line\n")
                    time.sleep(0.02)
            case "html":
                self._answer(200, b"<html>")
            case "list":
                self._answer(200, b"[]")
            case "proxy":
                self._answer(502, b"<html>\xff bad gateway")
            case status:
                body = {"kind": "Status", "message": "because"}
                self._answer(int(status), json.dumps(body).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    server = Faulty(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def make_transport(tmp_path: Path, port: int, *, read_seconds: float = 0.3) -> Transport:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG.replace("one.example:1", f"127.0.0.1:{port}"))
    configuration = load_configuration({"KUBECONFIG": str(path)})
    return Transport(configuration, read_seconds=read_seconds)


REFUSALS: dict[str, type[errors.OperatorError]] = {
    "/400": errors.InvalidObjectError,
    "/401": errors.TransientError,
    "/403": errors.ForbiddenError,
    "/404": errors.NotFoundError,
    "/409": errors.ConflictError,
    "/410": errors.TransientError,
    "/422": errors.InvalidObjectError,
    "/429": errors.TransientError,
    "/500": errors.TransientError,
    "/503": errors.TransientError,
    "/proxy": errors.TransientError,
    "/html": errors.TransientError,
    "/list": errors.TransientError,
    "/hang": errors.TransientError,
}


@pytest.mark.parametrize("path", REFUSALS)
def test_a_fault_of_the_api_server_becomes_an_error_of_ours(
    tmp_path: Path, faulty: Faulty, path: str
) -> None:
    patience_seconds = 0.3 if path == "/hang" else 10.0  # a busy machine is no fault
    transport = make_transport(tmp_path, faulty.server_address[1], read_seconds=patience_seconds)
    with pytest.raises(errors.OperatorError) as caught:
        transport.request("GET", path)
    assert type(caught.value) is REFUSALS[path]
    assert path in str(caught.value)
    assert faulty.requests == 1


def test_the_words_of_the_api_server_are_kept(tmp_path: Path, faulty: Faulty) -> None:
    transport = make_transport(tmp_path, faulty.server_address[1])
    with pytest.raises(errors.ForbiddenError, match="GET /403: 403 because"):
        transport.request("GET", "/403")


def test_nobody_at_the_address_is_transient(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(errors.TransientError, match="refused"):
        make_transport(tmp_path, port).request("GET", "/200")


def test_a_stream_is_read_within_its_time_or_not_at_all(tmp_path: Path, faulty: Faulty) -> None:
    transport = make_transport(tmp_path, faulty.server_address[1])
    started = time.monotonic()
    with pytest.raises(errors.TransientError, match="not read in"):
        transport.tail("/drops", query={}, limit_bytes=100, timeout_seconds=0.3)
    assert time.monotonic() - started < 1
    assert transport.tail("/drops", query={}, limit_bytes=7, timeout_seconds=10) == b"e\nline\n"
