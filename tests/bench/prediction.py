"""Whether the simulator's model predicts a real engine: fitted at some loads, tried at another.

`python -m tests.bench.prediction` fits a profile to the CPU engine at 1, 8 and 64 streams and has
the engine in virtual time say what 32 streams give at each K. Goodput is tokens by the engine's
busy seconds, on both sides. A small machine changes its speed by itself: each K of each load comes
round several times in short windows, and a figure is the median of its windows. Printed as JSON,
also written to .build/prediction.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from specdecode_sim import fit, virtual
from specdecode_sim.profile import Acceptance, Drafting, Profile, StepTimes
from tests.image.running_engine import K_MAX, MAX_BATCH, START_TABLE, Difference, RunningEngine
from tests.support.engine import ROOT, make_engine

REPEATS = 3
ROUNDS = 4
WINDOW_SECONDS = 3.0
FITTED_STREAMS = (1, 8, 64)
PREDICTED_STREAMS = 32
CHOICES = (0, 1, 2, 3, 5, 7)
LENGTH = fit.Length(prompt=32, output=128)  # the prompt is that of RunningEngine.load
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# What the issue asks of each repeat.
MEDIAN_ERROR = 0.10
LARGEST_ERROR = 0.20
BEST_K_LOSS = 0.05

Cell = tuple[int, int]  # streams, K


@dataclass
class Seen:
    """Windows by streams and K, and the drafts of the loads that are fitted, by position."""

    goodput: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    at_risk: list[float] = field(default_factory=lambda: [0.0] * K_MAX)
    accepted: list[float] = field(default_factory=lambda: [0.0] * K_MAX)

    @property
    def curve(self) -> tuple[float, ...]:
        """Return cumulative acceptance by position: the product of the chances so far."""
        survival, curve = 1.0, []
        for at_risk, accepted in zip(self.at_risk, self.accepted, strict=True):
            survival *= accepted / at_risk if at_risk else 0.0
            curve.append(survival)
        return tuple(curve)

    def medians(self, *streams: int) -> dict[Cell, float]:
        """Return the median goodput of each K at these loads."""
        return {cell: median(v) for cell, v in self.goodput.items() if cell[0] in streams}


def main(repeats: int = REPEATS, rounds: int = ROUNDS) -> int:
    """Run the repeats on one engine; return 1 when one is not as good as asked for."""
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(Path(folder) / "engine")
        try:
            engine.wait_until_ready()
            runs = [judge(observe(engine, rounds=rounds)) for _ in range(repeats)]
        finally:
            engine.stop()
    good = all(run["isGood"] for run in runs)
    text = json.dumps({"isGood": good, "rounds": rounds, "repeats": runs}, indent=2)
    (ROOT / ".build" / "prediction.json").write_text(text + "\n")
    print(text)
    return 0 if good else 1


def start_engine(folder: Path) -> RunningEngine:
    """Start the pair of high acceptance, one thread, so that the load has the other core."""
    os.environ.update(ENVIRONMENT)
    files = make_engine()
    pair = files.models["high"]
    config = {
        "method": "draft_model",
        "model": str(pair.draft),
        "num_speculative_tokens": K_MAX,
        "num_speculative_tokens_per_batch_size": START_TABLE,
    }
    return RunningEngine(
        files,
        folder,
        f"--speculative-config={json.dumps(config)}",
        model=pair.target,
    )


def observe(engine: RunningEngine, *, rounds: int) -> Seen:
    """Watch each K at each load, so many rounds."""
    seen = Seen()
    for number in range(rounds):
        for streams in sorted((*FITTED_STREAMS, PREDICTED_STREAMS)):
            with engine.load(streams, output_tokens=int(LENGTH.output)):
                for k in CHOICES if number % 2 == 0 else reversed(CHOICES):
                    observe_window(engine, seen, (streams, k))
    return seen


def observe_window(engine: RunningEngine, seen: Seen, cell: Cell) -> None:
    """Watch one K for one window."""
    streams, k = cell
    engine.apply([[1, MAX_BATCH, k]])
    engine.observe(2, k=k)  # the drafts of the table before are behind it
    before = engine.scrape()
    time.sleep(WINDOW_SECONDS)
    change = Difference(before, engine.scrape())
    seen.goodput[cell].append(goodput(change))
    if streams in FITTED_STREAMS:
        for position in range(k):
            at = str(position)
            seen.at_risk[position] += change.total(
                "specdecode_at_risk_per_position_total", position=at
            )
            seen.accepted[position] += change.total(
                "specdecode_accepted_per_position_total", position=at
            )


def goodput(change: Difference) -> float:
    """Return tokens by busy second, from the plugin's counters."""
    kinds = ("step", "mixed_step")
    tokens = sum(change.total(f"specdecode_{kind}_tokens_total") for kind in kinds)
    return tokens / sum(change.total(f"specdecode_{kind}_seconds_total") for kind in kinds)


def judge(seen: Seen) -> dict[str, Any]:
    """Fit on some loads, predict the other, and compare."""
    profile = fit_engine(seen.medians(*FITTED_STREAMS), seen.curve)
    measured = {k: value for (_, k), value in seen.medians(PREDICTED_STREAMS).items()}
    predicted = {k: predict(profile, k) for k in measured}
    errors = {k: predicted[k] / measured[k] - 1.0 for k in measured}
    sizes = sorted(map(abs, errors.values()))
    chosen = max(predicted, key=lambda k: predicted[k])
    best = max(measured, key=lambda k: measured[k])
    loss = 1.0 - measured[chosen] / measured[best]
    return {
        "isGood": (
            median(sizes) <= MEDIAN_ERROR and sizes[-1] <= LARGEST_ERROR and loss <= BEST_K_LOSS
        ),
        "medianErrorPercent": round(100 * median(sizes), 1),
        "largestErrorPercent": round(100 * sizes[-1], 1),
        "bestK": {"measured": best, "predicted": chosen, "lossPercent": round(100 * loss, 1)},
        "fitErrorPercent": round(profile.error_percent, 1),
        "curve": [round(value, 3) for value in seen.curve],
        "measuredTokensPerSecond": {k: round(value, 1) for k, value in measured.items()},
        "errorPercent": {k: round(100 * value, 1) for k, value in errors.items()},
        "windowsTokensPerSecond": {
            f"{streams} streams, K={k}": [round(value, 1) for value in values]
            for (streams, k), values in seen.goodput.items()
        },
        "times": profile.times.model_dump(exclude_defaults=True),
        "drafting": profile.drafting.model_dump(exclude_defaults=True),
    }


def fit_engine(measured: Mapping[Cell, float], curve: Sequence[float]) -> Profile:
    """Fit a profile; where it starts is a guess from a single stream without drafts."""
    step = 1000.0 / measured[1, 0]
    start = Profile(
        name="cpu",
        gpu="none",
        model="of the test",
        source="this run",
        error_percent=0.0,
        times=StepTimes(launch={"FULL": 0.0}, weights=step / 2, token=step / 20, prefill=step / 40),
        drafting=Drafting(
            step=step / 4, draft_pass=step / 4, request=step / 40, request_pass=step / 40
        ),
        acceptance=Acceptance(curve=tuple(curve)),
    )
    points = [fit.Measured(streams, k, value) for (streams, k), value in measured.items()]
    return fit.fit_profile(points, start, length=LENGTH, prior=0.003)


def predict(profile: Profile, k: int) -> float:
    """Return the goodput of the engine in virtual time."""
    prompt, output = int(LENGTH.prompt), int(LENGTH.output)
    engine = virtual.VirtualEngine(
        profile,
        k_max=K_MAX,
        graphs="FULL",
        max_requests=MAX_BATCH,
        lengths=virtual.Lengths(prompt, prompt, output, output),
        noise=False,
    )
    rows = [(1, MAX_BATCH, k)]
    engine.run(rows, streams=PREDICTED_STREAMS, seconds=60.0)
    return engine.run(rows, streams=PREDICTED_STREAMS, seconds=600.0).goodput


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
