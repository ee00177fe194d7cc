"""What the person or program at the other end sees: progress, a table, or JSON."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specdecode_load.measure import Measurement, Window
from specdecode_load.schedule import Stage
from specdecode_load.spread import Distribution, Spread
from specdecode_load.target import Target
from specdecode_load.workload import Workload

_PLAIN_LINE_EVERY_SECONDS = 10.0
_NOT_REPORTED = "not reported by the engine"
_HOW_TO_REPORT = "start it with --per-request-spec-decode-metrics summary"


@dataclass(frozen=True)
class Run:
    """A whole run: what was asked for, and a measurement for each stage that was begun."""

    target: Target
    workload: Workload
    warmup_seconds: float
    stages: tuple[Measurement, ...]
    interrupted: bool
    prompts_file: str | None = None
    last_error: str | None = None


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


def build_acceptance(run: Run) -> Table | str:
    """Lay out how the requests' drafts were accepted; a sentence where the engine told nothing."""
    if all(stage.acceptance is None for stage in run.stages):
        has_ended = any(stage.requests for stage in run.stages)
        why = f"{_NOT_REPORTED}: {_HOW_TO_REPORT}" if has_ended else "no request ended"
        return f"acceptance per request: {why}"
    title = "acceptance per request: mean acceptance length, draft acceptance rate"
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for name in ("streams", "requests", "length\nmean", "\np10", "\np50", "\np90"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("rate\nmean", "\np10", "\np50", "\np90"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("other requests")
    for stage in run.stages:
        told = stage.acceptance
        table.add_row(
            "-" if stage.streams is None else str(stage.streams),
            "-" if told is None else str(told.requests_with_drafts),
            *_ratios(told.mean_length if told else None),
            *_ratios(told.rate if told else None),
            _acceptance_note(stage) or "none",
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
                **_source_values(run),
            },
            "warmupSeconds": run.warmup_seconds,
            "interrupted": run.interrupted,
            "lastError": run.last_error,
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
        "reconnects": stage.reconnects,
        "generatorCpu": round(stage.generator_cpu, 4),
        "acceptance": _acceptance_values(stage),
    }


def _source_values(run: Run) -> dict[str, Any]:
    """Tell where the conversations came from; turns are those of generated ones."""
    workload = run.workload
    return {
        "turns": None if workload.scripts else workload.turns,
        "longShare": workload.long_share,
        "longPromptTokens": str(workload.long_prompt) if workload.long_prompt else None,
        "promptsFile": run.prompts_file,
        "prompts": len(workload.scripts) or None,
    }


def _acceptance_values(stage: Measurement) -> dict[str, Any]:
    told = stage.acceptance
    if told is None:
        return {
            "note": _acceptance_note(stage),
            "meanAcceptanceLength": None,
            "draftAcceptanceRate": None,
        }
    return {
        "note": _acceptance_note(stage),
        "requestsWithDrafts": told.requests_with_drafts,
        "requestsWithoutDrafts": told.requests_without_drafts,
        "requestsNotReported": told.requests_not_reported,
        "requestsUnreadable": told.requests_unreadable,
        "drafts": told.drafts,
        "draftTokens": told.draft_tokens,
        "acceptedTokens": told.accepted_tokens,
        "meanAcceptanceLength": _spread_values(told.mean_length),
        "draftAcceptanceRate": _spread_values(told.rate),
    }


def _acceptance_note(stage: Measurement) -> str | None:
    """Say why there is no figure, or not one of every request; None where all is told."""
    told = stage.acceptance
    if told is None:
        return _NOT_REPORTED if stage.requests else "no request ended"
    parts = {
        "without a draft": told.requests_without_drafts,
        "not reported": told.requests_not_reported,
        "in a form that is not known": told.requests_unreadable,
    }
    return ", ".join(f"{count} {what}" for what, count in parts.items() if count) or None


def _spread_values(spread: Spread | Distribution | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: round(value, 6) for name, value in asdict(spread).items()}


def _ratios(ratios: Distribution | None) -> list[str]:
    if ratios is None:
        return ["-"] * 4
    return [f"{value:.2f}" for value in (ratios.mean, ratios.p10, ratios.p50, ratios.p90)]


def _milliseconds(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 3
    times = (1000 * value for value in (spread.p50, spread.p90, spread.p99))
    return [f"{time_ms:.1f}" if time_ms < 100 else f"{time_ms:.0f}" for time_ms in times]
