"""Every field that we write is one that the Kubernetes API knows, under that name and kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.unit.manifests import situations

KINDS = {
    "ConfigMap": client.V1ConfigMap,
    "Deployment": client.V1Deployment,
    "PodDisruptionBudget": client.V1PodDisruptionBudget,
    "Service": client.V1Service,
}
PLAIN: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "object": (str, int),
    "datetime": str,
}


def misfits(value: Any, kind: str, path: str) -> Iterator[str]:
    """Yield the path of each field that the API's model does not have, or has as another kind."""
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        for position, item in enumerate(value):
            yield from misfits(item, match[1], f"{path}[{position}]")
    elif match := re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", kind):
        for key, item in value.items():
            yield from misfits(item, match[1], f"{path}.{key}")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]):
            yield f"{path} is {value!r}, not {kind}"
    else:
        model = getattr(client, kind)
        names = {outside: inside for inside, outside in model.attribute_map.items()}
        for key, item in value.items():
            if key in names:
                yield from misfits(item, model.openapi_types[names[key]], f"{path}.{key}")
            else:
                yield f"{path}.{key} is no field of {kind}"


@pytest.mark.parametrize("situation", situations.SITUATIONS)
def test_every_field_is_known_to_kubernetes(situation: str) -> None:
    for built in situations.objects_of(situations.SITUATIONS[situation]):
        kind = KINDS[built["kind"]].__name__
        assert list(misfits(built, kind, built["kind"])) == []


def test_a_misspelt_field_would_be_found() -> None:
    built = {"spec": {"template": {"spec": {"containers": [{"nmae": "engine"}]}}}}
    assert list(misfits(built, "V1Deployment", "Deployment")) == [
        "Deployment.spec.template.spec.containers[0].nmae is no field of V1Container"
    ]
