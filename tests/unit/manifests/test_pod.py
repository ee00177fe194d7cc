"""The engine's pod: each default is there, and each can be overridden through podTemplate."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.errors import InvalidSpecError
from tests.unit.manifests.builders import (
    DRAFT_MODEL,
    engine_of,
    env_of,
    inputs_of,
    mount_of,
    template_of,
    volume_of,
)


def with_overlay(spec: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """Render a template with an overlay over its pod spec."""
    return template_of(inputs_of(engine={**engine, "podTemplate": {"spec": spec}}))


def with_engine_overlay(container: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """Render a template with an overlay over the engine's container."""
    return with_overlay({"containers": [{"name": "engine", **container}]}, **engine)


# ------------------------------------------------------------- start, drain and crash


@pytest.mark.parametrize(
    ("startup_timeout", "tries"), [("30m", 360), ("7s", 2), ("1ms", 1), ("1h30m", 1080)]
)
def test_the_startup_probe_lasts_as_long_as_the_startup_timeout(
    startup_timeout: str, tries: int
) -> None:
    probe = engine_of(template_of(inputs_of(engine={"startupTimeout": startup_timeout})))[
        "startupProbe"
    ]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (5, tries)
    assert probe["httpGet"] == {"path": "/health", "port": "http"}


def test_a_pod_gets_time_for_endpoints_to_forget_it_for_the_drain_and_for_teardown() -> None:
    template = template_of(inputs_of(engine={"drainTimeout": "120s"}))
    pause = engine_of(template)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert template["spec"]["terminationGracePeriodSeconds"] > pause + 120


def test_crash_evidence_is_read_from_the_file_that_the_plugin_writes() -> None:
    template = template_of(inputs_of())
    engine = engine_of(template)
    assert engine["terminationMessagePolicy"] == "File"
    assert (
        engine["terminationMessagePath"]
        == env_of(template)["SPECDECODE_TERMINATION_LOG"]["value"]
        == "/dev/termination-log"
    )


def test_services_of_the_namespace_set_no_variables_that_vllm_would_take_for_its_own() -> None:
    assert template_of(inputs_of())["spec"]["enableServiceLinks"] is False


# --------------------------------------------------------------------- live table


def test_the_table_is_a_folder_that_may_not_be_there_yet() -> None:
    template = template_of(inputs_of())
    mount = mount_of(template, env_of(template)["SPECDECODE_TABLES"]["value"])
    assert mount is not None
    # A subPath mount would never follow the ConfigMap.
    assert mount == {
        "name": "specdecode-tables",
        "mountPath": "/etc/specdecode/tables",
        "readOnly": True,
    }
    volume = volume_of(template, mount["name"])
    assert volume is not None
    assert volume["configMap"] == {"name": "chat-spec-tables", "optional": True}


def test_the_arm_is_a_file_projected_from_the_pods_own_annotation() -> None:
    template = template_of(inputs_of())
    assert template["metadata"]["annotations"][metadata.ANNOTATION_ARM] == "stable"
    volume = volume_of(template, "specdecode-pod")
    assert volume is not None
    item = volume["downwardAPI"]["items"][0]
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['specdecode.io/arm']"
    assert mount_of(template, "/etc/specdecode/pod") is not None
    assert env_of(template)["SPECDECODE_ARM"]["value"] == f"/etc/specdecode/pod/{item['path']}"


# ------------------------------------------------------------------- model and hub


def test_secrets_reach_the_engine_as_references_and_only_when_given() -> None:
    plain = env_of(template_of(inputs_of()))
    assert not {"HF_TOKEN", "VLLM_API_KEY"} & plain.keys()
    env = env_of(
        template_of(
            inputs_of(
                model={"tokenSecretRef": {"name": "hub", "key": "token"}},
                engine={"apiKeySecretRef": {"name": "api", "key": "key"}},
            )
        )
    )
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "api", "key": "key"}


@pytest.mark.parametrize(
    ("situation", "model", "draft", "offline"),
    [
        ("both on disk", "/models/target", "/models/draft", True),
        ("drafter from the hub", "/models/target", "org/draft", False),
        ("target from the hub", "org/model", "/models/draft", False),
    ],
)
def test_the_hub_is_left_alone_when_nothing_comes_from_it(
    situation: str, model: str, draft: str, offline: bool
) -> None:
    inputs = inputs_of(model={"name": model}, speculation={**DRAFT_MODEL, "draftModel": draft})
    assert ("HF_HUB_OFFLINE" in env_of(template_of(inputs))) is offline, situation


def test_a_local_model_without_speculation_leaves_the_hub_alone() -> None:
    env = env_of(template_of(inputs_of(model={"name": "/models/target"})))
    assert env["HF_HUB_OFFLINE"]["value"] == "1"


def test_every_cache_is_in_a_folder_that_a_user_without_root_may_write() -> None:
    template = template_of(inputs_of())
    env = env_of(template)
    for name in (
        "HF_HOME",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "HOME",
    ):
        folder = env[name]["value"]
        mounts = [m for m in engine_of(template)["volumeMounts"] if not m.get("readOnly")]
        assert any(f"{folder}/".startswith(f"{m['mountPath']}/") for m in mounts), name


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        (None, {"emptyDir": {}}),
        ({"emptyDir": True}, {"emptyDir": {}}),
        ({"claimName": "weights"}, {"persistentVolumeClaim": {"claimName": "weights"}}),
        ({"hostPath": "/data/hf"}, {"hostPath": {"path": "/data/hf", "type": "Directory"}}),
    ],
)
def test_weights_are_kept_where_the_user_says(
    cache: dict[str, Any] | None, source: dict[str, Any]
) -> None:
    template = template_of(inputs_of(model={"cache": cache}))
    assert volume_of(template, "models") == {"name": "models", **source}
    mount = mount_of(template, env_of(template)["HF_HOME"]["value"])
    assert mount is not None
    assert mount["name"] == "models"


def test_a_claim_is_made_writable_for_the_images_user() -> None:
    claimed = template_of(inputs_of(model={"cache": {"claimName": "weights"}}))
    assert claimed["spec"]["securityContext"]["fsGroup"] == 1000
    assert "fsGroup" not in template_of(inputs_of())["spec"]["securityContext"]


# -------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("situation", "resources", "limits"),
    [
        ("nothing named", {}, {"nvidia.com/gpu": "2"}),
        (
            "memory and a network card",
            {"limits": {"memory": "8Gi", "rdma/hca": 1}},
            {"memory": "8Gi", "rdma/hca": "1", "nvidia.com/gpu": "2"},
        ),
        ("no GPU at all", {"limits": {"nvidia.com/gpu": 0}}, {"nvidia.com/gpu": "0"}),
        ("another maker", {"limits": {"amd.com/gpu": 2}}, {"amd.com/gpu": "2"}),
        ("slices", {"limits": {"nvidia.com/mig-3g.40gb": 2}}, {"nvidia.com/mig-3g.40gb": "2"}),
        ("Gaudi", {"limits": {"habana.ai/gaudi": 2}}, {"habana.ai/gaudi": "2"}),
    ],
)
def test_gpus_follow_tensor_parallel_size_unless_the_user_names_an_accelerator(
    situation: str, resources: dict[str, Any], limits: dict[str, str]
) -> None:
    engine = {"tensorParallelSize": 2, "resources": resources}
    built = engine_of(template_of(inputs_of(engine=engine)))["resources"]
    assert built["limits"] == limits, situation


def test_an_accelerator_among_the_requests_counts_too() -> None:
    built = engine_of(
        template_of(inputs_of(engine={"resources": {"requests": {"google.com/tpu": 4}}}))
    )["resources"]
    assert built == {"requests": {"google.com/tpu": "4"}, "limits": {}}


def test_workers_that_share_one_engine_get_shared_memory() -> None:
    several = template_of(inputs_of(engine={"tensorParallelSize": 2}))
    assert volume_of(several, "shm") == {"name": "shm", "emptyDir": {"medium": "Memory"}}
    assert mount_of(several, "/dev/shm") == {"name": "shm", "mountPath": "/dev/shm"}
    assert volume_of(template_of(inputs_of()), "shm") is None


# ---------------------------------------------------------------------- security


def test_the_pod_fits_the_restricted_profile_and_has_no_api_token() -> None:
    template = template_of(inputs_of())
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert engine_of(template)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


# ------------------------------------------------------------------ the user's env


def test_the_users_variable_takes_the_place_of_ours() -> None:
    template = template_of(inputs_of(engine={"env": [{"name": "HF_HOME", "value": "/mine"}]}))
    assert [v for v in engine_of(template)["env"] if v["name"] == "HF_HOME"] == [
        {"name": "HF_HOME", "value": "/mine"}
    ]


def test_a_variable_given_twice_occurs_once_with_the_last_value() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    template = template_of(inputs_of(engine={"env": env}))
    assert [v for v in engine_of(template)["env"] if v["name"] == "A"] == [env[1]]


@pytest.mark.parametrize("name", ["SPECDECODE_TABLES", "VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE"])
def test_a_managed_variable_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpecError, match=rf"spec\.engine\.env sets {name}"):
        template_of(inputs_of(engine={"env": [{"name": name, "value": "x"}]}))


def test_without_an_image_nothing_is_rendered() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.engine\.image is not set"):
        template_of(inputs_of(engine={"image": None}))


# ------------------------------------------------- each default, overridden by the user


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("automountServiceAccountToken", True),
        ("enableServiceLinks", True),
        ("terminationGracePeriodSeconds", 7),
        ("serviceAccountName", "engine"),
        ("priorityClassName", "high"),
        ("runtimeClassName", "nvidia"),
    ],
)
def test_a_pod_default_can_be_overridden(field: str, value: object) -> None:
    assert with_overlay({field: value})["spec"][field] == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("terminationMessagePolicy", "FallbackToLogsOnError"),
        ("imagePullPolicy", "Never"),
        ("command", ["/opt/start"]),
    ],
)
def test_an_engine_default_can_be_overridden(field: str, value: object) -> None:
    assert engine_of(with_engine_overlay({field: value}))[field] == value


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_can_be_tuned_replaced_or_removed(probe: str) -> None:
    tuned = engine_of(with_engine_overlay({probe: {"failureThreshold": 99}}))[probe]
    assert tuned["failureThreshold"] == 99
    assert tuned["httpGet"]["path"] == "/health"
    replaced = engine_of(with_engine_overlay({probe: {"tcpSocket": {"port": 8000}}}))[probe]
    assert "httpGet" not in replaced
    assert probe not in engine_of(with_engine_overlay({probe: None}))


def test_the_pause_before_stopping_can_become_another_handler() -> None:
    overlay = {"lifecycle": {"preStop": {"exec": {"command": ["sleep", "9"]}}}}
    assert engine_of(with_engine_overlay(overlay))["lifecycle"] == overlay["lifecycle"]


def test_the_user_and_the_profile_of_the_pod_can_be_set() -> None:
    security = with_overlay({"securityContext": {"runAsNonRoot": None, "runAsUser": 0}})["spec"]
    assert security["securityContext"] == {
        "runAsUser": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = engine_of(
        with_engine_overlay({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}})
    )["securityContext"]
    assert container["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize("volume", ["models", "cache", "tmp", "shm"])
def test_a_volume_can_come_from_elsewhere(volume: str) -> None:
    source = {"ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": "fast"}}}}
    template = with_overlay({"volumes": [{"name": volume, **source}]}, tensorParallelSize=2)
    assert volume_of(template, volume) == {"name": volume, **source}


def test_a_volume_of_ours_can_be_given_a_limit() -> None:
    overlay = {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "2Gi"}}]}
    template = with_overlay(overlay, tensorParallelSize=2)
    assert volume_of(template, "shm") == {
        "name": "shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"},
    }


def test_the_default_gpu_can_be_taken_away() -> None:
    template = with_engine_overlay({"resources": {"limits": {"nvidia.com/gpu": None, "cpu": "4"}}})
    assert engine_of(template)["resources"]["limits"] == {"cpu": "4"}


def test_a_variable_can_be_overridden_or_removed() -> None:
    overlay = {"env": [{"name": "HF_HOME", "value": "/x"}, {"name": "HOME", "$patch": "delete"}]}
    env = env_of(with_engine_overlay(overlay))
    assert env["HF_HOME"]["value"] == "/x"
    assert "HOME" not in env


def test_scrape_annotations_can_be_overridden_and_removed() -> None:
    overlay = {
        "metadata": {"annotations": {"prometheus.io/scrape": None, "prometheus.io/port": "9"}}
    }
    annotations = template_of(inputs_of(engine={"podTemplate": overlay}))["metadata"]["annotations"]
    assert "prometheus.io/scrape" not in annotations
    assert annotations["prometheus.io/port"] == "9"
