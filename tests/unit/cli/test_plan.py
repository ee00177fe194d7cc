"""`specdecode plan` as a person and as a script use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.cli import main

GOOD = """batch,k,tokens_per_second
1,off,100
1,1,140
1,5,180
64,off,2800
64,1,2500
64,5,1900
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.csv"
    path.write_text(GOOD)
    return path


def run(*arguments: str | Path) -> int:
    return main.main([str(argument) for argument in arguments])


def planned(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert run("plan", "--json", "--measurements", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_is_one_json_object_and_nothing_else(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, file)
    assert set(found) == {"rows", "by_batch", "speculation"}
    assert found["speculation"] == "on"
    assert [row[2] for row in found["rows"]] == [5, 1]
    assert found["rows"][0][0] == 1
    assert found["rows"][-1][1] == 64
    assert [one["batch"] for one in found["by_batch"]] == [1, 64]
    assert [one["choice"] for one in found["by_batch"]] == [5, "off"]
    assert [one["expected"] for one in found["by_batch"]] == [180, 2800]
    for one in found["by_batch"]:
        low, high = one["interval"]
        assert low < one["expected"] < high


def test_none_is_another_name_for_off_and_0_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_text("batch,k,tokens_per_second\n8,none,500\n8,0,400\n8,3,300\n")
    found = planned(capsys, path)
    assert found["by_batch"][0]["choice"] == "off"
    assert found["rows"] == [[1, 8, 0]]
    assert found["speculation"] == "off"


def test_without_a_k_there_are_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.csv"
    path.write_text("batch,k,tokens_per_second\n8,off,500\n")
    assert planned(capsys, path)["rows"] == []


def test_the_file_may_come_from_a_spreadsheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(
        b"\xef\xbb\xbf# my bench\r\nK , Batch,tokens_per_second,stderr,n\r\n"
        b'"3",8,"500.5",,\r\n\r\n OFF,8,400,4,2\r\n3,8,501.5,,1\r\n'
    )
    (one,) = planned(capsys, path)["by_batch"]
    assert one["choice"] == 3
    assert one["expected"] == 501


def test_a_column_that_is_not_used_is_named_beside_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_text("batch,k,tokens_per_second,std_err\n8,3,500,4\n")
    assert run("plan", "--json", "--measurements", path) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "std_err" in captured.err


@pytest.mark.parametrize(
    ("situation", "text", "said"),
    [
        ("empty", "", ":1: column 1: expected a header with batch, k, tokens_per_second"),
        ("a column missing", "batch,k\n1,2\n", ":1: column 2: expected a header with"),
        ("a column twice", "batch,k,k,tokens_per_second\n", ":1: column 3 (k): expected each name"),
        ("no rows", "batch,k,tokens_per_second\n", ":2: column 1 (batch): expected at least one"),
        (
            "no number",
            GOOD + "x,1,5\n",
            ':8: column 1 (batch): expected a batch size of at least 1, found "x"',
        ),
        ("batch 0", GOOD + "0,1,5\n", ":8: column 1 (batch): expected a batch size of at least 1"),
        (
            "K below 0",
            GOOD + "1,-1,5\n",
            ':8: column 2 (k): expected a whole number from 0 to 1024, or off, found "-1"',
        ),
        ("K no whole number", GOOD + "1,2.5,5\n", ":8: column 2 (k): expected a whole number"),
        ("K beyond all", GOOD + "1,99999,5\n", ":8: column 2 (k): expected a whole number"),
        ("K empty", GOOD + "1,,5\n", ":8: column 2 (k): expected a whole number from 0 to 1024"),
        (
            "no rate",
            GOOD + "1,2,\n",
            ":8: column 3 (tokens_per_second): expected a number above 0, found nothing",
        ),
        ("NaN", GOOD + "1,2,nan\n", ":8: column 3 (tokens_per_second): expected a number above 0"),
        ("infinite", GOOD + "1,2,inf\n", ":8: column 3 (tokens_per_second): expected a number"),
        ("negative", GOOD + "1,2,-5\n", ":8: column 3 (tokens_per_second): expected a number"),
        ("zero", GOOD + "1,2,0\n", ":8: column 3 (tokens_per_second): expected a number above 0"),
        (
            "a cell missing",
            GOOD + "1,2\n",
            ":8: column 3 (tokens_per_second): expected 3 cells as in the header, found 2",
        ),
        ("a cell too many", GOOD + "1,2,3,4\n", ":8: column 4: expected 3 cells as in the header"),
        ("semicolons", GOOD.replace(",", ";"), ":1: column 1: expected a header with"),
        ("a quote left open", GOOD + '1,"2,5\n', ":8: column 1: expected comma-separated values"),
        (
            "an error below 0",
            "batch,k,tokens_per_second,stderr,n\n1,2,5,-1,1\n",
            ":2: column 4 (stderr): expected a number of at least 0, or nothing",
        ),
        (
            "half a repeat",
            "batch,k,tokens_per_second,stderr,n\n1,2,5,,0.5\n",
            ":2: column 5 (n): expected a whole number of at least 1, or nothing",
        ),
    ],
)
def test_what_is_wrong_is_told_by_file_line_column_and_remedy(
    situation: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert run("plan", "--json", "--measurements", path) == 1, situation
    captured = capsys.readouterr()
    assert f"{path}{said}" in captured.err
    assert captured.out == ""


def test_bytes_that_are_no_text_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(GOOD.encode() + b"1,2,\xff\n")
    assert run("plan", "--measurements", path) == 1
    assert (
        f"{path}:8: column 3: expected UTF-8 text, found the byte 0xff" in capsys.readouterr().err
    )


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--measurements", "/nowhere/m.csv") == 1
    assert "/nowhere/m.csv: No such file or directory" in capsys.readouterr().err


def test_occupancy_weighs_the_loads(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "o.csv"
    weights.write_text("batch,weight\n1,1\n48,99\n")
    assert planned(capsys, file, "--occupancy", weights)["speculation"] == "off"
    weights.write_text("share,batch\n99,1\n1,64\n")
    assert planned(capsys, file, "--occupancy", weights)["speculation"] == "on"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch\n1\n", ":1: column 1: expected a header with batch, weight"),
        ("batch,weight\n1,-1\n", ":2: column 2 (weight): expected a number of at least 0"),
        ("batch,weight\n1,0\n", ":2: column 2 (weight): expected at least one weight above 0"),
        ("batch,weight\n1,1\n200,1\n", ":3: column 1 (batch): expected a batch size from 1 to 128"),
    ],
)
def test_a_bad_occupancy_is_told_likewise(
    text: str, said: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "o.csv"
    weights.write_text(text)
    assert run("plan", "--measurements", file, "--occupancy", weights) == 1
    assert f"{weights}{said}" in capsys.readouterr().err


def test_vllm_gets_its_own_form(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--measurements", file, "--vllm") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_speculative_tokens"] == 5
    rows = found["num_speculative_tokens_per_batch_size"]
    assert [row[2] for row in rows] == [5, 1]


def test_without_a_k_that_pays_vllm_gets_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_text("batch,k,tokens_per_second\n8,off,500\n")
    assert run("plan", "--measurements", path, "--vllm") == 1
    assert "without --speculative-config" in capsys.readouterr().err


def test_in_words_every_choice_has_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_text(GOOD.replace("64,5,1900\n", ""))
    assert run("plan", "--measurements", path) == 0
    told = capsys.readouterr().out
    assert "~" in told
    assert "K=5  180 tok/s [" in told
    assert "+28.6 % over K=1" in told
    assert "Speculation: on" in told


@pytest.mark.parametrize("text", [GOOD, "batch,k,tokens_per_second\n8,off,500\n"])
def test_a_picture_is_written(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    picture = tmp_path / "m.png"
    assert run("plan", "--measurements", path, "--plot", picture, "--json") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["/nowhere/m.png", "m.xyz"])
def test_a_picture_that_cannot_be_written_is_told(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--measurements", file, "--plot", tmp_path / name) == 1
    assert "the picture cannot be written" in capsys.readouterr().err
