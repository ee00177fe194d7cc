"""The live object's choice of K in words: what is in force, what was measured, what decided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.conditions import ConditionType, find_condition
from specdecode_operator.api.parse import parse_spec
from specdecode_operator.api.v1alpha1 import CellStatus, EstimateStatus, Status, Tuning
from specdecode_operator.decide.planner import batch_range, is_usable
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.domain.table import KTable, bucket_first, bucket_of
from specdecode_operator.errors import InvalidTableError
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.goodput import Rate, compare_at_equal_batch

_OFF = "Off"
_TOLD_CONDITIONS = (
    ConditionType.TUNED,
    ConditionType.TABLE_APPLIED,
    ConditionType.SPECULATION_ENABLED,
    ConditionType.DEGRADED,
)


def describe(
    key: ObjectKey, raw: Mapping[str, Any], status: Status, *, batch: int | None = None
) -> str:
    """Return the explanation for every batch of the table, or for the batches like one."""
    blocks = [[f"{key.namespace}/{key.name}: {_state(status)}", *_now(status.estimate)]]
    if status.active.speculation == _OFF:
        blocks.append(["No K is in force: the engines run with speculation off."])
    else:
        blocks += _table_blocks(raw, status, batch)
    blocks += [list(block) for block in (_changes(status), _conditions(status)) if block]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _state(status: Status) -> str:
    active = status.active
    parts = [f"phase {status.phase}", f"mode {status.mode or 'unknown'}"]
    if status.ready:
        parts.append(f"ready {status.ready}")
    if active.speculation:
        parts.append(f"speculation {active.speculation.lower()}")
    if active.table:
        generation = "" if active.table_generation is None else f" #{active.table_generation}"
        parts.append(f"table{generation} {active.table}")
    return ", ".join(parts)


def _now(estimate: EstimateStatus) -> list[str]:
    if estimate.batch is None or estimate.goodput_tokens_per_second is None:
        return ["Nothing was measured yet."]
    lines = [
        f"Now mostly {batch_range(estimate.batch)}: {estimate.goodput_tokens_per_second:.4g} tok/s "
        f"per engine, against speculation off: {estimate.versus_spec_off_percent}"
    ]
    if estimate.mean_acceptance_length is not None:
        shares = " ".join(f"{share:.2f}" for share in estimate.acceptance)
        lines.append(
            f"Mean acceptance length {estimate.mean_acceptance_length:.2f}"
            + (f"; accepted up to each position: {shares}" if shares else "")
        )
    return lines


def _table_blocks(raw: Mapping[str, Any], status: Status, batch: int | None) -> list[list[str]]:
    try:
        table = KTable.from_rows(status.active.k_table)
    except InvalidTableError:
        return [["No table is in force: K is static, or the operator has not written one yet."]]
    tuning = _tuning(raw)
    cells = [cell for cell in status.tuning.cells if is_usable(cell)]
    blocks = []
    for bound, upper, k in _stretches(table, cells, only=batch):
        here = [cell for cell in cells if cell.batch == bound]
        name = batch_range(bound) if bound == upper else f"batch {bucket_first(bound)}-{upper}"
        reason = _reason(here, k, tuning, status) if here else _unmeasured(status)
        blocks.append([f"{name}: K={k}. {reason}", *_cell_lines(here, k)])
    return blocks


def _stretches(
    table: KTable, cells: Sequence[CellStatus], *, only: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield first bucket, last bucket and K; unmeasured neighbours of one K go together."""
    measured = {cell.batch for cell in cells}
    top = bucket_of(max([table.max_batch, *measured]))
    bounds = [2**n for n in range(top.bit_length())]
    if only is not None:
        bound = bucket_of(only)
        yield bound, bound, table.k_at(only)
        return
    while bounds:
        first = last = bounds.pop(0)
        k = table.k_at(bucket_first(first))
        while (
            bounds
            and not {first, bounds[0]} & measured
            and table.k_at(bucket_first(bounds[0])) == k
        ):
            last = bounds.pop(0)
        yield first, last, k


def _tuning(raw: Mapping[str, Any]) -> Tuning:
    try:
        return parse_spec(raw).tuning
    except ValidationError:
        return Tuning()


def _unmeasured(status: Status) -> str:
    tuned = status.tuning.rows
    source = "it was set with a smaller batch's" if tuned else "it is the spec's kTable"
    return f"Nothing was measured here; {source}."


def _reason(cells: Sequence[CellStatus], k: int, tuning: Tuning, status: Status) -> str:
    """Say what decided between the K measured at one batch bucket."""
    own = next((cell for cell in cells if cell.k == k), None)
    if own is None:
        return "It was not measured here, others were."
    rivals = [(gain, cell.k) for cell in cells if cell.k != k for gain in _gain(cell, own)]
    if not rivals:
        return "No other K was measured here yet."
    gain, rival = max(rivals)
    if gain <= 0:
        return f"Best of {len(rivals) + 1} measured here: K={rival} is next, {_percent(gain)}."
    if 100 * math.expm1(gain) < tuning.min_gain_percent:
        return (
            f"K={rival} is {_percent(gain)}, less than minGainPercent {tuning.min_gain_percent:g}."
        )
    tuned = find_condition(status.conditions, ConditionType.TUNED)
    held = f": {tuned.reason}" if tuned is not None else ""
    return f"K={rival} is {_percent(gain)} and was not taken{held}."


def _gain(cell: CellStatus, own: CellStatus) -> list[float]:
    compared = compare_at_equal_batch(
        Rate(cell.tokens_per_second, cell.mean_batch), Rate(own.tokens_per_second, own.mean_batch)
    )
    return [] if isinstance(compared, NoEstimate) else [compared.log_ratio]


def _cell_lines(cells: Sequence[CellStatus], k: int) -> list[str]:
    own = next((cell for cell in cells if cell.k == k), None)
    lines = []
    for cell in sorted(cells, key=lambda cell: cell.k):
        against = "in force" if cell.k == k else ""
        if own is not None and cell.k != k:
            against = "".join(f"{_percent(gain)} at equal batch" for gain in _gain(cell, own))
        lines.append(
            f"  K={cell.k:<3} {cell.tokens_per_second:>8.4g} tok/s at mean batch "
            f"{cell.mean_batch:.3g}, {cell.steps} steps, {cell.measured_at:%Y-%m-%d %H:%M}Z"
            + (f"  {against}" if against else "")
        )
    return lines


def _changes(status: Status) -> list[str]:
    lines = []
    if status.experiment is not None:
        trial = status.experiment
        lines.append(
            f"Being tried: K {trial.from_k} -> {trial.to_k} at {batch_range(trial.batch)} "
            f"(experiment {trial.id})"
        )
    if status.tuning.recommendation is not None:
        advice = status.tuning.recommendation
        lines.append(
            f"Recommended: {advice.table}, {advice.expected_gain_percent:+.1f} %: {advice.why}"
        )
    lines += [
        f"Quarantined: revision {entry.revision} after {entry.evidence.fault_class or 'a crash'} "
        f"at {entry.at:%Y-%m-%d %H:%M}Z"
        for entry in status.quarantine
    ]
    return lines


def _conditions(status: Status) -> list[str]:
    lines = []
    for kind in _TOLD_CONDITIONS:
        found = find_condition(status.conditions, kind)
        if found is not None:
            lines.append(
                f"{found.type}={found.status} {found.reason}: {found.message}".rstrip(": ")
            )
    return lines


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(min(log_ratio, 50.0)):+.1f} %"
