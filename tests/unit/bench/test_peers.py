"""Each peer behaves as its source says, before it is compared with anything."""

from __future__ import annotations

import numpy as np
import pytest

from specdecode_sim import virtual
from specdecode_sim.virtual import Lengths
from tests.bench.policies import peers
from tests.bench.policies.surfaces import OFF, Load, Steps, Surface


def steps_of(count: int, *, drafts: int, accepted: tuple[float, ...]) -> Steps:
    """Make recorded steps in which every draft had the positions of `accepted`, as counts."""
    positions = 7
    steps = np.zeros((count, virtual.TAPE_COLUMNS + 2 * positions), dtype=np.float32)
    steps[:, virtual.STEP_SECONDS] = 0.02
    steps[:, virtual.STEP_BATCH] = drafts
    at_risk = [drafts, *accepted][: len(accepted)]
    steps[:, virtual.TAPE_COLUMNS : virtual.TAPE_COLUMNS + len(accepted)] = at_risk
    first = virtual.TAPE_COLUMNS + positions
    steps[:, first : first + len(accepted)] = accepted
    return steps


# ---------------------------------------------------------------------------------- SGLang


def adaptive() -> peers.SglangAdaptive:
    return peers.SglangAdaptive(k_max=7)


def feed(policy: peers.SglangAdaptive, batch: int, accepted: float, intervals: int) -> list[int]:
    """Accept so many tokens of every draft; return the K after each interval of five."""
    seen = []
    for _ in range(intervals):
        policy.observe(batch, steps_of(5, drafts=batch, accepted=(accepted * batch,)))
        seen.append(policy.choose(batch))
    return seen


def test_sglang_waits_ten_batches_then_decides_every_five() -> None:
    assert feed(adaptive(), 1, accepted=3.0, intervals=3) == [3, 3, 5]


def test_sglang_probes_one_candidate_beyond_full_acceptance_until_the_largest() -> None:
    policy = adaptive()
    feed(policy, 1, accepted=3.0, intervals=6)
    assert policy.choose(1) == 5  # accepted 3 never passes 5 - 0.5
    feed(policy, 1, accepted=5.0, intervals=10)
    assert policy.choose(1) == 7


def test_sglang_goes_down_when_drafts_are_rejected_and_keeps_one_step_at_small_batches() -> None:
    policy = adaptive()
    feed(policy, 1, accepted=0.0, intervals=10)
    assert policy.choose(1) == 1


def test_sglang_turns_speculation_off_at_medium_batches_and_probes_it_again() -> None:
    seen = feed(adaptive(), 16, accepted=0.0, intervals=12)
    assert OFF in seen
    assert seen[seen.index(OFF) + 1] == 1


def test_sglang_never_speculates_in_its_slot_of_64() -> None:
    policy = adaptive()
    feed(policy, 96, accepted=3.0, intervals=10)
    assert policy.choose(96) == OFF


@pytest.mark.parametrize(("batch", "candidates"), [(4, 7), (5, 3), (20, 3), (21, 1), (49, OFF)])
def test_sglang_sends_a_batch_to_the_nearest_slot(batch: int, candidates: int) -> None:
    policy = adaptive()
    feed(policy, batch, accepted=7.0, intervals=30)
    assert policy.choose(batch) == candidates


# ----------------------------------------------------------------------------- TensorRT-LLM


@pytest.mark.parametrize(
    ("batch", "k"), [(1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (32, 1), (33, OFF), (256, OFF)]
)
def test_tensorrt_follows_its_documented_schedule(batch: int, k: int) -> None:
    assert peers.TensorRtSchedule().choose(batch) == k


def test_tensorrt_gates_only_over_a_full_window_and_then_for_good() -> None:
    policy = peers.TensorRtSchedule(window=100, threshold=0.5)
    policy.observe(4, steps_of(99, drafts=4, accepted=(0.0,)))
    assert policy.choose(4) == 4
    policy.observe(4, steps_of(1, drafts=4, accepted=(0.0,)))
    assert policy.choose(4) == OFF
    policy.observe(4, steps_of(500, drafts=4, accepted=(4.0, 4.0, 4.0, 4.0)))
    assert policy.choose(4) == OFF


def test_tensorrt_keeps_speculation_above_the_threshold() -> None:
    policy = peers.TensorRtSchedule(window=100, threshold=0.5)
    policy.observe(4, steps_of(200, drafts=4, accepted=(4.0, 4.0, 2.0, 0.0)))
    assert policy.choose(4) == 4


# ------------------------------------------------------------------------------------ vLLM


def profiled(**changes: float) -> peers.OfflineProfile:
    flat = {k: 0.01 * (1 + changes.get("price", 0.0) * k) for k in (0, 1, 3, 5)}
    steep = {k: 0.02 * (1 + k) for k in (0, 1, 3, 5)}
    return peers.OfflineProfile({1: flat, 64: steep}, (0.8, 0.6, 0.4, 0.2, 0.1))


def test_vllm_takes_the_largest_k_while_drafts_are_free_and_none_when_each_costs_a_step() -> None:
    assert profiled().best_k(1) == 5
    assert profiled().best_k(64) == 0


def test_vllm_interpolates_between_the_profiled_batches_and_ks() -> None:
    chosen = [profiled().best_k(batch) for batch in (1, 2, 8, 32, 64)]
    assert chosen == sorted(chosen, reverse=True)
    assert 0 < chosen[2] < 5
    at_two = profiled(price=0.1).best_k(1)
    assert at_two in (2, 3, 4)  # 2 and 4 were never measured themselves


def test_vllm_keeps_its_table_whatever_it_sees() -> None:
    policy = peers.VllmTable(profiled())
    policy.observe(1, steps_of(1000, drafts=1, accepted=(0.0,)))
    assert policy.choose(1) == 5


# --------------------------------------------------------------------- SmartSpec / TurboSpec


def linear(constant: float, token: float, draft: float) -> peers.GoodputArgmax:
    return peers.GoodputArgmax(
        lambda batch, k: constant + token * batch * (k + 1) + draft * k, k_max=7
    )


def with_acceptance(policy: peers.GoodputArgmax, share: float) -> peers.GoodputArgmax:
    policy.observe(1, steps_of(200, drafts=100, accepted=(100 * share,)))
    assert policy.acceptance == pytest.approx(share)
    return policy


def test_smartspec_expects_the_geometric_sum_of_tokens() -> None:
    """At a=0.7 a third token gains 0.343: it is drafted up to a price of 0.343 / 2.19 a token."""
    cheap, dear = (linear(1.0, 0.0, price) for price in (0.17, 0.19))
    assert with_acceptance(linear(1.0, 0.0, 0.0), 0.7).choose(1) == 7
    assert with_acceptance(cheap, 0.7).choose(1) >= with_acceptance(dear, 0.7).choose(1)
    tokens = [(1 - 0.7 ** (k + 1)) / (1 - 0.7) for k in range(8)]
    best = max(range(8), key=lambda k: tokens[k] / (1 + 0.17 * k))
    assert with_acceptance(cheap, 0.7).choose(1) == best


def test_smartspec_drafts_less_at_larger_batches_and_nothing_at_the_largest() -> None:
    policy = with_acceptance(linear(0.01, 0.0004, 0.0005), 0.7)
    chosen = [policy.choose(batch) for batch in (1, 8, 32, 128, 1024)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 4
    assert chosen[-1] == OFF


def test_smartspec_drafts_more_the_more_is_accepted() -> None:
    chosen = [
        with_acceptance(linear(0.01, 0.0002, 0.001), a).choose(8) for a in (0.1, 0.4, 0.7, 0.95)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_smartspec_forgets_steps_beyond_its_window() -> None:
    policy = with_acceptance(linear(0.01, 0.0002, 0.001), 0.9)
    policy.observe(1, steps_of(100, drafts=10, accepted=(1.0,)))
    assert policy.acceptance == pytest.approx(0.1)


# ------------------------------------------------------------------- adaptive verification


def test_av_gains_most_where_the_batch_is_large_and_never_loses_much_where_it_is_small() -> None:
    """vLLM's figures: 4 to 11 % over the best K of this profile's source, 9 to 34 % over K=7."""
    lengths = Lengths(128, 128, 128, 128)
    plain, adaptive = Surface("dspark-v4flash-b300"), Surface("dspark-v4flash-b300", adaptive=True)
    gains = {
        streams: adaptive.goodput(load, 7) / plain.goodput(load, 7) - 1
        for streams in (1, 64)
        for load in [Load(streams, 60, lengths)]
    }
    assert gains[1] > -0.02
    assert 0.04 < gains[64] < 0.40
    assert gains[64] > gains[1]


def test_av_gains_more_where_less_is_accepted() -> None:
    lengths = Lengths(128, 128, 128, 128)
    plain, adaptive = Surface("dspark-v4flash-b300"), Surface("dspark-v4flash-b300", adaptive=True)
    gains = [
        adaptive.goodput(load, 7) / plain.goodput(load, 7)
        for load in (Load(64, ease, lengths) for ease in (100, 60))
    ]
    assert gains[1] > gains[0]
