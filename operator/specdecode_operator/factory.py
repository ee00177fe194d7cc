"""The only place that constructs things: from the configuration to a running application."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from specdecode_operator import errors
from specdecode_operator.clients import transport
from specdecode_operator.clients.engines import EngineClient
from specdecode_operator.clients.kube import KubeClient
from specdecode_operator.clients.prometheus import PrometheusClient
from specdecode_operator.config import OperatorConfig
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.loop import lease as leases
from specdecode_operator.loop.pods import Urgency
from specdecode_operator.loop.progress import Progress
from specdecode_operator.loop.workers import URGENT_WORKERS, Workers
from specdecode_operator.reconciler.reconciler import Reconciler
from specdecode_operator.telemetry import Server, Telemetry

logger = logging.getLogger(__name__)

# Shorter than the renewal leaves time for a second try before the lease is lost.
_LEASE_READ_SECONDS = 2.0
_LEASE_STUCK_SECONDS = 30.0
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def build(config: OperatorConfig, environ: Mapping[str, str] = os.environ) -> Application:
    """Construct everything and start nothing; raises ConfigurationError."""
    configuration = transport.load_configuration(environ)
    leadership = _build_leadership(config, environ)
    connection = transport.Transport(
        configuration, connections=URGENT_WORKERS + config.cycle_workers
    )
    kube = KubeClient(connection, namespaces=config.namespaces, may_write=leadership.is_leader)
    telemetry = Telemetry()
    progress = Progress(time.monotonic)
    reconciler = Reconciler(
        kube=kube,
        prometheus=_build_prometheus(config),
        engines=EngineClient(),
        config=config,
        clock=lambda: datetime.now(UTC),
        telemetry=telemetry,
    )
    workers = Workers(
        reconciler,
        cycle_workers=config.cycle_workers,
        leadership=leadership,
        progress=progress,
        telemetry=telemetry,
    )
    telemetry.watch_leader(leadership.is_leader)
    telemetry.watch_progress(progress.oldest_beat_seconds)
    server = _build_server(config, telemetry, progress)
    return Application(
        connection=connection,
        kube=kube,
        leadership=leadership,
        workers=workers,
        progress=progress,
        server=server,
    )


@dataclass(frozen=True)
class Application:
    """All parts of a running operator."""

    connection: transport.Transport
    kube: KubeClient
    leadership: leases.Alone | leases.Lease
    workers: Workers
    progress: Progress
    server: Server

    def start(self) -> None:
        """Start serving probes, contending for the lease, and working."""
        self.server.start()
        if isinstance(self.leadership, leases.Lease):
            self.progress.expect("lease", every_seconds=_LEASE_STUCK_SECONDS)
            self.leadership.start(lambda: self.progress.beat("lease"))
        self.workers.start()
        logger.info("started; metrics and probes on port %d", self.server.port)

    def check_installed(self) -> None:
        """Raise ConfigurationError while the resource definition is not installed."""
        try:
            next(self.kube.list_objects(), None)
        except errors.NotFoundError:
            raise errors.ConfigurationError(
                "the resource SpecDecodeDeployment is not installed: kubectl apply -f crds/"
            ) from None

    def ask(self, key: ObjectKey, urgency: Urgency) -> None:
        """Wish for a pass of an object; returns at once."""
        self.workers.ask(key, urgency)

    def stop(self) -> None:
        """Let the passes that run end, then give the lease up."""
        self.workers.stop()
        if isinstance(self.leadership, leases.Lease):
            self.leadership.stop()
        self.server.close()
        logger.info("stopped")


def _build_leadership(
    config: OperatorConfig, environ: Mapping[str, str]
) -> leases.Alone | leases.Lease:
    if not config.lease:
        return leases.Alone()
    # A connection of its own: a renewal must not queue behind the passes.
    connection = transport.Transport(
        transport.load_configuration(environ), connections=1, read_seconds=_LEASE_READ_SECONDS
    )
    return leases.Lease(
        KubeClient(connection),
        namespace=config.lease_namespace or _own_namespace(),
        name=config.lease_name,
        identity=config.identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        monotonic=time.monotonic,
        wall=lambda: datetime.now(UTC),
    )


def _build_server(config: OperatorConfig, telemetry: Telemetry, progress: Progress) -> Server:
    try:
        return Server(
            telemetry, host=config.listen_host, port=config.listen_port, problems=progress.stalled
        )
    except OSError as error:
        raise errors.ConfigurationError(
            f"SPECDECODE_LISTEN: {config.listen_host}:{config.listen_port} cannot be used: "
            f"{error.strerror or error}"
        ) from None


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise errors.ConfigurationError(
            "SPECDECODE_LEASE_NAMESPACE is needed outside a cluster, or SPECDECODE_LEASE=off "
            "(--no-lease) where no second operator runs"
        ) from None


def _build_prometheus(config: OperatorConfig) -> PrometheusClient | None:
    if config.prometheus_url is None:
        return None
    return PrometheusClient(
        config.prometheus_url,
        headers=_read_headers(config.prometheus_headers_file),
        ca=config.prometheus_ca_file,
        timeout=config.prometheus_timeout.total_seconds(),
    )


def _read_headers(path: str | None) -> Mapping[str, str]:
    """Read HTTP headers, one `Name: value` a line; the messages never repeat a value."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise errors.ConfigurationError(
            f"SPECDECODE_PROMETHEUS_HEADERS_FILE cannot be read: {error.strerror}: {path}"
        ) from None
    headers = {}
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if line.strip() and not (colon and name.strip()):
            raise errors.ConfigurationError(
                f"SPECDECODE_PROMETHEUS_HEADERS_FILE line {number}: write `Name: value`"
            )
        if line.strip():
            headers[name.strip()] = value.strip()
    return headers
