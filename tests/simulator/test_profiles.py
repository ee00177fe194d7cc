"""Profiles reproduce the published tables they came from, within the error they state."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_sim import cost, fit, profile, virtual

TABLES = Path(__file__).parents[1] / "data" / "tables"
FULL = "FULL_AND_PIECEWISE"


def read_table(name: str, metric: str) -> Iterator[tuple[int, int, float]]:
    """Yield (streams or tokens, K, value) of a table; K -1 is off; adaptive arms are left."""
    with (TABLES / f"{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] != metric or row["arm"] == "adaptive":
                continue
            if name.startswith("manoj") and not row["model"].startswith("Llama-3.1-8B"):
                continue
            if name.startswith("manoj") and "kv=fp16" not in row["model"]:
                continue
            k = int(row["k"]) if row["arm"] == "fixed" else -1
            yield int(row["concurrency_or_batch"]), k, float(row["value"])


def goodput(
    source: profile.Profile, *, streams: int, k: int, adaptive: bool = False, prompt: int = 512
) -> float:
    """Return tokens per second of an engine in virtual time; K -1 is speculation off."""
    engine = virtual.VirtualEngine(
        source,
        k_max=7,
        adaptive=adaptive,
        speculation=k >= 0,
        lengths=virtual.Lengths(prompt, prompt, 256, 256),
        noise=False,
    )
    rows = [(1, 256, max(k, 0))]
    engine.run(rows, streams=streams, seconds=5.0)
    return engine.run(rows, streams=streams, seconds=120.0 if streams == 1 else 15.0).goodput


def adaptive_gain(source: profile.Profile, *, streams: int, fixed: tuple[int, ...]) -> float:
    """Return by how much adaptive verification at K=7 is ahead of the best of the fixed K."""
    best = max(goodput(source, streams=streams, k=k, prompt=64) for k in fixed)
    return goodput(source, streams=streams, k=7, adaptive=True, prompt=64) / best - 1.0


def best_k(source: profile.Profile, *, streams: int, k_max: int) -> int:
    """Return the K of most tokens per second in steady decode."""
    engine = source.build_cost(graphs=FULL)
    curve = source.acceptance.curve
    return max(range(1, k_max + 1), key=lambda k: fit.predict(engine, curve, streams=streams, k=k))


@pytest.mark.parametrize("name", profile.list_profiles())
def test_every_profile_loads_and_names_its_source(name: str) -> None:
    assert profile.load_profile(name).source


@pytest.mark.parametrize(
    ("streams", "k", "measured"), list(read_table("manoj_phase2_gsm8k", "output_throughput"))
)
def test_llama_reproduces_its_table(streams: int, k: int, measured: float) -> None:
    source = profile.load_profile("llama8b-a100")
    assert goodput(source, streams=streams, k=k) == pytest.approx(
        measured, rel=source.error_percent / 100
    )


@pytest.mark.parametrize(
    ("streams", "k", "measured"),
    list(read_table("sglang_pr22246_autospec_qwen3_235b", "output_throughput")),
)
def test_qwen_reproduces_its_table(streams: int, k: int, measured: float) -> None:
    source = profile.load_profile("qwen3-235b-eagle3")
    predicted = fit.predict(
        source.build_cost(graphs=FULL), source.acceptance.curve, streams=streams, k=k
    )
    assert predicted == pytest.approx(measured, rel=source.error_percent / 100)


@pytest.mark.parametrize(
    ("tokens", "milliseconds"),
    # Its 1025 is the capture limit of 1024, read off a figure to 0.2 %.
    [
        (1024 if tokens == 1025 else tokens, value)
        for tokens, _, value in read_table("cost_dspark_v4flash_b300", "verify_step_cost")
    ],
)
def test_dspark_reproduces_verification(tokens: int, milliseconds: float) -> None:
    source = profile.load_profile("dspark-v4flash-b300")
    found = cost.verify_milliseconds(source.build_cost(graphs=FULL), float(tokens))
    assert found == pytest.approx(milliseconds, rel=source.error_percent / 100)


@pytest.mark.parametrize(
    ("requests", "milliseconds"),
    [(n, value) for n, _, value in read_table("cost_dspark_v4flash_b300", "draft_cost")],
)
def test_dspark_reproduces_drafting(requests: int, milliseconds: float) -> None:
    source = profile.load_profile("dspark-v4flash-b300")
    found = cost.draft_milliseconds(source.build_cost(graphs=FULL), float(requests), 7)
    assert found == pytest.approx(milliseconds, rel=source.error_percent / 100)


def test_a_dense_model_wants_a_lower_k_the_more_streams_it_has() -> None:
    source = profile.load_profile("llama8b-a100")
    chosen = [best_k(source, streams=2**n, k_max=7) for n in range(9)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 5
    assert chosen[-1] <= 2


def test_a_model_of_experts_has_a_best_k_that_rises_and_falls_as_its_table_says() -> None:
    source = profile.load_profile("qwen3-235b-eagle3")
    measured = {
        (streams, k): value
        for streams, k, value in read_table(
            "sglang_pr22246_autospec_qwen3_235b", "output_throughput"
        )
    }
    chosen = {2**n: best_k(source, streams=2**n, k_max=6) for n in range(7)}
    assert list(chosen.values()) == [4, 3, 3, 4, 3, 3, 2]
    for streams, k in chosen.items():
        best = max(measured[streams, other] for other in range(1, 7))
        assert measured[streams, k] > 0.995 * best


def test_its_best_k_is_not_a_tie() -> None:
    source = profile.load_profile("qwen3-235b-eagle3")
    engine, curve = source.build_cost(graphs=FULL), source.acceptance.curve
    for streams, better, worse in [(4, 3, 4), (8, 4, 3), (16, 3, 4)]:
        ahead = fit.predict(engine, curve, streams=streams, k=better)
        assert ahead > 1.002 * fit.predict(engine, curve, streams=streams, k=worse)


@pytest.mark.parametrize("streams", [16, 64, 128])
def test_adaptive_verification_is_ahead_of_the_best_fixed_k_as_published(streams: int) -> None:
    source = profile.load_profile("dspark-v4flash-b300")
    assert 0.03 < adaptive_gain(source, streams=streams, fixed=(5, 6, 7)) < 0.11


@pytest.mark.parametrize(
    "curve",
    [(0.82, 0.62, 0.47, 0.35, 0.27, 0.20, 0.15), (0.62, 0.38, 0.24, 0.16, 0.11, 0.08, 0.06)],
    ids=["low entropy, length 3.88", "high entropy, length 2.65"],
)
def test_adaptive_verification_gains_more_where_less_is_accepted(
    curve: tuple[float, ...],
) -> None:
    source = profile.load_profile("dspark-v4flash-b300")
    harder = source.acceptance.model_copy(update={"curve": curve})
    source = source.model_copy(update={"acceptance": harder})
    assert 0.09 < adaptive_gain(source, streams=64, fixed=(7,)) < 0.34


@pytest.mark.parametrize(
    ("name", "table", "length"),
    [
        ("llama8b-a100", "manoj_phase2_gsm8k", fit.Length(512, 256)),
        ("qwen3-235b-eagle3", "sglang_pr22246_autospec_qwen3_235b", fit.Length()),
    ],
)
def test_a_profile_is_where_its_own_fit_ends(name: str, table: str, length: fit.Length) -> None:
    source = profile.load_profile(name)
    points = [fit.Measured(*row) for row in read_table(table, "output_throughput")]
    found = fit.fit_profile(points, source, length=length)
    assert found.error_percent < source.error_percent
    for before, after in zip(
        source.build_cost(graphs=FULL), found.build_cost(graphs=FULL), strict=True
    ):
        assert after == pytest.approx(before, rel=0.15)


def test_a_fit_finds_the_profile_that_made_its_measurements() -> None:
    source = profile.load_profile("llama8b-a100")
    engine, curve = source.build_cost(graphs=FULL), source.acceptance.curve
    length = fit.Length(512, 256)
    points = [
        fit.Measured(streams, k, fit.predict(engine, curve, streams=streams, k=k, length=length))
        for streams in (1, 4, 16, 64)
        for k in (-1, 0, 1, 3, 7)
    ]
    found = fit.fit_profile(points, source.scaled(2.0), length=length, prior=1e-4)
    assert found.error_percent < 1.0


def test_the_steady_state_a_fit_assumes_is_the_virtual_engine_s() -> None:
    source = profile.load_profile("llama8b-a100")
    engine, curve = source.build_cost(graphs=FULL), source.acceptance.curve
    for streams, k in [(1, 5), (8, 2), (32, -1), (64, 5)]:
        assumed = fit.predict(engine, curve, streams=streams, k=k, length=fit.Length(512, 256))
        assert assumed == pytest.approx(goodput(source, streams=streams, k=k), rel=0.03)


def test_a_fit_refuses_no_measurements() -> None:
    with pytest.raises(ValueError, match="needs measurements"):
        fit.fit_profile([], profile.load_profile("llama8b-a100"))
