"""`specdecode acceptance`: what each further draft token brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdecode_operator.cli import main

TABLES = Path(__file__).parents[2] / "data" / "tables"


def run(*arguments: str | Path) -> int:
    return main.main(["acceptance", *(str(argument) for argument in arguments)])


def test_the_table_of_a_low_acceptance_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TABLES / "acceptance_low.csv") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "1.44", "0.72", "0.437"] in lines
    assert ["7", "1.93", "0.24", "0.016"] in lines


def test_every_model_of_a_file_has_its_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TABLES / "acceptance_vllm_48892.csv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(one["rows"]) for one in found] == [1, 8]
    assert all("MTP" in one["name"] for one in found)


@pytest.mark.parametrize("path", sorted(TABLES.glob("acceptance_*.csv")), ids=lambda p: p.stem)
def test_every_published_curve_is_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path) == 0
    assert "marginal gain" in capsys.readouterr().out


def test_counts_give_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("position,at_risk,accepted\n1,1000,800\n2,400,200\n")
    assert run(path, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["rows"][1]["marginal_gain"] == pytest.approx(0.4)
    low, high = found["rows"][1]["interval"]
    assert low < 0.4 < high


HEADER = "position,cumulative_acceptance\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("position\n1\n", ":1: column 1: expected cumulative_acceptance, or at_risk"),
        (HEADER + "1,0.5\n3,0.2\n", ":3: column 1 (position): expected each position once"),
        (HEADER + "1,0.5\n1,0.2\n", ":3: column 1 (position): expected each position once"),
        (HEADER + "0,0.5\n", ":2: column 1 (position): expected a whole number from 1 on"),
        (HEADER + "1,1.5\n", ":2: column 2 (cumulative_acceptance): expected a share from 0 to 1"),
        (HEADER + "1,nan\n", ":2: column 2 (cumulative_acceptance): expected a share from 0 to 1"),
        (HEADER + "1,0.5\n2,0.6\n", ":3: column 2 (cumulative_acceptance): expected at most 0.5"),
        ("position,at_risk,accepted\n1,9,10\n", ":2: column 3 (accepted): expected at most the 9"),
        ("position,at_risk,accepted\n1,9,5\n", ":2: column 2 (at_risk): expected more drafts"),
    ],
)
def test_what_is_wrong_is_told_by_file_line_column_and_remedy(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert run(path) == 1
    assert f"{path}{said}" in capsys.readouterr().err
