"""The client and its queries against a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import prometheus_client
import pytest

from specdecode_operator import errors
from specdecode_operator.clients import queries
from specdecode_operator.clients.prometheus import PrometheusClient
from tests.support.prometheus import LocalPrometheus
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

PODS = ("chat-abc-1", "chat-abc-2", "chatxabc-1", "other-1")


@pytest.fixture(scope="module")
def exporter() -> Iterator[str]:
    """Counters of four pods as relabelling would have named them; gives HOST:PORT."""
    registry = prometheus_client.CollectorRegistry()
    names = ("namespace", "pod", "batch")
    steps = prometheus_client.Counter("specdecode_steps", "Steps", names, registry=registry)
    running = prometheus_client.Gauge(
        "vllm:num_requests_running", "Running", names[:2], registry=registry
    )
    for pod in PODS:
        steps.labels("team-a", pod, "16").inc(5)
        running.labels("team-a", pod).set(3)
    steps.labels("team-b", PODS[0], "16").inc(7)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, exporter: str) -> Iterator[LocalPrometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    running = LocalPrometheus(folder, scrape_interval="1s", static_targets=[exporter])
    with running:
        running.wait_for("count_over_time(specdecode_steps_total[1m]) > 2")
        yield running


def test_the_raw_samples_of_exactly_the_pods_asked_for(server: LocalPrometheus) -> None:
    client = PrometheusClient(server.url)
    regex = queries.pods_regex(PODS[:2])
    found = client.query_range_vector(
        queries.engine_samples("team-a", regex, 60), datetime.now(UTC)
    )
    counters = [series for series in found if series.name == "specdecode_steps_total"]
    assert {series.labels["pod"] for series in counters} == set(PODS[:2])
    for series in counters:
        assert series.labels["namespace"] == "team-a"
        assert {value for _, value in series.samples} == {5.0}
        times = [at for at, _ in series.samples]
        assert len(times) > 2
        assert times == sorted(times)


def test_every_named_query_is_one_that_prometheus_takes(server: LocalPrometheus) -> None:
    client = PrometheusClient(server.url)
    labels = queries.Labels(matchers='job="static"')
    for query in vars(queries).values():
        if isinstance(query, queries.Query):
            promql = queries.range_vector(
                query, labels=labels, namespace='n"s\\', pods_regex="a\\.b", seconds=60
            )
            assert client.query_range_vector(promql, datetime.now(UTC)) == ()


def test_vllms_own_metrics_are_found_by_their_names(server: LocalPrometheus) -> None:
    promql = queries.range_vector(
        queries.REQUESTS_RUNNING,
        labels=queries.Labels(),
        namespace="team-a",
        pods_regex="other-1",
        seconds=60,
    )
    (series,) = PrometheusClient(server.url).query_range_vector(promql, datetime.now(UTC))
    assert series.samples[0][1] == 3.0


def test_its_own_words_for_a_wrong_query_are_kept(server: LocalPrometheus) -> None:
    with pytest.raises(errors.MetricsUnavailableError, match=r"answered 400: .*parse error"):
        PrometheusClient(server.url).query_range_vector("sum by (", datetime.now(UTC))


def test_it_answers_again_after_a_restart(server: LocalPrometheus, tmp_path: Path) -> None:
    client = PrometheusClient(server.url)
    client.check_health()
    server.stop()
    with pytest.raises(errors.MetricsUnavailableError, match="refused"):
        client.check_health()
    server.start()

    def is_healthy() -> bool:
        try:
            client.check_health()
        except errors.MetricsUnavailableError:
            return False
        return True

    wait_until(is_healthy, what="an answer", seconds=20)
