"""The command as a person and as a script use it."""

from __future__ import annotations

import io
import json
import sys
import tracemalloc
from pathlib import Path

import pytest

from specdecode_operator.cli import main

CASES = Path(__file__).parents[2] / "data" / "cases"
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def run(*arguments: str | Path) -> int:
    return main.main([str(argument) for argument in arguments])


def test_a_case_file_is_answered_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classify", CASES / "01.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "class": "illegal-memory-access",
        "action": "SpecOff",
        "line": FAULT,
    }


def test_no_line_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classify", CASES / "49.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["line"] is None


def test_a_log_in_hand_is_answered_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff\xfe broken bytes\nERROR 08-14 03:12:30 [x.py:1] " + FAULT.encode())
    assert run("classify", "--log", log, "--exit-code", "0", "--speculation-off") == 0
    told = capsys.readouterr().out
    assert "illegal-memory-access" in told
    assert "Report" in told
    assert FAULT in told


def test_a_log_may_come_from_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FAULT.encode())))
    assert run("classify", "--log", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["action"] == "SpecOff"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["classify"], "give either a case file or --log FILE"),
        (["classify", "a.yaml", "--log", "b.log"], "give either a case file or --log FILE"),
        (["classify", "/nowhere/a.yaml"], "/nowhere/a.yaml: No such file or directory"),
        (["classify", "--log", "/nowhere/b.log"], "/nowhere/b.log: No such file or directory"),
        (["classify", "/"], "/: Is a directory"),
    ],
)
def test_a_wrong_call_is_told_without_a_traceback(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    assert said in capsys.readouterr().err


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run("guess")
    assert exit_info.value.code == 2
    assert "classify" in capsys.readouterr().err


def test_under_kubectl_the_command_is_called_kubectl_specdecode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/kubectl-specdecode"])
    assert main.build_parser().prog == "kubectl specdecode"


def test_a_large_log_is_never_held_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatter = (
        "(APIServer pid=1) INFO 08-14 03:12:18 [loggers.py:123] Engine 000: "
        'Avg generation throughput: 3845.4 tokens/s\nINFO: 10.42.1.26:46986 - "POST /v1" 200 OK\n'
    )
    log = tmp_path / "engine.log"
    with log.open("w") as file:
        for _ in range(100):
            file.write(chatter * 1000)  # 16 MB
        file.write(FAULT)
    tracemalloc.start()
    try:
        assert run("classify", "--log", log, "--json") == 0
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert json.loads(capsys.readouterr().out)["class"] == "illegal-memory-access"
    assert peak_bytes < 8 * 2**20
