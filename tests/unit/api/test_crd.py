"""The generated CRD is structural, described, small, and what the models say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api import crd, rules, v1alpha1

CRDS = Path(__file__).parents[3] / "crds"
MADE = crd.build_crd()
VERSION = MADE["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]

# `kubectl apply` keeps the whole object in an annotation; all annotations together hold 256 KiB.
ANNOTATION_LIMIT = 256 * 1024


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk through a schema, each node with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


NODES = dict(nodes(SCHEMA))


def test_the_file_is_what_the_models_say() -> None:
    assert crd.main(["--check", "--folder", str(CRDS)]) == 0


def test_the_file_is_small_enough_for_every_kubectl_apply() -> None:
    assert len(crd.render()) < ANNOTATION_LIMIT / 2
    assert yaml.safe_load(crd.render()) == MADE


def test_it_is_written_where_it_is_missing_and_checked_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--folder", str(tmp_path / "crds")]
    assert crd.main(["--check", *there]) == 1
    assert crd.main(there) == 0
    assert crd.main(["--check", *there]) == 0
    file = tmp_path / "crds" / crd.FILE
    file.write_text(file.read_text("utf-8").replace("Engine pods.", "Pods."), "utf-8")
    assert crd.main(["--check", *there]) == 1
    assert "is not what the models say: run `make crds`" in capsys.readouterr().err


def test_the_schema_is_structural() -> None:
    for path, node in NODES.items():
        assert node.keys().isdisjoint({"$ref", "title", "allOf", "oneOf", "const"}), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("default", "") is not None, path
        assert node.get("type") != "null", path


def test_every_field_is_described_with_a_sentence() -> None:
    for path, node in NODES.items():
        if not path.endswith("[]") and path != ".metadata":
            assert re.fullmatch(r".{5,}[.]", node["description"], re.DOTALL), path


def test_the_defaults_are_those_of_the_models() -> None:
    def filled(schema: dict[str, Any]) -> dict[str, Any]:
        """What the API server makes of an object that is there and empty."""
        return {
            name: filled(child) if child["default"] == {} else child["default"]
            for name, child in schema.get("properties", {}).items()
            if "default" in child
        }

    spec = {"model": {"name": "org/model"}, **filled(SCHEMA["properties"]["spec"])}
    assert v1alpha1.Spec.model_validate(spec) == v1alpha1.Spec.model_validate(
        {"model": {"name": "org/model"}}
    )
    assert spec["tuning"] == {"mode": "Advise", "minGainPercent": 2, "minK": 1}
    assert spec["engine"]["resources"] == {}


def test_status_has_no_defaults_so_that_absent_means_not_known() -> None:
    assert not [p for p, n in NODES.items() if p.startswith(".status") and "default" in n]


def test_every_list_says_how_it_is_merged() -> None:
    merged = {p: n["x-kubernetes-list-type"] for p, n in NODES.items() if n.get("type") == "array"}
    assert {path for path, kind in merged.items() if kind == "map"} == {
        ".spec.engine.env",
        ".status.conditions",
    }


def test_every_column_shows_a_field_that_is_there() -> None:
    for name, _, path, _ in crd.COLUMNS:
        plain = re.sub(r"\[\?.*?\]", "[]", path)
        assert plain in NODES or plain == ".metadata.creationTimestamp", name


def test_the_columns_people_look_at_come_first() -> None:
    shown = [c["name"] for c in VERSION["additionalPrinterColumns"] if "priority" not in c]
    assert shown == [
        "PHASE", "MODE", "TABLE", "AV", "GRAPHS", "TOK/S", "VS-OFF", "READY", "AGE",
    ]  # fmt: skip


def test_status_and_scale_are_subresources() -> None:
    scale = VERSION["subresources"]["scale"]
    assert scale == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    assert set(scale.values()) <= set(NODES)
    assert VERSION["subresources"]["status"] == {}


def test_no_rule_looks_at_the_number_of_replicas() -> None:
    for listed in rules.RULES.values():
        for rule in listed:
            assert "replicas" not in rule.cel.lower()


def test_a_rule_over_two_parts_pardons_what_was_stored_before_it() -> None:
    assert all(rule.pardon for path in ("", "spec") for rule in rules.RULES[path])
    assert not any(
        r.pardon for path, rs in rules.RULES.items() if path not in ("", "spec") for r in rs
    )


def test_a_union_that_has_no_structural_form_is_an_error_of_the_models() -> None:
    class Odd(v1alpha1.ApiModel):
        odd: int | bool

    with pytest.raises(ValueError, match="no structural schema for a union"):
        crd._schema_of(Odd, with_defaults=True)
