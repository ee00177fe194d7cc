"""What a person sees: the object live while the course runs, and the summary at the end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import mean, median
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdecode_sim.engine import LAG_LIMIT
from tests.demo.course import Report

LINES_KEPT = 12


class Screen:
    """Plain lines without a terminal; with one, also the object's live figures above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._began = time.monotonic()
        self._read: Callable[[], dict[str, Any]] = dict
        self._load: Callable[[], str] = str
        self._status: dict[str, Any] = {}
        self._stop = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def tell(self, line: str) -> None:
        """Show a step of the course."""
        stamped = f"{time.monotonic() - self._began:6.0f} s  {line}"
        self._lines.append(stamped)
        if self._live is None:
            self._console.print(stamped, highlight=False, soft_wrap=True)
        else:
            self._live.update(self._draw())

    def follow(self, read: Callable[[], dict[str, Any]], load: Callable[[], str]) -> Self:
        """Show this status from now on, until the `with` block ends."""
        self._read, self._load = read, load
        return self

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._draw(), console=self._console, refresh_per_second=4)
            self._live.__enter__()
            self._thread = threading.Thread(target=self._refresh, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def _refresh(self) -> None:
        while not self._stop.wait(0.5):
            try:
                self._status = self._read()
            except Exception:  # the object or the API server may not be there yet
                continue
            if self._live is not None:
                self._live.update(self._draw())

    def _draw(self) -> Group:
        steps = Text("\n".join(self._lines), no_wrap=True, overflow="ellipsis")
        return Group(Panel(draw_status(self._status, self._load()), title="chat"), steps)


def draw_status(status: dict[str, Any], load: str) -> Table:
    """Draw the figures of one object: phase, table, batch, acceptance, goodput by cell."""
    active, estimate = status.get("active") or {}, status.get("estimate") or {}
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    acceptance = " ".join(f"{a:.2f}" for a in estimate.get("acceptance") or [])
    rows = {
        "phase": f"{status.get('phase', '–')}  pods {status.get('ready', '–')}  load {load}",
        "table": f"{active.get('table', '–')}  (K x last batch; the rest: K)",
        "batch": f"{estimate.get('batch', '–')}",
        "acceptance": f"{acceptance or '–'}  mean length "
        f"{estimate.get('meanAcceptanceLength', '–')}",
        "goodput": f"stable arm {estimate.get('goodputTokensPerSecond', '–')} tok/s",
        "measured": _draw_cells(status),
        "tuning": _message(status, "Tuned"),
        "speculation": _message(status, "SpeculationEnabled"),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value, overflow="fold"))
    return table


def _draw_cells(status: dict[str, Any]) -> str:
    """Write what was measured as `batch: K=tok/s`, a batch a piece."""
    by_batch: dict[int, list[str]] = {}
    cells = (status.get("tuning") or {}).get("cells") or []
    for cell in sorted(cells, key=lambda c: (c["batch"], c["k"])):
        figure = f"K{cell['k']}={cell['tokensPerSecond']:.0f}"
        by_batch.setdefault(cell["batch"], []).append(figure)
    return "   ".join(f"{batch}: {' '.join(f)}" for batch, f in by_batch.items()) or "–"


def _message(status: dict[str, Any], kind: str) -> str:
    for condition in status.get("conditions") or []:
        if condition["type"] == kind:
            return f"{condition['reason']}: {condition.get('message', '')}"
    return "–"


def draw_summary(report: Report) -> Table:
    """Draw tok/s at each load: tuned, each fixed K, and speculation off."""
    ks = sorted({k for stage in report.stages for k in stage.fixed})
    table = Table(title=f"tok/s on {report.engine}, measured in this run")
    for name in ("streams", "table", "tuned", *(f"K={k}" for k in ks), "off*", "tuned ÷ best K"):
        table.add_column(name, justify="right")
    for stage in report.stages:
        best = max(stage.fixed.values(), default=None)
        cells = [_figure(stage.fixed.get(k), bold=stage.fixed.get(k) == best) for k in ks]
        off = _figure(report.off.get(stage.streams))
        ratio = stage.ratio_to_best()
        shown = f"{ratio.value:.2f} ± {ratio.error:.2f}" if ratio else "–"
        table.add_row(str(stage.streams), stage.table, _figure(stage.tuned), *cells, off, shown)
    means = report.geometric_means()
    if len(means) > 1:
        row = [_figure(means.get(str(k))) for k in ks]
        table.add_row("all", "geometric mean", _figure(means["tuned"]), *row, "", "")
    table.caption = (
        "tuned and fixed K: in turn at the same load, in drawn order; the rounds differ by "
        f"{_spread(report):.0%} (median of highest - lowest over mean). tuned ÷ best K: in each "
        "round against the K that the other rounds say is best; ± is its standard error. "
        "*off: on the pod that the fall left behind; it needs a restart, so it is not interleaved."
    )
    return table


def draw_drain(report: Report) -> Table:
    """Draw how K moved while one batch of requests drained: most steps by batch."""
    drain = report.drain
    assert drain is not None
    table = Table(
        title=f"one batch of {drain.requests} requests drained in {drain.seconds:.0f} s, "
        f"{drain.restarts} engine restarts"
    )
    buckets = sorted(drain.steps, reverse=True)
    for batch in buckets:
        table.add_column(f"batch ≤ {batch}", justify="right")
    ks = [max(drain.steps[b], key=drain.steps[b].__getitem__) for b in buckets]
    table.add_row(*(f"K={k}" for k in ks))
    return table


def judge_lag(report: Report) -> str:
    """Say whether the simulated engines kept to their planned step times."""
    phase, worst = max(report.lag.items(), key=lambda one: one[1])
    if worst > LAG_LIMIT:
        return (
            f"[bold red]INVALID: simulated engines lagged by {worst:.1%}[/bold red] at load "
            f"{phase}, more than {LAG_LIMIT:.0%}: this measured the machine. Run it on an idle one"
        )
    limit = f"{LAG_LIMIT:.0%} is the limit"
    return f"simulated engines lagged by at most {worst:.1%}, at load {phase} ({limit})"


def draw_fault(report: Report) -> Table:
    """Draw the times of the fall, from the pod status that showed the engine's end."""
    table = Table(title="illegal memory access: seconds from the pod's status")
    for name in ("kill switch written", "first pod without speculation", "recovered"):
        table.add_column(name, justify="right")
    times = (
        report.kill_switch_seconds,
        report.first_spec_off_pod_seconds,
        report.recovered_seconds,
    )
    table.add_row(*("–" if t is None else f"{t:.2f}" for t in times))
    return table


def _spread(report: Report) -> float:
    """Median over arms and loads of (highest - lowest round) / mean."""
    spreads = [
        (max(values) - min(values)) / mean(values)
        for stage in report.stages
        for values in stage.rounds.values()
    ]
    return median(spreads) if spreads else 0.0


def _figure(value: float | None, *, bold: bool = False) -> str:
    if value is None:
        return "–"
    return f"[bold]{value:.0f}[/bold]" if bold else f"{value:.0f}"
