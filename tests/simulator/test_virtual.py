"""Virtual time step by step: closed loops come to what the cost and the curve say."""

from __future__ import annotations

import pytest

from specdecode_sim import acceptance, cost, profile, virtual

LENGTHS = virtual.Lengths(64, 192, 64, 192)
LONG = virtual.Lengths(16, 16, 20_000, 20_000)
K_MAX = 7


def build_profile(**acceptance_fields: float) -> profile.Profile:
    plain = profile.load_profile("llama8b-a100")
    curve = plain.acceptance.model_copy(update=acceptance_fields)
    return plain.model_copy(update={"acceptance": curve, "kv_tokens": 10_000_000})


def measure(
    engine: virtual.VirtualEngine, k: int, *, streams: int, seconds: float
) -> virtual.Totals:
    engine.run([(1, 256, k)], streams=streams, seconds=seconds / 5)
    return engine.run([(1, 256, k)], streams=streams, seconds=seconds)


@pytest.mark.parametrize("streams", [1, 16, 64])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_goodput_of_long_outputs_is_acceptance_length_over_step_time(k: int, streams: int) -> None:
    made = build_profile()
    # The context grows by the hour; without its price the step time is constant.
    made = made.model_copy(update={"times": made.times.model_copy(update={"context": 0.0})})
    engine = virtual.VirtualEngine(made, k_max=K_MAX, lengths=LONG, noise=False)
    totals = measure(engine, k, streams=streams, seconds=100)
    milliseconds = cost.step_milliseconds(
        made.build_cost(graphs="FULL_AND_PIECEWISE"), streams * (k + 1), streams, 0, 0, k
    )
    length = acceptance.mean_acceptance_length(made.acceptance.curve, k)
    assert totals.goodput == pytest.approx(streams * length / milliseconds * 1000, rel=0.015)


def test_time_passes_in_cells_of_batch_and_k_and_in_mixed_steps() -> None:
    engine = virtual.VirtualEngine(build_profile(), k_max=K_MAX, lengths=LENGTHS)
    totals = measure(engine, 3, streams=8, seconds=60)
    inside = totals.cells[3, 3, virtual.SECONDS] + totals.mixed[3, virtual.SECONDS]
    assert inside == pytest.approx(totals.seconds)
    assert totals.at_risk[3:].sum() == 0
    assert (totals.accepted[:3] > 0).all()


def test_streams_that_go_are_let_end_and_streams_that_come_start_at_once() -> None:
    engine = virtual.VirtualEngine(build_profile(), k_max=K_MAX, lengths=LENGTHS)
    rows = [(1, 256, 2)]
    engine.run(rows, streams=32, seconds=10)
    engine.run(rows, streams=4, seconds=20)
    few = engine.run(rows, streams=4, seconds=10)
    many = engine.run(rows, streams=64, seconds=10)
    assert few.cells[3:].sum() == 0
    assert many.cells[:6].sum() == 0


def test_one_seed_gives_one_course() -> None:
    goodputs = [
        virtual.VirtualEngine(build_profile(), k_max=K_MAX, seed=seed)
        .run([(1, 256, 3)], streams=8, seconds=20)
        .goodput
        for seed in (1, 1, 2)
    ]
    assert goodputs[0] == goodputs[1] != goodputs[2]


def test_acceptance_drifts_with_uptime() -> None:
    engine = virtual.VirtualEngine(build_profile(drift_per_hour=0.5, spread=0.0), k_max=K_MAX)
    shares = []
    for _ in range(2):
        totals = engine.run([(1, 256, 1)], streams=4, seconds=60)
        shares.append(totals.accepted[0] / totals.at_risk[0])
        engine.run([(1, 256, 1)], streams=1, seconds=3600)
    assert shares[0] == pytest.approx(0.72, abs=0.02)
    # Ease is 1 - 0.5 * 3660 s / 3600 s; the exponent on the curve is its inverse.
    assert shares[1] == pytest.approx(0.72 ** (1 / (1 - 0.5 * 3660 / 3600)), abs=0.02)


@pytest.mark.parametrize("streams", [1, 8, 32])
def test_adaptive_verification_beats_every_fixed_k_where_drafts_differ(streams: int) -> None:
    made = build_profile(spread=1.5)
    # Drafting free, as with a drafter that makes the whole block in one pass whatever K is.
    made = made.model_copy(update={"drafting": profile.Drafting(step=0.5)})
    fixed = virtual.VirtualEngine(made, k_max=K_MAX, lengths=LENGTHS, noise=False)
    best = max(measure(fixed, k, streams=streams, seconds=120).goodput for k in range(K_MAX + 1))
    adaptive = virtual.VirtualEngine(made, k_max=K_MAX, lengths=LENGTHS, noise=False, adaptive=True)
    gained = measure(adaptive, K_MAX, streams=streams, seconds=120).goodput
    assert gained > best * (0.99 if streams == 1 else 1.01)  # at one stream all of it pays


def test_lengths_that_never_fit_are_refused() -> None:
    small = build_profile().model_copy(update={"kv_tokens": 100})
    with pytest.raises(ValueError, match="never fits into 96 KV tokens"):
        virtual.VirtualEngine(small, k_max=1, lengths=LENGTHS)
