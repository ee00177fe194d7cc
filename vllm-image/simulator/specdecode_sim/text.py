"""The text of a simulated request: its tokens, whatever K they were drafted with.

Greedy output does not depend on speculation, so text depends on the prompt alone. About four
characters make a token, as English does with common tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

CHARACTERS_PER_TOKEN = 4
_SYLLABLES = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "lnrs "]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine sees it."""

    tokens: int
    seed: int


def read_prompt(value: object) -> Prompt:
    """Read the `prompt` of a completion: a text or a list of token ids. Raises ValueError."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return Prompt(count_tokens(value), _seed(value))
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return Prompt(len(value), _seed(json.dumps(value)))
    raise ValueError("Either prompt or prompt_embeds must be provided and non-empty.")


def read_messages(messages: Sequence[object]) -> Prompt:
    """Read the messages of a chat; a role costs four tokens. Raises ValueError."""
    contents = []
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError("each message needs a role")
        contents.append(str(message.get("content") or ""))
    if not contents:
        raise ValueError("messages must not be empty")
    text = "\n".join(contents)
    return Prompt(count_tokens(text) + 4 * len(contents), _seed(text))


def count_tokens(text: str) -> int:
    """Return how many tokens a text comes to."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def write_tokens(seed: int, first: int, count: int, *, corrupted: bool = False) -> str:
    """Write tokens first..first+count-1 of a request's output."""
    if corrupted:
        return "!" * CHARACTERS_PER_TOKEN * count
    size = len(_SYLLABLES)
    return "".join(
        " " + _SYLLABLES[(seed + n * (2 * (seed % 97) + 1) + n * n) % size]
        for n in range(first, first + count)
    )


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
