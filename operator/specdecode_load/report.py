"""What the person or program at the other end sees: progress, a table, or JSON."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specdecode_load.measure import Measurement, Spread, Window
from specdecode_load.schedule import Stage
from specdecode_load.target import Target
from specdecode_load.workload import Workload

_PLAIN_LINE_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Run:
    """A whole run: what was asked for, and a measurement for each stage that was begun."""

    target: Target
    workload: Workload
    warmup_seconds: float
    stages: tuple[Measurement, ...]
    interrupted: bool


class ProgressView:
    """Progress of the stages: a moving bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, stages: tuple[Stage, ...]) -> None:
        self._console = console
        self._stages = stages
        self._tokens = 0
        self._shown_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, figures="")

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, number: int) -> None:
        """Show that stage `number` (from 0) begins."""
        stage = self._stages[number]
        self._tokens, self._shown_at = 0, time.monotonic()
        name = f"stage {number + 1}/{len(self._stages)}: {stage.streams} streams"
        self._bar.reset(self._task, description=name, total=stage.seconds, figures="warm-up")
        self._say(f"{name} for {stage.seconds:g} s")

    def update(self, window: Window, *, elapsed_seconds: float) -> None:
        """Show how far the stage is, and the speed since the last line."""
        since_seconds = time.monotonic() - self._shown_at
        if not self._console.is_terminal and since_seconds < _PLAIN_LINE_EVERY_SECONDS:
            return
        speed = (window.output_tokens - self._tokens) / max(since_seconds, 1e-9)
        self._tokens, self._shown_at = window.output_tokens, time.monotonic()
        failed = sum(window.errors.values())
        figures = f"{speed:.0f} tok/s  {window.requests} requests  {failed} errors"
        self._bar.update(self._task, completed=elapsed_seconds, figures=figures)
        self._say(f"  {elapsed_seconds:.0f} s  {figures}")

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)


def build_table(run: Run) -> Table:
    """Lay the stages out as a table; a dash is what was not measured."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("streams", "time", "requests", "tokens", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT\np50 ms", "\np90", "\np99", "TPOT\np50 ms", "\np90", "\np99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("errors")
    for stage in run.stages:
        table.add_row(
            str(stage.streams),
            f"{stage.seconds:.0f} s",
            str(stage.requests),
            str(stage.output_tokens),
            f"{stage.tokens_per_second:.1f}",
            *_milliseconds(stage.ttft_seconds),
            *_milliseconds(stage.tpot_seconds),
            " ".join(f"{kind}:{count}" for kind, count in sorted(stage.errors.items())) or "none",
        )
    return table


def to_json(run: Run) -> str:
    """Write the run as JSON, schema 1: times in seconds, null for what was not measured."""
    return json.dumps(
        {
            "schema": 1,
            "url": run.target.url,
            "model": run.target.model,
            "keepAlive": run.target.keep_alive,
            "workload": {
                "promptTokens": str(run.workload.prompt),
                "outputTokens": str(run.workload.output),
                "seed": run.workload.seed,
                "temperature": run.workload.temperature,
                "ignoreEos": run.workload.ignore_eos,
            },
            "warmupSeconds": run.warmup_seconds,
            "interrupted": run.interrupted,
            "stages": [_stage_values(stage) for stage in run.stages],
        },
        indent=2,
    )


def _stage_values(stage: Measurement) -> dict[str, Any]:
    return {
        "streams": stage.streams,
        "seconds": round(stage.seconds, 3),
        "requests": stage.requests,
        "outputTokens": stage.output_tokens,
        "promptTokens": stage.prompt_tokens,
        "tokensPerSecond": round(stage.tokens_per_second, 2),
        "ttftSeconds": _spread_values(stage.ttft_seconds),
        "tpotSeconds": _spread_values(stage.tpot_seconds),
        "errors": {str(kind): count for kind, count in sorted(stage.errors.items())},
        "generatorCpu": round(stage.generator_cpu, 4),
    }


def _spread_values(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: round(value, 6) for name, value in asdict(spread).items()}


def _milliseconds(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 3
    times = (1000 * value for value in (spread.p50, spread.p90, spread.p99))
    return [f"{time_ms:.1f}" if time_ms < 100 else f"{time_ms:.0f}" for time_ms in times]
