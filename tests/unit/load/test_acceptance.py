"""Acceptance by request: what was not told is not zero, and each request counts once."""

from typing import Any

import pytest

from specdecode_load.acceptance import AcceptanceTally, Drafting, Report, read_report


def told(drafts: object, draft_tokens: object, accepted_tokens: object) -> dict[str, Any]:
    """Build the last chunk of an answer, as vLLM 0.33 sends it at the level `summary`."""
    return {
        "choices": [],
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 2.5,
                "draft_acceptance_rate": 0.5,
                "acceptance_histogram": [1, 2, 1, 2],
                "num_spec_steps": drafts,
                "num_accepted_draft_tokens": accepted_tokens,
                "num_draft_tokens": draft_tokens,
                "num_spec_tokens": 3,
            }
        },
    }


REPORTS: dict[str, tuple[dict[str, Any], Report]] = {
    "a summary": (told(6, 18, 9), Drafting(6, 18, 9)),
    "no draft in any step": (told(0, 0, 0), Drafting(0, 0, 0)),
    "drafts that the grammar forbade": (told(2, 0, 0), Drafting(2, 0, 0)),
    "no metrics": ({"choices": []}, None),
    "metrics null": ({"metrics": None}, None),
    "times only": ({"metrics": {"mean_itl_ms": 3.0}}, None),
    "times and no speculation": ({"metrics": {"speculative_decoding": None}}, None),
    "metrics of another shape": ({"metrics": [1]}, "unreadable"),
    "speculation of another shape": ({"metrics": {"speculative_decoding": [1]}}, "unreadable"),
    "counts under other names": ({"metrics": {"speculative_decoding": {"steps": 3}}}, "unreadable"),
    "a count that is a word": (told("6", 18, 9), "unreadable"),
    "a count that is true": (told(True, 18, 9), "unreadable"),
    "a negative count": (told(6, 18, -1), "unreadable"),
    "more accepted than drafted": (told(6, 8, 9), "unreadable"),
    "drafted in no step": (told(0, 8, 3), "unreadable"),
}


@pytest.mark.parametrize(("chunk", "report"), REPORTS.values(), ids=REPORTS.keys())
def test_what_an_answer_tells(chunk: dict[str, Any], report: Report) -> None:
    assert read_report(chunk) == report


def tally(*reports: Report) -> AcceptanceTally:
    collected = AcceptanceTally()
    for report in reports:
        collected.add(report)
    return collected


def test_each_request_counts_once_however_long_it_was() -> None:
    result = tally(Drafting(10, 30, 0), Drafting(1000, 3000, 2000)).summarise()
    assert result is not None
    assert result.mean_length is not None
    assert result.rate is not None
    assert result.mean_length.mean == pytest.approx((1 + 3) / 2)
    assert result.rate.mean == pytest.approx((0 + 2 / 3) / 2)
    assert (result.drafts, result.draft_tokens, result.accepted_tokens) == (1010, 3030, 2000)


def test_nothing_told_is_nothing_and_not_zero() -> None:
    assert tally().summarise() is None
    assert tally(None, None).summarise() is None


def test_requests_without_figures_are_counted_and_kept_out_of_the_mean() -> None:
    reports: list[Report] = [Drafting(4, 12, 6), Drafting(0, 0, 0), None, "unreadable"]
    result = tally(*reports).summarise()
    assert result is not None
    assert (
        result.requests_with_drafts,
        result.requests_without_drafts,
        result.requests_not_reported,
        result.requests_unreadable,
    ) == (1, 1, 1, 1)
    assert result.mean_length is not None
    assert (result.mean_length.count, result.mean_length.p10) == (1, 2.5)


def test_drafts_without_a_valid_token_have_a_length_and_no_rate() -> None:
    result = tally(Drafting(2, 0, 0)).summarise()
    assert result is not None
    assert result.rate is None
    assert result.mean_length is not None
    assert result.mean_length.p50 == 1.0


def test_answers_that_cannot_be_read_are_told_of() -> None:
    result = tally("unreadable").summarise()
    assert result is not None
    assert (result.requests_unreadable, result.mean_length, result.rate) == (1, None, None)
