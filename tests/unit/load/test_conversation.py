"""Conversations grow by what was said; the engine is asked turn by turn."""

import json
from typing import Any

import pytest

from specdecode_load.conversation import (
    CHAT,
    COMPLETIONS,
    Ask,
    Conversation,
    Message,
    Sampling,
    Script,
    Turn,
)

SAMPLING = Sampling("m", temperature=0.5, ignore_eos=False)


def talk_of(*texts: str, is_chat: bool) -> Conversation:
    turns = tuple(Turn((Message(text),), 10 + n) for n, text in enumerate(texts))
    return Conversation(Script(turns, is_chat=is_chat), SAMPLING)


def body_of(ask: Ask) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(ask.body)
    return value


def test_a_text_grows_by_each_answer() -> None:
    talk = talk_of("one ", " two ", is_chat=False)
    first = talk.ask()
    assert (first.path, body_of(first)["prompt"]) == (COMPLETIONS, "one ")
    talk.hear("ANSWER")
    second = talk.ask()
    assert (second.path, body_of(second)["prompt"]) == (COMPLETIONS, "one ANSWER two ")


def test_a_chat_keeps_who_said_what() -> None:
    talk = talk_of("one", "two", is_chat=True)
    talk.hear("ANSWER")
    ask = talk.ask()
    assert ask.path == CHAT
    assert body_of(ask)["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": "two"},
    ]


def test_only_an_answer_that_is_carried_on_has_to_be_kept() -> None:
    talk = talk_of("one", "two", is_chat=True)
    assert talk.ask().needs_text
    talk.hear("ANSWER")
    assert not talk.ask().needs_text


def test_a_conversation_is_over_when_every_turn_was_answered() -> None:
    talk = talk_of("one", "two", is_chat=False)
    heard = []
    while not talk.is_over:
        heard.append(body_of(talk.ask())["max_tokens"])
        talk.hear("")
    assert heard == [10, 11]


def test_asking_twice_asks_the_same() -> None:
    talk = talk_of("one", "two", is_chat=False)
    assert talk.ask() == talk.ask()


@pytest.mark.parametrize("is_chat", [False, True])
def test_sampling_is_part_of_every_request(is_chat: bool) -> None:
    body = body_of(talk_of("one", is_chat=is_chat).ask())
    assert (body["model"], body["temperature"], body["ignore_eos"]) == ("m", 0.5, False)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_length_that_was_not_drawn_is_an_error() -> None:
    talk = Conversation(Script((Turn((Message("one"),)),)), SAMPLING)
    with pytest.raises(ValueError, match="not drawn"):
        talk.ask()
