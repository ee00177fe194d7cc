"""How well each request's drafts were accepted, as the engine itself tells it.

With `--per-request-spec-decode-metrics summary` (or `detailed`) vLLM adds
`metrics.speculative_decoding` to an answer; in a stream it rides on the last chunk, the one that
carries the usage. Steps without a draft (K=0) are not in it. The field is experimental there:
counts that cannot be read are told apart from counts that were not sent.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

from specdecode_load.spread import Distribution

_COUNTS = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"


@dataclass(frozen=True)
class Drafting:
    """One request's counts: steps that verified a draft, tokens drafted, and those accepted."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int


Report = Drafting | Literal["unreadable"] | None
"""What an answer told of its drafts; None: nothing."""


@dataclass(frozen=True)
class Acceptance:
    """What the requests of one window came to; the counts are sums over them.

    `mean_length` (bonus token included) and `rate` are distributions over requests: each request
    counts once, however long it was. None where no request had a draft.
    """

    requests_with_drafts: int
    requests_without_drafts: int
    requests_not_reported: int
    requests_unreadable: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    mean_length: Distribution | None
    rate: Distribution | None


@dataclass
class AcceptanceTally:
    """Collects the reports of requests as they end."""

    without_drafts: int = 0
    not_reported: int = 0
    unreadable: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    _mean_lengths: "array[float]" = field(default_factory=lambda: array("d"))
    _rates: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, report: Report) -> None:
        """Take the report of one request."""
        if report is None:
            self.not_reported += 1
        elif report == "unreadable":
            self.unreadable += 1
        elif report.drafts == 0:
            self.without_drafts += 1  # vLLM sends length 1 and rate 0 here: neither was measured
        else:
            self._add_drafts(report)

    def _add_drafts(self, report: Drafting) -> None:
        self.drafts += report.drafts
        self.draft_tokens += report.draft_tokens
        self.accepted_tokens += report.accepted_tokens
        self._mean_lengths.append(1 + report.accepted_tokens / report.drafts)
        if report.draft_tokens:
            self._rates.append(report.accepted_tokens / report.draft_tokens)

    def summarise(self) -> Acceptance | None:
        """Sum up; None when no request told anything."""
        if not (self._mean_lengths or self.without_drafts or self.unreadable):
            return None
        return Acceptance(
            requests_with_drafts=len(self._mean_lengths),
            requests_without_drafts=self.without_drafts,
            requests_not_reported=self.not_reported,
            requests_unreadable=self.unreadable,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            mean_length=Distribution.of(self._mean_lengths),
            rate=Distribution.of(self._rates),
        )


def read_report(chunk: dict[str, Any]) -> Report:
    """Read what the last chunk of an answer tells of its drafts."""
    metrics = chunk.get("metrics")
    told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else metrics
    if told is None:
        return None
    if not isinstance(told, dict):
        return "unreadable"
    counts = (told.get(name) for name in _COUNTS)
    drafts, draft_tokens, accepted_tokens = (
        count if type(count) is int else -1 for count in counts
    )
    if drafts < 0 or not 0 <= accepted_tokens <= draft_tokens or (draft_tokens and not drafts):
        return "unreadable"
    return Drafting(drafts, draft_tokens, accepted_tokens)
