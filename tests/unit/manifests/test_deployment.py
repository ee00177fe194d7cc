"""A revision's Deployment, and the record in it that is read back and never made anew."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.domain import lever
from specdecode_operator.errors import InvalidSpecError
from specdecode_operator.manifests import deployment
from tests.unit.manifests import situations
from tests.unit.manifests.builders import (
    DRAFT_MODEL,
    KEY,
    UID,
    deployment_of,
    inputs_of,
    template_of,
)

LIVE = inputs_of(speculation=DRAFT_MODEL)


def stored(built: dict[str, Any]) -> dict[str, Any]:
    """Return a Deployment as the API server holds it: with its own fields and defaults."""
    raw = copy.deepcopy(built)
    raw["metadata"] |= {"creationTimestamp": "2026-11-05T12:00:00Z", "resourceVersion": "7"}
    raw["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    raw["status"] = {"replicas": 2}
    return raw


def test_it_is_named_and_selected_by_its_revision() -> None:
    built = deployment_of(LIVE)
    revision = lever.revision_hash(LIVE)
    selector = built["spec"]["selector"]["matchLabels"]
    assert built["metadata"]["name"] == f"chat-{revision}"
    assert selector == {"specdecode.io/deployment": "chat", "specdecode.io/revision": revision}
    assert selector.items() <= built["spec"]["template"]["metadata"]["labels"].items()


def test_it_goes_with_its_owner_and_asks_for_no_right_to_finalizers() -> None:
    (reference,) = deployment_of(LIVE)["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"], reference["uid"]) == (metadata.KIND, "chat", UID)
    assert (reference["controller"], reference["blockOwnerDeletion"]) == (True, False)


@pytest.mark.parametrize("startup_timeout", ["1s", "30m", "2h"])
def test_its_progress_deadline_lies_beyond_the_start(startup_timeout: str) -> None:
    built = deployment_of(inputs_of(engine={"startupTimeout": startup_timeout}))
    probe = built["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    longest = probe["periodSeconds"] * probe["failureThreshold"]
    assert built["spec"]["progressDeadlineSeconds"] > longest


@pytest.mark.parametrize("situation", situations.SITUATIONS)
def test_what_was_recorded_is_what_is_read_back(situation: str) -> None:
    inputs = situations.SITUATIONS[situation]
    seen = deployment.read_deployment(stored(deployment_of(inputs, replicas=3)))
    assert seen is not None
    assert seen.revision == lever.revision_hash(inputs)
    assert seen.inputs == inputs
    assert seen.template == template_of(inputs)
    assert seen.replicas == 3
    assert seen.created_at == datetime(2026, 11, 5, 12, 0, tzinfo=UTC)


def test_a_newer_operator_builds_the_same_deployment_from_the_record() -> None:
    first = deployment_of(LIVE)
    seen = deployment.read_deployment(stored(first))
    assert seen is not None
    again = deployment.build_deployment(
        KEY, UID, revision=seen.revision, inputs=seen.inputs, template=seen.template, replicas=2
    )
    assert again == first
    assert again["metadata"]["annotations"][metadata.ANNOTATION_RENDERED_BY] == "0.1.0"


@pytest.mark.parametrize(
    ("situation", "annotation", "value"),
    [
        ("no inputs", metadata.ANNOTATION_INPUTS, None),
        ("torn inputs", metadata.ANNOTATION_INPUTS, '{"model": {"na'),
        ("inputs of another shape", metadata.ANNOTATION_INPUTS, '{"model": 7}'),
        ("no template", metadata.ANNOTATION_TEMPLATE, None),
        ("torn template", metadata.ANNOTATION_TEMPLATE, "{"),
        ("a template that is no template", metadata.ANNOTATION_TEMPLATE, "[1, 2]"),
        ("an empty template", metadata.ANNOTATION_TEMPLATE, "{}"),
    ],
)
def test_a_damaged_record_is_no_revision(
    situation: str, annotation: str, value: str | None
) -> None:
    raw = stored(deployment_of(LIVE))
    raw["metadata"]["annotations"].pop(annotation)
    if value is not None:
        raw["metadata"]["annotations"][annotation] = value
    assert deployment.read_deployment(raw) is None, situation


def test_somebody_elses_deployment_is_no_revision() -> None:
    raw = {"metadata": {"name": "web", "creationTimestamp": "2026-11-05T12:00:00Z"}, "spec": {}}
    assert deployment.read_deployment(raw) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a" * 53, "has 53 characters: use at most 52"),
        ("chat.v2", "no dots"),
        ("2chat", "a letter first"),
        ("chat-", "no hyphen last"),
    ],
)
def test_a_name_that_labels_or_services_cannot_carry_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(InvalidSpecError, match=sentence):
        deployment.render_template(name, LIVE, revision="0123456789", rendered_by="0.1.0")


def test_the_longest_name_still_fits_with_its_revision() -> None:
    name = "a" * 52
    deployment.render_template(name, LIVE, revision="0123456789", rendered_by="0.1.0")
    assert len(metadata.revision_name(name, "0123456789")) == 63


def test_a_record_that_the_api_server_would_not_store_is_refused_in_words() -> None:
    inputs = inputs_of(engine={"env": [{"name": f"V{i}", "value": "x" * 4000} for i in range(40)]})
    with pytest.raises(InvalidSpecError, match="shorten extraArgs, env or podTemplate"):
        template_of(inputs)


def test_the_stored_template_is_the_one_that_runs() -> None:
    built = deployment_of(LIVE)
    record = json.loads(built["metadata"]["annotations"][metadata.ANNOTATION_TEMPLATE])
    assert record == built["spec"]["template"]
