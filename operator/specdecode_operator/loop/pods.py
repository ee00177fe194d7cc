"""What of a pod matters to the loop, kept small, and whether a change of it is urgent.

Thousands of pods are remembered: a record holds a few short values instead of the pod's 13 KB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specdecode_operator.api import metadata

_ANNOTATIONS = (
    metadata.ANNOTATION_ARM,
    metadata.ANNOTATION_TABLE_GENERATION,
    metadata.ANNOTATION_TABLE_BUMP,
)


class Urgency(Enum):
    """How soon a change needs a pass."""

    NONE = "none"
    SOON = "soon"
    NOW = "now"


@dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod as last seen; `ends` names every end of a container that its status still shows."""

    ends: tuple[tuple[str, str], ...]
    ready: bool
    deleting: bool
    node: str
    address: str
    reason: str
    states: tuple[str, ...]
    annotations: tuple[str | None, ...]


def to_record(pod: Mapping[str, Any]) -> PodRecord:
    """Keep of a pod what the loop compares."""
    meta, status = pod["metadata"], pod.get("status") or {}
    first = status.get("initContainerStatuses") or []
    main = status.get("containerStatuses") or []
    ends = [_end(c, init=True) for c in first] + [_end(c, init=False) for c in main]
    annotations = meta.get("annotations") or {}
    return PodRecord(
        ends=tuple(end for end in ends if end is not None),
        ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        ),
        deleting="deletionTimestamp" in meta,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        address=status.get("podIP") or "",
        reason=status.get("reason") or "",
        states=tuple(_state(container) for container in (*first, *main)),
        annotations=tuple(annotations.get(name) for name in _ANNOTATIONS),
    )


def compare(before: PodRecord | None, after: PodRecord) -> Urgency:
    """Judge a change: an end of a container not seen before is urgent.

    A pod seen for the first time with ends may have crashed while no operator looked.
    """
    if before is None:
        return Urgency.NOW if after.ends else Urgency.SOON
    if set(after.ends) - set(before.ends):
        return Urgency.NOW
    return Urgency.NONE if after == before else Urgency.SOON


def owner_name(pod: Mapping[str, Any]) -> str | None:
    """Name the object that a pod belongs to, None if it is nobody's."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get(metadata.LABEL_OBJECT)


def _state(container: Mapping[str, Any]) -> str:
    """Say `running`, `terminated`, or why a container waits."""
    state: Mapping[str, Any] = container.get("state") or {}
    waiting = state.get("waiting") or {}
    return waiting.get("reason") or next(iter(state), "")


def _end(container: Mapping[str, Any], *, init: bool) -> tuple[str, str] | None:
    """Identify a container's latest end; it keeps its identity when the container restarts."""
    state = (container.get("state") or {}).get("terminated")
    ended = state or (container.get("lastState") or {}).get("terminated")
    restarts = container.get("restartCount") or 0
    if not (ended or restarts) or (init and ended and ended.get("exitCode") == 0):
        return None
    ended = ended or {}
    identity = ended.get("containerID") or f"{restarts} {ended.get('finishedAt') or ''}"
    return container.get("name") or "", identity
