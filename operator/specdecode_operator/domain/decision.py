"""What one pass decided: actions in the order in which they must be done, status, Events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

from specdecode_operator.api.v1alpha1 import Status


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
class ApplyObject:
    """Server-side apply one owned object."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class DeleteObject:
    """Delete one owned object that is not wanted any more."""

    api_version: str
    kind: str
    name: str


Action = AnnotatePod | ApplyObject | DeleteObject


@dataclass(frozen=True)
class Decision:
    """The output of one pass.

    `urgent` actions (the kill switch) go first and before the status; then the status is
    written, guarded by resourceVersion; the other actions and the Events follow.
    """

    status: Status
    urgent: tuple[Action, ...] = ()
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: timedelta = field(default=timedelta(seconds=60))
