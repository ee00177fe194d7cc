"""Runs every arm on every surface and family, prints the tables, writes .build/policies.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.bench.policies import peers, report, runner
from tests.bench.policies.report import Score
from tests.bench.policies.surfaces import Surface
from tests.bench.policies.traces import FAMILIES, Family, build_trace
from tests.support.engine import ROOT

SURFACES = ("llama8b-a100", "qwen3-235b-eagle3", "dspark-v4flash-b300")
SEEDS = (1, 2, 3)
HOURS = 24.0
AV = "AV"

Scores = dict[str, dict[str, list[Score]]]  # by arm, by family: one for each seed


@dataclass
class Results:
    """All scores of one surface; those under adaptive verification apart."""

    plain: Scores = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    adaptive: Scores = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    gain_of_av: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    arms: dict[str, bool] = field(default_factory=dict)  # is it adaptive
    verdicts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    profile_minutes: float = 0.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 where an aim is missed."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    found = {name: measure(name, options) for name in options.surface}
    figures = summarize(found, options)
    (ROOT / ".build").mkdir(exist_ok=True)
    (ROOT / ".build" / "policies.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(render(found, figures))
    return 0 if all(figures["aims"].values()) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench policies", description=__doc__)
    parser.add_argument("--surface", nargs="*", choices=SURFACES, default=SURFACES)
    parser.add_argument("--family", nargs="*", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--seed", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--no-av", action="store_true", help="leave adaptive verification out")
    return parser.parse_args(arguments)


def measure(name: str, options: argparse.Namespace) -> Results:
    """Run all arms on one surface."""
    results = Results()
    surface = Surface(name)
    results.profile_minutes = peers.profile_offline(surface, seed=0).engine_seconds / 60
    adaptive = None if options.no_av else Surface(name, adaptive=True)
    for family in (FAMILIES[one] for one in options.family):
        for seed in options.seed:
            measure_trace(results, surface, family, seed=seed, hours=options.hours)
            if adaptive is not None:
                measure_av(results, (surface, adaptive), family, seed=seed, hours=options.hours)
        told = {arm: report.pooled(of[family.name]) for arm, of in results.plain.items()}
        line = ", ".join(f"{arm} {100 * regret:.2f}" for arm, regret in told.items())
        print(f"{name}, {family.name}: {line}", file=sys.stderr, flush=True)
    return results


def measure_trace(
    results: Results, surface: Surface, family: Family, *, seed: int, hours: float
) -> None:
    """Run all arms but adaptive verification on one trace."""
    trace = build_trace(family, seed=seed, hours=hours)
    ours = runner.run_tuned(surface, trace, seed=seed, noise_factor=family.noise_factor)
    results.verdicts[family.name].append(ours.verdicts)
    for run in (ours, *runner.run_peers(surface, trace, seed=seed)):
        results.arms[run.arm] = run.is_adaptive
        results.plain[run.arm][family.name].append(report.score(surface, run))


def measure_av(
    results: Results, surfaces: tuple[Surface, Surface], family: Family, *, seed: int, hours: float
) -> None:
    """Run adaptive verification: alone at the largest K, and with our table above it."""
    plain, adaptive = surfaces
    trace = build_trace(family, seed=seed, hours=hours)
    alone = runner.Run(
        AV,
        runner.run_policy(adaptive, trace, peers.FixedK(adaptive.k_max)),
        is_adaptive=True,
    )
    ours = runner.run_tuned(adaptive, trace, seed=seed, noise_factor=family.noise_factor)
    for run in (ours, alone):
        results.adaptive[run.arm][family.name].append(report.score(adaptive, run))
    reached = results.adaptive[AV][family.name][-1].tokens
    oracle = results.plain[runner.TUNED][family.name][-1].oracle_tokens
    results.gain_of_av[family.name].append(reached / oracle - 1.0)
    del plain


def summarize(found: dict[str, Results], options: argparse.Namespace) -> dict[str, Any]:
    """Put all figures together; shares as percent."""
    surfaces = {name: summarize_surface(results) for name, results in found.items()}
    late = [
        part
        for results in found.values()
        for scores in results.plain[runner.TUNED].values()
        for one in scores
        for part in one.late
    ]
    median, p95 = report.quantiles(late)
    hours = [
        one.worst_hour
        for results in found.values()
        for scores in (
            *results.plain[runner.TUNED].values(),
            *results.adaptive.get(runner.TUNED, {}).values(),
        )
        for one in scores
        if one.worst_hour is not None
    ]
    overall = over_everything(found)
    ours = overall[runner.TUNED]
    beaten = {
        f"{name}, {family}, {arm}": round(
            100 * (report.pooled(results.plain[runner.TUNED][family]) - report.pooled(scores)), 3
        )
        for name, results in found.items()
        for arm, of in results.plain.items()
        if results.arms[arm] and arm != runner.TUNED
        for family, scores in of.items()
        if report.pooled(scores) <= report.pooled(results.plain[runner.TUNED][family])
    }
    return {
        "hours": options.hours,
        "seeds": list(options.seed),
        "surfaces": surfaces,
        "overallRegretPercent": {arm: round(100 * x, 3) for arm, x in overall.items()},
        "afterConvergencePercent": {"median": round(100 * median, 3), "p95": round(100 * p95, 3)},
        "worstHourAgainstOffPercent": round(100 * min(hours), 3) if hours else None,
        "adaptivePeersNotBeaten": beaten,
        "aims": {
            "median regret after convergence at most 1 %": median <= 0.01,
            "95th percentile at most 4 %": p95 <= 0.04,
            "below every adaptive peer on each family": not beaten,
            "below every arm over the families": all(
                ours < x for arm, x in overall.items() if arm != runner.TUNED
            ),
            "never more than 1 % below speculation off over an hour": not hours
            or min(hours) >= -report.PROMISED,
        },
    }


def summarize_surface(results: Results) -> dict[str, Any]:
    """Give regret by arm and family, and what a person asks of our arm."""
    ours = results.plain[runner.TUNED]
    return {
        "regretPercent": to_percent(results.plain),
        "vllmOfflineProfileMinutesNotCounted": round(results.profile_minutes, 1),
        "regretUnderAdaptiveVerificationPercent": to_percent(results.adaptive),
        "adaptiveVerificationOverOraclePercent": {
            family: round(100 * mean(gains), 2) for family, gains in results.gain_of_av.items()
        },
        "ours": {
            family: {
                "medianLatePercent": round(100 * report.quantiles(late_of(scores))[0], 3),
                "p95LatePercent": round(100 * report.quantiles(late_of(scores))[1], 3),
                "excessOverBestFixedKPercent": round(100 * excess(results, family), 3),
                "worstHourAgainstOffPercent": [
                    None if one.worst_hour is None else round(100 * one.worst_hour, 2)
                    for one in scores
                ],
                "verdicts": results.verdicts[family],
            }
            for family, scores in ours.items()
        },
    }


def to_percent(scores: Scores) -> dict[str, dict[str, float]]:
    """Give the regret of each arm and family in percent."""
    return {
        arm: {family: round(100 * report.pooled(of), 3) for family, of in by_family.items()}
        for arm, by_family in scores.items()
    }


def late_of(scores: Iterable[Score]) -> list[tuple[float, float]]:
    """Return the second halves of several traces."""
    return [part for one in scores for part in one.late]


def excess(results: Results, family: str) -> float:
    """Return how much more we lose than the fixed K that is best for this family in hindsight."""
    fixed = [of[family] for arm, of in results.plain.items() if not results.arms[arm]]
    return report.pooled(results.plain[runner.TUNED][family]) - min(map(report.pooled, fixed))


def over_everything(found: dict[str, Results]) -> dict[str, float]:
    """Return each arm's mean regret over surfaces and families; a fixed K is one K for all."""
    arms = list(next(iter(found.values())).plain)
    regrets: dict[str, float] = {}
    for arm in arms:
        parts = [
            report.pooled(scores)
            for results in found.values()
            for scores in results.plain.get(arm, {}).values()
        ]
        if all(arm in results.plain for results in found.values()):
            regrets[arm] = mean(parts)
    return regrets


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def render(found: dict[str, Results], figures: dict[str, Any]) -> str:
    """Write the tables for people."""
    parts = []
    for name, results in found.items():
        for title, scores in (("", results.plain), (", AV on, oracle of AV", results.adaptive)):
            if scores:
                rows = {
                    arm: {
                        **{family: report.pooled(of) for family, of in by.items()},
                        "all": mean([report.pooled(of) for of in by.values()]),
                    }
                    for arm, by in scores.items()
                }
                head = f"{name}{title}: goodput lost against the oracle, %"
                parts.append(f"{head}\n{report.print_table(rows)}")
    shown = {key: value for key, value in figures.items() if key != "surfaces"}
    return "\n\n".join([*parts, json.dumps(shown, indent=2)])


if __name__ == "__main__":
    sys.exit(main())
