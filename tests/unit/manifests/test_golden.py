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
    shown = []
    for built in objects:
        annotations = built["metadata"].get("annotations", {})
        stored = annotations.get(metadata.ANNOTATION_TEMPLATE)
        if stored is not None:
            assert json.loads(stored) == built["spec"]["template"]
            annotations = {**annotations, metadata.ANNOTATION_TEMPLATE: SAME}
            built = {**built, "metadata": {**built["metadata"], "annotations": annotations}}
        shown.append(json.loads(json.dumps(built)))
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
