"""Builders of observations for tests: say only what the situation needs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from specdecode_operator.api.v1alpha1 import RevisionInputs, Spec, Status
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.observation import (
    MetricsAbsent,
    ObjectKey,
    Observation,
    ObservedObject,
    ObservedPod,
    ObservedRevision,
)

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
NOT_ASKED = MetricsAbsent(reason="", message="")


def build_spec(**changes: Any) -> Spec:
    """Build a spec of one eagle3 engine; changes are top-level camelCase pieces."""
    spec: dict[str, Any] = {
        "model": {"name": "org/model"},
        "replicas": 1,
        "engine": {"image": "registry/specdecode-vllm:0.33.0", "maxNumSeqs": 64},
        "speculation": {
            "method": "eagle3",
            "draftModel": "org/draft",
            "numSpeculativeTokens": 7,
            "envelope": [0, 1, 3, 7],
        },
    }
    for name, value in changes.items():
        there = spec.get(name)
        spec[name] = {**there, **value} if isinstance(there, dict) and value else value
    return Spec.model_validate(spec)


def build_revision(
    inputs: RevisionInputs, replicas: int, *, name: str | None = None
) -> ObservedRevision:
    """Build a revision's Deployment."""
    return ObservedRevision(
        revision=name or levers.revision_hash(inputs),
        inputs=inputs,
        template={"stored": True},
        replicas=replicas,
        created_at=NOW,
    )


def build_pod(name: str, revision: str, **changes: Any) -> ObservedPod:
    """Build a Ready pod of a revision."""
    facts: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "revision": revision,
        "node": "node-1",
        "created_at": NOW,
        "ready": True,
        "ever_ready": True,
        "deleting": False,
        "arm": "stable",
        "table_generation": "",
        "table_bump": "",
        "metrics_address": "10.0.0.1:8000",
        "container_running": True,
        "container_started_at": NOW,
        "waiting": None,
        "unschedulable": None,
        "termination": None,
    }
    return ObservedPod(**{**facts, **changes})


def build_observation(spec: Spec, **changes: Any) -> Observation:
    """Build what one pass sees of an object with this spec: nothing else is there yet."""
    target = ObservedObject(
        key=ObjectKey("default", "chat"),
        uid="uid-chat",
        generation=1,
        resource_version="1",
        deleting=False,
        annotations={},
        spec=spec,
        status=changes.pop("status", Status()),
    )
    facts: dict[str, Any] = {
        "now": NOW,
        "target": target,
        "unrenderable": None,
        "revisions": (),
        "pods": (),
        "tables": None,
        "acknowledgements": {},
        "metrics": NOT_ASKED,
    }
    return Observation(**{**facts, **changes})
