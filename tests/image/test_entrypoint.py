"""The image's entrypoint: a clean metrics folder, then the engine in its own process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[2] / "vllm-image" / "entrypoint"
ENGINE = """#!/bin/sh
printf '{"pid": %s, "folder": "%s", "arguments": "%s"}' $$ "$PROMETHEUS_MULTIPROC_DIR" "$*"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    engine = tmp_path / "bin" / "vllm"
    engine.parent.mkdir()
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    return {
        "PATH": f"{engine.parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "SPECDECODE_METRICS_DIR": str(tmp_path / "run" / "metrics"),
    }


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(ENTRYPOINT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_engine_is_the_main_process_and_gets_the_arguments(
    environment: dict[str, str],
) -> None:
    process = start(environment, "org/model", "--port=8000")
    told = json.loads(process.communicate(timeout=30)[0])
    assert told == {
        "pid": process.pid,
        "folder": environment["SPECDECODE_METRICS_DIR"],
        "arguments": "serve org/model --port=8000",
    }


def test_counters_of_an_engine_that_ended_are_gone(environment: dict[str, str]) -> None:
    folder = Path(environment["SPECDECODE_METRICS_DIR"])
    folder.mkdir(parents=True)
    (folder / "counter_17.db").write_text("old")
    start(environment).communicate(timeout=30)
    assert list(folder.iterdir()) == []


def test_two_engines_on_one_machine_do_not_share_a_folder(environment: dict[str, str]) -> None:
    del environment["SPECDECODE_METRICS_DIR"]
    folders = {json.loads(start(environment).communicate(timeout=30)[0])["folder"] for _ in "12"}
    assert len(folders) == 2


@pytest.mark.parametrize("folder", ["relative", "/", "/tmp"])
def test_a_folder_that_may_hold_other_things_is_refused(
    environment: dict[str, str], folder: str
) -> None:
    process = start({**environment, "SPECDECODE_METRICS_DIR": folder})
    _, message = process.communicate(timeout=30)
    assert process.returncode == 64
    assert "SPECDECODE_METRICS_DIR must be" in message


def test_the_rust_front_end_is_refused_with_a_termination_message(
    environment: dict[str, str], tmp_path: Path
) -> None:
    message = tmp_path / "termination-log"
    message.touch()
    settings = {"VLLM_USE_RUST_FRONTEND": "1", "SPECDECODE_TERMINATION_LOG": str(message)}
    process = start({**environment, **settings})
    _, log = process.communicate(timeout=30)
    told = json.loads(message.read_text())
    assert process.returncode == 64
    assert (told["schema"], told["cause"]) == (1, "config-refused")
    assert told["line"] == log.strip()
    assert "unset it" in told["line"]


def test_a_refusal_is_valid_json_whatever_it_tells(
    environment: dict[str, str], tmp_path: Path
) -> None:
    message = tmp_path / "termination-log"
    message.touch()
    settings = {
        "SPECDECODE_METRICS_DIR": 'a "quoted"\\\n\tfolder',
        "SPECDECODE_TERMINATION_LOG": str(message),
    }
    start({**environment, **settings}).communicate(timeout=30)
    assert "quotedfolder" in json.loads(message.read_text())["line"].replace(" ", "")


def test_without_the_rust_front_end_it_starts(environment: dict[str, str]) -> None:
    process = start({**environment, "VLLM_USE_RUST_FRONTEND": "0"})
    assert json.loads(process.communicate(timeout=30)[0])["pid"] == process.pid
