"""What runs now, measured: the K in force at the present batch bucket, and the cells remembered."""

from __future__ import annotations

import math
from typing import Final, TypeGuard

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import CellStatus, ExperimentStatus
from specdecode_operator.decide import planner
from specdecode_operator.decide.tuner_state import TunerState, reach
from specdecode_operator.domain.table import bucket_first
from specdecode_operator.estimate import load
from specdecode_operator.estimate.acceptance import PositionSurvival, Survival
from specdecode_operator.estimate.counters import NoEstimate, Window
from specdecode_operator.estimate.goodput import (
    ARM_STABLE,
    BETA,
    Measurement,
    Rate,
    compare_at_equal_batch,
    measure_goodput,
)
from specdecode_operator.estimate.step_cost import has_context_moved

MAX_CELLS: Final = 128

# Scrapes fall where they like: this much of a block is a block.
WHOLE_BLOCK: Final = 0.9
# How many blocks ago the K in force may have been measured to be the baseline after a put-back.
_BASELINE_BLOCKS: Final = 4
_CELL_MOVED: Final = 0.05
# A K ran all the time where this share of the steps had it; those before the table came had not.
_ALL_STEPS: Final = 0.95
_CELL_AGE_SECONDS: Final = 300.0
# Trials whose step times differ by more than this (log) were not of the same thing.
_SAME_TRIAL: Final = 0.15


def measure_present(state: TunerState) -> tuple[TunerState, planner.Present] | NoEstimate:
    """Measure the K in force at the batch bucket with most time now, and remember its cell."""
    recent = load.recent_window(state.counters, now=state.now, seconds=state.block_seconds / 2)
    if isinstance(recent, NoEstimate):
        return recent
    batch = load.busiest_batch(recent)
    if batch is None:
        return NoEstimate(Reason.NO_TRAFFIC, f"no step in the last {recent.seconds:.0f} s")
    k = state.table.k_at(bucket_first(batch))
    oldest = state.now - reach(state.inputs.min_block).total_seconds()
    window = state.counters.window(start=max(state.changed_at.timestamp(), oldest), end=state.now)
    measured = measure_block(window, batch=batch, k=k)
    if is_whole(measured, state) and isinstance(window, Window):
        survival = load.survival_now(state.counters, window)
        state = _refresh_cell(state, measured, load.first_acceptance(window))
        return state, to_present(state, batch=batch, k=k, rate=measured, survival=survival)
    rate = _recent_rate(state, recent, batch=batch, k=k)
    if rate is None:
        said = f"{planner.batch_range(batch)}, K={k}: {progress(state, measured)}"
        return NoEstimate(Reason.COLLECTING, said)
    survival = load.survival_now(state.counters, recent)
    return state, to_present(state, batch=batch, k=k, rate=rate, survival=survival)


def to_present(
    state: TunerState, *, batch: int, k: int, rate: Rate, survival: Survival | None
) -> planner.Present:
    """Put what the planner needs together; cells of another mean context say nothing now."""
    cells = (
        cell
        for cell in state.tuning.cells
        if not has_context_moved(cell.context_tokens, rate.context_tokens)
    )
    return planner.Present(
        batch=batch,
        k=k,
        rate=rate,
        survival=survival,
        cells=tuple(cells),
        envelope=state.inputs.envelope,
        min_k=state.inputs.min_k,
    )


def measure_block(window: Window | NoEstimate, *, batch: int, k: int) -> Measurement | NoEstimate:
    """Measure one (batch bucket, K) in a window."""
    if isinstance(window, NoEstimate):
        return window
    return measure_goodput(window, batch=batch, k=k)


def is_whole(measured: Measurement | NoEstimate, state: TunerState) -> TypeGuard[Measurement]:
    """Tell whether a measurement is a full block at its bucket."""
    return (
        isinstance(measured, Measurement)
        and measured.present_seconds >= WHOLE_BLOCK * state.block_seconds
        and measured.steps >= state.inputs.min_steps
    )


def find_lowered(state: TunerState, window: Window, *, batch: int, k: int) -> int | None:
    """Return the K that ran for a whole block in place of a higher one; None where it did run.

    The plugin lowers a row whose batch and K pass what the engine captured at start-up.
    """
    steps = {c.k: c.steps for c in window.cells if c.batch == batch and c.arm == ARM_STABLE}
    total = sum(steps.values())
    whole = window.seconds >= WHOLE_BLOCK * state.block_seconds
    if not whole or total < state.inputs.min_steps:
        return None
    ran = max(steps, key=lambda one: steps[one])
    return ran if ran < k and steps[ran] >= _ALL_STEPS * total else None


def remember_lowered(state: TunerState, open_one: ExperimentStatus) -> TunerState:
    """Write that a K which the engine lowers gives no more than the K it was compared with."""
    cell = CellStatus(
        batch=open_one.batch,
        k=open_one.to_k,
        tokens_per_second=open_one.baseline_tokens_per_second,
        mean_batch=open_one.baseline_mean_batch,
        steps=0,
        measured_at=state.inputs.now,
    )
    return _replace_cell(state, cell)


def progress(state: TunerState, measured: Measurement | NoEstimate) -> str:
    """Say how much of a block was seen."""
    if isinstance(measured, NoEstimate):
        return measured.message
    return (
        f"{measured.present_seconds:.0f} of {state.block_seconds:.0f} s and "
        f"{measured.steps:.0f} of {state.inputs.min_steps} steps"
    )


def remember_cell(
    state: TunerState,
    measured: Measurement,
    first: PositionSurvival | None,
    *,
    in_force: bool = False,
) -> TunerState:
    """Write a cell; the oldest go where they are too many.

    Where the K in force is measured anew, what its step time gained or lost since is taken for
    the machine's mood: the bucket's other cells go with it, so that they keep the ratios in which
    they were measured.
    """
    context = measured.context_tokens
    cell = CellStatus(
        batch=measured.batch,
        k=measured.k,
        tokens_per_second=load.rounded(measured.tokens_per_second),
        mean_batch=load.rounded(measured.mean_batch),
        steps=int(min(measured.steps, 1e9)),
        step_seconds=load.rounded(measured.step_seconds),
        acceptance=None if first is None else round(first.survival, 3),
        context_tokens=context and load.rounded(context),
        measured_at=state.inputs.now,
    )
    before = _find_cell(state, cell.batch, cell.k) if in_force else None
    others = [
        _in_step(c, before, cell) if before is not None and c.batch == cell.batch else c
        for c in state.tuning.cells
        if (c.batch, c.k) != (cell.batch, cell.k)
    ]
    youngest = sorted([*others, cell], key=lambda c: c.measured_at)[-MAX_CELLS:]
    return state.remember(cells=sorted(youngest, key=lambda c: (c.batch, c.k)))


def remember_trial(
    state: TunerState,
    measured: Measurement,
    first: PositionSurvival | None,
    *,
    baseline: Rate,
    from_k: int,
) -> TunerState:
    """Write the cell of a K that was tried, in step with the cell of the K it was compared with.

    What counts is the ratio of the two blocks: the machine's mood that both had is left out. The
    ratio is averaged with that of an earlier trial, the later one counting double.
    """
    before = _find_cell(state, measured.batch, measured.k)
    state = remember_cell(state, measured, first)
    trial, anchor = (_find_cell(state, measured.batch, k) for k in (measured.k, from_k))
    if trial is None or anchor is None:
        return state
    mood = compare_at_equal_batch(Rate(anchor.tokens_per_second, anchor.mean_batch), baseline)
    change = 0.0 if isinstance(mood, NoEstimate) else -mood.log_ratio
    if before is not None and before.step_seconds and trial.step_seconds:
        batches = math.log(trial.mean_batch / before.mean_batch) * (1 - BETA)
        again = math.log(before.step_seconds / trial.step_seconds) + batches - change
        change += again / 3 if abs(again) < _SAME_TRIAL else 0.0
    return _replace_cell(state, _slower(trial, math.exp(change)))


def _refresh_cell(
    state: TunerState, measured: Measurement, first: PositionSurvival | None
) -> TunerState:
    """Write the cell of the K in force when it moved or grew old, not at every pass."""
    cell = _find_cell(state, measured.batch, measured.k)
    if cell is not None:
        age = (state.inputs.now - cell.measured_at).total_seconds()
        moved = abs(measured.tokens_per_second / cell.tokens_per_second - 1) > _CELL_MOVED
        fresh = planner.is_fresh(cell, mean_batch=measured.mean_batch, first=first)
        elsewhere = has_context_moved(cell.context_tokens, measured.context_tokens)
        if fresh and not moved and not elsewhere and age < _CELL_AGE_SECONDS:
            return state
    return remember_cell(state, measured, first, in_force=True)


def _in_step(cell: CellStatus, before: CellStatus, now: CellStatus) -> CellStatus:
    """Change a cell's step time as that of the K in force has changed, at equal batch."""
    times = (cell.step_seconds, before.step_seconds, now.step_seconds)
    if None in times or has_context_moved(before.context_tokens, now.context_tokens):
        return cell
    batches = (before.mean_batch / now.mean_batch) ** (1 - BETA)
    change = batches * (now.step_seconds or 0.0) / (before.step_seconds or 1.0)
    return _slower(cell, change) if 0.1 < change < 10 else cell


def _slower(cell: CellStatus, factor: float) -> CellStatus:
    """Return a cell whose steps take `factor` times as long."""
    seconds = None if cell.step_seconds is None else load.rounded(cell.step_seconds * factor)
    return cell.model_copy(
        update={
            "step_seconds": seconds,
            "tokens_per_second": load.rounded(cell.tokens_per_second / factor),
        }
    )


def _replace_cell(state: TunerState, cell: CellStatus) -> TunerState:
    others = [c for c in state.tuning.cells if (c.batch, c.k) != (cell.batch, cell.k)]
    return state.remember(cells=sorted([*others, cell], key=lambda c: (c.batch, c.k)))


def _recent_rate(state: TunerState, recent: Window, *, batch: int, k: int) -> Rate | None:
    """Return the K in force as measured just before, at a load and acceptance like now's."""
    cell = _find_cell(state, batch, k)
    if cell is None:
        return None
    young = cell.measured_at >= state.inputs.now - _BASELINE_BLOCKS * state.inputs.min_block
    fresh = planner.is_fresh(
        cell,
        mean_batch=load.mean_batch_at(recent, batch),
        first=load.first_acceptance(recent),
    )
    if not (young and fresh):
        return None
    return Rate(cell.tokens_per_second, cell.mean_batch, context_tokens=cell.context_tokens)


def _find_cell(state: TunerState, batch: int, k: int) -> CellStatus | None:
    usable = (c for c in state.tuning.cells if (c.batch, c.k) == (batch, k))
    return next((cell for cell in usable if planner.is_usable(cell)), None)
