"""Prompts from a file: JSON Lines, one conversation a line.

{"prompt": "…"}                       a text to go on with, as it is
{"messages": [{"role": …, "content": …}, …]}    a chat, through the model's template
{"turns": ["…", "…"]}                 what the user of a chat says, one turn after the other

An answer is asked for after each user message that no assistant message follows: recorded answers
stay as they are, missing ones come from the engine. "max_tokens" limits each answer of its line.
"""

import difflib
import json
from pathlib import Path
from typing import Any

from specdecode_load.conversation import Message, Script, Turn
from specdecode_load.lengths import LONGEST_TOKENS

LARGEST_BYTES = 256 * 1024 * 1024
MOST_ERRORS_SHOWN = 5

_FORMS = "prompt", "messages", "turns"
_KEYS = *_FORMS, "max_tokens"
_ROLES = "system", "developer", "user", "assistant"


def read_prompts(path: Path) -> tuple[Script, ...]:
    """Read a file of prompts; raises ValueError that tells each bad line and what to write."""
    scripts, errors = [], []
    for number, line in enumerate(_read_lines(path), start=1):
        try:
            if line.strip():
                scripts.append(parse_line(line))
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        shown = "\n  ".join(errors[:MOST_ERRORS_SHOWN])
        more = len(errors) - MOST_ERRORS_SHOWN
        raise ValueError(f"{path}:\n  {shown}" + (f"\n  and {more} more" if more > 0 else ""))
    if not scripts:
        raise ValueError(f'{path} holds no prompt: write one a line, like {{"prompt": "Once"}}')
    return tuple(scripts)


def parse_line(line: str) -> Script:
    """Read one line; raises ValueError with what to write instead."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError('this is no JSON object: write {"prompt": "…"} on one line')
    _refuse_misspelt(value)
    forms = [form for form in _FORMS if form in value]
    if len(forms) != 1:
        raise ValueError('write exactly one of "prompt", "messages" and "turns"')
    tokens = _read_max_tokens(value)
    if forms[0] == "prompt":
        message = Message(_read_text(value["prompt"], name='"prompt"'))
        return Script((Turn((message,), tokens),))
    messages = _read_turns(value) if forms[0] == "turns" else _read_messages(value)
    return Script(_split(messages, tokens), is_chat=True)


def _read_lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"{path} is larger than {LARGEST_BYTES >> 20} MiB: give fewer prompts")
        # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: write JSON Lines in UTF-8") from error


def _refuse_misspelt(value: dict[str, Any]) -> None:
    """Pass over the keys that data sets add, but no slip of the pen."""
    for key in value:
        close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
        if key not in _KEYS and close:
            raise ValueError(f'"{key}" is not known: did you mean "{close[0]}"?')


def _read_max_tokens(value: dict[str, Any]) -> int | None:
    tokens = value.get("max_tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= LONGEST_TOKENS:
        raise ValueError(f'"max_tokens" is a whole number from 1 to {LONGEST_TOKENS}, or left out')
    return tokens


def _read_text(value: object, *, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty")
    return value


def _read_turns(value: dict[str, Any]) -> list[Message]:
    turns = value["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError('"turns" must be a list of texts, like ["Hello", "And then?"]')
    return [Message(_read_text(turn, name='each of "turns"')) for turn in turns]


def _read_messages(value: dict[str, Any]) -> list[Message]:
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list like [{"role": "user", "content": "Hello"}]')
    return [_read_message(message) for message in messages]


def _read_message(value: object) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise ValueError('each message is like {"role": "user", "content": "Hello"}')
    if value["role"] not in _ROLES:
        raise ValueError(f'"role" must be one of {", ".join(_ROLES)}')
    return Message(_read_text(value["content"], name='"content"'), role=value["role"])


def _split(messages: list[Message], tokens: int | None) -> tuple[Turn, ...]:
    """Cut a chat into turns: one after each user message that no assistant message follows."""
    turns: list[Turn] = []
    said: list[Message] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        said.append(message)
        is_answered = following is not None and following.role == "assistant"
        if message.role == "user" and not is_answered:
            turns.append(Turn(tuple(said), tokens))
            said = []
    if said:
        raise ValueError("the last message must be the user's, or nothing is left to answer")
    return tuple(turns)
