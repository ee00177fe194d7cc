"""What CEL cannot see is refused in Python, with vLLM's own parser rules."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api import refused
from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.domain import refusal

SIMULATOR = Path(__file__).parents[3] / "vllm-image" / "simulator" / "specdecode_sim"
FLAGS = json.loads((SIMULATOR / "vllm_flags.json").read_text("utf-8"))

SPECULATION = {"method": "eagle3", "draftModel": "org/draft", "numSpeculativeTokens": 7}


def a_spec(
    *, engine: dict[str, Any] | None = None, speculation: dict[str, Any] | None = None
) -> Spec:
    return Spec.model_validate(
        {
            "model": {"name": "org/model"},
            "engine": {"version": "0.33.0", **(engine or {})},
            "speculation": None if speculation is None else {**SPECULATION, **speculation},
        }
    )


def with_arguments(*arguments: str) -> Spec:
    return a_spec(engine={"extraArgs": list(arguments)})


REFUSED_ARGUMENTS = {
    "in full": ("--max-num-seqs", "--max-num-seqs: set spec.engine.maxNumSeqs instead"),
    "with its value": ("--max-num-seqs=64", "--max-num-seqs: set"),
    "with underscores": ("--max_num_seqs", "--max-num-seqs: set"),
    "with both": ("--max_num-seqs=64", "--max-num-seqs: set"),
    "as an unambiguous prefix": ("--max-num-s", "--max-num-seqs: set"),
    "as a prefix with underscores and a value": ("--served_mod=x", "--served-model-name: set"),
    "as a prefix that may be ambiguous": ("--max-num", "--max-num-seqs: set"),
    "as dotted JSON": ("--speculative-config.method", "--speculative-config: set"),
    "as dotted JSON with a value": ("--speculative_config.method=x", "--speculative-config: set"),
    "as dotted JSON of a prefix": ("--compil.cudagraph_mode=NONE", "--compilation-config: set"),
    "as a list element of dotted JSON": ("-cc.cudagraph_capture_sizes+=8", "--compilation-config"),
    "as the short form": ("-tp", "--tensor-parallel-size: set"),
    "as the short form with a value": ("-tp=2", "--tensor-parallel-size: set"),
    "as a prefix of the short form": ("-s", "--speculative-config: set"),
    "as the short form with dotted JSON": ("-sc.method=ngram", "--speculative-config: set"),
    "as a digit glued to the short form": ("-n2", "--nnodes: leave it out, an engine runs on one"),
    "as the optimization level": ("-O3", "--optimization-level: set spec.speculation.cudagraph"),
    "as the optimization level with =": ("-O=0", "--optimization-level: set"),
    "as a file that sets anything": ("--config", "--config: leave it out, a file can set any flag"),
    "as data parallelism": ("-dp", "--data-parallel-size: leave it out, an engine runs without"),
    "as disaggregation": ("--kv_transfer_config", "leave it out, prefill and decode are not split"),
    "as a flag and its value in one": ("--seed 1", "holds a flag and its value: write them as two"),
    "as an end of flags": ("--", "after which vLLM takes no more flags: leave it out"),
    "as a bare word at the beginning": ("org/other-model", "is no flag: begin with one"),
}


@pytest.mark.parametrize("situation", REFUSED_ARGUMENTS)
def test_an_argument_is_refused_with_what_to_do_instead(situation: str) -> None:
    argument, sentence = REFUSED_ARGUMENTS[situation]
    (problem,) = refusal.find_refusals(with_arguments(argument))
    assert sentence in problem
    assert problem.startswith("spec.engine.extraArgs[0] ")


ALLOWED_ARGUMENTS = {
    "a flag of the user's": ["--enable-prefix-caching"],
    "a flag with a value": ["--dtype", "float32"],
    "a negative value": ["--max-logprobs", "-1"],
    "a negative fraction": ["--seed", "-0.5"],
    "a value with spaces": ['--hf-overrides={"a": 1}', "--chat-template", "You are a helper"],
    "a value that names a managed flag": ["--generation-config=--port"],
    "a flag that begins like a managed one": ["--model-impl=auto", "--config-format=hf"],
    "dotted JSON of another flag": ["--attention-config.backend=FLASH", "-ac.backend=FLASH"],
    "short forms of other flags": ["-q", "fp8", "-ep", "-pp", "2", "-dcp", "2", "-asc", "1"],
    "what switches a feature off": ["--no-enable-prefix-caching", "--disable-chunked-mm-input"],
    "LoRA without adaptive verification": ["--enable-lora"],
}


@pytest.mark.parametrize("situation", ALLOWED_ARGUMENTS)
def test_an_argument_of_the_users_own_passes(situation: str) -> None:
    assert refusal.find_refusals(with_arguments(*ALLOWED_ARGUMENTS[situation])) == ()


def test_every_problem_is_named_with_its_place() -> None:
    spec = a_spec(
        engine={
            "extraArgs": ["--seed", "1", "--api-key=sk-secret"],
            "env": [{"name": "A", "value": "1"}, {"name": "VLLM_PLUGINS", "value": "sk-secret"}],
        }
    )
    problems = refusal.find_refusals(spec)
    assert [p.partition(":")[0] for p in problems] == [
        "spec.engine.extraArgs[2] gives --api-key",
        "spec.engine.env[1] sets VLLM_PLUGINS",
    ]
    assert "sk-secret" not in " ".join(problems)


# ------------------------------------------------------------ against argparse itself


class _Remember(argparse.Action):
    """Keeps the option's full name, however it was spelled."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore
        namespace.found = option_string


class _Ambiguous(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise _Ambiguous(message)


def a_parser(version: str) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False)
    for number, options in enumerate(FLAGS[version]):
        parser.add_argument(*options, dest=f"option{number}", action=_Remember, nargs="?")
    return parser


PARSERS = {version: a_parser(version) for version in FLAGS}
REFUSED = set(refused.REFUSED_FLAGS) | {
    short for short, flag in refused.SHORT_FLAGS.items() if flag in refused.REFUSED_FLAGS
}


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, str, str]:
    """A version, what a user wrote, and what vLLM hands over to argparse."""
    version = draw(st.sampled_from(sorted(FLAGS)))
    flag = draw(st.sampled_from([option for options in FLAGS[version] for option in options]))
    dashes = 2 if flag.startswith("--") else 1
    cut = flag[: draw(st.integers(dashes + 1, len(flag)))]
    end = draw(st.sampled_from(["", "=1", ".a", ".a.b=1", "=a.b"]))
    written = cut[:dashes] + "".join(
        draw(st.sampled_from("_-")) if letter == "-" and dashes == 2 else letter
        for letter in cut[dashes:]
    )
    return version, written + end, cut


@given(spellings())
def test_a_flag_is_refused_exactly_when_argparse_would_take_it(
    spelling: tuple[str, str, str],
) -> None:
    version, written, handed_over = spelling
    try:
        found, _ = PARSERS[version].parse_known_args([handed_over])
    except _Ambiguous:
        return  # vLLM refuses it itself
    resolved = refusal.resolve_flag(written, refused.REFUSED_FLAGS)
    assert (resolved is not None) == (found.found in REFUSED)


@pytest.mark.parametrize("version", sorted(FLAGS))
def test_every_short_form_stands_for_the_flag_that_vllm_says(version: str) -> None:
    known = {option: options for options in FLAGS[version] for option in options}
    for short, flag in refused.SHORT_FLAGS.items():
        if short != "-O":  # vLLM rewrites it before it parses
            assert flag in known[short]


def test_no_refused_flag_is_misspelled() -> None:
    options = {option for version in FLAGS.values() for names in version for option in names}
    known = (
        refused.REFUSED_FLAGS.keys() | refused.FLAGS_AGAINST_ADAPTIVE_VERIFICATION | {refused.EAGER}
    )
    assert known - options == {"--omni"}  # read from the command line before it is parsed


# ------------------------------------------------------------------- variables, timeouts


@pytest.mark.parametrize(
    "name",
    [*refused.REFUSED_VARIABLES, "SPECDECODE_TABLES", "SPECDECODE_NEW", "VLLM_DP_SIZE"],
)
def test_a_managed_variable_is_refused(name: str) -> None:
    (problem,) = refusal.find_refusals(a_spec(engine={"env": [{"name": name, "value": "1"}]}))
    assert f"spec.engine.env[0] sets {name}: leave it out" in problem


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "HF_HOME", "PYTHONPATH", "vllm_plugins"])
def test_other_variables_pass(name: str) -> None:
    assert not refusal.find_refusals(a_spec(engine={"env": [{"name": name, "value": "1"}]}))


@pytest.mark.parametrize("field", ["startupTimeout", "drainTimeout"])
def test_a_timeout_beyond_a_week_is_refused(field: str) -> None:
    (problem,) = refusal.find_refusals(a_spec(engine={field: "8d"}))
    assert problem == f"spec.engine.{field} is 8d: give at most 7d."


# ------------------------------------------------------------------------- speculation


def test_a_table_that_breaks_an_invariant_is_refused() -> None:
    rows = [{"minBatch": 1, "k": 7}, {"minBatch": 4, "k": 3}]
    (problem,) = refusal.find_refusals(a_spec(speculation={"kTable": rows}))
    assert "spec.speculation.kTable: a row starts at batch 4: rows start at 1 or 2^n + 1" in problem


AV = {"adaptiveVerification": "Enabled", "cudagraphMode": "FULL_DECODE_ONLY"}

AV_REFUSED = {
    "no logits to weigh": ({}, {"method": "ngram"}, "for the method ngram"),
    "a method of the V1 runner": ({}, {"method": "suffix"}, "for the method suffix"),
    "LoRA": ({"extraArgs": ["--enable-lora"]}, {}, "gives --enable-lora"),
    "LoRA in another spelling": ({"extraArgs": ["--enable_lora"]}, {}, "gives --enable-lora"),
    "pipeline parallelism": ({"extraArgs": ["-pp", "2"]}, {}, "gives --pipeline-parallel-size"),
}


@pytest.mark.parametrize("situation", AV_REFUSED)
def test_adaptive_verification_is_refused_where_the_engine_would_refuse_it(situation: str) -> None:
    engine, speculation, sentence = AV_REFUSED[situation]
    (problem,) = refusal.find_refusals(a_spec(engine=engine, speculation={**AV, **speculation}))
    assert sentence in problem
    assert "set spec.speculation.adaptiveVerification to Disabled" in problem


@pytest.mark.parametrize("argument", ["--enforce-eager", "--enforce_eager", "--enforce"])
def test_graphs_are_refused_where_the_engine_would_record_none(argument: str) -> None:
    engine = {"extraArgs": ["--seed=1", argument]}
    (problem,) = refusal.find_refusals(a_spec(engine=engine, speculation={}))
    assert problem == (
        "spec.engine.extraArgs[1] gives --enforce-eager, which records no CUDA graphs: leave it "
        "out, or set spec.speculation.cudagraphMode to NONE."
    )
    assert not refusal.find_refusals(a_spec(engine=engine, speculation={"cudagraphMode": "NONE"}))
    assert not refusal.find_refusals(a_spec(engine=engine))


def test_adaptive_verification_with_tensor_parallelism_passes() -> None:
    spec = a_spec(engine={"tensorParallelSize": 2}, speculation={**AV, "method": "dspark"})
    assert refusal.find_refusals(spec) == ()


def test_an_unknown_version_is_not_judged_by_what_other_versions_do() -> None:
    spec = a_spec(engine={"version": "0.40.0"}, speculation={**AV, "method": "ngram"})
    assert refusal.find_refusals(spec) == ()


def test_a_combination_that_is_known_to_crash_is_refused_whatever_the_version() -> None:
    for version in ("0.33.0", "0.40.0"):
        speculation = {"adaptiveVerification": "Enabled", "method": "dspark"}
        (problem,) = refusal.find_refusals(
            a_spec(engine={"version": version}, speculation=speculation)
        )
        assert problem.startswith(f"vLLM {version} is not known to survive adaptive verification")
