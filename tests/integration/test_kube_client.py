"""The client against a real API server: what it writes, and what the server refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator import errors
from specdecode_operator.api import metadata
from specdecode_operator.clients.kube import PAGE_SIZE, KubeClient
from specdecode_operator.clients.transport import Transport, load_configuration
from specdecode_operator.domain.decision import Event, EventType
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.loop.lease import Lease
from tests.support.cluster import LocalCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

CRDS = Path(__file__).parents[2] / "crds"
AT = datetime(2030, 1, 1, tzinfo=UTC)
Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def definition(cluster: LocalCluster) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    cluster.kubectl(
        "wait",
        "--for=condition=Established",
        f"crd/{metadata.PLURAL}.{metadata.GROUP}",
        "--timeout=30s",
    )


@pytest.fixture
def connection(cluster: LocalCluster) -> Iterator[Transport]:
    made = Transport(load_configuration({"KUBECONFIG": str(cluster.kubeconfig)}))
    yield made
    made.close()


@pytest.fixture
def client(connection: Transport, namespace: str) -> KubeClient:
    return KubeClient(connection, namespaces=(namespace,))


def make_config_map(namespace: str, name: str = "tables", **data: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": name, "labels": {"mine": "yes"}},
        "data": data,
    }


def make_pod(namespace: str, name: str = "engine-1") -> Json:
    """A pod that no node takes."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "nodeSelector": {"no": "such-node"},
            "containers": [{"name": "engine", "image": "none"}],
        },
    }


def make_object(namespace: str, name: str = "chat") -> Json:
    return {
        "apiVersion": metadata.API_VERSION,
        "kind": metadata.KIND,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "replicas": 1,
            "model": {"name": "org/model"},
            "engine": {"image": "registry/engine:0.33.0"},
        },
    }


@pytest.fixture
def chat(client: KubeClient, namespace: str) -> Json:
    return client.apply(make_object(namespace))


def status_of(phase: str) -> Json:
    return {"phase": phase, "observedGeneration": 1}


def test_what_is_not_there_is_none(client: KubeClient, namespace: str) -> None:
    assert client.get_object(ObjectKey(namespace, "none")) is None
    assert client.get("v1", "ConfigMap", namespace, "none") is None
    assert client.get("monitoring.coreos.com/v1", "PodMonitor", namespace, "none") is None
    assert client.list_owned(namespace, "Pod", {"a": "b"}) == []
    assert client.annotate_pod(namespace, "none", {"a": "b"}) is False
    assert client.delete("v1", "ConfigMap", namespace, "none") is False
    assert (
        client.pod_log(
            namespace,
            "none",
            container="engine",
            previous=True,
            limit_bytes=1024,
            timeout_seconds=1,
        )
        is None
    )


def test_applying_creates_changes_and_takes_over(client: KubeClient, namespace: str) -> None:
    client.apply(make_config_map(namespace, stable="1"))
    client.apply(make_config_map(namespace, canary="2"))
    found = client.get("v1", "ConfigMap", namespace, "tables")
    assert found is not None
    assert found["data"] == {"canary": "2"}
    managers = {entry["manager"] for entry in found["metadata"]["managedFields"]}
    assert managers == {metadata.FIELD_MANAGER}


def test_an_unchanged_apply_changes_nothing(client: KubeClient, namespace: str) -> None:
    first = client.apply(make_config_map(namespace, stable="1"))
    second = client.apply(make_config_map(namespace, stable="1"))
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


def test_listed_objects_say_what_they_are(client: KubeClient, namespace: str) -> None:
    client.apply(make_config_map(namespace))
    (found,) = client.list_owned(namespace, "ConfigMap", {"mine": "yes"})
    assert (found["apiVersion"], found["kind"]) == ("v1", "ConfigMap")


def test_objects_are_listed_over_all_pages(client: KubeClient, namespace: str) -> None:
    names = {f"chat-{i}" for i in range(PAGE_SIZE + 3)}
    for name in names:
        client.apply(make_object(namespace, name))
    assert {item["metadata"]["name"] for item in client.list_objects()} == names


def test_a_status_is_written_and_gives_the_next_version(client: KubeClient, chat: Json) -> None:
    key = ObjectKey(chat["metadata"]["namespace"], "chat")
    uid, version = chat["metadata"]["uid"], chat["metadata"]["resourceVersion"]
    second = client.apply_status(key, uid, status_of("Pending"), resource_version=version)
    assert second != version
    assert client.apply_status(key, uid, status_of("Pending"), resource_version=second) == second
    third = client.apply_status(key, uid, status_of("Idle"), resource_version=second)
    found = client.get_object(key)
    assert found is not None
    assert found["status"]["phase"] == "Idle"
    assert found["metadata"]["resourceVersion"] == third
    assert found["metadata"]["generation"] == 1


def test_a_status_from_a_stale_reading_is_a_conflict(client: KubeClient, chat: Json) -> None:
    key = ObjectKey(chat["metadata"]["namespace"], "chat")
    uid, version = chat["metadata"]["uid"], chat["metadata"]["resourceVersion"]
    client.apply_status(key, uid, status_of("Pending"), resource_version=version)
    with pytest.raises(errors.ConflictError):
        client.apply_status(key, uid, status_of("Idle"), resource_version=version)


def test_a_status_for_an_object_that_was_made_anew_is_refused(
    client: KubeClient, chat: Json
) -> None:
    key = ObjectKey(chat["metadata"]["namespace"], "chat")
    client.delete(metadata.API_VERSION, metadata.KIND, key.namespace, key.name)
    client.apply(make_object(key.namespace))
    with pytest.raises(errors.ConflictError):
        client.apply_status(
            key,
            chat["metadata"]["uid"],
            status_of("Idle"),
            resource_version=chat["metadata"]["resourceVersion"],
        )


def test_a_status_for_an_object_that_is_gone_makes_none(client: KubeClient, chat: Json) -> None:
    key = ObjectKey(chat["metadata"]["namespace"], "chat")
    client.delete(metadata.API_VERSION, metadata.KIND, key.namespace, key.name)
    with pytest.raises((errors.ConflictError, errors.NotFoundError)):
        client.apply_status(
            key,
            chat["metadata"]["uid"],
            status_of("Idle"),
            resource_version=chat["metadata"]["resourceVersion"],
        )
    assert client.get_object(key) is None


def test_a_pod_is_annotated_and_what_others_wrote_stays(client: KubeClient, namespace: str) -> None:
    client.create(make_pod(namespace))
    client.annotate_pod(namespace, "engine-1", {"others": "x", metadata.ANNOTATION_ARM: "stable"})
    assert client.annotate_pod(namespace, "engine-1", {metadata.ANNOTATION_ARM: "off"})
    found = client.get("v1", "Pod", namespace, "engine-1")
    assert found is not None
    assert found["metadata"]["annotations"] == {"others": "x", metadata.ANNOTATION_ARM: "off"}
    client.annotate_pod(namespace, "engine-1", {"others": None})
    found = client.get("v1", "Pod", namespace, "engine-1")
    assert found is not None
    assert "others" not in found["metadata"]["annotations"]


def test_what_is_deleted_takes_what_it_owns_along(client: KubeClient, namespace: str) -> None:
    owner = client.apply(make_config_map(namespace, "owner"))
    owned = make_config_map(namespace, "owned")
    owned["metadata"]["ownerReferences"] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "owner",
            "uid": owner["metadata"]["uid"],
        }
    ]
    client.apply(owned)
    assert client.delete("v1", "ConfigMap", namespace, "owner") is True
    wait_until(
        lambda: client.get("v1", "ConfigMap", namespace, "owned") is None,
        what="the owned object to go",
        seconds=60,
    )


def test_what_the_server_refuses_is_said_in_its_words(client: KubeClient, namespace: str) -> None:
    with pytest.raises(errors.InvalidObjectError, match="Invalid value"):
        client.apply(make_config_map(namespace, "Not_A_Name"))
    wrong_type = make_config_map(namespace) | {"data": ["a", "list"]}
    with pytest.raises(errors.InvalidObjectError, match="expected map"):
        client.apply(wrong_type)
    with pytest.raises(errors.InvalidObjectError, match="no kind that this client knows"):
        client.get("v1", "Secret", namespace, "x")


def test_a_missing_right_is_named(cluster: LocalCluster, namespace: str) -> None:
    configuration = load_configuration({"KUBECONFIG": str(cluster.kubeconfig)})
    token = cluster.kubectl("create", "token", "default", "-n", namespace).strip()
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"BearerToken": token}
    configuration.api_key_prefix = {"BearerToken": "Bearer"}
    configuration.refresh_api_key_hook = None
    weak = KubeClient(Transport(configuration))
    with pytest.raises(errors.ForbiddenError, match="cannot list resource"):
        weak.list_owned(namespace, "Pod", {})


def test_an_event_is_shown_and_counted(
    cluster: LocalCluster, client: KubeClient, chat: Json
) -> None:
    told = Event("Promoted", "table 7x16,1: 4.1 % faster", EventType.WARNING)
    for minute in range(3):
        client.create_event(chat, told, at=AT + timedelta(minutes=minute))
    namespace = chat["metadata"]["namespace"]
    (found,) = client.list_owned(namespace, "Event", {})
    assert found["count"] == 3
    assert found["firstTimestamp"] == "2030-01-01T00:00:00Z"
    assert found["lastTimestamp"] == "2030-01-01T00:02:00Z"
    described = cluster.kubectl("describe", metadata.PLURAL, "chat", "-n", namespace)
    assert "4.1 % faster" in described
    assert metadata.FIELD_MANAGER in described


def test_without_the_lease_nothing_is_written(connection: Transport, namespace: str) -> None:
    fenced = KubeClient(connection, may_write=lambda: False)
    key = ObjectKey(namespace, "chat")
    for write in (
        lambda: fenced.apply(make_config_map(namespace)),
        lambda: fenced.apply_status(key, "uid", {}, resource_version="1"),
        lambda: fenced.annotate_pod(namespace, "x", {}),
        lambda: fenced.delete("v1", "ConfigMap", namespace, "tables"),
        lambda: fenced.create(make_config_map(namespace)),
        lambda: fenced.replace(make_config_map(namespace)),
        lambda: fenced.create_event(make_object(namespace), Event("A", "b"), at=AT),
    ):
        with pytest.raises(errors.NotLeaderError):
            write()
    assert fenced.get("v1", "ConfigMap", namespace, "tables") is None


def test_the_end_of_a_log_is_read_with_bad_bytes_replaced(
    cluster: LocalCluster, client: KubeClient, namespace: str
) -> None:
    script = (
        r"for i in $(seq 5000); do echo line $i; done; printf 'bad \377 byte\n'; exec sleep 600"
    )
    image = cluster.set_image("talker:1", ["/bin/sh", "-c", script])
    pod = make_pod(namespace)
    pod["spec"] = {"containers": [{"name": "engine", "image": image}]}
    client.create(pod)

    def read(limit_bytes: int) -> str | None:
        return client.pod_log(
            namespace,
            "engine-1",
            container="engine",
            previous=False,
            limit_bytes=limit_bytes,
            timeout_seconds=5,
        )

    log = wait_until(
        lambda: (text := read(1000)) and "byte" in text and text, what="the log", seconds=60
    )
    assert log.endswith("line 5000\nbad \N{REPLACEMENT CHARACTER} byte\n")
    assert len(log.encode(errors="ignore")) <= 1010
    whole = read(1024 * 1024)
    assert whole is not None
    assert whole.startswith("line 1\n")


def test_a_lease_moves_from_one_operator_to_the_next(connection: Transport, namespace: str) -> None:
    def contend(identity: str) -> Lease:
        return Lease(
            KubeClient(connection),
            namespace=namespace,
            name="operator",
            identity=identity,
            monotonic=time.monotonic,
            wall=lambda: datetime.now(UTC),
        )

    first, second = contend("one"), contend("two")
    first.step()
    first.step()
    second.step()
    assert first.is_leader()
    assert not second.is_leader()
    first.stop()
    second.step()
    assert second.is_leader()


def test_many_threads_share_one_client(client: KubeClient, namespace: str) -> None:
    failed: list[Exception] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                client.apply(make_config_map(namespace, f"map-{number}", stable=str(number)))
                found = client.get("v1", "ConfigMap", namespace, f"map-{number}")
                assert found is not None
                assert found["data"] == {"stable": str(number)}
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
