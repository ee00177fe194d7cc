"""The engine's pod template: defaults that let vLLM start, drain and crash in the open.

Every default can be overridden by `spec.engine.podTemplate` (overlay.py), but for what the
operator itself stands on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from specdecode_operator import durations
from specdecode_operator.api import metadata, v1alpha1
from specdecode_operator.domain import engine as engines
from specdecode_operator.domain import refusal
from specdecode_operator.errors import InvalidSpecError

from . import arguments, inject, overlay, owner

# HF_HOME, the user's volume where one is given; other caches are the pod's own.
MODELS_FOLDER: Final = "/var/lib/specdecode/models"
CACHE_FOLDER: Final = "/var/cache/specdecode"

# Time for the Service's endpoints to forget the pod before vLLM stops taking requests.
PRE_STOP_SECONDS: Final = 5
# After the drain vLLM tears down its workers; a kill in the middle may leave GPU memory taken.
TEARDOWN_SECONDS: Final = 25
PROBE_PERIOD_SECONDS: Final = 5
# Group that may write to a claimed volume; the user is the image's own.
VOLUME_GROUP: Final = 1000
# User and group of an engine whose image is not ours: most of those would run as root.
ENGINE_USER: Final = 10_001
ENGINE_GROUP: Final = 0

GPU_RESOURCE: Final = "nvidia.com/gpu"
_ACCELERATOR_WORDS: Final = (
    "nvidia.com/",
    "amd.com/",
    "gpu",
    "gaudi",
    "tpu",
    "npu",
    "xpu",
    "neuron",
    "ascend",
)


def build_pod_template(
    name: str,
    inputs: v1alpha1.RevisionInputs,
    *,
    revision: str,
    rendered_by: str,
    plugin_image: str | None = None,
) -> dict[str, Any]:
    """Build the pod template of one revision, the user's overlay included.

    `rendered_by` (the operator's version) is kept in it, since a template is rendered once.
    Raises InvalidSpecError where the inputs cannot become a pod.
    """
    plugin = engines.choose_plugin(inputs.engine, can_inject=plugin_image is not None)
    template: dict[str, Any] = {
        "metadata": {
            "labels": owner.build_labels(name, revision=revision),
            "annotations": {
                metadata.ANNOTATION_ARM: metadata.ARM_STABLE,
                metadata.ANNOTATION_RENDERED_BY: rendered_by,
                metadata.ANNOTATION_SCRAPE: "true",
                metadata.ANNOTATION_SCRAPE_PORT: str(metadata.ENGINE_PORT),
                metadata.ANNOTATION_SCRAPE_PATH: "/metrics",
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            # A Service called `vllm` would set VLLM_PORT, which the engine refuses to start with.
            "enableServiceLinks": False,
            "securityContext": _pod_security(inputs.model.cache),
            "terminationGracePeriodSeconds": PRE_STOP_SECONDS
            + arguments.drain_seconds(inputs)
            + TEARDOWN_SECONDS,
            "containers": [_engine_container(inputs, plugin)],
            "volumes": _volumes(name, inputs, plugin),
        },
    }
    if plugin is v1alpha1.Plugin.INJECT:
        template = inject.add_plugin(template, plugin_image)
    return overlay.apply_overlay(template, inputs.engine.pod_template)


def startup_seconds(inputs: v1alpha1.RevisionInputs) -> int:
    """Return how long an engine may take to start, in whole seconds, at least 1."""
    seconds = durations.parse_duration(inputs.engine.startup_timeout).total_seconds()
    return max(1, math.ceil(seconds))


def _engine_container(inputs: v1alpha1.RevisionInputs, plugin: v1alpha1.Plugin) -> dict[str, Any]:
    user = _user(inputs.engine, plugin)
    if not inputs.engine.image:
        raise InvalidSpecError(
            "spec.engine.image is not set: build one from vllm-image/ and name it there"
        )
    return {
        "name": metadata.ENGINE_CONTAINER,
        "image": inputs.engine.image,
        "args": arguments.build_arguments(inputs),
        "env": _environment(inputs, plugin, has_user=bool(user)),
        "ports": [
            {
                "name": metadata.ENGINE_PORT_NAME,
                "containerPort": metadata.ENGINE_PORT,
                "protocol": "TCP",
            }
        ],
        "resources": _resources(inputs.engine),
        "volumeMounts": _mounts(inputs, plugin),
        **_probes(inputs),
        # The kubelet's own sleep: an exec needs a program that the image may not have.
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        # File and nothing else: the plugin writes the cause there, a log's tail is only echoes.
        "terminationMessagePath": metadata.TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **user,
        },
    }


def _user(engine: v1alpha1.Engine, plugin: v1alpha1.Plugin) -> dict[str, int]:
    """Name the user where the image is not made from vllm-image/: an official one runs as root."""
    if plugin is v1alpha1.Plugin.IMAGE or engines.is_our_image(engine):
        return {}
    return {"runAsUser": ENGINE_USER, "runAsGroup": ENGINE_GROUP}


def _environment(
    inputs: v1alpha1.RevisionInputs, plugin: v1alpha1.Plugin, *, has_user: bool
) -> list[dict[str, Any]]:
    """List the variables, ours first; the user's take the place of ours with the same name."""
    model, engine = inputs.model, inputs.engine
    for variable in engine.env:
        instead = refusal.find_variable_refusal(variable.name)
        if instead is not None:
            raise InvalidSpecError(f"spec.engine.env sets {variable.name}: {instead}")
    plain = {
        "HOME": CACHE_FOLDER,
        "HF_HOME": MODELS_FOLDER,
        "VLLM_CACHE_ROOT": f"{CACHE_FOLDER}/vllm",
        "TRITON_CACHE_DIR": f"{CACHE_FOLDER}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_FOLDER}/inductor",
    }
    if plugin is not v1alpha1.Plugin.NONE:
        plain["SPECDECODE_TABLES"] = metadata.TABLES_FOLDER
        plain["SPECDECODE_ARM"] = f"{metadata.POD_FOLDER}/{metadata.ARM_FILE}"
        plain["SPECDECODE_TERMINATION_LOG"] = metadata.TERMINATION_LOG
    if _is_local(inputs):
        plain["HF_HUB_OFFLINE"] = "1"
    if has_user:
        # The image knows no such user, and Python asks for its name.
        plain["USER"] = metadata.ENGINE_CONTAINER
    secrets = {"HF_TOKEN": model.token_secret_ref, "VLLM_API_KEY": engine.api_key_secret_ref}
    variables: dict[str, dict[str, Any]] = {
        **{name: {"name": name, "value": value} for name, value in plain.items()},
        **{
            name: {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}
            for name, ref in secrets.items()
            if ref is not None
        },
    }
    users = {variable.name: variable.to_json() for variable in engine.env}
    # The user's go last: they may refer to ours as $(NAME).
    return [v for name, v in variables.items() if name not in users] + list(users.values())


def _is_local(inputs: v1alpha1.RevisionInputs) -> bool:
    """Tell whether nothing is fetched from a hub: target and drafter are both paths."""
    draft = inputs.speculation.draft_model if inputs.speculation else None
    return all(name.startswith("/") for name in (inputs.model.name, draft) if name is not None)


def _resources(engine: v1alpha1.Engine) -> dict[str, Any]:
    """Return the user's resources; GPUs are added unless they name an accelerator themselves."""
    requests, limits = _quantities(engine.resources.requests), _quantities(engine.resources.limits)
    if not _names_accelerator([*requests, *limits]):
        limits = {**limits, GPU_RESOURCE: str(engine.tensor_parallel_size)}
    return {"requests": requests, "limits": limits} if requests else {"limits": limits}


def _quantities(amounts: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(amount) for name, amount in amounts.items()}


def _names_accelerator(resources: Iterable[str]) -> bool:
    return any(
        "/" in name and any(word in name.lower() for word in _ACCELERATOR_WORDS)
        for name in resources
    )


def _probes(inputs: v1alpha1.RevisionInputs) -> dict[str, Any]:
    """Build the three probes; liveness and readiness begin after the start-up probe's success.

    Liveness is patient: a full engine answers late, and /health knows little of its engine core.
    """
    check = {"httpGet": {"path": "/health", "port": metadata.ENGINE_PORT_NAME}}
    tries = math.ceil(startup_seconds(inputs) / PROBE_PERIOD_SECONDS)
    often = {**check, "periodSeconds": PROBE_PERIOD_SECONDS, "timeoutSeconds": 5}
    return {
        "startupProbe": {**often, "failureThreshold": tries},
        "readinessProbe": {**often, "failureThreshold": 3},
        "livenessProbe": {
            **check,
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
    }


def _volumes(
    name: str, inputs: v1alpha1.RevisionInputs, plugin: v1alpha1.Plugin
) -> list[dict[str, Any]]:
    arm = f"metadata.annotations['{metadata.ANNOTATION_ARM}']"
    followed: list[dict[str, Any]] = [
        {
            "name": metadata.TABLES_VOLUME,
            "configMap": {"name": metadata.tables_name(name), "optional": True},
        },
        {
            "name": metadata.POD_VOLUME,
            "downwardAPI": {"items": [{"path": metadata.ARM_FILE, "fieldRef": {"fieldPath": arm}}]},
        },
    ]
    volumes: list[dict[str, Any]] = [
        *(followed if plugin is not v1alpha1.Plugin.NONE else ()),
        {"name": "models", **_model_source(inputs.model.cache)},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if _needs_shared_memory(inputs):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    return volumes


def _mounts(inputs: v1alpha1.RevisionInputs, plugin: v1alpha1.Plugin) -> list[dict[str, Any]]:
    followed = [
        {"name": metadata.TABLES_VOLUME, "mountPath": metadata.TABLES_FOLDER, "readOnly": True},
        {"name": metadata.POD_VOLUME, "mountPath": metadata.POD_FOLDER, "readOnly": True},
    ]
    mounts: list[dict[str, Any]] = [
        *(followed if plugin is not v1alpha1.Plugin.NONE else ()),
        {"name": "models", "mountPath": MODELS_FOLDER},
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if _needs_shared_memory(inputs):
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return mounts


def _needs_shared_memory(inputs: v1alpha1.RevisionInputs) -> bool:
    """Tell whether workers exchange data in /dev/shm, of which a container has 64 MiB."""
    return inputs.engine.tensor_parallel_size > 1


def _model_source(cache: v1alpha1.ModelCache | None) -> dict[str, Any]:
    if cache is not None and cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache is not None and cache.host_path is not None:
        # Directory, not DirectoryOrCreate: that one belongs to root, and no engine could write.
        return {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    return {"emptyDir": {}}


def _pod_security(cache: v1alpha1.ModelCache | None) -> dict[str, Any]:
    """Build the pod's security context: the restricted profile, the user left to the image."""
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if cache is not None and cache.claim_name is not None:
        security["fsGroup"] = VOLUME_GROUP
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    return security
