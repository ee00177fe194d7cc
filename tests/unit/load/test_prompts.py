"""Prompts from a file: what each form means, and what is said of lines that are wrong."""

import json
from pathlib import Path

import pytest

from specdecode_load.conversation import Message, Script, Turn
from specdecode_load.prompts import parse_line, read_prompts

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def turns_of(value: dict[str, object]) -> list[str]:
    """Write a chat's turns as words, a letter for each message."""
    script = parse_line(json.dumps(value))
    assert script.is_chat
    return ["".join(message.content for message in turn.messages) for turn in script.turns]


CHATS: dict[str, tuple[dict[str, object], list[str]]] = {
    "one question": ({"messages": [USER]}, ["q"]),
    "a system message first": ({"messages": [SYSTEM, USER]}, ["sq"]),
    "a recorded answer stays": ({"messages": [USER, ANSWER, USER]}, ["qaq"]),
    "a missing answer is asked for": ({"messages": [SYSTEM, USER, USER]}, ["sq", "q"]),
    "some recorded, some missing": ({"messages": [USER, ANSWER, USER, USER]}, ["qaq", "q"]),
    "turns of a user": ({"turns": ["x", "y", "z"]}, ["x", "y", "z"]),
}


@pytest.mark.parametrize(("value", "turns"), CHATS.values(), ids=CHATS.keys())
def test_an_answer_is_asked_for_where_none_is_recorded(
    value: dict[str, object], turns: list[str]
) -> None:
    assert turns_of(value) == turns


def test_a_prompt_is_no_chat() -> None:
    assert parse_line('{"prompt": "Once"}') == Script((Turn((Message("Once"),)),))


def test_a_limit_holds_for_each_answer_of_its_line() -> None:
    script = parse_line('{"turns": ["x", "y"], "max_tokens": 7}')
    assert [turn.output_tokens for turn in script.turns] == [7, 7]


def test_what_data_sets_add_is_passed_over() -> None:
    assert turns_of({"question_id": 81, "category": "writing", "turns": ["x"]}) == ["x"]


WRONG = {
    "no JSON": ("Once upon a time", 'write {"prompt"'),
    "a list": ("[1]", "no JSON object"),
    "too deep": ("[" * 100_000, "no JSON object"),
    "no prompt": ("{}", "exactly one of"),
    "two forms": ('{"prompt": "x", "turns": ["y"]}', "exactly one of"),
    "an empty prompt": ('{"prompt": ""}', "not empty"),
    "a prompt of tokens": ('{"prompt": [1, 2]}', "must be a text"),
    "a slip of the pen": ('{"prompt": "x", "max_token": 3}', 'did you mean "max_tokens"'),
    "a limit of nothing": ('{"prompt": "x", "max_tokens": 0}', "whole number from 1"),
    "a limit that is a word": ('{"prompt": "x", "max_tokens": "9"}', "whole number from 1"),
    "a limit that is true": ('{"prompt": "x", "max_tokens": true}', "whole number from 1"),
    "no messages": ('{"messages": []}', "must be a list"),
    "a message that is a text": ('{"messages": ["x"]}', "each message is like"),
    "a message without role": ('{"messages": [{"content": "x"}]}', "each message is like"),
    "a role that is not known": (
        '{"messages": [{"role": "bot", "content": "x"}]}',
        "one of system",
    ),
    "a picture": ('{"messages": [{"role": "user", "content": [{}]}]}', "must be a text"),
    "the last word is the assistant's": (json.dumps({"messages": [USER, ANSWER]}), "the user's"),
    "turns that are a text": ('{"turns": "x"}', "list of texts"),
    "a turn of nothing": ('{"turns": ["x", ""]}', "not empty"),
}


@pytest.mark.parametrize(("line", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_line_is_refused_with_what_to_write(line: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_line(line)


def test_bad_lines_are_named_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n\nOnce\n{"prompt": 3}\n' + "{}\n" * 6)
    with pytest.raises(
        ValueError, match=r"(?s)prompts.jsonl.*line 3: .*line 4: .*and 3 more"
    ) as caught:
        read_prompts(path)
    assert "line 1:" not in str(caught.value)
    assert "line 2:" not in str(caught.value)


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    texts = [script.turns[0].messages[0].content for script in read_prompts(path)]
    assert texts == ["a\u2028b", "c"]


FILES = {
    "empty": (b"\n \n", "holds no prompt"),
    "not text": (b'{"prompt": "\xff"}', "UTF-8"),
}


@pytest.mark.parametrize(("content", "sentence"), FILES.values(), ids=FILES.keys())
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_prompts(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone.jsonl cannot be read: No such file"):
        read_prompts(tmp_path / "gone.jsonl")
