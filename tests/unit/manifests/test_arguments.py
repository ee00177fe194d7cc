"""The arguments of `vllm serve`: what is asked for is there, what is not is absent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.errors import InvalidSpecError
from specdecode_operator.manifests.arguments import build_arguments
from tests.unit.manifests.builders import DRAFT_MODEL, inputs_of


def flag(arguments: list[str], name: str) -> str | None:
    """Return the value of a `--name=value` argument, None where it is absent."""
    found = [a.removeprefix(f"--{name}=") for a in arguments if a.startswith(f"--{name}=")]
    assert len(found) <= 1, f"--{name} is given twice"
    return found[0] if found else None


def speculative(**inputs: Any) -> dict[str, Any] | None:
    text = flag(build_arguments(inputs_of(**inputs)), "speculative-config")
    return None if text is None else json.loads(text)


def test_the_model_comes_first_as_vllm_serve_wants_it() -> None:
    assert build_arguments(inputs_of())[0] == "org/model"


def test_flags_that_were_not_asked_for_are_absent() -> None:
    arguments = build_arguments(inputs_of())
    for name in ("served-model-name", "revision", "max-model-len"):
        assert flag(arguments, name) is None


@pytest.mark.parametrize(
    ("inputs", "name", "value"),
    [
        ({"model": {"servedName": "chat"}}, "served-model-name", "chat"),
        ({"model": {"revision": "v1.0"}}, "revision", "v1.0"),
        ({"model": {"maxModelLen": 4096}}, "max-model-len", "4096"),
        ({"engine": {"tensorParallelSize": 4}}, "tensor-parallel-size", "4"),
        ({"engine": {"maxNumSeqs": 64}}, "max-num-seqs", "64"),
        ({"engine": {"drainTimeout": "1m30s"}}, "shutdown-timeout", "90"),
        ({"engine": {"drainTimeout": "1500ms"}}, "shutdown-timeout", "2"),
        ({}, "host", "0.0.0.0"),
        ({}, "port", "8000"),
        ({}, "scheduler-cls", "specdecode_vllm.scheduler.make_scheduler"),
    ],
)
def test_a_field_becomes_its_flag(inputs: dict[str, Any], name: str, value: str) -> None:
    assert flag(build_arguments(inputs_of(**inputs)), name) == value


def test_a_live_table_names_every_k_of_the_envelope_at_the_top_rows() -> None:
    config = speculative(
        engine={"maxNumSeqs": 256}, speculation={**DRAFT_MODEL, "envelope": [1, 3]}
    )
    assert config == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 7,
        "num_speculative_tokens_per_batch_size": [
            [1, 253, 7],
            [254, 254, 3],
            [255, 255, 1],
            [256, 256, 0],
        ],
    }


@pytest.mark.parametrize(
    ("situation", "inputs"),
    [
        ("liveTable Off", {"engine": {"liveTable": "Off"}, "speculation": DRAFT_MODEL}),
        ("a proposer with a fixed K", {"speculation": {**DRAFT_MODEL, "method": "suffix"}}),
        (
            "an engine of unknown version",
            {"engine": {"image": "mine:latest"}, "speculation": DRAFT_MODEL},
        ),
    ],
)
def test_k_is_static_with(situation: str, inputs: dict[str, Any]) -> None:
    config = speculative(**inputs)
    assert config is not None, situation
    assert config["num_speculative_tokens"] == 7
    assert "num_speculative_tokens_per_batch_size" not in config


def test_a_method_without_a_drafter_names_no_model() -> None:
    config = speculative(speculation={"method": "ngram", "numSpeculativeTokens": 3})
    assert config is not None
    assert "model" not in config


def test_adaptive_verification_is_named_only_where_it_is_enabled() -> None:
    asked = speculative(speculation={**DRAFT_MODEL, "adaptiveVerification": "Enabled"})
    absent = speculative(speculation=DRAFT_MODEL)
    assert asked is not None
    assert asked["enable_adaptive_verification"] is True
    assert absent is not None
    assert "enable_adaptive_verification" not in absent


def test_speculation_off_leaves_the_scheduler_that_exports_steps_and_nothing_else() -> None:
    arguments = build_arguments(inputs_of())
    assert flag(arguments, "speculative-config") is None
    assert flag(arguments, "compilation-config") is None
    assert flag(arguments, "scheduler-cls") is not None


def test_graphs_can_be_off_beside_enforce_eager() -> None:
    arguments = build_arguments(
        inputs_of(
            engine={"extraArgs": ["--enforce-eager"]},
            speculation={**DRAFT_MODEL, "cudagraphMode": "NONE"},
        )
    )
    assert flag(arguments, "compilation-config") == '{"cudagraph_mode":"NONE"}'
    assert arguments[-1] == "--enforce-eager"


def test_the_users_arguments_come_last_and_in_their_order() -> None:
    extra = ["--dtype", "float32", "--enable-prefix-caching"]
    assert build_arguments(inputs_of(engine={"extraArgs": extra}))[-3:] == extra


@given(st.text(min_size=1, max_size=40))
def test_no_value_can_become_a_flag_of_its_own(text: str) -> None:
    arguments = build_arguments(inputs_of(model={"servedName": text, "revision": text}))
    plain = build_arguments(inputs_of(model={"servedName": "x", "revision": "x"}))
    assert [a.partition("=")[0] for a in arguments] == [a.partition("=")[0] for a in plain]
    assert flag(arguments, "served-model-name") == text


def test_a_model_name_that_vllm_would_read_as_a_flag_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.model\.name is '--config=/tmp/x'"):
        build_arguments(inputs_of(model={"name": "--config=/tmp/x"}))
