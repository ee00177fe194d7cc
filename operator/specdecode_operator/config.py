"""The operator's own configuration: environment variables to one frozen object.

A misspelt variable is refused: a setting that silently does nothing is worse than a pod that
says at start what it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from specdecode_operator import durations, errors

PREFIX = "SPECDECODE_"
MIN_SCRAPES_PER_CYCLE = 4

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# Kubernetes adds such variables for every Service of the namespace whose name begins with
# `specdecode`; they are nobody's settings. No setting may end in one of these.
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$"
)


@dataclass(frozen=True)
class OperatorConfig:
    """Everything that an operator may be told at start.

    `prometheus_url` None means that there is no Prometheus: rollouts and the answer to faults
    work, tuning does not. `namespaces` empty means all. `identity` empty: made up at start.
    """

    prometheus_url: str | None = None
    prometheus_headers_file: str | None = None
    prometheus_ca_file: str | None = None
    prometheus_timeout: timedelta = timedelta(seconds=10)
    prometheus_matchers: str = ""
    namespace_label: str = "namespace"
    pod_label: str = "pod"
    scrape_interval: timedelta = timedelta(seconds=15)
    cycle: timedelta = timedelta(seconds=60)
    cycle_workers: int = 4
    namespaces: tuple[str, ...] = ()
    lease: bool = True
    lease_name: str = "specdecode-operator"
    lease_namespace: str = ""
    identity: str = ""
    plugin_image: str | None = None
    listen_host: str = "0.0.0.0"
    listen_port: int = 8080
    log_format: str = "text"
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if self.cycle < MIN_SCRAPES_PER_CYCLE * self.scrape_interval:
            raise errors.ConfigurationError(
                f"SPECDECODE_CYCLE is {_seconds(self.cycle)}, shorter than "
                f"{MIN_SCRAPES_PER_CYCLE} scrapes of {_seconds(self.scrape_interval)} "
                "(SPECDECODE_SCRAPE_INTERVAL): raise it"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> OperatorConfig:
        """Read the SPECDECODE_ variables; raises ConfigurationError, which names the variable."""
        values: dict[str, Any] = {}
        for name, text in sorted(environ.items()):
            if not name.startswith(PREFIX) or _SERVICE_LINK.search(name):
                continue
            reader = _READERS.get(name)
            if reader is None:
                raise errors.ConfigurationError(
                    f"{name} is no setting; known are {', '.join(sorted(_READERS))}"
                )
            if text.strip():
                values.update(_read(reader, name, text.strip()))
        return cls(**values)


def _read(reader: _Reader, name: str, text: str) -> Mapping[str, Any]:
    try:
        return reader(text)
    except ValueError as error:
        raise errors.ConfigurationError(f"{name}={text!r}: {error}") from None


_Reader = Callable[[str], Mapping[str, Any]]


def _to(field: str, convert: Callable[[str], Any]) -> _Reader:
    if field not in {known.name for known in fields(OperatorConfig)}:
        raise AttributeError(field)
    return lambda text: {field: convert(text)}


def _duration(text: str) -> timedelta:
    duration = durations.parse_duration(text)
    if not duration:
        raise ValueError("it must be longer than nothing")
    return duration


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write it like http://prometheus.monitoring:9090")
    return text


def _label(text: str) -> str:
    if not _LABEL_NAME.fullmatch(text):
        raise ValueError("this is no Prometheus label name")
    return text


def _switch(text: str) -> bool:
    known = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError("write on or off")
    return known[text.lower()]


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ValueError("write a whole number from 1 to 64")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            raise ValueError(f"{name!r} is no namespace; patterns are not supported")
    return names


def _choice(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(f"write one of {', '.join(choices)}")
        return text

    return convert


def _listen(text: str) -> Mapping[str, Any]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError("write a port or host:port, such as 8080 or 127.0.0.1:8080")
    return {"listen_port": int(port)} | ({"listen_host": host.strip("[]")} if host else {})


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g}s"


_READERS: Mapping[str, _Reader] = {
    "SPECDECODE_PROMETHEUS_URL": _to("prometheus_url", _url),
    "SPECDECODE_PROMETHEUS_HEADERS_FILE": _to("prometheus_headers_file", str),
    "SPECDECODE_PROMETHEUS_CA_FILE": _to("prometheus_ca_file", str),
    "SPECDECODE_PROMETHEUS_TIMEOUT": _to("prometheus_timeout", _duration),
    "SPECDECODE_PROMETHEUS_MATCHERS": _to("prometheus_matchers", str),
    "SPECDECODE_NAMESPACE_LABEL": _to("namespace_label", _label),
    "SPECDECODE_POD_LABEL": _to("pod_label", _label),
    "SPECDECODE_SCRAPE_INTERVAL": _to("scrape_interval", _duration),
    "SPECDECODE_CYCLE": _to("cycle", _duration),
    "SPECDECODE_CYCLE_WORKERS": _to("cycle_workers", _count),
    "SPECDECODE_NAMESPACES": _to("namespaces", _names),
    "SPECDECODE_LEASE": _to("lease", _switch),
    "SPECDECODE_LEASE_NAME": _to("lease_name", str),
    "SPECDECODE_LEASE_NAMESPACE": _to("lease_namespace", str),
    "SPECDECODE_IDENTITY": _to("identity", str),
    "SPECDECODE_PLUGIN_IMAGE": _to("plugin_image", str),
    "SPECDECODE_LISTEN": _listen,
    "SPECDECODE_LOG_FORMAT": _to("log_format", _choice("text", "json")),
    "SPECDECODE_LOG_LEVEL": _to("log_level", _choice("DEBUG", "INFO", "WARNING", "ERROR")),
}
