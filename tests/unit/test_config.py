"""The operator's configuration: every variable, and a clear refusal of what is wrong."""

from datetime import timedelta

import pytest

from specdecode_operator import config, errors
from specdecode_operator.config import OperatorConfig

ALL = {
    "SPECDECODE_PROMETHEUS_URL": "https://prometheus.monitoring:9090",
    "SPECDECODE_PROMETHEUS_HEADERS_FILE": "/etc/headers",
    "SPECDECODE_PROMETHEUS_CA_FILE": "/etc/ca.crt",
    "SPECDECODE_PROMETHEUS_TIMEOUT": "5s",
    "SPECDECODE_PROMETHEUS_MATCHERS": 'cluster="eu"',
    "SPECDECODE_NAMESPACE_LABEL": "exported_namespace",
    "SPECDECODE_POD_LABEL": "exported_pod",
    "SPECDECODE_SCRAPE_INTERVAL": "30s",
    "SPECDECODE_CYCLE": "1m30s500ms",
    "SPECDECODE_CYCLE_WORKERS": "8",
    "SPECDECODE_NAMESPACES": "team-a, team-b",
    "SPECDECODE_LEASE": "off",
    "SPECDECODE_LEASE_NAME": "other",
    "SPECDECODE_LEASE_NAMESPACE": "system",
    "SPECDECODE_IDENTITY": "operator-0",
    "SPECDECODE_PLUGIN_IMAGE": "registry/specdecode-operator:0.1.0",
    "SPECDECODE_LISTEN": "127.0.0.1:9000",
    "SPECDECODE_LOG_FORMAT": "json",
    "SPECDECODE_LOG_LEVEL": "DEBUG",
}


def test_nothing_set_gives_the_defaults() -> None:
    assert OperatorConfig.from_environment({"PATH": "/bin"}) == OperatorConfig()


def test_every_variable_arrives() -> None:
    environ = {**ALL, "SPECDECODE_CYCLE": "2m"}
    assert OperatorConfig.from_environment(environ) == OperatorConfig(
        prometheus_url="https://prometheus.monitoring:9090",
        prometheus_headers_file="/etc/headers",
        prometheus_ca_file="/etc/ca.crt",
        prometheus_timeout=timedelta(seconds=5),
        prometheus_matchers='cluster="eu"',
        namespace_label="exported_namespace",
        pod_label="exported_pod",
        scrape_interval=timedelta(seconds=30),
        cycle=timedelta(minutes=2),
        cycle_workers=8,
        namespaces=("team-a", "team-b"),
        lease=False,
        lease_name="other",
        lease_namespace="system",
        identity="operator-0",
        plugin_image="registry/specdecode-operator:0.1.0",
        listen_host="127.0.0.1",
        listen_port=9000,
        log_format="json",
        log_level="DEBUG",
    )


REFUSED = {
    "a misspelt name": ({"SPECDECODE_PROMETHEUS_URI": "http://x"}, "no setting.*PROMETHEUS_URL"),
    "an address without scheme": ({"SPECDECODE_PROMETHEUS_URL": "prometheus:9090"}, "http://"),
    "a duration without unit": ({"SPECDECODE_CYCLE": "60"}, "SPECDECODE_CYCLE='60'.*90s"),
    "a duration of nothing": ({"SPECDECODE_CYCLE": "0s"}, "longer than nothing"),
    "a cycle below four scrapes": (
        {"SPECDECODE_CYCLE": "1m", "SPECDECODE_SCRAPE_INTERVAL": "30s"},
        "shorter than 4 scrapes of 30s",
    ),
    "no worker": ({"SPECDECODE_CYCLE_WORKERS": "0"}, "from 1 to 64"),
    "a pattern of namespaces": ({"SPECDECODE_NAMESPACES": "team-*"}, "patterns are not"),
    "a label with a dash": ({"SPECDECODE_POD_LABEL": "pod-name"}, "no Prometheus label name"),
    "neither on nor off": ({"SPECDECODE_LEASE": "maybe"}, "on or off"),
    "a port out of range": ({"SPECDECODE_LISTEN": "70000"}, "port"),
    "an unknown format": ({"SPECDECODE_LOG_FORMAT": "xml"}, "text, json"),
}


@pytest.mark.parametrize("situation", REFUSED)
def test_what_is_wrong_is_refused_with_a_hint(situation: str) -> None:
    environ, hint = REFUSED[situation]
    with pytest.raises(errors.ConfigurationError, match=hint):
        OperatorConfig.from_environment(environ)


def test_an_empty_variable_is_as_one_not_set() -> None:
    assert OperatorConfig.from_environment({"SPECDECODE_NAMESPACES": " "}).namespaces == ()


def test_what_kubernetes_adds_for_services_is_no_setting() -> None:
    environ = {
        "SPECDECODE_OPERATOR_SERVICE_HOST": "10.0.0.1",
        "SPECDECODE_OPERATOR_SERVICE_PORT": "8080",
        "SPECDECODE_OPERATOR_SERVICE_PORT_METRICS": "8080",
        "SPECDECODE_OPERATOR_PORT": "tcp://10.0.0.1:8080",
        "SPECDECODE_OPERATOR_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "SPECDECODE_OPERATOR_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    assert OperatorConfig.from_environment(environ) == OperatorConfig()


def test_no_setting_looks_like_what_kubernetes_adds() -> None:
    assert set(config._READERS) == set(ALL)
    assert not [name for name in ALL if config._SERVICE_LINK.search(name)]
