"""Inputs of revisions, small or whole, so that each test names only what it is about."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api import v1alpha1
from specdecode_operator.domain import lever
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.manifests import deployment

KEY = ObjectKey(namespace="serving", name="chat")
UID = "11111111-2222-3333-4444-555555555555"
IMAGE = "registry.example/specdecode-vllm:0.33.0"

DRAFT_MODEL = {"method": "draft_model", "draftModel": "org/draft", "numSpeculativeTokens": 7}
EAGLE3 = {"method": "eagle3", "draftModel": "org/eagle3-head", "numSpeculativeTokens": 5}


def inputs_of(
    *,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    speculation: dict[str, Any] | None = None,
) -> v1alpha1.RevisionInputs:
    """Make a revision's inputs from what a user would write; speculation is off where absent."""
    return v1alpha1.RevisionInputs.model_validate(
        {
            "model": {"name": "org/model", **(model or {})},
            "engine": {"image": IMAGE, **(engine or {})},
            "speculation": speculation,
        }
    )


def template_of(inputs: v1alpha1.RevisionInputs) -> dict[str, Any]:
    """Render the pod template of an object called `chat`."""
    return deployment.render_template(
        KEY.name,
        inputs,
        revision=lever.revision_hash(inputs),
        rendered_by="0.1.0",
        plugin_image="registry.example/specdecode-operator:0.1.0",
    )


def deployment_of(inputs: v1alpha1.RevisionInputs, *, replicas: int = 2) -> dict[str, Any]:
    """Build the Deployment of a revision of `chat`."""
    return deployment.build_deployment(
        KEY,
        UID,
        revision=lever.revision_hash(inputs),
        inputs=inputs,
        template=template_of(inputs),
        replicas=replicas,
    )


def engine_of(template: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's container of a pod template."""
    return next(c for c in template["spec"]["containers"] if c["name"] == "engine")


def env_of(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the engine's variables by name."""
    return {variable["name"]: variable for variable in engine_of(template)["env"]}


def volume_of(template: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a volume of a pod template by its name."""
    return next((v for v in template["spec"]["volumes"] if v["name"] == name), None)


def mount_of(template: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """Return the engine's mount at a folder."""
    mounts = engine_of(template)["volumeMounts"]
    return next((m for m in mounts if m["mountPath"] == folder), None)
