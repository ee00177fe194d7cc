"""The models as a CustomResourceDefinition: the schema is written once, in v1alpha1.py.

The API server takes structural schemas only (no $ref, no null), and prices every CEL rule by the
greatest size of what it looks at: hence maxItems and maxLength in the models. Each rule sits on
the smallest part that it speaks of, because the API server does not check an unchanged part again:
an object stored under older rules can still be scaled. Rules over two parts pardon what was there
before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from specdecode_operator.api import metadata, v1alpha1
from specdecode_operator.api.rules import RULES

FILE: Final = f"{metadata.GROUP}_{metadata.PLURAL}.yaml"
HEADER: Final = "# Made by `make crds` from operator/specdecode_operator/api; do not edit.\n"

# Lists whose items have a name; server-side apply merges them, and a name occurs once.
LIST_KEYS: Final = {"spec.engine.env": "name", "status.conditions": "type"}

# Name, type, path, whether it is shown by `-o wide` only.
COLUMNS: Final = (
    ("PHASE", "string", ".status.phase", False),
    ("MODE", "string", ".spec.tuning.mode", False),
    ("TABLE", "string", ".status.active.table", False),
    ("AV", "string", ".status.active.adaptiveVerification", False),
    ("GRAPHS", "string", ".status.active.cudagraphMode", False),
    ("TOK/S", "number", ".status.estimate.goodputTokensPerSecond", False),
    ("VS-OFF", "string", ".status.estimate.versusSpecOffPercent", False),
    ("READY", "string", ".status.ready", False),
    ("AGE", "date", ".metadata.creationTimestamp", False),
    ("METHOD", "string", ".spec.speculation.method", True),
    ("BATCH", "integer", ".status.estimate.batch", True),
    ("ACCEPTED", "number", ".status.estimate.meanAcceptanceLength", True),
    ("REVISION", "string", ".status.active.revision", True),
    ("MESSAGE", "string", '.status.conditions[?(@.type=="Ready")].message', True),
)

_BOUNDS: Final = (
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
)
# What is taken over from pydantic's schema as it is, in the order in which it is written.
_KEPT: Final = (
    "description",
    "type",
    "format",
    "x-kubernetes-int-or-string",
    "anyOf",
    "enum",
    "default",
    *_BOUNDS,
    "required",
)


def build_crd() -> dict[str, Any]:
    """Build the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{metadata.PLURAL}.{metadata.GROUP}"},
        "spec": {
            "group": metadata.GROUP,
            "names": {
                "plural": metadata.PLURAL,
                "singular": metadata.SINGULAR,
                "kind": metadata.KIND,
                "listKind": f"{metadata.KIND}List",
                "shortNames": [metadata.SHORT_NAME],
                "categories": ["ml"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": metadata.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": build_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [_column(*column) for column in COLUMNS],
                }
            ],
        },
    }


def build_schema() -> dict[str, Any]:
    """Build the structural schema of the whole object, rules included."""
    schema = {
        "description": "A model served by vLLM whose speculative decoding is tuned live.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{metadata.API_VERSION}."},
            "kind": {"type": "string", "description": f"{metadata.KIND}."},
            "metadata": {"type": "object"},
            "spec": _schema_of(v1alpha1.Spec, with_defaults=True),
            "status": _schema_of(v1alpha1.Status, with_defaults=False),
        },
    }
    for path, key in LIST_KEYS.items():
        node = _find(schema, path)
        node["x-kubernetes-list-type"], node["x-kubernetes-list-map-keys"] = "map", [key]
    for path, rules in RULES.items():
        _find(schema, path)["x-kubernetes-validations"] = [rule.to_schema() for rule in rules]
    return schema


def render() -> str:
    """Render the file of crds/; the same models give the same text."""
    text = yaml.dump(build_crd(), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return HEADER + text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or with --check tell whether it is what the models say."""
    parser = argparse.ArgumentParser(prog="python -m specdecode_operator.api.crd")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--folder", type=Path, default=Path("crds"), help="default: crds")
    options = parser.parse_args(arguments)
    path = options.folder / FILE
    wanted = render()
    if options.check:
        if path.is_file() and path.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{path} is not what the models say: run `make crds`", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(wanted, encoding="utf-8")
    return 0


class _Dumper(yaml.SafeDumper):
    """Writes every node in full: Kubernetes' parsers know no anchors of long standing."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _column(name: str, kind: str, path: str, wide: bool) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": 1} if wide else column


def _find(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the node at a path such as `spec.engine.env[].name`."""
    node = schema
    for step in path.split(".") if path else ():
        name, brackets, _ = step.partition("[]")
        node = node["properties"][name]
        if brackets:
            node = node["items"]
    return node


def _schema_of(model: type[BaseModel], *, with_defaults: bool) -> dict[str, Any]:
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _Structural(raw.pop("$defs", {}), with_defaults).convert(raw)


@dataclass(frozen=True)
class _Structural:
    """Turns pydantic's JSON schema into what the API server takes.

    Status gets no defaults: the operator writes it whole, and an absent part means "not known".
    """

    definitions: Mapping[str, dict[str, Any]]
    with_defaults: bool

    def convert(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Convert one node with all below it."""
        node = self._resolve(raw)
        kept: dict[str, Any] = {key: node[key] for key in _KEPT if key in node}
        if not self.with_defaults or kept.get("default", "") is None:
            kept.pop("default", None)
        if node.get("type") == "integer":
            kept["format"] = "int64"
        if "items" in node:
            kept |= {"x-kubernetes-list-type": "atomic", "items": self.convert(node["items"])}
        if "properties" in node:
            kept["properties"] = dict(self._properties(node))
        elif node.get("additionalProperties") is True:
            kept["x-kubernetes-preserve-unknown-fields"] = True
        elif node.get("additionalProperties"):
            kept["additionalProperties"] = self.convert(node["additionalProperties"])
        return kept

    def _properties(self, node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        required = node.get("required", [])
        for name, raw in node["properties"].items():
            child = self.convert(raw)
            # The API server fills in defaults only below a parent that is there.
            is_made = "default" not in raw and name not in required and "properties" in child
            if is_made and self.with_defaults:
                child["default"] = {}
            yield name, child

    def _resolve(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Put what a node refers to in its place; what the node itself says wins."""
        node = dict(raw)
        if "$ref" in node:
            name = node.pop("$ref").removeprefix("#/$defs/")
            return self._resolve({**self.definitions[name], **node})
        if "anyOf" in node:
            branches = [b for b in node.pop("anyOf") if b.get("type") != "null"]
            if len(branches) == 1:
                return self._resolve({**branches[0], **node})
            return {**_int_or_string(branches), **node}
        return node


def _int_or_string(branches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    types = [branch["type"] for branch in branches]
    if types != ["integer", "string"]:
        raise ValueError(f"no structural schema for a union of {types}")
    bounds = {key: value for branch in branches for key, value in branch.items() if key in _BOUNDS}
    return {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": name} for name in types],
        **bounds,
    }


if __name__ == "__main__":
    sys.exit(main())
