"""The lag that tests and the demo judge a run by is that of the worst pod, between two readings."""

from __future__ import annotations

import pytest

from tests.support.lag import StepSeconds, worst_lag

SITUATIONS: dict[str, tuple[StepSeconds, StepSeconds | None, float | None]] = {
    "no pod": ({}, None, None),
    "no step yet": ({"a": (0.0, 0.0)}, None, None),
    "since the start": ({"a": (100.0, 101.0)}, None, 0.01),
    "the worst of two": ({"a": (100.0, 101.0), "b": (10.0, 10.5)}, None, 0.05),
    "since a reading": ({"a": (200.0, 204.0)}, {"a": (100.0, 101.0)}, 0.03),
    "idle since a reading": ({"a": (100.0, 101.0)}, {"a": (100.0, 101.0)}, None),
    "a pod that came meanwhile": ({"b": (10.0, 10.2)}, {"a": (100.0, 101.0)}, 0.02),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_lag(situation: str) -> None:
    after, before, lag = SITUATIONS[situation]
    assert worst_lag(after, before=before) == (None if lag is None else pytest.approx(lag))
