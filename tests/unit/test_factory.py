"""What the factory reads and refuses before anything is started."""

import socket
from pathlib import Path

import pytest

from specdecode_operator import errors, factory
from specdecode_operator.config import OperatorConfig

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: one
contexts: [{name: one, context: {cluster: one, user: me}}]
clusters: [{name: one, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: me, user: {token: abc}}]
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return {"KUBECONFIG": str(path)}


def make_config(**more: object) -> OperatorConfig:
    values = {"lease": False, "listen_host": "127.0.0.1", "listen_port": 0, **more}
    return OperatorConfig(**values)  # type: ignore[arg-type]


def test_an_application_is_built_without_asking_anybody(environ: dict[str, str]) -> None:
    application = factory.build(make_config(prometheus_url="http://127.0.0.1:1"), environ)
    assert application.leadership.is_leader()
    application.server.close()


def test_with_a_lease_nobody_leads_before_it_is_held(environ: dict[str, str]) -> None:
    application = factory.build(make_config(lease=True, lease_namespace="ns"), environ)
    assert not application.leadership.is_leader()
    application.server.close()


def test_a_lease_outside_a_cluster_needs_its_namespace(environ: dict[str, str]) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"SPECDECODE_LEASE_NAMESPACE.*--no-lease"):
        factory.build(make_config(lease=True), environ)


def test_a_port_in_use_is_said_so(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.ConfigurationError, match=f"SPECDECODE_LISTEN: .*{port}"):
            factory.build(make_config(listen_port=port), environ)


def test_headers_are_read_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("Authorization: Bearer a:b\n\nX-Scope-OrgID:  team \n")
    assert factory._read_headers(str(path)) == {
        "Authorization": "Bearer a:b",
        "X-Scope-OrgID": "team",
    }


def test_a_wrong_header_is_named_by_its_line_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("X-Fine: yes\ns3cret-without-a-name\n")
    with pytest.raises(errors.ConfigurationError, match="line 2") as caught:
        factory._read_headers(str(path))
    assert "s3cret" not in str(caught.value)


def test_a_missing_headers_file_is_said_so() -> None:
    with pytest.raises(errors.ConfigurationError, match="cannot be read: No such file"):
        factory._read_headers("/nowhere/headers")
