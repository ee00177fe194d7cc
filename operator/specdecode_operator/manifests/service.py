"""The Service in front of an object's engines."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api import metadata
from specdecode_operator.domain.observation import ObjectKey

from . import owner


def build_service(key: ObjectKey, uid: str) -> dict[str, Any]:
    """Build the Service NAME: ready pods of all revisions, so that a rollout shifts traffic."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.build_metadata(key, uid, name=key.name),
        "spec": {
            "type": "ClusterIP",
            "selector": owner.build_selector(key.name),
            "ports": [
                {
                    "name": metadata.ENGINE_PORT_NAME,
                    "port": metadata.ENGINE_PORT,
                    "protocol": "TCP",
                    "targetPort": metadata.ENGINE_PORT_NAME,
                }
            ],
        },
    }
