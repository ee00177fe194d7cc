"""The simulator takes and refuses what vLLM's own parser does."""

from __future__ import annotations

import json

import pytest

from specdecode_sim import arguments

START_TABLE = [[1, 63, 7], [64, 64, 0]]


def speculative(**changes: object) -> str:
    config = {
        "method": "eagle3",
        "model": "org/head",
        "num_speculative_tokens": 7,
        "num_speculative_tokens_per_batch_size": START_TABLE,
        **changes,
    }
    return f"--speculative-config={json.dumps(config)}"


def parse(*words: str, **environment: str) -> arguments.Options:
    return arguments.parse(["org/model", *words], environment)


def test_what_the_operator_renders_is_understood() -> None:
    options = parse(
        "--served-model-name=chat",
        "--max-model-len=512",
        "--port=8001",
        "--max-num-seqs=64",
        speculative(),
        '--compilation-config={"cudagraph_mode":"PIECEWISE"}',
        "--scheduler-cls=specdecode_vllm.scheduler.make_scheduler",
        "--shutdown-timeout=120",
    )
    assert (options.served_name, options.port, options.max_requests) == ("chat", 8001, 64)
    assert options.graphs == "PIECEWISE"
    assert options.has_plugin
    assert options.speculation is not None
    assert options.speculation.envelope == {0, 7}
    assert options.ignored == ()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--max_num_seqs=8",), id="underscores"),
        pytest.param(("--max-num-seqs", "8"), id="value apart"),
        pytest.param(("--max-num-seq=8",), id="an unambiguous prefix"),
    ],
)
def test_a_flag_may_be_written_as(words: tuple[str, ...]) -> None:
    assert parse(*words).max_requests == 8


def test_short_forms_are_known() -> None:
    options = parse("-sc", speculative().partition("=")[2], "-tp", "2", "-O3")
    assert options.speculation is not None
    assert options.ignored == ("-tp", "--optimization-level")


def test_flags_without_meaning_here_are_taken_and_named() -> None:
    options = parse("--enable-prefix-caching", "--dtype=float32", "--attention-config.backend=X")
    assert options.ignored == ("--enable-prefix-caching", "--dtype", "--attention-config")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_each_flag_acted_by_is_one_of_vllms(version: str) -> None:
    names = {names[0] for names in arguments.read_flags(version)}
    assert arguments._settings().keys() <= names


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--max-num-sequences=8",), id="unknown flag"),
        pytest.param(("--max-num-seqs=eight",), id="no number"),
        pytest.param(("--max-num=8",), id="ambiguous prefix"),
        pytest.param(("--speculative-config={",), id="bad JSON"),
        pytest.param(("another",), id="a word too many"),
    ],
)
def test_the_parser_ends_with_2_at(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    assert "vllm serve: error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param((speculative(method="magic"),), "'magic' is not known", id="method"),
        pytest.param((speculative(num_speculative_tokens=0),), "from 1", id="K"),
        pytest.param(
            (speculative(enable_adaptive_verification=True), "--enforce-eager"),
            "needs a FULL kind",
            id="adaptive verification without graphs",
        ),
        pytest.param(
            ('--compilation-config={"cudagraph_mode":"MOST"}',), "not one of", id="graphs"
        ),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(arguments.ConfigRefusedError, match=sentence):
        parse(*words)
