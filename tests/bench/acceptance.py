"""`python -m tests.bench acceptance`: bias and interval coverage of acceptance, by simulation.

Each seed is one window of 20,000 drafts: pods with concurrent requests whose drafts are accepted
or not, K changing from step to step, counters scraped at even intervals as Prometheus hands them
over, and the operator's own estimate of them. Beside it: what `accepted_per_pos / num_drafts`
says, and how often the interval of independent drafts (Greenwood) holds the truth. Nothing is
estimated here. Fails above the aims. SEEDS as the first argument changes their number.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from specdecode_operator.domain.observation import MetricsSamples, Series
from specdecode_operator.estimate.acceptance import (
    Survival,
    estimate_clustered_survival,
    estimate_survival,
    mean_acceptance_length,
)
from specdecode_operator.estimate.counters import Counters, Window

SEEDS: Final = 1000
DRAFTS: Final = 20_000
SCRAPE_SECONDS: Final = 5.0
MOST_BIAS: Final = 0.005
COVERAGE: Final = (0.93, 0.97)
# A request's quality is one of so many quantiles of the normal distribution.
_QUALITIES: Final = 8

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """Traffic and engines of one window.

    `spread` is the standard deviation, in log odds, of a request's hazards around the curve's;
    `request_drafts` its mean length; `ks` are drawn anew every `k_steps` steps.
    """

    name: str
    hazards: tuple[float, ...]
    spread: float = 0.0
    request_drafts: float = 50.0
    pods: int = 2
    streams: int = 4
    scrapes: int = 24
    ks: tuple[int, ...] = (1, 3, 7)
    k_steps: int = 1
    faults: bool = False


EAGLE: Final = (0.74, 0.70, 0.68, 0.67, 0.66, 0.65, 0.64)
LOW: Final = (0.44, 0.50, 0.54, 0.57, 0.63, 0.63, 0.59)
HIGH: Final = (0.94, 0.91, 0.90, 0.90, 0.88, 0.80, 0.71)

SCENARIOS: Final = (
    Scenario("independent drafts", EAGLE),
    Scenario("independent drafts, low acceptance", LOW),
    Scenario("independent drafts, high acceptance", HIGH),
    Scenario("by request", EAGLE, spread=1.0),
    Scenario("by request, low acceptance", LOW, spread=1.0),
    Scenario("by request, high acceptance", HIGH, spread=1.0),
    Scenario("by request, K by phases of load", EAGLE, spread=1.0, k_steps=100),
    Scenario("by request, one pod, 12 scrapes", EAGLE, spread=1.0, pods=1, streams=8, scrapes=12),
    Scenario("by request, long requests", EAGLE, spread=1.0, request_drafts=200, pods=4, streams=2),
    Scenario("by request, 16 streams a pod", EAGLE, spread=1.0, pods=4, streams=16, scrapes=12),
    Scenario("by request, restart and lost scrapes", EAGLE, spread=1.0, faults=True),
)


def main(seeds: int = SEEDS) -> int:
    """Simulate every scenario, print, and fail outside of the aims."""
    results = [measure(scenario, seeds=seeds) for scenario in SCENARIOS]
    print(json.dumps({"seeds": seeds, "drafts": DRAFTS, "scenarios": results}, indent=2))
    _print_table(results)
    return 0 if all(result["holds"] for result in results) else 1


def measure(scenario: Scenario, *, seeds: int, first_seed: int = 0) -> dict[str, Any]:
    """Return bias and coverage by position over so many windows."""
    truth = true_survival(scenario)
    windows = [estimate(scenario, seed=first_seed + seed) for seed in range(seeds)]
    survival = np.array([[p.survival for p in w.clustered.positions] for w in windows])
    lengths = 1.0 + np.cumsum(truth)
    covered = np.array([_covered(w.clustered, truth) for w in windows])
    independent = np.array([_covered(w.independent, truth) for w in windows])
    by_length = np.array([_length_covered(w.clustered, lengths) for w in windows])
    bias = survival.mean(axis=0) - truth
    coverage = covered.mean(axis=0)
    low, high = COVERAGE
    return {
        "scenario": asdict(scenario),
        "truth": _rounded(truth),
        "bias": _rounded(bias, 5),
        "naiveBias": _rounded(np.mean([w.naive for w in windows], axis=0) - truth),
        "coverage": _rounded(coverage),
        "coverageOfIndependent": _rounded(independent.mean(axis=0)),
        "coverageOfLength": _rounded(by_length.mean(axis=0)),
        "designEffect": round(float(np.mean([w.clustered.design_effect for w in windows])), 2),
        "holds": bool(
            np.all(np.abs(bias) <= MOST_BIAS) and np.all((coverage >= low) & (coverage <= high))
        ),
    }


# ----------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Estimated:
    """One window's estimates: the operator's, that of independent drafts, the naive one."""

    clustered: Survival
    independent: Survival
    naive: Floats


def estimate(scenario: Scenario, *, seed: int) -> Estimated:
    """Simulate one window and estimate it from its scrapes."""
    at_risk, accepted = simulate(scenario, np.random.default_rng(seed))
    window = Counters.of(to_samples(scenario, at_risk, accepted)).window(start=0.0, end=1e9)
    assert isinstance(window, Window)
    clustered = estimate_clustered_survival(window.drafts)
    independent = estimate_survival(window.at_risk, window.accepted)
    assert isinstance(clustered, Survival)
    assert isinstance(independent, Survival)
    naive = accepted.sum(axis=(0, 1)) / at_risk[:, :, 0].sum()
    return Estimated(clustered, independent, naive)


def simulate(scenario: Scenario, chance: np.random.Generator) -> tuple[Ints, Ints]:
    """Return drafts at risk and accepted by pod, scrape interval and position."""
    streams = scenario.pods * scenario.streams
    steps = DRAFTS // streams
    positions = len(scenario.hazards)
    hazards = _hazards(scenario).astype(np.float32)[_qualities(scenario, chance, steps, streams)]
    hits = chance.random((steps, streams, positions), dtype=np.float32) < hazards
    phases = -(-steps // scenario.k_steps)
    ks = np.repeat(chance.choice(scenario.ks, (phases, scenario.pods)), scenario.k_steps, axis=0)
    ks = np.repeat(ks[:steps], scenario.streams, axis=1)
    proposed = np.arange(positions) < ks[:, :, None]
    alive = np.cumprod(hits & proposed, axis=2, dtype=bool)
    before = np.concatenate([np.ones((steps, streams, 1), dtype=bool), alive[:, :, :-1]], axis=2)
    edges = np.linspace(0, steps, scenario.scrapes + 1).astype(int)[:-1]
    shape = (-1, scenario.pods, scenario.streams, positions)

    def by_interval(flags: NDArray[np.bool_]) -> Ints:
        by_pod = flags.reshape(shape).sum(axis=2)
        return np.asarray(np.add.reduceat(by_pod, edges, axis=0).swapaxes(0, 1))

    return by_interval(before & proposed), by_interval(alive)


def _qualities(scenario: Scenario, chance: np.random.Generator, steps: int, streams: int) -> Ints:
    """Draw which of the qualities each request has; one follows another in each stream."""
    begins = chance.random((steps, streams)) < 1.0 / scenario.request_drafts
    request = np.cumsum(begins, axis=0)
    drawn = chance.integers(_QUALITIES, size=(int(request.max()) + 1, streams))
    return np.take_along_axis(drawn, request, axis=0)


def _hazards(scenario: Scenario) -> Floats:
    """Return the hazards (columns) of a request of each quality (rows)."""
    quality = norm.ppf((np.arange(_QUALITIES) + 0.5) / _QUALITIES)
    curve = np.array(scenario.hazards)
    log_odds = np.log(curve / (1.0 - curve)) + scenario.spread * quality[:, None]
    return np.asarray(1.0 / (1.0 + np.exp(-log_odds)))


def true_survival(scenario: Scenario) -> Floats:
    """Return the exact share of drafts accepted up to each position."""
    return np.asarray(np.cumprod(_hazards(scenario), axis=1).mean(axis=0))


# -------------------------------------------------------------------------------- scrapes


def to_samples(scenario: Scenario, at_risk: Ints, accepted: Ints) -> MetricsSamples:
    """Write the counters as Prometheus holds them, with or without faults."""
    series: list[Series] = []
    moments = SCRAPE_SECONDS * np.arange(scenario.scrapes + 1)
    for pod in range(scenario.pods):
        grown = {
            ("specdecode_at_risk_per_position_total", str(position)): at_risk[pod, :, position]
            for position in range(at_risk.shape[2])
        } | {
            ("specdecode_accepted_per_position_total", str(position)): accepted[pod, :, position]
            for position in range(at_risk.shape[2])
        }
        for (name, position), growth in grown.items():
            values = np.append(0, np.cumsum(growth)).astype(float)
            samples = list(zip((moments + 0.1 * pod).tolist(), values.tolist(), strict=True))
            if scenario.faults:
                samples = _with_faults(samples, pod)
            labels = {"pod": f"pod-{pod}", "engine": "0", "position": position}
            series.append(Series(name, labels, tuple(samples)))
    return MetricsSamples(0.0, float(moments[-1]) + 1.0, tuple(series))


def _with_faults(samples: list[tuple[float, float]], pod: int) -> list[tuple[float, float]]:
    """Let the engine restart once, two scrapes fail, one arrive twice and one show an old page."""
    restart = len(samples) // 2 + pod
    base = samples[restart][1]
    found = [
        (moment, value - base if number > restart else value)
        for number, (moment, value) in enumerate(samples)
    ]
    found[4] = (found[4][0], found[3][1])
    return [one for number, one in enumerate(found) if number not in (7, 8)] + [found[2]]


# ---------------------------------------------------------------------------------- report


def _covered(survival: Survival, truth: Floats) -> list[bool]:
    return [p.lower <= t <= p.upper for p, t in zip(survival.positions, truth, strict=True)]


def _length_covered(survival: Survival, lengths: Floats) -> list[bool]:
    found = [mean_acceptance_length(survival, k) for k in range(1, lengths.size + 1)]
    return [one.lower <= t <= one.upper for one, t in zip(found, lengths, strict=True)]


def _rounded(values: Floats, digits: int = 4) -> list[float]:
    return [round(float(value), digits) for value in values]


def _print_table(results: list[dict[str, Any]]) -> None:
    say = sys.stderr.write
    for result in results:
        say(f"{result['scenario']['name']}{'' if result['holds'] else '   OUTSIDE'}\n")
        say("  position  truth   bias     naive bias  coverage  Greenwood's  of the length\n")
        columns = ("truth", "bias", "naiveBias", "coverage", "coverageOfIndependent")
        rows = zip(*(result[name] for name in (*columns, "coverageOfLength")), strict=True)
        for position, (truth, bias, naive, ours, theirs, length) in enumerate(rows):
            say(
                f"  {position:>8}  {truth:.3f}  {bias:+.4f}  {naive:+.3f}      {ours:.3f}"
                f"     {theirs:.3f}        {length:.3f}\n"
            )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else SEEDS))
