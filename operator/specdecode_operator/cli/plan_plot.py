"""Draws an offline plan: goodput by batch and K, intervals, and the steps of the chosen table.

Arms differ by percents where goodput grows a hundredfold with the batch; so below the goodput
stands each arm against the best K there, and the table's steps run along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from specdecode_operator.cli.plan_text import arm_name, batch_name, describe_speculation
from specdecode_operator.decide.offline_plan import OfflinePlan
from specdecode_operator.estimate.surface import Estimate, Surface
from specdecode_operator.estimate.surface_prior import Arm

_OFF_COLOUR: Final = "#555555"
_CHOSEN_COLOUR: Final = "#c0392b"
_WIDE_SPAN: Final = 8
# What is further below the best K leaves the lower picture: the arms that compete fill it.
_LOWEST_PERCENT: Final = -35
_DOTS_PER_INCH: Final = 130

_Scale = Callable[[Estimate, float], tuple[float, float, float]]


def draw(surface: Surface, plan: OfflinePlan, path: Path) -> None:
    """Write the picture; the format follows the file's name. Raises OSError, ValueError."""
    figure = Figure(figsize=(10, 8.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.15, 1])
    colours = _colours(surface.arms)
    best = {c.batch: _best_k(c.estimates) for c in plan.by_load}
    for arm in surface.arms:
        _draw_arm(
            top, plan, arm, colours[arm], lambda e, _: (e.tokens_per_second, e.lower, e.upper)
        )
        _draw_arm(bottom, plan, arm, colours[arm], lambda e, b: _against(e, best[b]))
    _draw_choices(top, plan, lambda e, _: (e.tokens_per_second, e.lower, e.upper))
    _draw_choices(bottom, plan, lambda e, b: _against(e, best[b]))
    _draw_steps(bottom, plan, colours)
    _label(top, bottom, plan)
    _scale_axes(top, bottom, surface)
    top.legend(handles=_legend(surface.arms, colours), loc="upper left", fontsize=9, ncols=2)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _colours(arms: Sequence[Arm]) -> dict[Arm, str]:
    ks = [arm for arm in arms if arm is not None]
    shades = mpl.colormaps["viridis"](np.linspace(0.05, 0.9, max(len(ks), 1)))
    return {None: _OFF_COLOUR, **dict(zip(ks, map(to_hex, shades), strict=False))}


def _best_k(estimates: Mapping[Arm, Estimate]) -> float:
    """Return the goodput of the best K; of off where no K was measured."""
    ks = [e.tokens_per_second for arm, e in estimates.items() if arm is not None]
    return max(ks or [e.tokens_per_second for e in estimates.values()])


def _against(estimate: Estimate, best: float) -> tuple[float, float, float]:
    return (
        100 * (estimate.tokens_per_second / best - 1),
        100 * (estimate.lower / best - 1),
        100 * (estimate.upper / best - 1),
    )


def _draw_arm(axes: Axes, plan: OfflinePlan, arm: Arm, colour: str, scale: _Scale) -> None:
    batches = [choice.batch for choice in plan.by_load]
    found = [choice.estimates[arm] for choice in plan.by_load]
    scaled = [scale(e, b) for e, b in zip(found, batches, strict=True)]
    middle, lower, upper = (np.array(part) for part in zip(*scaled, strict=True))
    axes.plot(batches, middle, color=colour, linestyle="--" if arm is None else "-", linewidth=1.4)
    for measured in (True, False):
        here = np.array([e.measured == measured for e in found])
        if here.any():
            axes.errorbar(
                np.array(batches)[here],
                middle[here],
                yerr=[(middle - lower)[here], (upper - middle)[here]],
                fmt="s" if arm is None else "o",
                markersize=5.5,
                color=colour,
                markerfacecolor=colour if measured else "white",
                elinewidth=1.0,
                capsize=2.5 if measured else 0,
                alpha=1.0 if measured else 0.75,
            )


def _draw_choices(axes: Axes, plan: OfflinePlan, scale: _Scale) -> None:
    axes.plot(
        [choice.batch for choice in plan.by_load],
        [scale(choice.expected, choice.batch)[0] for choice in plan.by_load],
        linestyle="none",
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor=_CHOSEN_COLOUR,
        markeredgewidth=1.8,
        zorder=5,
    )


def _draw_steps(axes: Axes, plan: OfflinePlan, colours: Mapping[Arm, str]) -> None:
    """Shade the rows of the table and write their K above them."""
    if plan.table is None:
        return
    smallest, largest = plan.by_load[0].batch, plan.by_load[-1].batch
    for number, row in enumerate(plan.table.rows):
        left = max(row.first - 0.5, smallest / 1.25) if number else smallest / 1.25
        right = row.last + 0.5 if row is not plan.table.rows[-1] else largest * 1.25
        if right <= left:
            continue
        axes.axvspan(left, right, color=colours[row.k], alpha=0.13, linewidth=0)
        if number:
            axes.axvline(left, color=_CHOSEN_COLOUR, linewidth=1.2, linestyle=":")
        axes.text(
            math.sqrt(left * right),
            1.015,
            f"K={row.k}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=10,
            color=_CHOSEN_COLOUR,
            fontweight="bold",
        )


def _label(top: Axes, bottom: Axes, plan: OfflinePlan) -> None:
    top.set_title(describe_speculation(plan), fontsize=11, loc="left")
    top.set_ylabel("goodput, tok/s")
    bottom.set_ylabel("against the best K at that batch, %")
    bottom.set_xlabel("batch, requests")
    for axes in (top, bottom):
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def _scale_axes(top: Axes, bottom: Axes, surface: Surface) -> None:
    batches = surface.batches
    if batches[-1] >= _WIDE_SPAN * batches[0]:
        bottom.set_xscale("log", base=2)
        top.set_yscale("log")
        top.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=20))
        top.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        top.yaxis.set_minor_locator(NullLocator())
    bottom.set_xticks(batches)
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda x, _: batch_name(x)))
    bottom.xaxis.set_minor_locator(NullLocator())
    low, high = bottom.get_ylim()
    bottom.set_ylim(max(low, min(_LOWEST_PERCENT, high - 20)), high)
    bottom.set_xlim(batches[0] / 1.25, batches[-1] * 1.25)


def _legend(arms: Sequence[Arm], colours: Mapping[Arm, str]) -> list[Line2D]:
    lines = [
        Line2D([], [], color=colours[arm], linestyle="--" if arm is None else "-", label=name)
        for arm in arms
        for name in ("speculation off" if arm is None else arm_name(arm),)
    ]
    for label, size, face in (
        ("measured, 95 % interval", 5.5, "#333333"),
        ("predicted", 5.5, "white"),
        ("best arm at that batch", 11, "none"),
    ):
        edge = _CHOSEN_COLOUR if face == "none" else "#333333"
        mark = Line2D([], [], linestyle="none", marker="o", label=label, markersize=size)
        mark.set_markerfacecolor(face)
        mark.set_markeredgecolor(edge)
        mark.set_markeredgewidth(1.8 if face == "none" else 1.0)
        lines.append(mark)
    return lines
