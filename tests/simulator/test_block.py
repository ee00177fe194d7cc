"""By block and step by step are one model: means, variances and neighbours of totals agree.

Each cell is run for BLOCKS blocks of SECONDS in both fidelities, from a recording of that length.
Under a slow noise of 20 s so many blocks are worth 280 that are independent, or more: a standard
deviation has an error of 4 %, a lag-1 autocorrelation one of 0.03, and the bounds are some 4 errors
of a difference of two. Means may differ by 0.4 % (the error of one recording) and SIGMAS errors.

Whether the noise of a section is that of its steps needs no second run of the engine: there both
sides replay one tape, and MANY blocks bring the bounds down to 5 % and 0.05.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from specdecode_sim import block, profile, virtual

LENGTHS = virtual.Lengths(64, 192, 64, 192)
K_MAX = 7
BLOCKS = 600
MANY = 10_000
SECONDS = 10.0
SIGMAS = 4.0
NAMES = ("goodput", "steps", "tokens", "seconds", "mixed steps", "accepted")


@functools.cache
def build_profile(name: str = "llama8b-a100") -> profile.Profile:
    plain = profile.load_profile(name)
    noise = profile.Noise(step=0.02, slow=0.03, slow_seconds=20.0)
    return plain.model_copy(update={"noise": noise, "kv_tokens": 1_000_000})


def to_figures(totals: virtual.Totals) -> list[float]:
    both = totals.cells.sum(axis=(0, 1)) + totals.mixed.sum(axis=0)
    return [
        totals.goodput,
        both[virtual.STEPS],
        both[virtual.TOKENS],
        both[virtual.SECONDS],
        totals.mixed[:, virtual.STEPS].sum(),
        float(totals.accepted.sum()),
    ]


def measure(
    engine: virtual.VirtualEngine | block.BlockEngine, *, k: int, streams: int, blocks: int = BLOCKS
) -> np.ndarray:
    """Return figures by block and name, once the start has been forgotten."""
    rows = [(1, 256, k)]
    engine.run(rows, streams=streams, seconds=150.0)
    return np.array(
        [to_figures(engine.run(rows, streams=streams, seconds=SECONDS)) for _ in range(blocks)]
    )


def correlate(series: np.ndarray) -> float:
    """Return the lag-1 autocorrelation; 0 for what does not vary."""
    return float(np.corrcoef(series[:-1], series[1:])[0, 1]) if series.std() > 0 else 0.0


@pytest.mark.parametrize("streams", [1, 8, 64, 256])
@pytest.mark.parametrize("mode", ["off", 0, 1, 3, 7, "adaptive"])
def test_both_fidelities_agree(
    mode: int | str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "TAPE_SECONDS", BLOCKS * SECONDS)
    speculation, adaptive = mode != "off", mode == "adaptive"
    k = mode if isinstance(mode, int) else (K_MAX if adaptive else 0)
    tapes = block.Tapes(
        build_profile(), k_max=K_MAX, adaptive=adaptive, speculation=speculation, lengths=LENGTHS
    )
    by_step = measure(
        virtual.VirtualEngine(
            build_profile(),
            k_max=K_MAX,
            adaptive=adaptive,
            speculation=speculation,
            lengths=LENGTHS,
            seed=7,
        ),
        k=k,
        streams=streams,
    )
    by_block = measure(block.BlockEngine(tapes, seed=8), k=k, streams=streams)
    for index, name in enumerate(NAMES):
        one, other = by_step[:, index], by_block[:, index]
        alike = min(0.9, max(0.0, correlate(one), correlate(other)))
        blocks = BLOCKS * (1 - alike) / (1 + alike)
        error = np.hypot(one.std(), other.std()) / np.sqrt(blocks)
        allowed = 0.004 * one.mean() + SIGMAS * error
        assert abs(one.mean() - other.mean()) <= allowed, f"mean of {name}"
        if name != "seconds":  # they vary by less than a step beyond what was asked for
            assert other.std() <= 1.27 * one.std() + 1e-9, f"deviation of {name}"
            assert one.std() <= 1.27 * other.std() + 1e-9, f"deviation of {name}"
        assert abs(correlate(one) - correlate(other)) < 0.18, f"autocorrelation of {name}"


def build_engines(
    name: str, *, k: int, streams: int, noise: bool, monkeypatch: pytest.MonkeyPatch
) -> list[block.BlockEngine]:
    """Make two engines of one tape and seed: one takes it by section, one step by step."""
    engines = []
    for section_seconds in (block.SECTION_SECONDS, 0.0):
        monkeypatch.setattr(block, "SECTION_SECONDS", section_seconds)
        tapes = block.Tapes(build_profile(name), k_max=K_MAX, lengths=LENGTHS)
        section_steps = tapes.get((((1, 256, k),), streams, 100)).section_steps
        assert (section_steps > 1) == (section_seconds > 0)
        engines.append(block.BlockEngine(tapes, noise=noise, seed=5))
    return engines


@pytest.mark.parametrize("name", profile.list_profiles())
@pytest.mark.parametrize("streams", [1, 64])
def test_sections_hold_the_very_steps_of_their_tape(
    name: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = build_engines(name, k=3, streams=streams, noise=False, monkeypatch=monkeypatch)
    for seconds in (0.001, 0.05, 3.0, 15.0, 60.0):
        by_section, by_step = (
            engine.run([(1, 256, 3)], streams=streams, seconds=seconds) for engine in engines
        )
        assert by_section.cells == pytest.approx(by_step.cells, rel=1e-6)
        assert by_section.mixed == pytest.approx(by_step.mixed, rel=1e-6)
        assert (by_section.at_risk == by_step.at_risk).all()
        assert (by_section.accepted == by_step.accepted).all()
        assert by_section.seconds == pytest.approx(by_step.seconds, rel=1e-6)


@pytest.mark.parametrize("name", profile.list_profiles())
def test_the_noise_of_a_section_is_that_of_its_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = build_engines(name, k=3, streams=1, noise=True, monkeypatch=monkeypatch)
    by_section, by_step = (measure(engine, k=3, streams=1, blocks=MANY) for engine in engines)
    for index, figure in enumerate(NAMES):
        one, other = by_step[:, index], by_section[:, index]
        assert other.mean() == pytest.approx(one.mean(), rel=0.002), f"mean of {figure}"
        if figure != "seconds":
            assert other.std() == pytest.approx(one.std(), rel=0.05), f"deviation of {figure}"
        assert correlate(other) == pytest.approx(correlate(one), abs=0.05), figure


def test_the_slow_noise_runs_on_through_blocks_of_different_cells() -> None:
    engine = block.BlockEngine(block.Tapes(build_profile(), k_max=K_MAX, lengths=LENGTHS), seed=3)
    rows = ([(1, 256, 1)], [(1, 256, 5)])
    goodputs = np.array(
        [engine.run(rows[i % 2], streams=8, seconds=5.0).goodput for i in range(400)]
    )
    relative = goodputs.reshape(-1, 2) / goodputs.reshape(-1, 2).mean(axis=0)
    assert np.corrcoef(relative[:, 0], relative[:, 1])[0, 1] > 0.4


def test_a_cell_is_recorded_once() -> None:
    tapes = block.Tapes(build_profile(), k_max=K_MAX, lengths=LENGTHS)
    cell: block.Cell = (((1, 256, 2),), 4, 100)
    assert tapes.get(cell) is tapes.get(cell)
