"""The engines themselves, asked for one thing only: which table they have in force.

Whatever is judged comes from Prometheus. Its scrapes are too far apart to tell whether a table
has just arrived, so this alone is read from the pods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent import futures

import urllib3
from prometheus_client import parser

from specdecode_operator.domain.observation import Acknowledgement

TIMEOUT_SECONDS = 1.0
MAX_BODY_BYTES = 4 * 1024 * 1024
_THREADS = 32
_CHUNK_BYTES = 65536
_WANTED = ("specdecode_table_", "specdecode_plugin_info")


class EngineClient:
    """Reads /metrics of engine pods in parallel; safe to use from many threads."""

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._pool = urllib3.PoolManager(num_pools=64, maxsize=2, retries=False)
        self._threads = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="engines")

    def read_acknowledgements(self, addresses: Mapping[str, str]) -> Mapping[str, Acknowledgement]:
        """Ask each pod (name → `ip:port`) for its table; pods that do not answer are absent.

        Returns within the time-out, whatever the pods do.
        """
        deadline = time.monotonic() + self._timeout_seconds
        asked = {
            self._threads.submit(self._read, address, deadline): pod
            for pod, address in addresses.items()
        }
        done, late = futures.wait(asked, timeout=self._timeout_seconds)
        for future in late:
            future.cancel()
        answers = ((asked[future], future.result()) for future in done)
        return {pod: answer for pod, answer in answers if answer is not None}

    def close(self) -> None:
        """Stop the threads and close the idle connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.clear()

    def _read(self, address: str, deadline: float) -> Acknowledgement | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            response = self._pool.request(
                "GET",
                f"http://{address}/metrics",
                timeout=urllib3.Timeout(total=left),
                redirect=False,
                preload_content=False,
            )
            try:
                if response.status != 200:
                    return None
                return parse_acknowledgement(_wanted_lines(response, deadline))
            finally:
                _finish(response)
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            return None


def parse_acknowledgement(text: str) -> Acknowledgement | None:
    """Read the plugin's gauges; None where there is no plugin. Raises ValueError for nonsense."""
    values: dict[str, float] = {}
    info: Mapping[str, str] | None = None
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = sample.value
            if sample.name == "specdecode_plugin_info":
                info = sample.labels
    if info is None:
        return None
    return Acknowledgement(
        generation=int(values.get("specdecode_table_generation", 0)),
        fingerprint=int(values.get("specdecode_table_fingerprint", 0)),
        stale=values.get("specdecode_table_stale", 0) != 0,
        arm=int(values.get("specdecode_table_arm", 0)),
        enabled=values.get("specdecode_table_enabled", 0) != 0,
        live=info.get("live_table", "").lower() in ("1", "true"),
        engine_version=info.get("vllm_version", ""),
        method=info.get("method", ""),
        cudagraph_mode=info.get("cudagraph_mode", ""),
    )


def _wanted_lines(response: urllib3.BaseHTTPResponse, deadline: float) -> str:
    """Keep the few lines of interest; the rest of a large body is never decoded."""
    prefixes = tuple(prefix.encode() for prefix in _WANTED)
    lines = [line for line in _lines(response, deadline) if line.startswith(prefixes)]
    return b"\n".join([*lines, b""]).decode(errors="replace")


def _lines(response: urllib3.BaseHTTPResponse, deadline: float) -> Iterator[bytes]:
    """Yield whole lines until the end, the size limit or the deadline."""
    rest = b""
    size = 0
    while chunk := response.read1(_CHUNK_BYTES):
        size += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if size >= MAX_BODY_BYTES:
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the engine answers too slowly")
    if rest:
        yield rest


def _finish(response: urllib3.BaseHTTPResponse) -> None:
    """Give the connection back if the body was read to its end, else close it."""
    if response.closed or getattr(response, "length_remaining", None) == 0:
        response.release_conn()
    else:
        response.close()
