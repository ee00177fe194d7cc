"""Strategic merge over a pod template: maps, keyed lists, directives, and what is managed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.errors import InvalidSpecError
from specdecode_operator.manifests.overlay import FIELD, apply_overlay, merge
from tests.unit.manifests.builders import inputs_of, template_of

TEMPLATE = template_of(inputs_of())


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    return merge(base, patch, path=FIELD)


@pytest.mark.parametrize(
    ("situation", "base", "patch", "expected"),
    [
        ("a map gains a key", {"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"x": 1, "y": 2}}),
        ("null deletes", {"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ("null in what is new leaves nothing", {}, {"a": {"x": None}}, {"a": {}}),
        (
            "$patch replace empties a map first",
            {"a": {"x": 1}},
            {"a": {"$patch": "replace", "y": 2}},
            {"a": {"y": 2}},
        ),
        ("$patch delete takes a map away", {"a": {"x": 1}}, {"a": {"$patch": "delete"}}, {}),
        (
            "a list without a key is replaced",
            {"command": ["a", "b"]},
            {"command": ["c"]},
            {"command": ["c"]},
        ),
        (
            "tolerations are added to",
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
        ),
        (
            "$patch replace empties a list first",
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"$patch": "replace"}, {"key": "b"}]},
            {"tolerations": [{"key": "b"}]},
        ),
        (
            "an item is laid over its namesake",
            {"containers": [{"name": "a", "x": 1}, {"name": "b"}]},
            {"containers": [{"name": "a", "y": 2}, {"name": "c"}]},
            {"containers": [{"name": "a", "x": 1, "y": 2}, {"name": "b"}, {"name": "c"}]},
        ),
        (
            "an item is replaced",
            {"containers": [{"name": "a", "x": 1}]},
            {"containers": [{"name": "a", "$patch": "replace", "y": 2}]},
            {"containers": [{"name": "a", "y": 2}]},
        ),
        (
            "an item is deleted",
            {"volumes": [{"name": "a"}, {"name": "b"}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": [{"name": "b"}]},
        ),
        (
            "an item that is not there is deleted in vain",
            {"volumes": [{"name": "b"}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": [{"name": "b"}]},
        ),
        (
            "a volume has one source",
            {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "a", "hostPath": {"path": "/x"}}]},
            {"volumes": [{"name": "a", "hostPath": {"path": "/x"}}]},
        ),
        (
            "a variable has a value or a reference",
            {"env": [{"name": "A", "value": "x"}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]},
        ),
        (
            "mounts are told apart by folder",
            {"volumeMounts": [{"mountPath": "/a", "name": "x"}]},
            {"volumeMounts": [{"mountPath": "/a", "name": "y"}, {"mountPath": "/b", "name": "x"}]},
            {"volumeMounts": [{"mountPath": "/a", "name": "y"}, {"mountPath": "/b", "name": "x"}]},
        ),
        (
            "ports are told apart by number",
            {"ports": [{"containerPort": 8000, "name": "http"}]},
            {"ports": [{"containerPort": 9000}]},
            {"ports": [{"containerPort": 8000, "name": "http"}, {"containerPort": 9000}]},
        ),
        (
            "spread constraints are told apart by topology",
            {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}]},
            {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]},
            {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]},
        ),
        (
            "host aliases are told apart by address",
            {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]},
            {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["b"]}]},
            {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["b"]}]},
        ),
        (
            "pull secrets are added to",
            {"imagePullSecrets": [{"name": "a"}]},
            {"imagePullSecrets": [{"name": "b"}]},
            {"imagePullSecrets": [{"name": "a"}, {"name": "b"}]},
        ),
    ],
)
def test_strategic_merge(
    situation: str, base: dict[str, Any], patch: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert merged(base, patch) == expected, situation


def engine(**changes: Any) -> dict[str, Any]:
    """Make an overlay over the engine's container."""
    return {"spec": {"containers": [{"name": "engine", **changes}]}}


@pytest.mark.parametrize(
    ("overlay", "sentence"),
    [
        ({"labels": {}}, "podTemplate.labels is not known: it holds metadata and spec"),
        ({"metadata": {"name": "x"}}, "podTemplate.metadata.name is not supported"),
        ({"spec": ["x"]}, "podTemplate.spec must be a map, not a list"),
        ({"spec": {"containers": {"name": "x"}}}, "spec.containers must be a list, not a map"),
        ({"spec": {"enableServiceLinks": {}}}, "spec.enableServiceLinks must be a plain value"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, r"spec.volumes[0] must be a map with `name`"),
        ({"spec": {"volumes": ["x"]}}, r"spec.volumes[0] must be a map with `name`"),
        ({"spec": {"$patch": "merge"}}, "spec.$patch is 'merge': use replace or delete"),
        ({"spec": {"$retainKeys": ["x"]}}, "spec.$retainKeys is not supported"),
        (engine(args=["--x"]), "changes the engine's args: use spec.engine.extraArgs"),
        (engine(image="other"), "changes the engine's image: use spec.engine.image"),
        (engine(terminationMessagePath="/x"), "changes the engine's terminationMessagePath"),
        (engine(**{"$patch": "delete"}), "changes the engine container's name"),
        (engine(**{"$patch": "replace"}), "changes the engine's args"),
        (engine(env=[{"name": "SPECDECODE_ARM", "value": "/x"}]), "variable SPECDECODE_ARM"),
        (engine(env=[{"name": "SPECDECODE_TABLES", "$patch": "delete"}]), "SPECDECODE_TABLES"),
        (engine(env=[{"name": "VLLM_PLUGINS", "value": "x"}]), "the variable VLLM_PLUGINS"),
        (engine(env=[{"name": "VLLM_DP_SIZE", "value": "2"}]), "the variable VLLM_DP_SIZE"),
        (engine(env=[{"$patch": "replace"}]), "the variable SPECDECODE_"),
        (engine(ports=[{"containerPort": 8000, "name": "web"}]), "changes the engine's port"),
        (
            engine(volumeMounts=[{"mountPath": "/etc/specdecode/tables", "name": "cache"}]),
            "changes the mount at /etc/specdecode/tables",
        ),
        (
            {"spec": {"volumes": [{"name": "specdecode-tables", "emptyDir": {}}]}},
            "changes the volume specdecode-tables",
        ),
        (
            {"spec": {"volumes": [{"name": "specdecode-pod", "$patch": "delete"}]}},
            "changes the volume specdecode-pod",
        ),
        (
            {"metadata": {"labels": {"specdecode.io/revision": "x"}}},
            "changes the label specdecode.io/revision",
        ),
        (
            {"metadata": {"labels": {"specdecode.io/deployment": None}}},
            "changes the label specdecode.io/deployment",
        ),
        (
            {"metadata": {"annotations": {"specdecode.io/arm": "off"}}},
            "changes the annotation specdecode.io/arm",
        ),
    ],
)
def test_an_overlay_is_refused_with_the_field_and_what_to_do(
    overlay: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSpecError) as refusal:
        apply_overlay(TEMPLATE, overlay)
    assert sentence in str(refusal.value)
    assert str(refusal.value).startswith("spec.engine.podTemplate")


def test_saying_what_is_so_already_is_no_change() -> None:
    assert apply_overlay(TEMPLATE, engine(image=TEMPLATE["spec"]["containers"][0]["image"])) == (
        TEMPLATE
    )


def test_sidecars_and_init_containers_stand_beside_the_engine() -> None:
    overlay = {
        "spec": {
            "containers": [{"name": "proxy", "image": "proxy:1"}],
            "initContainers": [{"name": "warm", "image": "warm:1"}],
        }
    }
    spec = apply_overlay(TEMPLATE, overlay)["spec"]
    assert [c["name"] for c in spec["containers"]] == ["engine", "proxy"]
    assert spec["initContainers"] == overlay["spec"]["initContainers"]


NAMES = st.sampled_from("abcd")
LEAVES = st.none() | st.integers(0, 3)
ITEMS = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"x": st.integers(0, 3)}),
    max_size=3,
    unique_by=lambda item: item["name"],
)
TREES = st.recursive(
    st.fixed_dictionaries({}, optional={"a": LEAVES, "volumes": ITEMS, "command": st.just(["x"])}),
    lambda children: st.fixed_dictionaries({}, optional={"m": children, "n": children}),
    max_leaves=6,
)


@given(TREES, TREES)
def test_merging_twice_is_merging_once_and_changes_neither_side(
    base: dict[str, Any], patch: dict[str, Any]
) -> None:
    base = merged({}, base)
    before = copy.deepcopy((base, patch))
    once = merged(base, patch)
    assert (base, patch) == before
    assert merged(once, patch) == once


@given(TREES)
def test_an_empty_overlay_changes_nothing(base: dict[str, Any]) -> None:
    assert merged(base, {}) == base
