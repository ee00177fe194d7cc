"""From a pod as the API server gives it to the few facts that decisions look at."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from specdecode_operator.api import metadata
from specdecode_operator.domain.evidence import Evidence, Termination
from specdecode_operator.domain.observation import (
    ContainerWaiting,
    ObservedPod,
    ObservedTermination,
)

Json = Mapping[str, Any]


def observe_pod(raw: Json) -> ObservedPod:
    """Read one engine pod; what is absent is None or empty."""
    meta, status = raw["metadata"], raw.get("status") or {}
    annotations = meta.get("annotations") or {}
    container = _engine_status(status)
    state = container.get("state") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    started_at = parse_time((state.get("running") or {}).get("startedAt"))
    deleting = "deletionTimestamp" in meta
    return ObservedPod(
        name=meta["name"],
        uid=meta["uid"],
        revision=(meta.get("labels") or {}).get(metadata.LABEL_REVISION, ""),
        node=(raw.get("spec") or {}).get("nodeName") or "",
        created_at=parse_time(meta.get("creationTimestamp")) or datetime.min,
        ready=_is_true(conditions.get("Ready")),
        ever_ready=_was_ready(conditions.get("Ready"), started_at),
        deleting=deleting,
        arm=annotations.get(metadata.ANNOTATION_ARM, ""),
        table_generation=annotations.get(metadata.ANNOTATION_TABLE_GENERATION, ""),
        table_bump=annotations.get(metadata.ANNOTATION_TABLE_BUMP, ""),
        metrics_address=_metrics_address(status, annotations),
        container_running="running" in state,
        container_started_at=started_at,
        waiting=_waiting(state),
        unschedulable=_unschedulable(conditions.get("PodScheduled")),
        termination=_termination(container, status, conditions.get("Ready"), deleting),
    )


def parse_time(text: str | None) -> datetime | None:
    """Read an RFC 3339 time of the API server, None where there is none."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def _engine_status(status: Json) -> Json:
    statuses: list[Json] = status.get("containerStatuses") or []
    return next((s for s in statuses if s.get("name") == metadata.ENGINE_CONTAINER), {})


def _is_true(condition: Json | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _was_ready(ready: Json | None, started_at: datetime | None) -> bool:
    """Tell whether the boot that started then was ever Ready.

    A pod that was never Ready keeps the transition time of its creation; one that lost its
    readiness has the time of the loss, which lies after the start of the boot that lost it.
    """
    if _is_true(ready):
        return True
    moved_at = parse_time((ready or {}).get("lastTransitionTime"))
    return started_at is not None and moved_at is not None and moved_at > started_at


def _metrics_address(status: Json, annotations: Json) -> str | None:
    address = status.get("podIP")
    port = annotations.get(metadata.ANNOTATION_SCRAPE_PORT) or str(metadata.ENGINE_PORT)
    return f"{address}:{port}" if address else None


def _waiting(state: Json) -> ContainerWaiting | None:
    waiting = state.get("waiting")
    if waiting is None:
        return None
    return ContainerWaiting(waiting.get("reason") or "", waiting.get("message") or "")


def _unschedulable(scheduled: Json | None) -> str | None:
    if scheduled is None or scheduled.get("reason") != "Unschedulable":
        return None
    return scheduled.get("message") or "no node fits"


def _termination(
    container: Json, status: Json, ready: Json | None, deleting: bool
) -> ObservedTermination | None:
    """Return the container's latest end, counted by the boot that ended.

    restartCount rises when the next boot starts: while one runs, the last end is of the boot
    before; while none runs, of the boot that the count names.
    """
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated")
    if ended is None:
        return None
    restarts = int(container.get("restartCount") or 0)
    boot = restarts - 1 if "running" in state else restarts
    started_at = parse_time(ended.get("startedAt"))
    return ObservedTermination(
        container=metadata.ENGINE_CONTAINER,
        restart_count=max(0, boot),
        evidence=Evidence(
            termination=Termination(
                exit_code=ended.get("exitCode"),
                signal=ended.get("signal") or None,
                reason=ended.get("reason") or "",
                message=ended.get("message") or "",
                started_at=started_at,
                finished_at=parse_time(ended.get("finishedAt")),
            ),
            pod_reason=status.get("reason") or "",
            deletion_requested=deleting,
            ever_ready=_was_ready(ready, started_at),
        ),
    )
