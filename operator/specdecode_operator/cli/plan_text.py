"""An offline plan in words: the surface as a table, the choices, and the reason for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdecode_operator.decide.offline_plan import LoadChoice, OfflinePlan
from specdecode_operator.domain.table import Row
from specdecode_operator.estimate.surface import Surface
from specdecode_operator.estimate.surface_prior import Arm


def describe(plan: OfflinePlan, surface: Surface) -> str:
    """Return everything a person needs to follow the plan."""
    parts = [
        "Goodput in tok/s; ~ is predicted, not measured.",
        _surface_text(plan, surface),
        "Best arm at each batch alone:",
        _columns([_choice_cells(choice) for choice in plan.by_load]),
    ]
    if plan.table is not None:
        parts += [
            "Table (speculation on):",
            _columns([_row_cells(row, plan) for row in plan.table.rows]),
        ]
    parts.append(describe_speculation(plan))
    return "\n\n".join(parts)


def describe_speculation(plan: OfflinePlan) -> str:
    """Say whether speculation should be on, with the number behind it."""
    if plan.table is None:
        return "Speculation: off. No K was measured that the table may use."
    if plan.gain_log is None:
        return "Speculation: on. Speculation off was not measured, so the gain over it is unknown."
    gain = f"{_percent(plan.gain_log)} against speculation off over all loads"
    return f"Speculation: {'on' if plan.speculation else 'off'}. The table gives {gain}."


def arm_name(arm: Arm) -> str:
    """Name an arm for people: `off`, `K=3`."""
    return "off" if arm is None else f"K={arm}"


def batch_name(batch: float) -> str:
    """Name a batch without a needless fraction."""
    return f"{batch:.10g}"


def _surface_text(plan: OfflinePlan, surface: Surface) -> str:
    header = ["batch", *(arm_name(arm) for arm in surface.arms), "best"]
    rows = [
        [
            batch_name(choice.batch),
            *(_rate(choice, arm) for arm in surface.arms),
            arm_name(choice.arm),
        ]
        for choice in plan.by_load
    ]
    return _columns([header, *rows], right=True)


def _rate(choice: LoadChoice, arm: Arm) -> str:
    estimate = choice.estimates[arm]
    return f"{'' if estimate.measured else '~'}{estimate.tokens_per_second:.5g}"


def _choice_cells(choice: LoadChoice) -> list[str]:
    expected, other = choice.expected, choice.runner_up
    why = "the only arm"
    if other != choice.arm:
        rival = choice.estimates[other]
        lead = expected.log - rival.log
        noise = math.hypot(expected.half_width, rival.half_width)
        sure = "" if lead > noise else ", within the noise"
        why = f"{_percent(lead)} over {arm_name(other)}{sure}"
    return [
        f"batch {batch_name(choice.batch)}:",
        arm_name(choice.arm),
        f"{expected.tokens_per_second:.5g} tok/s [{expected.lower:.5g}, {expected.upper:.5g}]",
        why + ("" if expected.measured else "; predicted, measure it before you rely on it"),
    ]


def _row_cells(row: Row, plan: OfflinePlan) -> list[str]:
    loads = [c for c in plan.by_load if row.first <= math.ceil(c.batch) <= row.last]
    lost = [
        f"batch {batch_name(c.batch)}: {_percent(c.estimates[row.k].log - c.expected.log)} against "
        f"{arm_name(c.arm)}"
        for c in loads
        if c.arm != row.k
    ]
    best = len(loads) - len(lost)
    why = [f"best at {best} of {len(loads)} loads"] if loads else ["no load measured here"]
    return [f"batch {row.first}-{row.last}:", f"K={row.k}", "; ".join(why + lost)]


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(min(log_ratio, 50.0)):+.1f} %"


def _columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
