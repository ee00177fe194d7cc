"""Everything that one decision may look at, gathered first; absent is None.

`now` is read once, here it travels; nothing below reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from specdecode_operator.api.v1alpha1 import RevisionInputs, Spec, Status

from .evidence import Evidence
from .table import TableFile


@dataclass(frozen=True, order=True)
class ObjectKey:
    """Which object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class InvalidSpec:
    """A spec that the models refuse; sentences for the user."""

    problems: tuple[str, ...]


@dataclass(frozen=True)
class ObservedObject:
    """The custom resource as just read."""

    key: ObjectKey
    uid: str
    generation: int
    resource_version: str
    deleting: bool
    annotations: Mapping[str, str]
    spec: Spec | InvalidSpec
    status: Status


@dataclass(frozen=True)
class ObservedRevision:
    """One revision's Deployment: the record of what it was made from."""

    revision: str
    inputs: RevisionInputs
    template: Mapping[str, object]
    replicas: int
    created_at: datetime


@dataclass(frozen=True)
class ContainerWaiting:
    """Why the engine container waits."""

    reason: str
    message: str


@dataclass(frozen=True)
class ObservedTermination:
    """The latest end of a pod's container, with its identity for answering once."""

    container: str
    restart_count: int
    evidence: Evidence


@dataclass(frozen=True)
class ObservedPod:
    """One engine pod."""

    name: str
    uid: str
    revision: str
    node: str
    created_at: datetime
    ready: bool
    ever_ready: bool
    deleting: bool
    arm: str
    table_generation: str
    table_bump: str
    metrics_address: str | None
    container_running: bool
    container_started_at: datetime | None
    waiting: ContainerWaiting | None
    unschedulable: str | None
    termination: ObservedTermination | None


@dataclass(frozen=True)
class ObservedTables:
    """The ConfigMap of tables as just read; a file is None where it is missing or unreadable."""

    stable: TableFile | None
    canary: TableFile | None
    generation: int
    written_at: datetime | None


@dataclass(frozen=True)
class Acknowledgement:
    """What one engine reports of its table, read from the pod itself."""

    generation: int
    fingerprint: int
    stale: bool
    arm: int
    enabled: bool
    live: bool
    engine_version: str
    method: str
    cudagraph_mode: str


@dataclass(frozen=True)
class Series:
    """Raw samples of one time series, oldest first, as (unix seconds, value)."""

    name: str
    labels: Mapping[str, str]
    samples: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MetricsSamples:
    """What Prometheus holds of the object's pods between start and end (unix seconds)."""

    start: float
    end: float
    series: tuple[Series, ...]


@dataclass(frozen=True)
class MetricsAbsent:
    """Prometheus gave nothing; `reason` is a condition reason. It was not asked: reason empty."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observation:
    """The input of one decision.

    `unrenderable` says why the spec cannot become a pod, None where it can.
    """

    now: datetime
    target: ObservedObject
    unrenderable: str | None
    revisions: tuple[ObservedRevision, ...]
    pods: tuple[ObservedPod, ...]
    tables: ObservedTables | None
    acknowledgements: Mapping[str, Acknowledgement]
    metrics: MetricsSamples | MetricsAbsent
