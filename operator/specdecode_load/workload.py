"""What is asked of the engine: conversation number n, the same for the same seed whoever sends it.

Generated prompts are random letters, drawn anew for each conversation: engines cache the prefixes
they have seen, and a repeated prompt would measure the cache. Prompts from a file are taken in the
order of the file, and again from its start when they are used up.
"""

import random
from dataclasses import dataclass, field, replace

from specdecode_load.conversation import Conversation, Message, Sampling, Script, Turn
from specdecode_load.lengths import Lengths

MOST_TURNS = 1000

# Bytes to text: 26 letters, and a space for about one byte in six, so that words come out.
_LETTERS = bytes(b"abcdefghijklmnopqrstuvwxyz     "[byte % 31] for byte in range(256))


@dataclass(frozen=True)
class Workload:
    """Prompt and output lengths in tokens, sampling, and the seed that all of it is drawn from.

    `turns` is for generated conversations; `scripts` come from a file and are used instead of
    generated ones. Either way `long_share` of the conversations, drawn, open with a generated
    prompt of `long_prompt` tokens.
    """

    prompt: Lengths = field(default_factory=lambda: Lengths("fixed", 32))
    output: Lengths = field(default_factory=lambda: Lengths("fixed", 64))
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    turns: int = 1
    long_share: float = 0.0
    long_prompt: Lengths | None = None
    scripts: tuple[Script, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.turns <= MOST_TURNS:
            raise ValueError(f"{self.turns} turns: from 1 to {MOST_TURNS} are possible")
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"{self.long_share:g} is no share of long prompts: give 0 to 1")
        if (self.long_share > 0) != (self.long_prompt is not None):
            raise ValueError("a share of long prompts and their length belong together: give both")

    def conversation(self, number: int, *, model: str, tokens_per_character: float) -> Conversation:
        """Draw conversation `number` of this workload."""
        script = self._script(number, tokens_per_character)
        return Conversation(script, Sampling(model, self.temperature, self.ignore_eos))

    def request(self, number: int, *, model: str, tokens_per_character: float) -> bytes:
        """Build the JSON body of the first request of conversation `number`."""
        talk = self.conversation(number, model=model, tokens_per_character=tokens_per_character)
        return talk.ask().body

    def _script(self, number: int, tokens_per_character: float) -> Script:
        chance = random.Random(f"{self.seed}:{number}")
        long_prompt = self._draw_long(number)
        if self.scripts and long_prompt is None:
            return self._fill_lengths(self.scripts[number % len(self.scripts)], chance)
        first = long_prompt or self.prompt
        lengths = [first] + [self.prompt] * (self.turns - 1)
        return Script(tuple(self._turn(chance, each, tokens_per_character) for each in lengths))

    def _draw_long(self, number: int) -> Lengths | None:
        """Draw whether a conversation is a long one, from a chance of its own.

        So the others stay what they are with another share, or none.
        """
        if self.long_share > random.Random(f"{self.seed}:{number}:long").random():
            return self.long_prompt
        return None

    def _turn(self, chance: random.Random, prompt: Lengths, tokens_per_character: float) -> Turn:
        prompt_tokens = prompt.draw(chance)
        output_tokens = self.output.draw(chance)
        characters = max(1, round(prompt_tokens / tokens_per_character))
        return Turn((Message(random_text(chance, characters)),), output_tokens)

    def _fill_lengths(self, script: Script, chance: random.Random) -> Script:
        """Draw the length of each answer that its script leaves open."""
        turns = (
            turn
            if turn.output_tokens is not None
            else replace(turn, output_tokens=self.output.draw(chance))
            for turn in script.turns
        )
        return replace(script, turns=tuple(turns))


def random_text(chance: random.Random, characters: int) -> str:
    """Draw random words of ASCII letters, `characters` long in all."""
    return chance.randbytes(characters).translate(_LETTERS).decode("ascii")
