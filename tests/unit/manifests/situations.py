"""Whole sets of inputs that users have, each with the objects that it leads to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from specdecode_operator.api import v1alpha1
from specdecode_operator.domain.table import KTable, TableFile
from specdecode_operator.manifests import disruption, service, tables
from tests.unit.manifests import builders

SITUATIONS: Final[dict[str, v1alpha1.RevisionInputs]] = {
    "a-draft-model-with-a-live-table": builders.inputs_of(
        model={"revision": "main", "servedName": "chat", "maxModelLen": 32768},
        speculation={**builders.DRAFT_MODEL, "envelope": [0, 1, 3, 7]},
    ),
    "everything-set-on-two-gpus": builders.inputs_of(
        model={
            "cache": {"claimName": "weights"},
            "tokenSecretRef": {"name": "hub", "key": "token"},
        },
        engine={
            "liveTable": "Off",
            "tensorParallelSize": 2,
            "maxNumSeqs": 128,
            "extraArgs": ["--enable-prefix-caching"],
            "env": [
                {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"},
                {
                    "name": "HTTPS_PROXY",
                    "valueFrom": {"configMapKeyRef": {"name": "proxy", "key": "url"}},
                },
            ],
            "apiKeySecretRef": {"name": "api", "key": "key"},
            "startupTimeout": "1h",
            "drainTimeout": "90s",
            "resources": {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
            "podTemplate": {
                "metadata": {"labels": {"team": "search"}},
                "spec": {
                    "nodeSelector": {"pool": "gpu"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "runtimeClassName": "nvidia",
                    "imagePullSecrets": [{"name": "registry"}],
                },
            },
        },
        speculation={
            **builders.EAGLE3,
            "adaptiveVerification": "Enabled",
            "cudagraphMode": "FULL_DECODE_ONLY",
        },
    ),
    "a-local-pair-on-a-cpu": builders.inputs_of(
        model={"name": "/srv/models/target", "servedName": "tiny", "maxModelLen": 512},
        engine={
            "maxNumSeqs": 64,
            "extraArgs": ["--enforce-eager", "--dtype=float32"],
            "resources": {"limits": {"nvidia.com/gpu": 0}},
        },
        speculation={
            **builders.DRAFT_MODEL,
            "draftModel": "/srv/models/draft",
            "envelope": [0, 1, 2, 3, 5, 7],
            "cudagraphMode": "NONE",
        },
    ),
    "speculation-off": builders.inputs_of(),
    "the-plugin-injected": builders.inputs_of(
        engine={"image": "vllm/vllm-openai:v0.33.0"}, speculation=builders.EAGLE3
    ),
    "without-the-plugin": builders.inputs_of(
        engine={"image": "vllm/vllm-openai:v0.33.0", "plugin": "None", "maxNumSeqs": 64},
        speculation={
            **builders.EAGLE3,
            "kTable": [{"minBatch": 1, "k": 5}, {"minBatch": 17, "k": 1}],
        },
    ),
}


def objects_of(inputs: v1alpha1.RevisionInputs) -> list[dict[str, Any]]:
    """Build every object of `chat` with this one revision."""
    stable = TableFile(
        KTable.from_rows([[1, 16, 7], [17, 64, 3]]), 12, enabled=True, reason="asked"
    )
    return [
        service.build_service(builders.KEY, builders.UID),
        disruption.build_disruption_budget(builders.KEY, builders.UID),
        tables.build_tables(
            builders.KEY,
            builders.UID,
            stable=stable,
            canary=None,
            written_at=datetime(2026, 11, 5, 12, 0, tzinfo=UTC),
        ),
        builders.deployment_of(inputs),
    ]
