"""The benchmark of policies in small: its own arithmetic, and one trace from end to end."""

from __future__ import annotations

import pytest

from tests.bench.policies import report, runner
from tests.bench.policies.surfaces import OFF, Load, Surface
from tests.bench.policies.traces import (
    FAMILIES,
    HOUR,
    SCRAPE_SECONDS,
    SHORT,
    Phase,
    build_trace,
)
from tests.bench.policies.tuned import Stretch


@pytest.fixture(scope="module")
def surface() -> Surface:
    return Surface("llama8b-a100")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trace_is_drawn_from_its_seed_and_lasts_as_long_as_asked(name: str) -> None:
    first, again = (build_trace(FAMILIES[name], seed=1, hours=3.0) for _ in range(2))
    assert first == again
    assert sum(phase.seconds for phase in first) == pytest.approx(3 * HOUR, abs=SCRAPE_SECONDS * 20)
    assert all(phase.seconds % SCRAPE_SECONDS == 0 for phase in first)


def test_the_surface_falls_beyond_the_captured_graphs_and_the_plugin_keeps_away() -> None:
    cliff = Surface("dspark-v4flash-b300")
    load = Load(256, 100, SHORT)
    assert cliff.goodput(load, 4) < 0.5 * cliff.goodput(load, 3)
    assert cliff.clamped([[1, 256, 7]], 256) == 3
    assert cliff.clamped([[1, 128, 7], [129, 256, 3]], 128) == 7


def test_regret_and_the_worst_hour_are_counted_from_the_cells_goodput(surface: Surface) -> None:
    load = Load(64, 100, SHORT)
    held = (Stretch(load, 7, HOUR), Stretch(load, 2, HOUR))
    score = report.score(surface, runner.Run("ours", held, is_adaptive=True, first_verdict=0.0))
    low, high = surface.goodput(load, 7), surface.goodput(load, 2)
    assert score.regret == pytest.approx(1 - (low + high) / (2 * surface.best(load)))
    off = surface.goodput(load, OFF)
    assert score.worst_hour == pytest.approx(min(low, high) / off - 1)


def test_only_the_verdict_starts_the_promise(surface: Surface) -> None:
    load = Load(64, 100, SHORT)
    held = (Stretch(load, 7, HOUR), Stretch(load, 2, HOUR))
    late = runner.Run("ours", held, is_adaptive=True, first_verdict=HOUR)
    never = runner.Run("ours", held, is_adaptive=True, first_verdict=None)
    assert report.score(surface, late).worst_hour == pytest.approx(
        surface.goodput(load, 2) / surface.goodput(load, OFF) - 1
    )
    assert report.score(surface, never).worst_hour is None


def test_quantiles_are_weighted_by_time() -> None:
    assert report.quantiles([(0.5, 1.0), (0.0, 94.0), (0.1, 5.0)]) == (0.0, 0.1)


def test_a_day_in_small_every_arm_is_scored_and_ours_learns(surface: Surface) -> None:
    trace = [Phase(4 * HOUR, Load(96, 100, SHORT))]
    ours = runner.run_tuned(surface, trace, seed=1)
    runs = [ours, *runner.run_peers(surface, trace, seed=1)]
    scores = {run.arm: report.score(surface, run) for run in runs}
    assert {"ours", "K=1", "SGLang", "TensorRT-LLM", "vLLM table", "TurboSpec"} <= set(scores)
    assert all(-1e-9 <= one.regret < 1 for one in scores.values())
    assert ours.verdicts > 0
    started = report.score(surface, runner.Run("start", (Stretch(trace[0].load, 3, 1.0),), False))
    assert scores["ours"].regret < started.regret
    median, _ = report.quantiles(scores["ours"].late)
    assert median <= 0.02
