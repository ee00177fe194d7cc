"""By block and step by step are one model: means, variances and neighbours of totals agree.

Each cell is run for BLOCKS blocks of SECONDS in both fidelities. Means may differ by 0.4 % (the
error of one recording) and SIGMAS standard errors of neighbouring blocks that are alike; standard
deviations by a factor of 1.5 and lag-1 autocorrelations by 0.35, which with so many blocks under a
slow noise of 20 s are both about 3 standard errors or more.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from specdecode_sim import block, profile, virtual

LENGTHS = virtual.Lengths(64, 192, 64, 192)
K_MAX = 7
BLOCKS = 150
SECONDS = 10.0
SIGMAS = 4.0
NAMES = ("goodput", "steps", "tokens", "seconds", "mixed steps", "accepted")


@functools.cache
def build_profile() -> profile.Profile:
    plain = profile.load_profile("llama8b-a100")
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
    engine: virtual.VirtualEngine | block.BlockEngine, *, k: int, streams: int
) -> np.ndarray:
    """Return figures by block and name, once the start has been forgotten."""
    rows = [(1, 256, k)]
    engine.run(rows, streams=streams, seconds=150.0)
    return np.array(
        [to_figures(engine.run(rows, streams=streams, seconds=SECONDS)) for _ in range(BLOCKS)]
    )


def correlate(series: np.ndarray) -> float:
    """Return the lag-1 autocorrelation; 0 for what does not vary."""
    return float(np.corrcoef(series[:-1], series[1:])[0, 1]) if series.std() > 0 else 0.0


@pytest.mark.parametrize("streams", [1, 8, 64, 256])
@pytest.mark.parametrize("mode", ["off", 0, 1, 3, 7, "adaptive"])
def test_both_fidelities_agree(mode: int | str, streams: int) -> None:
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
            assert other.std() <= 1.5 * one.std() + 1e-9, f"deviation of {name}"
            assert one.std() <= 1.5 * other.std() + 1e-9, f"deviation of {name}"
        assert abs(correlate(one) - correlate(other)) < 0.35, f"autocorrelation of {name}"


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
