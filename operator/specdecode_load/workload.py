"""What is asked of the engine: request number n, the same for the same seed whoever sends it.

Prompts are random letters, drawn anew for each request: engines cache the prefixes they have seen,
and a repeated prompt would measure the cache.
"""

import json
import random
from dataclasses import dataclass, field

from specdecode_load.lengths import Lengths

# Bytes to text: 26 letters, and a space for about one byte in six, so that words come out.
_LETTERS = bytes(b"abcdefghijklmnopqrstuvwxyz     "[byte % 31] for byte in range(256))


@dataclass(frozen=True)
class Workload:
    """Prompt and output lengths in tokens, sampling, and the seed that all of it is drawn from."""

    prompt: Lengths = field(default_factory=lambda: Lengths("fixed", 32))
    output: Lengths = field(default_factory=lambda: Lengths("fixed", 64))
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True

    def request(self, number: int, *, model: str, tokens_per_character: float) -> bytes:
        """Build the JSON body of request `number` of this workload."""
        chance = random.Random(f"{self.seed}:{number}")
        prompt_tokens = self.prompt.draw(chance)
        output_tokens = self.output.draw(chance)
        characters = max(1, round(prompt_tokens / tokens_per_character))
        return completion_body(
            model,
            prompt=random_text(chance, characters),
            output_tokens=output_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
        )


def random_text(chance: random.Random, characters: int) -> str:
    """Draw random words of ASCII letters, `characters` long in all."""
    return chance.randbytes(characters).translate(_LETTERS).decode("ascii")


def completion_body(
    model: str, *, prompt: str, output_tokens: int, temperature: float, ignore_eos: bool
) -> bytes:
    """Build a streaming completion request that makes the engine count tokens in every chunk."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
        "stream": True,
        # One chunk carries several tokens under speculation: only the engine's count is right.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return json.dumps(body).encode()
