"""How an engine comes by the plugin: from its image, from an init container, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_operator.api import metadata, v1alpha1
from specdecode_operator.errors import InvalidSpecError
from specdecode_operator.manifests import deployment, inject
from specdecode_operator.manifests.arguments import SCHEDULER_FACTORY, build_arguments
from tests.unit.manifests.builders import (
    DRAFT_MODEL,
    KEY,
    engine_of,
    env_of,
    inputs_of,
    mount_of,
    volume_of,
)

STOCK = "vllm/vllm-openai:v0.33.0"
OURS = "registry.example/team/specdecode-vllm:0.33.0"
CARRIER = "registry.example/specdecode-operator:0.1.0"
TABLE = [{"minBatch": 1, "k": 7}, {"minBatch": 17, "k": 4}]


def rendered(inputs: v1alpha1.RevisionInputs, carrier: str | None = CARRIER) -> dict[str, Any]:
    """Render with an operator that has, or has not, something to inject."""
    return deployment.render_template(
        KEY.name, inputs, revision="0123456789", rendered_by="0.1.0", plugin_image=carrier
    )


def table_of(inputs: v1alpha1.RevisionInputs) -> list[list[int]] | None:
    """Return vLLM's own table among the arguments."""
    (text,) = [a for a in build_arguments(inputs) if a.startswith("--speculative-config=")]
    config = json.loads(text.partition("=")[2])
    rows: list[list[int]] | None = config.get("num_speculative_tokens_per_batch_size")
    return rows


# ---------------------------------------------------------------------- which of the three

CHOICES = {
    "our image": ({"image": OURS}, CARRIER, "Image"),
    "our image by digest": ({"image": f"{OURS}@sha256:0a1b"}, CARRIER, "Image"),
    "any other image": ({"image": STOCK}, CARRIER, "Inject"),
    "another image with nothing to inject": ({"image": STOCK}, None, "Image"),
    "a folder that is called as ours": ({"image": "specdecode-vllm/x:0.33.0"}, CARRIER, "Inject"),
    "asked to inject into ours": ({"image": OURS, "plugin": "Inject"}, CARRIER, "Inject"),
    "another image that has it": ({"image": STOCK, "plugin": "Image"}, CARRIER, "Image"),
    "without": ({"image": STOCK, "plugin": "None"}, CARRIER, "None"),
}


@pytest.mark.parametrize("situation", CHOICES)
def test_the_plugin_comes_as_asked_or_as_the_image_needs_it(situation: str) -> None:
    engine, carrier, choice = CHOICES[situation]
    template = rendered(inputs_of(engine=engine, speculation=DRAFT_MODEL), carrier)
    flag = f"--scheduler-cls={SCHEDULER_FACTORY}"
    assert ("initContainers" in template["spec"]) is (choice == "Inject")
    assert (flag in engine_of(template)["args"]) is (choice != "None")


def test_a_revision_without_the_field_is_the_one_that_it_was_before_there_was_the_field() -> None:
    assert "plugin" not in inputs_of(engine={"image": STOCK}).to_json()["engine"]


# ------------------------------------------------------------------------------- Inject


def test_an_init_container_fills_the_folder_that_the_engine_starts_from() -> None:
    template = rendered(inputs_of(engine={"image": STOCK}, speculation=DRAFT_MODEL))
    (init,) = template["spec"]["initContainers"]
    assert (init["image"], init["command"]) == (CARRIER, ["specdecode-inject", inject.FOLDER])
    assert init["volumeMounts"] == [{"name": inject.VOLUME, "mountPath": inject.FOLDER}]
    assert volume_of(template, inject.VOLUME) == {"name": inject.VOLUME, "emptyDir": {}}
    mount = mount_of(template, inject.FOLDER)
    assert mount is not None
    assert mount["readOnly"] is True
    assert engine_of(template)["command"] == [f"{inject.FOLDER}/entrypoint"]


def test_the_table_is_as_live_as_with_our_image() -> None:
    injected = inputs_of(engine={"image": STOCK, "plugin": "Inject"}, speculation=DRAFT_MODEL)
    assert table_of(injected) == table_of(inputs_of(speculation=DRAFT_MODEL))


def test_an_image_that_is_not_ours_gets_a_user_that_is_not_root() -> None:
    for engine in ({"image": STOCK}, {"image": STOCK, "plugin": "None"}):
        template = rendered(inputs_of(engine=engine))
        security = engine_of(template)["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"]) == (10_001, 0)
        assert env_of(template)["USER"]["value"] == "engine"
    assert "runAsUser" not in engine_of(rendered(inputs_of()))["securityContext"]


def test_a_users_folders_of_python_are_not_lost_since_the_entrypoint_adds_ours() -> None:
    variable = {"name": "PYTHONPATH", "value": "/srv/patches"}
    template = rendered(inputs_of(engine={"image": STOCK, "env": [variable]}))
    assert env_of(template)["PYTHONPATH"] == variable


def test_an_operator_with_nothing_to_inject_says_what_to_set() -> None:
    with pytest.raises(InvalidSpecError, match="set SPECDECODE_PLUGIN_IMAGE to the operator's own"):
        rendered(inputs_of(engine={"image": STOCK, "plugin": "Inject"}), None)


OVERLAYS: dict[str, tuple[dict[str, Any], str]] = {
    "the command": (
        {"containers": [{"name": "engine", "command": ["vllm", "serve"]}]},
        "the engine's command",
    ),
    "the container": (
        {"initContainers": [{"name": inject.CONTAINER, "image": "x"}]},
        "the container that brings the plugin",
    ),
    "the volume": (
        {"volumes": [{"name": inject.VOLUME, "hostPath": {"path": "/x"}}]},
        f"the volume {inject.VOLUME}",
    ),
    "the mount": (
        {
            "containers": [
                {"name": "engine", "volumeMounts": [{"mountPath": inject.FOLDER, "name": "tmp"}]}
            ]
        },
        f"the mount at {inject.FOLDER}",
    ),
}


@pytest.mark.parametrize("situation", OVERLAYS)
def test_an_overlay_leaves_the_injection_as_it_is(situation: str) -> None:
    spec, what = OVERLAYS[situation]
    with pytest.raises(InvalidSpecError, match=f"changes {what}"):
        rendered(inputs_of(engine={"image": STOCK, "podTemplate": {"spec": spec}}))


def test_other_init_containers_stay_beside_it() -> None:
    spec = {"initContainers": [{"name": "download", "image": "downloader"}]}
    template = rendered(inputs_of(engine={"image": STOCK, "podTemplate": {"spec": spec}}))
    names = [container["name"] for container in template["spec"]["initContainers"]]
    assert names == [inject.CONTAINER, "download"]


# --------------------------------------------------------------------------------- None


def without(version: str = "0.33.0", **speculation: Any) -> v1alpha1.RevisionInputs:
    return inputs_of(
        engine={"image": STOCK, "version": version, "plugin": "None", "maxNumSeqs": 64},
        speculation={**DRAFT_MODEL, **speculation},
    )


def test_vllm_alone_gets_the_users_own_table() -> None:
    assert table_of(without(kTable=TABLE)) == [[1, 16, 7], [17, 64, 4]]


STATIC = {
    "no table was given": without(),
    "a version that is not known": without(version="0.40.0", kTable=TABLE),
    "a method that follows none": without(method="suffix", kTable=TABLE),
    "a static K by the user's choice": inputs_of(
        engine={"image": STOCK, "plugin": "None", "liveTable": "Off"},
        speculation={**DRAFT_MODEL, "kTable": TABLE},
    ),
}


@pytest.mark.parametrize("situation", STATIC)
def test_vllm_alone_gets_a_static_k_where(situation: str) -> None:
    assert table_of(STATIC[situation]) is None


def test_nothing_of_the_plugin_is_left_in_the_pod() -> None:
    template = rendered(without(kTable=TABLE))
    assert not [name for name in env_of(template) if name.startswith("SPECDECODE_")]
    assert volume_of(template, metadata.TABLES_VOLUME) is None
    assert mount_of(template, metadata.POD_FOLDER) is None
    assert "command" not in engine_of(template)


def test_a_table_that_breaks_an_invariant_is_refused_as_a_specs_fault() -> None:
    rows = [{"minBatch": 1, "k": 7}, {"minBatch": 4, "k": 3}]
    with pytest.raises(InvalidSpecError, match="kTable: a row starts at batch 4"):
        rendered(without(kTable=rows))


# ------------------------------------------------------------------- what is known to crash


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.9", "0.40.0"])
def test_no_pod_is_rendered_that_would_die_of_adaptive_verification(
    version: str, mode: str
) -> None:
    speculation = {**DRAFT_MODEL, "adaptiveVerification": "Enabled", "cudagraphMode": mode}
    inputs = inputs_of(engine={"version": version}, speculation=speculation)
    with pytest.raises(InvalidSpecError, match="cudagraphMode to FULL_DECODE_ONLY"):
        rendered(inputs)
    rendered(inputs_of(speculation={**speculation, "cudagraphMode": "FULL_DECODE_ONLY"}))
    rendered(inputs_of(speculation={**speculation, "adaptiveVerification": "Disabled"}))
