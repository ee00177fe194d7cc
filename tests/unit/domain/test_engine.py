"""What each engine can do, as its sources say."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Engine, Method, RevisionInputs
from specdecode_operator.domain import engine

ALL = {method.value for method in Method}


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1", "0.32.0+cpu", "0.33.1rc2.dev5"])
def test_a_known_version_follows_a_table_with_every_method_but_suffix(version: str) -> None:
    live = {m.value for m in Method if engine.capabilities(version, m).live_table}
    assert live == ALL - {"suffix"}


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_adaptive_verification_is_for_methods_with_a_model_on_the_v2_runner(version: str) -> None:
    able = {m.value for m in Method if engine.capabilities(version, m).adaptive_verification}
    assert able == ALL - {"ngram", "suffix"}


def test_vllm_chooses_the_v2_runner_for_every_method_but_suffix() -> None:
    chosen = {m.value for m in Method if engine.capabilities("0.33.0", m).runner_v2_default}
    assert chosen == ALL - {"suffix"}


@pytest.mark.parametrize("version", [None, "", "latest", "0.31.9", "0.34.0", "1.33.0", "0.330.0"])
def test_nothing_is_promised_for_a_version_that_is_not_known(version: str | None) -> None:
    for method in Method:
        assert engine.capabilities(version, method) == engine.Capabilities(
            known=False, live_table=False, adaptive_verification=False, runner_v2_default=False
        )


def test_what_a_user_should_know_of_a_method_is_a_note() -> None:
    (note,) = engine.capabilities("0.33.0", Method.DRAFT_MODEL).notes
    assert "a smaller K saves verification only" in note
    assert engine.capabilities("0.33.0", Method.EAGLE3).notes == ()


LIVE = {
    "a known version": ({}, {}, True),
    "the version told by the image's tag": (
        {"version": None, "image": "registry:5000/specdecode-vllm:0.33.0-cu13"},
        {},
        True,
    ),
    "static K by the user's choice": ({"liveTable": "Off"}, {}, False),
    "a method that follows no table": ({}, {"method": "suffix"}, False),
    "a version that is not known": ({"version": "0.40.0"}, {}, False),
    "a tag that tells no version": ({"version": None, "image": "vllm:latest"}, {}, False),
}


@pytest.mark.parametrize("situation", LIVE)
def test_a_start_up_table_is_given_only_where_the_engine_follows_it(situation: str) -> None:
    changed, speculation, live = LIVE[situation]
    assert engine.has_live_table(an_input(changed, speculation)) is live


def test_without_speculation_there_is_no_table() -> None:
    assert engine.has_live_table(an_input({}, None)) is False


def an_input(changed: dict[str, Any], speculation: dict[str, Any] | None) -> RevisionInputs:
    draft = {"method": "eagle3", "draftModel": "org/draft", "numSpeculativeTokens": 3}
    return RevisionInputs.model_validate(
        {
            "model": {"name": "org/model"},
            "engine": {"version": "0.33.0", **changed},
            "speculation": None if speculation is None else {**draft, **speculation},
        }
    )


VERSIONS = {
    "the field": (Engine(version="0.33.0", image="vllm:0.32.0"), "0.33.0"),
    "the tag": (Engine(image="registry.example:5000/vllm:0.33.0"), "0.33.0"),
    "a tag with more around it": (Engine(image="vllm:v0.33.0-cu13-arm64"), "0.33.0"),
    "a port and no tag": (Engine(image="registry.example:5000/vllm"), None),
    "a digest": (Engine(image="vllm@sha256:0a1b2c"), None),
    "a floating tag": (Engine(image="vllm:latest"), None),
    "no image": (Engine(), None),
}


@pytest.mark.parametrize("situation", VERSIONS)
def test_the_version_is_read_from(situation: str) -> None:
    given, version = VERSIONS[situation]
    assert engine.engine_version_of(given) == version
