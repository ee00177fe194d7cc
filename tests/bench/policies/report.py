"""Scores: goodput lost against the oracle, in all and after convergence; the promise.

Goodput is the cells' long-run mean, so a run's regret is exact given the K it held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.bench.policies.runner import Run
from tests.bench.policies.surfaces import OFF, Surface
from tests.bench.policies.tuned import Stretch

HOUR = 3600.0
PROMISED = 0.01  # never more than this below speculation off, over an hour


@dataclass(frozen=True)
class Score:
    """One arm on one trace. Shares of goodput; `late` are (regret, seconds) of the second half."""

    tokens: float
    oracle_tokens: float
    late: tuple[tuple[float, float], ...]
    worst_hour: float | None

    @property
    def regret(self) -> float:
        """Goodput lost against the oracle over the whole trace, exploration included."""
        return 1.0 - self.tokens / self.oracle_tokens


def score(surface: Surface, run: Run) -> Score:
    """Score a run."""
    half = sum(stretch.seconds for stretch in run.stretches) / 2
    tokens = oracle = passed = 0.0
    late = []
    for stretch in run.stretches:
        gained = surface.goodput(stretch.load, stretch.k)
        best = surface.best(stretch.load)
        tokens += gained * stretch.seconds
        oracle += best * stretch.seconds
        passed += stretch.seconds
        if passed > half:
            late.append((1.0 - gained / best, stretch.seconds))
    return Score(tokens, oracle, tuple(late), _worst_hour(surface, run))


def _worst_hour(surface: Surface, run: Run) -> float | None:
    """Return the least gain over speculation off in any hour from the first verdict on."""
    if run.first_verdict is None:
        return None
    ends, ours, off = [0.0], [0.0], [0.0]
    for stretch in _from(run.stretches, run.first_verdict):
        ends.append(ends[-1] + stretch.seconds)
        ours.append(ours[-1] + stretch.seconds * surface.goodput(stretch.load, stretch.k))
        off.append(off[-1] + stretch.seconds * surface.goodput(stretch.load, OFF))
    if ends[-1] < HOUR:
        return None
    stops = np.array([end for end in ends if end >= HOUR])
    starts = stops - HOUR
    gained = np.interp(stops, ends, ours) - np.interp(starts, ends, ours)
    without = np.interp(stops, ends, off) - np.interp(starts, ends, off)
    return float((gained / without).min() - 1.0)


def _from(stretches: Sequence[Stretch], begun: float) -> Iterable[Stretch]:
    passed = 0.0
    for stretch in stretches:
        if passed + stretch.seconds > begun:
            yield Stretch(
                stretch.load, stretch.k, min(stretch.seconds, passed + stretch.seconds - begun)
            )
        passed += stretch.seconds


def quantiles(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return median and 95th percentile of regrets weighted by their seconds."""
    regrets, seconds = np.array(sorted(parts)).T
    shares = np.cumsum(seconds) / seconds.sum()
    return tuple(float(regrets[np.searchsorted(shares, q - 1e-12)]) for q in (0.5, 0.95))  # type: ignore[return-value]


def pooled(scores: Iterable[Score]) -> float:
    """Return the regret of several traces together, each counting alike."""
    found = [one.regret for one in scores]
    return sum(found) / len(found)


def print_table(rows: Mapping[str, Mapping[str, float | None]]) -> str:
    """Lay out rows of percentages: one row per arm, one column per family."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    head = ["arm", *columns]
    body = [[arm, *(_percent(row.get(name)) for name in columns)] for arm, row in rows.items()]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *body]
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
