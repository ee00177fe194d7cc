"""One Deployment per revision, and what it records: inputs and template, rendered once.

The stored template is what the pods run. It is read back and never rendered again, so that a
newer operator with other defaults restarts no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from specdecode_operator.api import metadata, v1alpha1
from specdecode_operator.domain import engine
from specdecode_operator.domain.observation import ObjectKey, ObservedRevision
from specdecode_operator.errors import InvalidSpecError

from . import owner, pod

# What the API server takes for all annotations of one object, less some room for others.
MAX_RECORD_BYTES: Final = 240 * 1024
# Image pull and scheduling come before the engine's own start.
PROGRESS_MARGIN_SECONDS: Final = 600


def render_template(
    name: str,
    inputs: v1alpha1.RevisionInputs,
    *,
    revision: str,
    rendered_by: str,
    plugin_image: str | None = None,
) -> dict[str, Any]:
    """Render a revision's pod template; done once, when its Deployment is first made.

    `rendered_by` is the operator's version, `plugin_image` what the plugin is injected from; both
    stay in the template with everything else. Raises InvalidSpecError, with what to change, where
    the inputs cannot become a pod, or are known to crash.
    """
    speculation = inputs.speculation
    crash = engine.find_crash(inputs.engine, speculation) if speculation else None
    problem = metadata.name_problem(name) or crash
    if problem is not None:
        raise InvalidSpecError(problem)
    template = pod.build_pod_template(
        name, inputs, revision=revision, rendered_by=rendered_by, plugin_image=plugin_image
    )
    size = len(_to_text(template).encode()) + len(_to_text(inputs.to_json()).encode())
    if size > MAX_RECORD_BYTES:
        raise InvalidSpecError(
            f"spec.model, spec.engine and spec.speculation make a record of {size} bytes, at most "
            f"{MAX_RECORD_BYTES} fit: shorten extraArgs, env or podTemplate"
        )
    return template


def build_deployment(
    key: ObjectKey,
    uid: str,
    *,
    revision: str,
    inputs: v1alpha1.RevisionInputs,
    template: Mapping[str, Any],
    replicas: int,
) -> dict[str, Any]:
    """Build the Deployment NAME-REVISION around a template that was rendered before."""
    rendered_by = template["metadata"]["annotations"].get(metadata.ANNOTATION_RENDERED_BY, "")
    annotations = {
        metadata.ANNOTATION_INPUTS: _to_text(inputs.to_json()),
        metadata.ANNOTATION_TEMPLATE: _to_text(template),
        metadata.ANNOTATION_RENDERED_BY: rendered_by,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.build_metadata(
            key,
            uid,
            name=metadata.revision_name(key.name, revision),
            revision=revision,
            annotations=annotations,
        ),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": pod.startup_seconds(inputs) + PROGRESS_MARGIN_SECONDS,
            # Matters only when somebody edits the template by hand: GPUs are scarce.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "selector": {"matchLabels": owner.build_selector(key.name, revision=revision)},
            "template": template,
        },
    }


def read_deployment(raw: Mapping[str, Any]) -> ObservedRevision | None:
    """Read a revision back from the Deployment as the API server holds it.

    None where it is not one of ours, or where its record was damaged.
    """
    meta, spec = raw.get("metadata") or {}, raw.get("spec") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    try:
        return ObservedRevision(
            revision=labels[metadata.LABEL_REVISION],
            inputs=v1alpha1.RevisionInputs.model_validate_json(
                annotations[metadata.ANNOTATION_INPUTS]
            ),
            template=_to_template(annotations[metadata.ANNOTATION_TEMPLATE]),
            replicas=int(spec.get("replicas", 1)),
            created_at=datetime.fromisoformat(meta["creationTimestamp"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _to_template(text: str) -> dict[str, Any]:
    template = json.loads(text)
    if not isinstance(template, dict) or not {"metadata", "spec"} <= template.keys():
        raise ValueError("the stored template is no pod template")
    return template


def _to_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
