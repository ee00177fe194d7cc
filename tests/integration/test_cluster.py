"""The local cluster does what the tests and the demo take for granted of a real one.

Only what the process node does itself is tested here: the control plane is Kubernetes' own.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kubernetes
import pytest

from tests.support.cluster import ClusterError, LocalCluster, wait_for

pytestmark = pytest.mark.integration

GPU = "nvidia.com/gpu"


@pytest.fixture(scope="module")
def python(cluster: LocalCluster) -> str:
    if cluster.external:
        pytest.skip("tests the local cluster itself")
    return cluster.set_image("python", [sys.executable, "-u"])


def a_pod(name: str, image: str, script: str, **container: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "containers": [{"name": "main", "image": image, "args": ["-c", script], **container}],
        },
    }


def a_server(image: str, **container: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "image": image,
        "args": ["-m", "http.server", "8000"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        **container,
    }


Core = kubernetes.client.CoreV1Api


def status_of(core: Core, namespace: str, name: str) -> Any:
    statuses = core.read_namespaced_pod_status(name, namespace).status.container_statuses
    return statuses[0] if statuses else None


def await_status(
    core: Core, namespace: str, name: str, *, what: str, when: Callable[[Any], object]
) -> Any:
    def look() -> Any:
        status = status_of(core, namespace, name)
        return status if status and when(status) else None

    return wait_for(look, what=f"{name} {what}")


def log_of(cluster: LocalCluster, namespace: str, name: str, *options: str) -> str:
    return cluster.kubectl("logs", "-n", namespace, name, *options)


def await_log(cluster: LocalCluster, namespace: str, name: str, text: str) -> str:
    def look() -> str:
        try:
            log = log_of(cluster, namespace, name)
        except ClusterError:  # a container that is still being made has no log
            return ""
        return log if text in log else ""

    return wait_for(look, what=f"{text!r} in the log of {name}")


def events_of(core: Core, namespace: str, name: str) -> dict[str, str]:
    selector = f"involvedObject.name={name}"
    found = core.list_namespaced_event(namespace, field_selector=selector).items
    return {event.reason: event.message for event in found}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def get(url: str) -> str:
    # A new connection each time: the balancer chooses an endpoint per connection.
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_deployment_becomes_available_and_its_service_follows_the_ready_pods(
    cluster: LocalCluster, core: Core, namespace: str, python: str
) -> None:
    # The pod serves its folder, in which it writes its own name first.
    script = 'echo $HOSTNAME > index.html; exec "$0" "$@"'
    server = a_server(python, command=["sh", "-c", script, sys.executable])
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [server]}}
    apps = kubernetes.client.AppsV1Api(core.api_client)
    apps.create_namespaced_deployment(
        namespace,
        {
            "metadata": {"name": "web"},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": {"app": "web"}},
                "template": template,
            },
        },
    )
    core.create_namespaced_service(
        namespace,
        {
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
        },
    )
    wait_for(
        lambda: apps.read_namespaced_deployment("web", namespace).status.available_replicas == 2,
        what="two available replicas",
    )
    url = cluster.service_url(namespace, "web")
    pods = {pod.metadata.name for pod in core.list_namespaced_pod(namespace).items}

    def answering() -> set[str]:
        answers = set()
        for _ in range(4):
            try:
                answers.add(get(f"{url}/index.html").strip())
            except OSError:
                answers.add("")
        return answers

    wait_for(lambda: len(answering()) == 2 or None, what="both pods answering")
    apps.patch_namespaced_deployment_scale("web", namespace, {"spec": {"replicas": 1}})
    wait_for(lambda: len(answering()) == 1 and "" not in answering(), what="one pod answering")
    apps.patch_namespaced_deployment_scale("web", namespace, {"spec": {"replicas": 0}})
    wait_for(lambda: answering() == {""}, what="the service refusing")
    assert len(pods) == 2
    assert cluster.service_url(namespace, "web") == url


def test_a_volume_follows_its_config_map_when_the_pod_is_annotated(
    cluster: LocalCluster, core: Core, namespace: str, python: str
) -> None:
    core.create_namespaced_config_map(
        namespace, {"metadata": {"name": "tables"}, "data": {"stable.json": "one"}}
    )
    script = """
import os, time
seen = None
while True:
    try:
        now = tuple(open(os.environ[n]).read() for n in ("TABLE", "NOTE"))
    except FileNotFoundError:
        now = None
    if now and now != seen:
        seen = now
        print(*now, flush=True)
    time.sleep(0.01)
"""
    pod = a_pod(
        "reader",
        python,
        script,
        env=[
            {"name": "TABLE", "value": "/etc/tables/stable.json"},
            {"name": "NOTE", "value": "/etc/pod/note"},
        ],
        volumeMounts=[
            {"name": "tables", "mountPath": "/etc/tables"},
            {"name": "pod", "mountPath": "/etc/pod"},
        ],
    )
    pod["metadata"]["annotations"] = {"note": "first"}
    note = {"path": "note", "fieldRef": {"fieldPath": "metadata.annotations['note']"}}
    pod["spec"]["volumes"] = [
        {"name": "tables", "configMap": {"name": "tables", "optional": True}},
        {"name": "pod", "downwardAPI": {"items": [note]}},
    ]
    core.create_namespaced_pod(namespace, pod)
    await_log(cluster, namespace, "reader", "one first")
    log = Path(wait_for(lambda: log_path(cluster, core, namespace, "reader"), what="its log"))

    core.patch_namespaced_config_map("tables", namespace, {"data": {"stable.json": "two"}})
    started = time.monotonic()
    core.patch_namespaced_pod("reader", namespace, {"metadata": {"annotations": {"note": "next"}}})
    wait_for(lambda: "two next" in log.read_text(), what="the change", pause_seconds=0.005)
    assert time.monotonic() - started < 0.5


def log_path(cluster: LocalCluster, core: Core, namespace: str, name: str) -> str:
    pod = core.read_namespaced_pod(name, namespace)
    number = pod.status.container_statuses[0].restart_count
    folder = cluster.directory / "pods" / pod.metadata.uid / "containers" / "main" / str(number)
    return str(folder / "log")


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("sys.exit(0)", 0, "Completed"),
        ("sys.exit(3)", 3, "Error"),
        ("os.kill(os.getpid(), 9)", 137, "Error"),
        ("os.abort()", 134, "Error"),
    ],
)
def test_an_ended_container_is_restarted_and_its_end_is_told(
    cluster: LocalCluster,
    core: Core,
    namespace: str,
    python: str,
    tmp_path: Path,
    end: str,
    code: int,
    reason: str,
) -> None:
    script = f"""
import os, sys, time
print("run of", os.environ["POD"])
if os.path.exists("{tmp_path}/ran"):
    time.sleep(600)
open("{tmp_path}/ran", "w")
open("/dev/termination-log", "w").write('{{"class": "test"}}')
{end}
"""
    field = {"fieldRef": {"fieldPath": "metadata.uid"}}
    pod = a_pod("ends", python, script, env=[{"name": "POD", "valueFrom": field}])
    core.create_namespaced_pod(namespace, pod)
    status = await_status(
        core,
        namespace,
        "ends",
        what="running again",
        when=lambda status: status.restart_count == 1 and status.state.running,
    )
    last = status.last_state.terminated
    assert (last.exit_code, last.reason) == (code, reason)
    assert json.loads(last.message) == {"class": "test"}
    assert last.started_at <= last.finished_at
    assert "run of" in log_of(cluster, namespace, "ends", "--previous")
    assert "run of" in log_of(cluster, namespace, "ends")


def test_a_failed_container_without_a_message_shows_its_last_lines(
    core: Core, namespace: str, python: str
) -> None:
    pod = a_pod(
        "fails",
        python,
        "import sys; print('a\\n' * 200 + 'CUDA error'); sys.exit(1)",
        terminationMessagePolicy="FallbackToLogsOnError",
    )
    core.create_namespaced_pod(namespace, pod)
    status = await_status(
        core,
        namespace,
        "fails",
        what="backing off",
        when=lambda status: status.state.waiting and status.last_state.terminated,
    )
    assert status.state.waiting.reason == "CrashLoopBackOff"
    message = status.last_state.terminated.message
    assert message.endswith("CUDA error\n")
    assert message.count("\n") == 80


def test_a_pod_waits_for_an_unknown_image_until_there_is_one(
    cluster: LocalCluster, core: Core, namespace: str, python: str
) -> None:
    image = f"late-{namespace}"
    core.create_namespaced_pod(namespace, a_pod("late", image, "import time; time.sleep(600)"))
    reasons = []

    def seen(status: Any) -> bool:
        waiting = status.state.waiting
        if waiting and waiting.reason not in reasons:
            reasons.append(waiting.reason)
        return "ImagePullBackOff" in reasons

    await_status(core, namespace, "late", what="backing off from its image", when=seen)
    assert reasons[-2:] == ["ErrImagePull", "ImagePullBackOff"]
    assert "Failed to pull image" in wait_for(
        lambda: "; ".join(
            event.message
            for event in core.list_namespaced_event(namespace).items
            if event.reason == "Failed"
        ),
        what="an event",
    )
    cluster.set_image(image, [sys.executable])
    await_status(core, namespace, "late", what="running", when=lambda status: status.state.running)
    cluster.remove_image(image)


def test_a_pod_that_asks_for_more_gpus_than_a_node_has_stays_pending(
    core: Core, namespace: str, python: str
) -> None:
    def asking(name: str, gpus: int) -> dict[str, Any]:
        limits = {"limits": {GPU: str(gpus)}}
        return a_pod(name, python, "import time; time.sleep(600)", resources=limits)

    core.create_namespaced_pod(namespace, asking("fits", 1))
    core.create_namespaced_pod(namespace, asking("too-many", 2))
    await_status(core, namespace, "fits", what="running", when=lambda status: status.state.running)

    def condition() -> Any:
        conditions = core.read_namespaced_pod("too-many", namespace).status.conditions or []
        return next((c for c in conditions if c.type == "PodScheduled"), None)

    scheduled = wait_for(condition, what="the scheduler's word")
    assert (scheduled.status, scheduled.reason) == ("False", "Unschedulable")
    assert f"Insufficient {GPU}" in scheduled.message


def test_deleting_a_pod_leaves_none_of_its_processes(
    cluster: LocalCluster, core: Core, namespace: str, python: str
) -> None:
    script = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
same_group = subprocess.Popen([sys.executable, "-c", sleep])
own_session = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
print("pids", os.getpid(), same_group.pid, own_session.pid)
time.sleep(600)
"""
    core.create_namespaced_pod(namespace, a_pod("stubborn", python, script))
    log = await_log(cluster, namespace, "stubborn", "pids")
    pids = [int(word) for word in log.split()[1:]]
    assert all(map(is_alive, pids))
    core.delete_namespaced_pod("stubborn", namespace)
    wait_for(lambda: not any(map(is_alive, pids)), what="the processes' end")
    wait_for(lambda: not core.list_namespaced_pod(namespace).items, what="the object's end")


def test_a_pod_is_asked_to_stop_before_it_is_killed(
    cluster: LocalCluster, core: Core, namespace: str, python: str, tmp_path: Path
) -> None:
    script = f"""
import pathlib, signal, sys, time
def stop(*_):
    with open("{tmp_path}/order", "a") as order: order.write("TERM ")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready")
time.sleep(600)
"""
    hook = ["sh", "-c", f"printf 'preStop ' >> {tmp_path}/order"]
    pod = a_pod("polite", python, script, lifecycle={"preStop": {"exec": {"command": hook}}})
    core.create_namespaced_pod(namespace, pod)
    await_log(cluster, namespace, "polite", "ready")
    core.delete_namespaced_pod("polite", namespace)
    wait_for(lambda: not core.list_namespaced_pod(namespace).items, what="its end")
    assert (tmp_path / "order").read_text() == "preStop TERM "


def test_probes_decide_over_readiness_and_restarts(
    cluster: LocalCluster, core: Core, namespace: str, python: str, tmp_path: Path
) -> None:
    for name in ("ready", "alive"):
        (tmp_path / name).touch()

    def probe(name: str) -> Mapping[str, Any]:
        command = ["test", "-e", f"{tmp_path}/{name}"]
        return {"exec": {"command": command}, "periodSeconds": 1, "failureThreshold": 1}

    pod = a_pod(
        "probed",
        python,
        "import time; time.sleep(600)",
        readinessProbe=probe("ready"),
        livenessProbe=probe("alive"),
    )
    core.create_namespaced_pod(namespace, pod)
    await_status(core, namespace, "probed", what="ready", when=lambda status: status.ready)
    (tmp_path / "ready").unlink()
    await_status(core, namespace, "probed", what="not ready", when=lambda status: not status.ready)
    assert status_of(core, namespace, "probed").restart_count == 0
    (tmp_path / "ready").touch()
    (tmp_path / "alive").unlink()
    status = await_status(
        core, namespace, "probed", what="restarted", when=lambda status: status.restart_count >= 1
    )
    assert status.last_state.terminated.exit_code == 128 + signal.SIGTERM
    assert "Unhealthy" in events_of(core, namespace, "probed")


def test_a_port_of_its_own_is_given_to_args_env_and_annotations(
    cluster: LocalCluster, core: Core, namespace: str, python: str
) -> None:
    script = "import os, sys, time; print(sys.argv[1:], os.environ['PORT']); time.sleep(600)"
    pod = a_pod(
        "ported",
        python,
        script,
        ports=[{"containerPort": 8000}],
        env=[{"name": "PORT", "value": "8000"}],
    )
    pod["spec"]["containers"][0]["args"] += ["--port", "8000", "--port=8000", "--tokens", "8000"]
    pod["metadata"]["annotations"] = {"prometheus.io/port": "8000"}
    core.create_namespaced_pod(namespace, pod)
    log = await_log(cluster, namespace, "ported", "--port")
    annotations = core.read_namespaced_pod("ported", namespace).metadata.annotations
    port = annotations["prometheus.io/port"]
    assert port != "8000"
    assert json.loads(annotations["cluster.specdecode.io/ports"]) == {"8000": int(port)}
    assert log.strip() == f"['--port', '{port}', '--port={port}', '--tokens', '8000'] {port}"


def test_init_containers_run_first_and_share_volumes(
    cluster: LocalCluster, core: Core, namespace: str, python: str
) -> None:
    mount = [{"name": "shared", "mountPath": "/opt/shared"}]
    pod = a_pod("prepared", python, "print(open('/opt/shared/word').read())", volumeMounts=mount)
    pod["spec"]["volumes"] = [{"name": "shared", "emptyDir": {"medium": "Memory"}}]
    pod["spec"]["restartPolicy"] = "Never"
    pod["spec"]["initContainers"] = [
        {
            "name": "prepare",
            "image": python,
            "args": ["-c", "open('/opt/shared/word', 'w').write('hello from init')"],
            "volumeMounts": mount,
        }
    ]
    core.create_namespaced_pod(namespace, pod)
    wait_for(
        lambda: core.read_namespaced_pod("prepared", namespace).status.phase == "Succeeded",
        what="the pod's success",
    )
    assert log_of(cluster, namespace, "prepared").strip() == "hello from init"


def test_exec_runs_beside_the_container_and_logs_can_be_followed(
    cluster: LocalCluster, core: Core, namespace: str, python: str, tmp_path: Path
) -> None:
    script = """
import os, time
print("first")
while not os.path.exists(os.environ["WORD"]):
    time.sleep(0.01)
print("last")
"""
    pod = a_pod("talks", python, script, env=[{"name": "WORD", "value": str(tmp_path / "go")}])
    pod["spec"]["restartPolicy"] = "Never"
    core.create_namespaced_pod(namespace, pod)
    await_log(cluster, namespace, "talks", "first")
    printed = cluster.kubectl("exec", "-n", namespace, "talks", "--", "sh", "-c", "echo $WORD")
    assert printed.strip() == str(tmp_path / "go")
    with pytest.raises(ClusterError, match="exit code 7"):
        cluster.kubectl("exec", "-n", namespace, "talks", "--", "sh", "-c", "exit 7")
    follow = [str(cluster.binary), "kubectl", "--kubeconfig", str(cluster.kubeconfig), "logs"]
    with subprocess.Popen(
        [*follow, "-f", "-n", namespace, "talks"], stdout=subprocess.PIPE, text=True
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        (tmp_path / "go").touch()
        assert following.stdout.readline() == "last\n"
        assert following.wait(timeout=10) == 0
    assert log_of(cluster, namespace, "talks", "--tail", "1").strip() == "last"


def test_a_missing_config_map_holds_the_pod_and_says_so(
    core: Core, namespace: str, python: str
) -> None:
    pod = a_pod("waits", python, "import time; time.sleep(600)")
    pod["spec"]["volumes"] = [{"name": "tables", "configMap": {"name": "absent"}}]
    core.create_namespaced_pod(namespace, pod)
    message = wait_for(
        lambda: events_of(core, namespace, "waits").get("FailedMount"), what="an event"
    )
    assert 'configmaps "absent" not found' in message
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "absent"}})
    await_status(core, namespace, "waits", what="running", when=lambda status: status.state.running)


@pytest.mark.parametrize("victim", ["supervisor", "agent", "kube-apiserver"])
def test_nothing_outlives_a_killed_part_of_the_cluster(tmp_path: Path, victim: str) -> None:
    if "KUBECONFIG" in os.environ and "SPECDECODE_TEST_IMAGE" in os.environ:
        pytest.skip("tests the local cluster itself")
    # A second cluster, beside the one that the other tests use.
    with LocalCluster(tmp_path / "second", nodes=1) as second:
        image = second.set_image("python", [sys.executable, "-u"])
        script = "import subprocess; subprocess.run(['sleep', '600'], start_new_session=True)"
        second.kubectl("create", "-f", "-", stdin=json.dumps(manifest(a_pod("p", image, script))))
        sleeper = wait_for(lambda: find_processes(tmp_path, "sleep"), what="the pod's process")
        pids = json.loads((second.directory / "cluster.json").read_text())["pids"]
        os.kill(pids[victim], signal.SIGKILL)
        everything = [*pids.values(), *sleeper]
        wait_for(lambda: not any(map(is_alive, everything)), what="the end of all processes")


def manifest(pod: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def find_processes(folder: Path, program: str) -> list[int]:
    answer = subprocess.run(["pgrep", "-x", program], capture_output=True, text=True, check=False)
    return [int(pid) for pid in answer.stdout.split() if is_ours(int(pid), folder)]


def is_ours(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
