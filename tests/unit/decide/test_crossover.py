"""Arms of a live experiment: halves that swap, in drawn order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.decide.crossover import choose_canaries

PODS = st.sets(st.text("abc123", min_size=1), min_size=1, max_size=9).map(sorted)


@given(PODS, st.integers(0, 2**32), st.integers(0, 50))
def test_each_pod_runs_each_arm_once_a_pair(pods: list[str], seed: int, pair: int) -> None:
    first = choose_canaries(pods, seed=seed, block=2 * pair)
    second = choose_canaries(pods, seed=seed, block=2 * pair + 1)
    assert first | second == frozenset(pods)
    assert not first & second


@given(PODS, st.integers(0, 2**32), st.integers(0, 50))
def test_a_restarted_operator_draws_the_same(pods: list[str], seed: int, block: int) -> None:
    again = choose_canaries(list(reversed(pods)), seed=seed, block=block)
    assert choose_canaries(pods, seed=seed, block=block) == again


def test_which_half_starts_is_drawn_by_pair() -> None:
    starts = [choose_canaries(["a", "b"], seed=7, block=2 * pair) for pair in range(200)]
    share = sum("a" in canaries for canaries in starts) / 200
    assert 0.4 < share < 0.6
    assert len({tuple(sorted(one)) for one in starts}) == 2
