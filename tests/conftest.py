"""Fixtures shared by the integration and end-to-end tests."""

import contextlib
import os
import re
import uuid
from collections.abc import Iterator

import hypothesis
import kubernetes
import pytest

from tests.support import prometheus
from tests.support.cluster import LocalCluster, build_binary, is_external, wait_for

# A busy machine is no failure; and CI tells what a change broke, not what chance found: new
# examples are for people's own runs.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile cluster and Prometheus before any test's own time limit runs."""
    if session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        if not is_external() and any(
            "cluster" in getattr(item, "fixturenames", ()) for item in session.items
        ):
            build_binary()
        if any(hasattr(item.module, "LocalPrometheus") for item in session.items):
            prometheus.fetch_binaries(kubernetes=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A running cluster of three nodes with one GPU each; or the user's own."""
    with LocalCluster() as running:
        yield running


@pytest.fixture(scope="session")
def core(cluster: LocalCluster) -> kubernetes.client.CoreV1Api:
    """The core API, as administrator."""
    return kubernetes.client.CoreV1Api(
        kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
    )


@pytest.fixture
def namespace(request: pytest.FixtureRequest, core: kubernetes.client.CoreV1Api) -> Iterator[str]:
    """A namespace of the test's own, with its default ServiceAccount; deleted afterwards."""
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    name = f"{test}-{uuid.uuid4().hex[:6]}"
    core.create_namespace({"metadata": {"name": name}})
    # Pods are refused until the controller manager has made their ServiceAccount.
    wait_for(
        lambda: core.list_namespaced_service_account(name).items,
        what=f"the default ServiceAccount of {name}",
    )
    yield name
    core.delete_namespace(name)
