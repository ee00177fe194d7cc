"""The plugin for an engine whose image does not carry it: an init container brings it along.

The container copies two things into a volume that the engine shares: the plugin as Python would
install it, and the entrypoint, which puts it onto PYTHONPATH and empties the metrics folder. So
any image with `vllm` on its PATH will do. What it brings comes from the operator's own image, so
that operator and plugin are always of one version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.api import metadata
from specdecode_operator.errors import InvalidSpecError

FOLDER: Final = "/opt/specdecode"
VOLUME: Final = "specdecode-plugin"
CONTAINER: Final = "specdecode-plugin"
# Looked up on the image's PATH; it takes the folder to fill.
PROGRAM: Final = "specdecode-inject"


def add_plugin(template: Mapping[str, Any], image: str | None) -> dict[str, Any]:
    """Return the pod template with the init container, its volume and the engine's command.

    Raises InvalidSpecError where the operator has no image to inject from.
    """
    if image is None:
        raise InvalidSpecError(
            "spec.engine.plugin is Inject, and this operator has nothing to inject: set "
            "SPECDECODE_PLUGIN_IMAGE to the operator's own image, or build the engine's image from "
            "vllm-image/ and set spec.engine.plugin to Image"
        )
    spec = template["spec"]
    return {
        **template,
        "spec": {
            **spec,
            "initContainers": [_build_container(image)],
            "containers": [_start_through_plugin(container) for container in spec["containers"]],
            "volumes": [*spec["volumes"], {"name": VOLUME, "emptyDir": {}}],
        },
    }


def _build_container(image: str) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": image,
        "command": [PROGRAM, FOLDER],
        "resources": {
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"memory": "64Mi"},
        },
        "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _start_through_plugin(container: Mapping[str, Any]) -> dict[str, Any]:
    if container["name"] != metadata.ENGINE_CONTAINER:
        return dict(container)
    mount = {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}
    return {
        **container,
        "command": [f"{FOLDER}/entrypoint"],
        "volumeMounts": [*container["volumeMounts"], mount],
    }
