"""How one request's drafts fared, as vLLM reports it under --per-request-spec-decode-metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AcceptanceRecord:
    """Counts of one request's verified drafts; the order of steps only where it is `detailed`."""

    k_max: int
    detailed: bool
    histogram: list[int] = field(default_factory=list)  # steps by accepted draft tokens
    draft_tokens: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted, accepted

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.k_max + 1)

    def count(self, drafted: int, accepted: int) -> None:
        """Count one step's draft; a step without any is none."""
        if not drafted:
            return
        self.histogram[accepted] += 1
        self.draft_tokens += drafted
        if self.detailed:
            self.steps.append((drafted, accepted))

    def to_json(self) -> dict[str, Any]:
        """Return the member `metrics.speculative_decoding` of an answer."""
        drafts = sum(self.histogram)
        accepted = sum(tokens * steps for tokens, steps in enumerate(self.histogram))
        answer: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + (accepted / drafts if drafts else 0.0),
            "draft_acceptance_rate": accepted / self.draft_tokens if drafts else 0.0,
            "acceptance_histogram": self.histogram,
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.draft_tokens,
            "num_spec_tokens": self.k_max,
        }
        if self.steps:
            answer["per_step_accepted"] = [accepted for _, accepted in self.steps]
            answer["per_step_drafted"] = [drafted for drafted, _ in self.steps]
        return answer
