"""What one pass decided: actions in the order in which they must be done, status, Events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from specdecode_operator.api.v1alpha1 import RevisionInputs, Status
from specdecode_operator.domain.table import TableFile


class EventType(StrEnum):
    """Kubernetes' two kinds of Events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Event:
    """A decision told to the user, with its numbers."""

    reason: str
    message: str
    type: EventType = EventType.NORMAL


@dataclass(frozen=True)
class AnnotatePod:
    """Set annotations of a pod; this makes its kubelet refresh the mounted files at once."""

    pod: str
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class WriteTables:
    """Write the ConfigMap of tables."""

    stable: TableFile
    canary: TableFile | None
    written_at: datetime


@dataclass(frozen=True)
class SetRevision:
    """Have a revision's Deployment with so many pods.

    Its template is rendered only where `template` is None: a stored one is never re-rendered.
    """

    revision: str
    inputs: RevisionInputs
    replicas: int
    template: Mapping[str, Any] | None


@dataclass(frozen=True)
class DeleteRevision:
    """Delete a Deployment that is scaled to zero and past the history limit."""

    revision: str


@dataclass(frozen=True)
class EnsureService:
    """Have the Service and the PodDisruptionBudget over the pods of all revisions."""


Action = AnnotatePod | WriteTables | SetRevision | DeleteRevision | EnsureService


@dataclass(frozen=True)
class Decision:
    """The output of one pass.

    `urgent` actions (the kill switch) go first and before the status, because a second attempt
    does no harm; then the status is written, guarded by resourceVersion; the other actions and
    the Events follow, so that a pass killed in between finds in status what it was about to do.
    `faults` are the classes of those that this pass answered.
    """

    status: Status
    urgent: tuple[Action, ...] = ()
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()
    requeue_after: timedelta = field(default=timedelta(seconds=60))
