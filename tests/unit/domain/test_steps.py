"""The way from one revision to another: single changes, none of which is known to crash."""

from __future__ import annotations

from itertools import permutations

import pytest

from specdecode_operator.domain import engine, lever
from tests.support.builders import build_spec

ON = {"adaptiveVerification": "Enabled"}
OFF = {"adaptiveVerification": "Disabled"}
MIXED = {"cudagraphMode": "FULL_AND_PIECEWISE"}
DECODE = {"cudagraphMode": "FULL_DECODE_ONLY"}
# Each is fine by itself.
FINE = [{**OFF, **MIXED}, {**OFF, **DECODE}, {**ON, **DECODE}]


@pytest.mark.parametrize(("start", "end"), list(permutations(FINE, 2)))
def test_no_step_stands_where_engines_are_known_to_crash(
    start: dict[str, str], end: dict[str, str]
) -> None:
    here, there = (lever.inputs_of(build_spec(speculation=levers)) for levers in (start, end))
    for _ in range(5):
        step = lever.next_step(here, there)
        if step is None:
            break
        here = step[1]
        assert here.speculation is not None
        assert engine.find_crash(here.engine, here.speculation) is None
    assert here == there
