"""The Prometheus that the other tests and the demo stand on: does it scrape, restart and end?"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import prometheus_client
import pytest

from tests.support.cluster import LocalCluster
from tests.support.prometheus import LocalPrometheus, PrometheusError, build_configuration

pytestmark = pytest.mark.integration


@pytest.fixture
def exporter() -> Iterator[str]:
    """A process's own metrics endpoint with one gauge; gives HOST:PORT."""
    registry = prometheus_client.CollectorRegistry()
    gauge = prometheus_client.Gauge("answer", "A known value", ["arm"], registry=registry)
    gauge.labels(arm="stable").set(42)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def wait_until(condition: Callable[[], object], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_named_target_is_scraped(tmp_path: Path, exporter: str) -> None:
    with LocalPrometheus(tmp_path, scrape_interval="1s", static_targets=[exporter]) as prometheus:
        (sample,) = prometheus.wait_for("answer")
        assert sample["metric"]["arm"] == "stable"
        assert sample["metric"]["instance"] == exporter
        assert sample["value"][1] == "42"


def test_a_restart_keeps_address_and_data(tmp_path: Path, exporter: str) -> None:
    prometheus = LocalPrometheus(tmp_path, scrape_interval="1s", static_targets=[exporter])
    with prometheus:
        prometheus.wait_for("answer")
        url, first_pid = prometheus.url, prometheus.pid
        prometheus.stop()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(url)
        prometheus.start()
        assert prometheus.url == url
        assert prometheus.pid != first_pid
        prometheus.wait_for("count_over_time(answer[5m]) > 1")
        last_pid = prometheus.pid
    assert last_pid is not None
    assert not is_running(last_pid)


def test_a_wrong_query_is_an_error_and_no_empty_answer(tmp_path: Path) -> None:
    with LocalPrometheus(tmp_path) as prometheus:
        assert prometheus.query("nothing_has_this_name") == []
        with pytest.raises(PrometheusError, match="parse error"):
            prometheus.query("sum by (")
        with pytest.raises(PrometheusError, match="no result"):
            prometheus.wait_for("nothing_has_this_name", seconds=0.2)


def test_a_start_that_fails_shows_the_log(tmp_path: Path) -> None:
    prometheus = LocalPrometheus(tmp_path, scrape_interval="often")
    with pytest.raises(PrometheusError, match=r"(?s)ended with status.*often"):
        prometheus.start()
    assert prometheus.pid is None


def test_the_configuration_for_pods_is_one_that_promtool_takes(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("apiVersion: v1\nkind: Config\n")
    prometheus = LocalPrometheus(tmp_path, kubeconfig=kubeconfig)
    (job,) = build_configuration(kubeconfig=kubeconfig, scrape_interval="2s", static_targets=[])[
        "scrape_configs"
    ]
    assert job["kubernetes_sd_configs"][0]["kubeconfig_file"] == str(kubeconfig)
    prometheus.write_configuration()
    done = subprocess.run(
        [prometheus.promtool, "check", "config", prometheus.configuration_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


EXPORTER = """
import prometheus_client, sys, threading
prometheus_client.Gauge("answer", "A known value").set(42)
prometheus_client.start_http_server(int(sys.argv[1]))
threading.Event().wait()
"""


def an_exporter(name: str, image: str, annotations: dict[str, str]) -> dict[str, Any]:
    container = {"name": "main", "image": image, "args": ["-c", EXPORTER, "8000"]}
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{**container, "ports": [{"containerPort": 8000}]}],
        },
    }


def test_annotated_pods_are_discovered_and_no_others(
    cluster: LocalCluster, core: kubernetes.client.CoreV1Api, namespace: str, tmp_path: Path
) -> None:
    if cluster.external:
        pytest.skip("a Prometheus outside that cluster does not reach its pods")
    image = cluster.set_image("exporter", [sys.executable, "-u"])
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": "8000"}
    core.create_namespaced_pod(namespace, an_exporter("silent", image, {}))
    core.create_namespaced_pod(namespace, an_exporter("seen", image, annotations))
    with LocalPrometheus(
        tmp_path, kubeconfig=cluster.kubeconfig, scrape_interval="1s"
    ) as prometheus:
        selector = f'{{namespace="{namespace}"}}'
        (sample,) = prometheus.wait_for(f"answer{selector} == 42")
        pod = core.read_namespaced_pod("seen", namespace)
        assert sample["metric"]["pod"] == "seen"
        assert sample["metric"]["node"] == pod.spec.node_name
        port = pod.metadata.annotations["prometheus.io/port"]
        assert sample["metric"]["instance"] == f"{pod.status.pod_ip}:{port}"
        assert len(prometheus.query(f"up{selector}")) == 1
        core.delete_namespaced_pod("seen", namespace)
        wait_until(lambda: prometheus.query(f"up{selector}") == [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_none_is_left_when_the_command_ends(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.prometheus", "--dir", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        text=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    with urllib.request.urlopen(f"{url}/-/ready") as reply:
        assert reply.status == 200
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (child,) = (int(pid) for pid in children)
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()
    wait_until(lambda: not is_running(child))
