"""Which K to try next, which table to advise, and whether speculation pays at all.

Everything stands on cells that were measured; the step-cost model fills in the rest. Its forecast
for an unmeasured K is a *ratio* to the nearest measured K of the same batch bucket, so that what
the model gets wrong about both cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import CellStatus
from specdecode_operator.domain.table import Envelope, KTable, bucket_first, bucket_of
from specdecode_operator.estimate.acceptance import (
    PositionSurvival,
    Survival,
    mean_acceptance_length,
)
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.goodput import Rate, compare_at_equal_batch
from specdecode_operator.estimate.step_cost import StepCost, StepTime, fit_step_cost

# A cell is out of date when acceptance has moved by more than this and so many standard errors,
# and nothing says what it would give now; drafts of one request are alike, so two would be too
# few. From the smaller move on it is read with today's acceptance.
_STALE: Final = {"least": 0.05, "errors": 3.0}
_MOVED: Final = {"least": 0.015, "errors": 2.0}
# And when the load has moved by more than this.
_MOVED_BATCH: Final = 0.50

# A K is tried beside one that is at most this much worse than the K in force: one bad block or a
# dent in the landscape does not hide what lies beyond it.
_NEAR: Final = 0.90
# A K that was put back is tried again when its own figure is this far above the K in force, once
# that was measured for longer: its baseline was a lucky one, or the machine has become slower.
_OVERLOOKED: Final = 1.03
# An untried K that is put this far below the K in force is not tried: by a model to be relied on,
# or by any forecast where it is not next to the K in force.
_HOPELESS: Final = 0.85

# A model is relied on from this many cells, K values and this fit on.
_MIN_CELLS: Final = 3
_MIN_KS: Final = 2
_MAX_MODEL_ERROR: Final = 0.15

# The model's forecast of K=0 stands outside of all it was fitted to, and may be off by this much.
_ERROR_AT_ZERO: Final = 0.10

# Guesses that choose the direction of the first step, where nothing better is known.
_GUESSED_HAZARD: Final = 0.7
_GUESSED_TOKEN_COST: Final = 1 / 128
_GUESSED_DRAFT_COST: Final = 0.06

# In an advised table a further row must be worth this much goodput (log) at its batch.
_ROW_PRICE: Final = 0.01


@dataclass(frozen=True)
class Present:
    """What runs now at one batch bucket, and everything known around it.

    `survival` is None where no acceptance was seen (K=0, no drafts yet).
    """

    batch: int
    k: int
    rate: Rate
    survival: Survival | None
    cells: tuple[CellStatus, ...]
    envelope: Envelope
    min_k: int

    @property
    def first(self) -> PositionSurvival | None:
        """Acceptance at the first position."""
        return self.survival.positions[0] if self.survival else None


@dataclass(frozen=True)
class Forecast:
    """Goodput of one K at the present batch: measured, or by a model to be relied on or not."""

    k: int
    tokens_per_second: float
    measured: bool
    reliable: bool


@dataclass(frozen=True)
class Advice:
    """A table to be recommended; the gain is over the batches whose goodput is known."""

    table: KTable
    gain_percent: float
    why: str


@dataclass(frozen=True)
class Payoff:
    """Whether the best K above 0 beats K=0 at the present batch, in words with the numbers."""

    pays: bool
    message: str


def is_usable(cell: CellStatus) -> bool:
    """Tell whether a cell's figures are numbers that can be divided by."""
    return all(math.isfinite(x) and x > 0 for x in (cell.tokens_per_second, cell.mean_batch))


def is_fresh(cell: CellStatus, *, mean_batch: float, first: PositionSurvival | None) -> bool:
    """Tell whether a cell still speaks for the present load and acceptance.

    `first` is acceptance at the first position now.
    """
    if not is_usable(cell):
        return False
    return not _has_moved(cell, first, **_STALE) and _is_same_load(cell, mean_batch)


def _is_same_load(cell: CellStatus, mean_batch: float) -> bool:
    return is_usable(cell) and abs(mean_batch / cell.mean_batch - 1) <= _MOVED_BATCH


def _has_moved(
    cell: CellStatus, first: PositionSurvival | None, *, least: float, errors: float
) -> bool:
    """Tell whether acceptance now differs from a cell's by more than `least` and their errors."""
    if first is None or cell.acceptance is None:
        return False
    share = (first.survival + cell.acceptance) / 2
    drafts = max(cell.steps * cell.mean_batch, 1.0)
    error = math.sqrt(max(share * (1 - share), 0.0) * (1 / first.at_risk + 1 / drafts))
    return abs(first.survival - cell.acceptance) > max(least, errors * error)


def fit_cells(cells: Iterable[CellStatus]) -> StepCost | NoEstimate:
    """Fit the step-cost model to the cells that hold a step time."""
    return fit_step_cost(
        StepTime(batch=c.mean_batch, k=c.k, seconds=c.step_seconds, steps=c.steps)
        for c in cells
        if c.step_seconds is not None
    )


def find_luck(cells: Iterable[CellStatus], batch: int) -> dict[int, float]:
    """Return by K how much (log) faster than likely each cell of a bucket was measured.

    A block is off by some 3 %; the step-cost model, blended with each cell by its variance, sees
    in all cells together which ones were. Empty while the model is not to be relied on.
    """
    cells = [cell for cell in cells if is_usable(cell) and cell.step_seconds]
    cost = fit_cells(cells)
    if isinstance(cost, NoEstimate) or not _is_supported(cost):
        return {}
    luck: dict[int, float] = {}
    for cell in cells:
        likely = cost.predict(cell.mean_batch, cell.k) if cell.batch == batch else None
        if likely is not None and not isinstance(likely, NoEstimate) and likely.seconds > 0:
            luck[cell.k] = math.log(likely.seconds / (cell.step_seconds or likely.seconds))
    return luck


def forecast_goodput(present: Present, *, likely: bool = False) -> tuple[Forecast, ...]:
    """Give measured or predicted goodput at the present batch for every K of the envelope.

    `likely`: a measured one less its luck, by all that was measured.
    """
    cost = fit_cells(present.cells)
    known = _known_goodput(present, find_luck(present.cells, present.batch) if likely else {})
    return tuple(
        Forecast(k, known[k], measured=True, reliable=True)
        if k in known
        else _predict(present, k, known, cost)
        for k in sorted({*present.envelope.ks, present.k})
    )


def choose_candidate(present: Present) -> Forecast | None:
    """Choose the K to try next, None where nothing is left to try at this batch.

    Candidates are untried and next to a K of this bucket that is known to be about as good as
    the one in force, or were put back and look clearly better now; the best forecast wins, among
    equals the smaller K.
    """
    forecasts = [
        f
        for f in forecast_goodput(present, likely=True)
        if f.k >= present.min_k or f.k == present.k
    ]
    now = present.rate.tokens_per_second
    candidates = [f for f in forecasts if f.measured and f.tokens_per_second > _OVERLOOKED * now]
    for one, other in pairwise(forecasts):
        for known, untried in ((one, other), (other, one)):
            if (
                known.measured
                and not untried.measured
                and known.tokens_per_second >= _NEAR * now
                and not (
                    untried.tokens_per_second < _HOPELESS * now
                    and (untried.reliable or known.k != present.k)
                )
            ):
                candidates.append(untried)
    return max(candidates, key=lambda f: (f.tokens_per_second, -f.k), default=None)


def table_to_try(table: KTable, present: Present, k: int) -> KTable:
    """Set K at the present bucket; a lower one for the rest of its row too, where unmeasured.

    So no edge lies right above the load, where one joining request would cross it, and larger
    batches start from the less daring K. A higher K is never spread: at a larger batch drafts
    cost more.
    """
    tried = table.with_bucket(present.batch, k)
    measured = {cell.batch for cell in present.cells}
    bound = 2 * present.batch
    while (
        k < present.k
        and bucket_first(bound) <= table.max_batch
        and bound not in measured
        and table.k_at(bucket_first(bound)) == present.k
    ):
        tried = tried.with_bucket(bound, k)
        bound *= 2
    return tried


def does_speculation_pay(present: Present, *, min_gain_percent: float) -> Payoff | NoEstimate:
    """Compare the best measured K above 0 with K=0, which is measured or predicted.

    It does not pay when K=0 is better by the minimum gain, and where K=0 was not measured also
    by the error that its forecast may have.
    """
    forecasts = forecast_goodput(present)
    live = [f for f in forecasts if f.k > 0 and f.measured]
    zero = next((f for f in forecasts if f.k == 0), None)
    if not live or zero is None or not (zero.measured or _is_supported(fit_cells(present.cells))):
        return NoEstimate(
            Reason.COLLECTING, f"K=0 at {batch_range(present.batch)} cannot be told yet."
        )
    best = max(live, key=lambda f: f.tokens_per_second)
    lost = zero.tokens_per_second / best.tokens_per_second - 1
    least = min_gain_percent / 100 + (0.0 if zero.measured else _ERROR_AT_ZERO)
    source = "measured" if zero.measured else "predicted, not measured"
    return Payoff(
        pays=lost < max(least, 1e-9),
        message=(
            f"{batch_range(present.batch)}: K=0 gives {zero.tokens_per_second:.4g} tok/s "
            f"({source}), {100 * lost:+.0f} % against K={best.k} with "
            f"{best.tokens_per_second:.4g}; K=0 keeps the drafter, speculation off itself was "
            "not measured"
        ),
    )


def recommend_table(
    presents: Sequence[Present],
    *,
    table: KTable,
    min_gain_percent: float,
    weights: Mapping[int, float],
    stored: KTable | None = None,
) -> Advice | None:
    """Advise a table: by batch bucket the best K that is measured or reliably predicted.

    A bucket keeps its K unless another is better by the minimum gain; unknown buckets keep
    theirs; of tables about as good the one with fewer rows is taken, and the one already
    recommended (`stored`) stays unless it is beaten by the minimum gain. `weights` is the busy
    time by bucket. None where the gain over all of it is below the minimum.
    """
    gains = {p.batch: _log_gains(p) for p in presents}
    least = math.log1p(min_gain_percent / 100)
    best = _fewest_rows(table, gains, least)
    if stored is not None:
        better = _mean_gain(best, gains, weights) - _mean_gain(stored, gains, weights)
        best = best if better >= least else stored
    gain = _mean_gain(best, gains, weights)
    changed = [p for p in presents if best.k_at(bucket_first(p.batch)) != p.k]
    if not changed or gain < least:
        return None
    return Advice(
        table=best,
        gain_percent=100 * math.expm1(gain),
        why="; ".join(_why(p, best.k_at(bucket_first(p.batch))) for p in changed),
    )


def batch_range(batch: int) -> str:
    """Name a bucket for people: `batch 5-8`."""
    first = bucket_first(batch)
    return f"batch {batch}" if first == batch else f"batch {first}-{batch}"


def _known_goodput(present: Present, luck: Mapping[int, float]) -> dict[int, float]:
    """Return goodput at the present batch of the K in force and of those tried and still fresh.

    Each is told by its ratio to the cell of the K in force, with which it keeps step.
    """
    anchor, anchored = _find_anchor(present)
    known: dict[int, float] = {}
    for cell in present.cells:
        if cell.batch != present.batch or not _is_same_load(cell, present.rate.mean_batch):
            continue
        change = _acceptance_change(present, cell)
        shift = compare_at_equal_batch(Rate(cell.tokens_per_second, cell.mean_batch), anchor)
        if change is not None and not isinstance(shift, NoEstimate):
            lucky = luck.get(cell.k, 0.0) - luck.get(present.k, 0.0)
            log_ratio = shift.log_ratio + change - anchored - lucky
            known[cell.k] = present.rate.tokens_per_second * math.exp(log_ratio)
    known[present.k] = present.rate.tokens_per_second
    return known


def _find_anchor(present: Present) -> tuple[Rate, float]:
    """Return the cell of the K in force as a rate, and what today's acceptance makes of it.

    The present rate itself where that cell says nothing now. All rates are at equal batch.
    """
    for cell in present.cells:
        if (cell.batch, cell.k) == (present.batch, present.k):
            change = _acceptance_change(present, cell)
            if change is not None and _is_same_load(cell, present.rate.mean_batch):
                return Rate(cell.tokens_per_second, cell.mean_batch), change
    return present.rate, 0.0


def _acceptance_change(present: Present, cell: CellStatus) -> float | None:
    """Return ln of what today's acceptance makes of a cell's goodput; None where nobody knows.

    What a step costs does not depend on what is accepted: a cell keeps its step time and is read
    with today's tokens a step.
    """
    if not _has_moved(cell, present.first, **_MOVED):
        return 0.0
    if present.survival is None or cell.step_seconds is None:
        return None if _has_moved(cell, present.first, **_STALE) else 0.0
    then = cell.tokens_per_second * cell.step_seconds / cell.mean_batch
    now = mean_acceptance_length(present.survival, cell.k).tokens
    return math.log(now / then) if then > 0 and math.isfinite(then) else None


def _predict(
    present: Present, k: int, known: Mapping[int, float], cost: StepCost | NoEstimate
) -> Forecast:
    anchor = min(known, key=lambda other: (abs(other - k), other != present.k))
    modelled = _model_ratio(present, k, anchor, cost)
    if modelled is None:
        guessed = _guess(present, k) / _guess(present, anchor)
        return Forecast(k, known[anchor] * guessed, measured=False, reliable=False)
    ratio, reliable = modelled
    return Forecast(k, known[anchor] * ratio, measured=False, reliable=reliable)


def _model_ratio(
    present: Present, k: int, anchor: int, cost: StepCost | NoEstimate
) -> tuple[float, bool] | None:
    """Return goodput at k ÷ that at the anchor, and whether k lies within what was measured."""
    if present.survival is None or isinstance(cost, NoEstimate) or not _is_supported(cost):
        return None
    batch = present.rate.mean_batch
    there, here = cost.predict(batch, k), cost.predict(batch, anchor)
    if isinstance(there, NoEstimate) or isinstance(here, NoEstimate):
        return None
    if not (there.seconds > 0 and here.seconds > 0):
        return None
    lengths = mean_acceptance_length(present.survival, k).tokens / (
        mean_acceptance_length(present.survival, anchor).tokens
    )
    return lengths * here.seconds / there.seconds, not there.extrapolated


def _guess(present: Present, k: int) -> float:
    """Guess goodput in arbitrary units, from what engines have in common."""
    if present.survival is not None:
        tokens = mean_acceptance_length(present.survival, k).tokens
    else:
        tokens = sum(_GUESSED_HAZARD**position for position in range(k + 1))
    verified = present.rate.mean_batch * (k + 1)
    return tokens / (1 + _GUESSED_DRAFT_COST * k + _GUESSED_TOKEN_COST * verified)


def _is_supported(cost: StepCost | NoEstimate) -> bool:
    return (
        not isinstance(cost, NoEstimate)
        and cost.cells >= _MIN_CELLS
        and len(cost.ks) >= _MIN_KS
        and cost.relative_error <= _MAX_MODEL_ERROR
    )


def _log_gains(present: Present) -> dict[int, float]:
    """Return ln goodput over that of the K in force, where it is known or can be relied on."""
    now = present.rate.tokens_per_second
    return {
        f.k: math.log(f.tokens_per_second / now)
        for f in forecast_goodput(present)
        if f.reliable and f.tokens_per_second > 0 and (f.k >= present.min_k or f.k == present.k)
    }


def _fewest_rows(table: KTable, gains: Mapping[int, Mapping[int, float]], least: float) -> KTable:
    """Choose K by bucket by dynamic programming: gain of all buckets less a price per row."""
    bounds = [2**n for n in range(max(bucket_of(table.max_batch), *gains, 1).bit_length())]
    paths: dict[int, tuple[float, tuple[int, ...]]] = {}
    for bound in bounds:
        stays = table.k_at(bucket_first(bound))
        choices = {
            k: gain for k, gain in gains.get(bound, {}).items() if k == stays or gain >= least
        } or {stays: 0.0}
        paths = {
            k: max(
                (
                    (score + gain - (_ROW_PRICE if before != k else 0.0), (*path, k))
                    for before, (score, path) in paths.items()
                ),
                default=(gain, (k,)),
            )
            for k, gain in choices.items()
        }
    _, ks = max(paths.values())
    best = table
    for bound, k in zip(bounds, ks, strict=True):
        best = best.with_bucket(bound, k) if k != best.k_at(bucket_first(bound)) else best
    return best


def _mean_gain(
    table: KTable, gains: Mapping[int, Mapping[int, float]], weights: Mapping[int, float]
) -> float:
    """Return the mean log gain of a table over buckets, weighted; -inf where one is unknown."""
    total = sum(weights.get(batch, 0.0) for batch in gains)
    if not total > 0:
        return 0.0
    return (
        sum(
            weights.get(batch, 0.0) * by_k.get(table.k_at(bucket_first(batch)), -math.inf)
            for batch, by_k in gains.items()
            if weights.get(batch, 0.0) > 0
        )
        / total
    )


def _why(present: Present, k: int) -> str:
    chosen = next(f for f in forecast_goodput(present) if f.k == k)
    source = "measured" if chosen.measured else "predicted"
    return (
        f"{batch_range(present.batch)}: K {present.k} → {k}, "
        f"{present.rate.tokens_per_second:.4g} → {chosen.tokens_per_second:.4g} tok/s ({source})"
    )
