"""Every object of each situation, as YAML that a person has read.

After a change that is meant: `UPDATE_GOLDEN=1 pytest tests/unit/manifests`, then read the diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api import metadata
from tests.unit.manifests import situations

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
SAME = "(the template below, as JSON)"


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """Write objects as YAML; a Deployment's stored template is not shown twice."""
    shown = json.loads(json.dumps(objects))
    for built in shown:
        annotations = built["metadata"].get("annotations", {})
        if metadata.ANNOTATION_TEMPLATE in annotations:
            assert (
                json.loads(annotations[metadata.ANNOTATION_TEMPLATE]) == built["spec"]["template"]
            )
            annotations[metadata.ANNOTATION_TEMPLATE] = SAME
    return yaml.safe_dump_all(shown, sort_keys=False, width=100)


@pytest.mark.parametrize("situation", situations.SITUATIONS)
def test_the_objects_are_the_ones_that_were_read_and_approved(situation: str) -> None:
    path = GOLDEN / f"{situation}.yaml"
    text = as_yaml(situations.objects_of(situations.SITUATIONS[situation]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_every_golden_file_belongs_to_a_situation() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(situations.SITUATIONS)


@pytest.mark.parametrize("situation", situations.SITUATIONS)
def test_the_same_inputs_give_the_same_objects(situation: str) -> None:
    inputs = situations.SITUATIONS[situation]
    again = type(inputs).model_validate(inputs.to_json())
    assert as_yaml(situations.objects_of(again)) == as_yaml(situations.objects_of(inputs))
