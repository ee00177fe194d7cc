"""Acceptance of drafts by position, right also where K varies, with intervals that hold.

Under a varying K a late position is proposed less often than an early one (it is censored), so
accepted ÷ drafts is biased. The product-limit estimator (Kaplan and Meier 1958) is not: the
hazard of a position is accepted ÷ at risk there, survival is the product of the hazards up to it.
It needs K to be chosen without a look at the draft; adaptive verification does look, so there
only tokens per step are a figure (`tokens_per_step`).

**Intervals.** Drafts of one request are alike, so counts vary more than those of independent
drafts would (Greenwood 1926), and the counters do not show requests. What they show is the
increments of each scrape interval of each engine. The score of an interval, its share in the
error of ln survival (or of the mean acceptance length), is Σ c_i (accepted_i − hazard_i · at
risk_i). Requests reach over several intervals, so scores are correlated; their long-run variance
is the mean square of their first B cosine sums, with Student's t of B degrees of freedom
(Müller 2007; Lazarus, Lewis, Stock and Watson 2018), B of the order of intervals^(2/3). Two
choices make it hold here: engines are laid end to end, so that what differs between pods counts
too, and the cosines run in information time, the share of Greenwood's variance so far, so that
a K that ruled for a part of the window only is no surprise. The interval of survival is on the
log-log scale. It holds where the window, over all pods, lasts for many request lifetimes; with
too few intervals Greenwood's is given and `clustered` is false. Shown by
`python -m tests.bench acceptance`.

**Beyond the longest K observed** the log odds of the hazard go on as a random walk, filtered over
the observed positions; 0.35 per position is what 113 steps of public curves show. After the
first position of n-gram drafters, whose misses are all at the first, steps are far larger.

**Ends of requests.** Accepted tokens are counted before stop strings, EOS and max_tokens trim the
output: a request's last draft counts whole, though on average half of it is thrown away. So
acceptance is right for drafts and 1 + accepted ÷ drafts is up to (length − 1) ÷ 2 ÷ (tokens per
request) higher than the tokens that users get per step: 1 % at a length of 3.5 and 128 tokens,
8 % at 16 tokens. Goodput counts what was emitted and does not have this bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from specdecode_operator.api.conditions import Reason

from .counters import Drafts, Floats, NoEstimate, Window

MIN_DRAFTS: Final = 50
Z_95: Final = 1.96
_TAIL: Final = 0.975

# Positions that any engine drafts; a longer row of counters is no acceptance.
_MOST_POSITIONS: Final = 256
_MOST_DRAFTS: Final = 1e18
# Beside 1, anything smaller is lost in rounding.
_LEAST_MARGIN: Final = 1e-12
# Counters of one scrape may be read a step apart.
_SKEW: Final = 1.02

# Cosine sums: B = 0.3 · intervals^(2/3) within these; fewer intervals tell nothing of clusters.
_COSINES_FACTOR: Final = 0.3
_LEAST_COSINES: Final = 4
_MOST_COSINES: Final = 16
_LEAST_INTERVALS: Final = 8
# Scores may cancel by chance. Where all or none was accepted they do so always: 1 is used there.
_LEAST_DESIGN_EFFECT: Final = 0.1

# Logarithm beyond which an interval is everything.
_MOST_SPREAD: Final = 50.0

# Standard deviation of the step in log odds from the hazard of one position to the next.
_HAZARD_STEP: Final = 0.35


@dataclass(frozen=True)
class PositionSurvival:
    """Share of drafts accepted up to and including one position, with a 95 % interval."""

    at_risk: float
    hazard: float
    survival: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Survival:
    """Survival by position, from 0, as far as it was observed.

    `length_halves` are half the 95 % intervals of the mean acceptance length at K = 1, 2, ….
    `design_effect` is the variance at the first position over that of independent drafts, 1 where
    clusters could not be seen (`clustered` is false). `next_log_odds` and its variance forecast
    the hazard of the first position that was not observed.
    """

    positions: tuple[PositionSurvival, ...]
    length_halves: tuple[float, ...]
    clustered: bool
    design_effect: float
    next_log_odds: float
    next_variance: float

    def at(self, position: int) -> float:
        """Return survival at a position; beyond the observed ones its forecast."""
        beyond = position + 1 - len(self.positions)
        if beyond <= 0:
            return self.positions[position].survival
        return self.positions[-1].survival * self.next_hazard**beyond

    def interval(self, position: int) -> tuple[float, float]:
        """Return the 95 % interval at a position, which widens beyond the observed ones."""
        beyond = position + 1 - len(self.positions)
        last = self.positions[min(position, len(self.positions) - 1)]
        if beyond <= 0:
            return last.lower, last.upper
        spread = math.exp(min(Z_95 * self._forecast_error(beyond), _MOST_SPREAD))
        survival = self.at(position)
        below = last.lower / last.survival if last.survival > 0 else 0.0
        above = last.upper / last.survival if last.survival > 0 else 1.0
        ceiling = last.upper
        return survival * below / spread, min(survival * above * spread, ceiling)

    @property
    def first(self) -> float:
        """Acceptance at the first position."""
        return self.positions[0].survival

    @property
    def next_hazard(self) -> float:
        """Forecast of the hazard beyond the observed positions."""
        return 1.0 / (1.0 + math.exp(-self.next_log_odds))

    def _forecast_error(self, beyond: int) -> float:
        """Return the standard error of ln (survival ÷ that at the last observed position)."""
        steps = beyond * (beyond + 1) * (2 * beyond + 1) / 6 * _HAZARD_STEP**2
        return (1.0 - self.next_hazard) * math.sqrt(beyond**2 * self.next_variance + steps)


@dataclass(frozen=True)
class AcceptanceLength:
    """Tokens that one request gains per step at some K, with a 95 % interval; 1 is no gain."""

    tokens: float
    extrapolated: bool
    lower: float
    upper: float


def estimate_survival(
    at_risk: Mapping[int, float], accepted: Mapping[int, float], *, min_drafts: float = MIN_DRAFTS
) -> Survival | NoEstimate:
    """Estimate survival by position from total drafts at risk and accepted there.

    It ends before the first position with fewer than `min_drafts` at risk. Totals do not show
    clusters: the intervals are those of independent drafts.
    """
    width = min(max([0, *at_risk, *accepted]), _MOST_POSITIONS) + 1
    totals = Drafts(
        *(
            np.array([[float(counts.get(position, 0.0)) for position in range(width)]])
            for counts in (at_risk, accepted)
        )
    )
    return estimate_clustered_survival(totals, min_drafts=min_drafts)


def estimate_clustered_survival(
    drafts: Drafts, *, min_drafts: float = MIN_DRAFTS
) -> Survival | NoEstimate:
    """Estimate survival by position from the increments of scrape intervals."""
    problem = _problem_of(drafts, min_drafts)
    if problem is not None:
        return problem
    totals = drafts.at_risk.sum(axis=0)
    observed = int(np.argmin(np.append(totals >= max(min_drafts, 1.0), False)))
    at_risk, accepted = drafts.at_risk[:, :observed], drafts.accepted[:, :observed]
    totals = totals[:observed]
    hazard = np.minimum(accepted.sum(axis=0) / totals, 1.0)
    # Half a draft keeps logarithms finite where all or none was accepted.
    margin = np.maximum(0.5 / totals, _LEAST_MARGIN)
    within = np.clip(hazard, margin, 1.0 - margin)
    halves, design_effect = _half_widths(at_risk, accepted, within, is_exact=within == hazard)
    survival = np.cumprod(hazard)
    lower, upper = _log_log_interval(survival, np.cumsum(np.log(within)), halves[:observed])
    columns = (totals, hazard, survival, lower, upper)
    log_odds, variance = _forecast_log_odds(within, totals * within * (1 - within))
    return Survival(
        positions=tuple(
            PositionSurvival(*row) for row in zip(*(c.tolist() for c in columns), strict=True)
        ),
        length_halves=tuple(halves[observed:].tolist()),
        clustered=design_effect is not None,
        design_effect=design_effect or 1.0,
        next_log_odds=log_odds,
        next_variance=variance,
    )


def mean_acceptance_length(survival: Survival, k: int) -> AcceptanceLength:
    """Return 1 + the sum of survival over the first k positions."""
    k = min(max(k, 0), _MOST_POSITIONS)
    tokens = 1.0 + sum(survival.at(position) for position in range(k))
    observed = min(k, len(survival.positions))
    half = survival.length_halves[observed - 1] if observed else 0.0
    lower, upper = tokens - half, tokens + half
    for position in range(observed, k):
        low, high = survival.interval(position)
        lower -= survival.at(position) - low
        upper += high - survival.at(position)
    return AcceptanceLength(
        tokens=tokens,
        extrapolated=k > len(survival.positions),
        lower=max(lower, 1.0),
        upper=min(upper, 1.0 + k),
    )


def tokens_per_step(window: Window, arm: int = 0) -> float | NoEstimate:
    """Return tokens emitted per request and decode-only step: all that there is under AV."""
    cells = [cell for cell in window.cells if cell.arm == arm]
    requests, tokens = sum(c.requests for c in cells), sum(c.tokens for c in cells)
    if not (requests > 0 and tokens > 0 and math.isfinite(tokens / requests)):
        return NoEstimate(Reason.NO_TRAFFIC, "No decode-only step emitted a token.")
    return tokens / requests


def _problem_of(drafts: Drafts, min_drafts: float) -> NoEstimate | None:
    at_risk, accepted = drafts.at_risk, drafts.accepted
    for name, counts in (("at risk", at_risk), ("accepted", accepted)):
        wrong = np.flatnonzero(~np.all((counts >= 0) & (counts <= _MOST_DRAFTS), axis=0))
        if wrong.size:
            return NoEstimate(
                Reason.BAD_DATA, f"Drafts {name} at position {wrong[0]} are no counts."
            )
    drafted = float(at_risk[:, 0].sum()) if at_risk.size else 0.0
    if drafted < max(min_drafts, 1.0):
        return NoEstimate(
            Reason.COLLECTING, f"{drafted:.0f} drafts are too few for acceptance ({min_drafts:g})."
        )
    totals, hits = at_risk.sum(axis=0), accepted.sum(axis=0)
    wrong = np.flatnonzero((hits > _SKEW * totals + 1) & (totals >= min_drafts))
    if wrong.size:
        return NoEstimate(
            Reason.BAD_DATA,
            f"{hits[wrong[0]]:.0f} drafts were accepted at position {wrong[0]} and only "
            f"{totals[wrong[0]]:.0f} had it.",
        )
    if hits[0] == 0:
        return NoEstimate(
            Reason.NOTHING_ACCEPTED,
            f"None of {drafted:.0f} drafts was accepted: look at drafter and engine, a lower K "
            "mends nothing.",
        )
    return None


def _half_widths(
    at_risk: Floats, accepted: Floats, hazard: Floats, *, is_exact: NDArray[np.bool_]
) -> tuple[Floats, float | None]:
    """Return half the 95 % intervals of ln survival and of the mean acceptance length, by position.

    And the design effect at the first position, None where clusters cannot be seen. `is_exact`:
    the hazard was not moved off 0 or 1.
    """
    lengths = np.cumsum(np.cumprod(hazard))
    per_draft = 1.0 / (hazard * at_risk.sum(axis=0))
    reaches = np.triu(np.ones((hazard.size, hazard.size)))
    gained = lengths[None, :] - np.append(0.0, lengths[:-1])[:, None]
    weights = np.hstack([reaches, reaches * gained]) * per_draft[:, None]
    scores = (accepted - hazard * at_risk) @ weights
    information = (at_risk * hazard * (1.0 - hazard)) @ weights**2
    independent = information.sum(axis=0)
    variance, cosines = _long_run_variance(scores, information)
    seen = cosines > 0
    least = np.where(np.minimum.accumulate(is_exact), _LEAST_DESIGN_EFFECT, 1.0)
    effect = np.maximum(variance / independent, np.tile(least, 2))
    design_effect = float(effect[0]) if seen[0] else None
    # Where too few intervals had a position, its drafts are taken to be as alike as at the first.
    effect = np.where(seen, effect, max(design_effect or 1.0, 1.0))
    quantile = np.where(seen, stdtrit(np.maximum(cosines, 1), _TAIL), Z_95)
    return quantile * np.sqrt(effect * independent), design_effect


def _long_run_variance(scores: Floats, information: Floats) -> tuple[Floats, Floats]:
    """Return the variance of the sum of each column of correlated scores, and its cosine sums.

    These are its degrees of freedom, 0 where too few intervals carry the information.
    """
    share = information / information.sum(axis=0)
    intervals = 1.0 / np.square(share).sum(axis=0)
    cosines = np.clip(
        np.floor(_COSINES_FACTOR * intervals ** (2 / 3)), _LEAST_COSINES, _MOST_COSINES
    )
    cosines[intervals < _LEAST_INTERVALS] = 0.0
    wave = np.cos(np.pi * (np.cumsum(share, axis=0) - share / 2))
    before, now = np.ones_like(wave), wave
    variance = np.zeros(scores.shape[1])
    for number in range(1, int(cosines.max(initial=0.0)) + 1):
        sums = 2.0 * np.square((scores * now).sum(axis=0))
        variance += np.where(number <= cosines, sums, 0.0)
        before, now = now, 2.0 * wave * now - before
    return variance / np.maximum(cosines, 1.0), cosines


def _log_log_interval(survival: Floats, log: Floats, halves: Floats) -> tuple[Floats, Floats]:
    """Return the interval of survival from half that of its logarithm, on the log-log scale.

    `log` is that of survival kept off 0 and 1, where logarithms end.
    """
    spread = np.exp(np.minimum(halves / -log, _MOST_SPREAD))
    lower, upper = np.exp(log * spread), np.exp(log / spread)
    lower = np.where(survival > 0.0, lower, 0.0)
    return np.minimum(lower, survival), np.maximum(upper, survival)


def _forecast_log_odds(hazard: Floats, precision: Floats) -> tuple[float, float]:
    """Filter the log odds of hazards, a random walk seen with noise: mean, variance at the end."""
    seen = np.log(hazard / (1.0 - hazard))
    level, variance = float(seen[0]), 1.0 / float(precision[0])
    for value, exact in zip(seen[1:].tolist(), precision[1:].tolist(), strict=True):
        variance += _HAZARD_STEP**2
        gain = variance * exact / (variance * exact + 1.0)
        level += gain * (value - level)
        variance *= 1.0 - gain
    return level, variance
