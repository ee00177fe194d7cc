"""Case files as people write them, and what is said about those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_operator.cli import case_file
from specdecode_operator.cli.case_file import InvalidCaseError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "case.yaml"
    path.write_text(text)
    return path


def test_a_repeated_line_takes_the_place_of_its_marker() -> None:
    fields = {"log": "a {{logRepeat}} b\n", "logRepeat": {"line": "xy", "times": 300_000}}
    blocks = list(case_file.parse(fields, name="c").log_blocks())
    assert "".join(blocks) == "a " + "xy" * 300_000 + " b\n"
    assert max(map(len, blocks)) <= 1 << 18


def test_escapes_become_bytes_and_broken_bytes_a_replacement() -> None:
    fields = {"log": r"\xe2\x82\xac \xff \x1b[31m", "logEscapes": True}
    assert case_file.parse(fields, name="c").log == "\u20ac \ufffd \x1b[31m"


def test_escapes_are_text_where_nobody_asked_for_bytes() -> None:
    assert case_file.parse({"log": r"\xff"}, name="c").log == r"\xff"


def test_a_case_that_never_ended_has_no_termination() -> None:
    case = case_file.parse({"container": {"exitCode": None}, "hang": True}, name="c")
    assert case.evidence.termination is None
    assert case.evidence.hang


def test_unknown_keys_and_a_missing_expectation_are_no_matter(tmp_path: Path) -> None:
    case = case_file.load(write(tmp_path, "id: x\nweather: fine\nlog: |\n  hello\n"))
    assert (case.log, case.expect) == ("hello\n", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("just words", "expected a mapping"),
        ("log: [unclosed", "not readable as YAML"),
        ("container: 7", "container: expected a mapping, got int"),
        ("container: {exitCode: many}", "exitCode: expected a whole number, got 'many'"),
        ("log: \x07", "not readable as YAML"),
    ],
)
def test_what_is_no_case_is_refused_with_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidCaseError, match=said):
        case_file.load(write(tmp_path, text))
