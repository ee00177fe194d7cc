"""The operator's own metrics and its probes, on one port.

Few, and each one acted upon: passes that fail, a slow answer to faults, a queue that grows, a
loop that stands still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_PASS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FAST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)


class Telemetry:
    """The metrics of one operator, in a registry of its own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._registry = registry
        self._passes = Counter(
            "specdecode_operator_passes",
            "Passes by lane (urgent, full) and outcome "
            "(done, conflict, transient, permanent, bug, not-leader).",
            ("lane", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "specdecode_operator_pass_seconds",
            "Duration of a pass.",
            ("lane",),
            buckets=_PASS_BUCKETS,
            registry=registry,
        )
        self._fast_path = Histogram(
            "specdecode_operator_fast_path_seconds",
            "From a pod's status that shows an ended container to the end of the urgent pass, "
            "which has written the kill switch.",
            buckets=_FAST_BUCKETS,
            registry=registry,
        )
        self._faults = Counter(
            "specdecode_operator_faults",
            "Ended or hung engines answered, by class of fault.",
            ("fault_class",),
            registry=registry,
        )
        self._depth = Gauge(
            "specdecode_operator_queue_depth",
            "Objects that wait for a worker now.",
            ("lane",),
            registry=registry,
        )
        self._leader = Gauge(
            "specdecode_operator_leader",
            "1 while this operator may write.",
            registry=registry,
        )
        self._progress = Gauge(
            "specdecode_operator_loop_progress_age_seconds",
            "How long the slowest part of the loop has not come round.",
            registry=registry,
        )

    def record_pass(self, lane: str, outcome: str, *, seconds: float) -> None:
        """Count a finished pass."""
        self._passes.labels(lane, outcome).inc()
        self._seconds.labels(lane).observe(seconds)

    def record_fast_path(self, seconds: float) -> None:
        """Note how long a pod's end waited until its urgent pass was through."""
        self._fast_path.observe(seconds)

    def record_fault(self, fault_class: str) -> None:
        """Count a fault that was answered."""
        self._faults.labels(fault_class).inc()

    def watch_queue(self, lane: str, count_due: Callable[[], int]) -> None:
        """Ask this function for the depth of a lane at each scrape."""
        self._depth.labels(lane).set_function(count_due)

    def watch_leader(self, is_leader: Callable[[], bool]) -> None:
        """Ask this function at each scrape whether we lead."""
        self._leader.set_function(is_leader)

    def watch_progress(self, age_seconds: Callable[[], float]) -> None:
        """Ask this function at each scrape how old the oldest sign of life is."""
        self._progress.set_function(age_seconds)

    def to_text(self) -> bytes:
        """Render all metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class Server:
    """Serves /metrics, /healthz and /readyz until it is closed.

    `/healthz` answers 503 with sentences while `problems` gives any; `/readyz` follows the process
    alone: a waiting second operator is ready too.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        host: str,
        port: int,
        problems: Callable[[], tuple[str, ...]],
    ) -> None:
        server_class = _ServerV6 if ":" in host else _Server
        self._server = server_class((host, port), _handler(telemetry, problems))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="probes", daemon=True
        )

    @property
    def port(self) -> int:
        """The port in use; not the one asked for if that was 0."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        if self._thread.is_alive():  # otherwise shutdown would wait for ever
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = AF_INET6


def _handler(
    telemetry: Telemetry, problems: Callable[[], tuple[str, ...]]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # a client that sends nothing must not hold a thread

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._answer(200, telemetry.to_text(), CONTENT_TYPE_LATEST)
                case "/healthz":
                    found = problems()
                    text = "\n".join((*found, "")) if found else "ok\n"
                    self._answer(503 if found else 200, text.encode())
                case "/readyz":
                    self._answer(200, b"ok\n")
                case _:
                    self._answer(404, b"here are /metrics, /healthz and /readyz\n")

        def _answer(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: probes come every few seconds."""

    return Handler
