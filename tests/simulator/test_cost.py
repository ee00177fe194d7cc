"""Step time: a jump where graphs end, drafting by K, launch by the kind of graphs."""

from __future__ import annotations

import pytest

from specdecode_sim import cost, profile

PLAIN = cost.Cost(
    launch=1.0,
    weights=5.0,
    token=0.01,
    draft=1.0,
    draft_pass=0.5,
    captured_tokens=1024,
    uncaptured=80.0,
)


def test_leaving_the_captured_graphs_is_a_jump() -> None:
    inside = cost.verify_milliseconds(PLAIN, 1024.0)
    assert cost.verify_milliseconds(PLAIN, 1025.0) - inside == pytest.approx(80.01)


@pytest.mark.parametrize(("k", "milliseconds"), [(-1, 0.0), (0, 1.0), (1, 1.0), (3, 2.0)])
def test_drafting_costs_by_further_passes_and_nothing_when_off(k: int, milliseconds: float) -> None:
    assert cost.draft_milliseconds(PLAIN, 8.0, k) == pytest.approx(milliseconds)


def test_drafting_a_block_in_one_pass_costs_the_same_at_any_k() -> None:
    engine = profile.load_profile("dspark-v4flash-b300").build_cost(graphs="FULL")
    assert len({cost.draft_milliseconds(engine, 32.0, k) for k in range(1, 8)}) == 1


@pytest.mark.parametrize("name", profile.list_profiles())
def test_piecewise_graphs_launch_more_slowly_than_full_ones(name: str) -> None:
    source = profile.load_profile(name)
    full, piecewise = (source.build_cost(graphs=kind) for kind in ("FULL", "PIECEWISE"))
    assert piecewise.launch > full.launch
