"""What each engine can do, as its sources say."""

from __future__ import annotations

import dataclasses
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
        assert engine.capabilities(version, method) == engine.NOTHING
        assert not any(
            value for value in dataclasses.asdict(engine.capabilities(version, method)).values()
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


# --------------------------------------------------------------------------- the features


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """A table of our own, so that each origin occurs."""
    everything = {feature.value: "upstream" for feature in engine.Feature}
    table = {
        "0.33.0": {**everything, "uniformBatchGraphs": "absent", "truncatedDrafts": "absent"},
        "0.33.2": {**everything, "uniformBatchGraphs": "ours"},
        "0.34.0": dict.fromkeys(everything, "absent"),
        "0.35.1": everything,
    }
    monkeypatch.setattr(engine.features, "VERSIONS", table)
    return table


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.33.0", "0.33.0"),
        ("0.33.1", "0.33.0"),
        ("0.33.2rc1", "0.33.2"),
        ("0.33.10", "0.33.2"),
        ("0.35.0", None),
        ("0.36.0", None),
    ],
)
def test_a_patch_release_has_what_the_one_before_it_has(
    versions: dict[str, dict[str, str]], version: str, line: str | None
) -> None:
    expected = engine.capabilities(line, Method.EAGLE3)
    assert engine.capabilities(version, Method.EAGLE3) == expected
    assert expected.known is (line is not None)


@pytest.mark.usefixtures("versions")
def test_what_is_absent_is_not_used() -> None:
    can = engine.capabilities("0.34.0", Method.EAGLE3)
    assert (can.live_table, can.adaptive_verification, can.adaptive_graphs) == (False,) * 3


@pytest.mark.usefixtures("versions")
def test_a_drafter_of_blocks_needs_an_engine_that_cuts_them() -> None:
    assert not engine.capabilities("0.33.0", Method.DSPARK).live_table
    assert engine.capabilities("0.33.0", Method.DFLASH).live_table
    assert engine.capabilities("0.33.2", Method.DSPARK).live_table


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("image", "ours"),
    [
        ("registry/specdecode-vllm:0.33.2", True),
        ("specdecode-vllm:0.33.2", True),
        ("vllm/vllm-openai:v0.33.2", False),
        ("specdecode-vllm/other:0.33.2", False),
    ],
)
def test_what_is_ours_is_there_in_our_image_only(image: str, ours: bool) -> None:
    can = engine.capabilities_of(Engine(image=image), Method.EAGLE3)
    assert can.adaptive_graphs is ours


CRASHES = {
    "a version without the fix": ({}, {}, True),
    "graphs that vLLM makes mixed": ({}, {"cudagraphMode": "FULL"}, True),
    "a version that is not known": ({"version": "1.0.0"}, {}, True),
    "no version at all": ({"version": None, "image": "vllm:latest"}, {}, True),
    "graphs of the decode only": ({}, {"cudagraphMode": "FULL_DECODE_ONLY"}, False),
    "verification not adaptive": ({}, {"adaptiveVerification": "Disabled"}, False),
    "our image with our fix": ({"version": None, "image": "specdecode-vllm:0.33.2"}, {}, False),
    "another image without it": ({"version": None, "image": "vllm:0.33.2"}, {}, True),
    "a version with the fix": ({"version": "0.35.1"}, {}, False),
}


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("situation", CRASHES)
def test_adaptive_verification_beside_mixed_graphs_is_known_to_crash_with(situation: str) -> None:
    changed, speculation, crashes = CRASHES[situation]
    inputs = an_input(changed, {"adaptiveVerification": "Enabled", **speculation})
    assert inputs.speculation is not None
    sentence = engine.find_crash(inputs.engine, inputs.speculation)
    assert (sentence is not None) is crashes
    if sentence:
        assert "FULL_DECODE_ONLY, or spec.speculation.adaptiveVerification to Disabled" in sentence


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
