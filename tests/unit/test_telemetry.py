"""The operator's port: metrics that parse, and a probe that fails with a reason."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator.telemetry import Server, Telemetry


class Probed:
    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()
        self.telemetry = Telemetry()
        self.server = Server(self.telemetry, host="127.0.0.1", port=0, problems=lambda: self.found)
        self.server.start()

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def probed() -> Iterator[Probed]:
    started = Probed()
    yield started
    started.server.close()


def test_the_metrics_are_served_in_prometheus_text(probed: Probed) -> None:
    probed.telemetry.record_pass("urgent", "done", seconds=0.2)
    probed.telemetry.record_fault("illegal-memory-access")
    probed.telemetry.watch_queue("urgent", lambda: 3)
    status, text = probed.get("/metrics")
    assert status == 200
    values = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["specdecode_operator_passes_total", ("urgent", "done")] == 1
    assert values["specdecode_operator_pass_seconds_sum", ("urgent",)] == pytest.approx(0.2)
    assert values["specdecode_operator_faults_total", ("illegal-memory-access",)] == 1
    assert values["specdecode_operator_queue_depth", ("urgent",)] == 3
    assert values["process_resident_memory_bytes", ()] > 0


def test_the_probe_fails_with_what_stands_still(probed: Probed) -> None:
    assert probed.get("/healthz") == (200, "ok\n")
    probed.found = ("events has not moved for 40 s",)
    assert probed.get("/healthz") == (503, "events has not moved for 40 s\n")
    assert probed.get("/readyz")[0] == 200


def test_an_unknown_path_says_which_there_are(probed: Probed) -> None:
    status, text = probed.get("/favicon.ico")
    assert status == 404
    assert "/metrics" in text
