"""How long prompts and outputs are: a fixed number or a distribution, written as one word.

32                  always 32 tokens
uniform:16:64       every length from 16 to 64 equally likely
lognormal:200:0.8   mean 200 tokens, sigma 0.8 of the logarithm: many short, a few very long
"""

import math
import random
from dataclasses import dataclass

LONGEST_TOKENS = 1_000_000
"""No length goes beyond this, whatever is drawn: a slip of the finger must not fill the memory."""

_FORMS = "give a number (32), uniform:LOW:HIGH (uniform:16:64) or lognormal:MEAN:SIGMA"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: `kind` is fixed, uniform or lognormal."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read the written form; raises ValueError with what to write instead."""
        kind, *parts = text.split(":") if ":" in text else ["fixed", text]
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            raise ValueError(f"{text!r} is no length: {_FORMS}") from None
        if len(numbers) != {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind):
            raise ValueError(f"{text!r} is no length: {_FORMS}")
        lengths = cls(kind, *numbers)
        lengths._check(text)
        return lengths

    def _check(self, text: str) -> None:
        bounds = [self.first, self.second] if self.kind == "uniform" else [self.first]
        if not all(1 <= bound <= LONGEST_TOKENS for bound in bounds):
            raise ValueError(f"{text!r}: lengths go from 1 to {LONGEST_TOKENS} tokens")
        if self.kind != "lognormal" and any(bound != int(bound) for bound in bounds):
            raise ValueError(f"{text!r}: lengths are whole tokens")
        if self.kind == "uniform" and self.first > self.second:
            raise ValueError(f"{text!r}: the low end is above the high end")
        if self.kind == "lognormal" and not 0 <= self.second <= 5:
            raise ValueError(f"{text!r}: sigma goes from 0 to 5")

    def draw(self, chance: random.Random) -> int:
        """Draw one length in tokens, from 1 to LONGEST_TOKENS."""
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return chance.randint(int(self.first), int(self.second))
        # The mean of a lognormal is exp(mu + sigma²/2): mu follows from the mean asked for.
        mu = math.log(self.first) - self.second**2 / 2
        return min(LONGEST_TOKENS, max(1, round(chance.lognormvariate(mu, self.second))))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:.0f}"
        return f"{self.kind}:{self.first:g}:{self.second:g}"
