"""The limit on how many engines node drains may take at once."""

from __future__ import annotations

from typing import Any

from specdecode_operator.domain.observation import ObjectKey

from . import owner


def build_disruption_budget(key: ObjectKey, uid: str) -> dict[str, Any]:
    """Build the PodDisruptionBudget NAME: one pod at a time, over all revisions.

    A pod that is not ready may always be evicted: it serves nobody, and an engine that crashes
    at each start would otherwise hold up every drain.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.build_metadata(key, uid, name=key.name),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": owner.build_selector(key.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
