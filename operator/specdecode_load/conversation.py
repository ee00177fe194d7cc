"""One conversation: what is said turn by turn, and the request that each turn makes.

Each turn's request carries all that was said before, the engine's answers among it, so that the
context grows as it does with people. A conversation of one turn is a plain request.
"""

import json
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Message:
    """What one side says; `role` is of no account outside a chat."""

    content: str
    role: str = "user"


@dataclass(frozen=True)
class Turn:
    """What is said before an answer is asked for, and the answer's greatest length.

    `output_tokens` None: the workload draws it.
    """

    messages: tuple[Message, ...]
    output_tokens: int | None = None


@dataclass(frozen=True)
class Script:
    """The turns of a conversation (at least one), and whether the model's chat template is used.

    Without a chat the texts are joined as they are, which models without a template take too.
    """

    turns: tuple[Turn, ...]
    is_chat: bool = False


@dataclass(frozen=True)
class Sampling:
    """What all requests of a conversation have in common."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True

    def build_body(self, *, output_tokens: int, **content: object) -> bytes:
        """Build a streaming request that makes the engine count tokens in every chunk."""
        body: dict[str, Any] = {
            "model": self.model,
            **content,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            # One chunk carries several tokens under speculation: only the engine's count is right.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return json.dumps(body).encode()


@dataclass(frozen=True)
class Ask:
    """One request to send; `needs_text` when a later turn carries the answer."""

    path: str
    body: bytes
    needs_text: bool = False


class Conversation:
    """A script under way: `ask`, send it, then `hear` the answer, until it `is_over`."""

    def __init__(self, script: Script, sampling: Sampling) -> None:
        self._script = script
        self._sampling = sampling
        self._said: list[Message] = []
        self._next_turn = 0

    @property
    def is_over(self) -> bool:
        """Tell whether every turn has been answered."""
        return self._next_turn == len(self._script.turns)

    def ask(self) -> Ask:
        """Build the request of the turn that is due; ValueError if its length was not drawn."""
        turn = self._script.turns[self._next_turn]
        if turn.output_tokens is None:
            raise ValueError("the length of this turn's answer was not drawn")
        messages = [*self._said, *turn.messages]
        needs_text = self._next_turn + 1 < len(self._script.turns)
        if self._script.is_chat:
            content = [{"role": message.role, "content": message.content} for message in messages]
            body = self._sampling.build_body(messages=content, output_tokens=turn.output_tokens)
            return Ask(CHAT, body, needs_text)
        prompt = "".join(message.content for message in messages)
        body = self._sampling.build_body(prompt=prompt, output_tokens=turn.output_tokens)
        return Ask(COMPLETIONS, body, needs_text)

    def hear(self, answer: str) -> None:
        """Take the answer to the turn that was asked; the next turn is due."""
        self._said += self._script.turns[self._next_turn].messages
        self._said.append(Message(answer, role="assistant"))
        self._next_turn += 1
