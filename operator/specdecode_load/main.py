"""The command `specdecode-load`: options in, stages run one after the other, figures out.

Exit status: 0 measured, 1 not one token came, 2 wrong options, 130 interrupted (what was measured
until then is printed all the same).
"""

import argparse
import asyncio
import math
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from specdecode_load import report, schedule
from specdecode_load.lengths import Lengths
from specdecode_load.loop import ClosedLoop
from specdecode_load.measure import Measurement, Window
from specdecode_load.probe import probe
from specdecode_load.prompts import read_prompts
from specdecode_load.target import RequestError, Target
from specdecode_load.workload import MOST_TURNS, Workload

_EPILOG = """\
lines of a --prompts file (each also takes "max_tokens"; without it --output-tokens is drawn):
  {"prompt": "Once upon a time"}                      a text to go on with
  {"messages": [{"role": "user", "content": "Hi"}]}   a chat, through the model's template
  {"turns": ["Hi", "And then?"]}                      what the user of a chat says, turn by turn
A chat's user messages are answered by the engine unless an assistant message follows in the file.
Answers to real prompts end by themselves only with --no-ignore-eos.

examples:
  specdecode-load --schedule 1:60s,8:60s,32:2m --warmup 5s --json load.json
  specdecode-load --concurrency 16 --turns 4 --long-share 0.1 --long-prompt uniform:2000:8000
  specdecode-load --concurrency 8 --prompts prompts.jsonl --no-ignore-eos --output-tokens 512

Acceptance per request is reported where the engine runs with
--per-request-spec-decode-metrics summary (or detailed).
"""
_REFRESH_SECONDS = 0.25
_Value = TypeVar("_Value")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parse(arguments)
    progress = Console(stderr=True)
    try:
        run = asyncio.run(_run(options, progress))
    except RequestError as error:
        print(f"specdecode-load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the load began, or the second one
        return 130
    _print(run, json_path=options.json, progress=progress)
    if run.interrupted:
        return 130
    return 0 if any(stage.output_tokens for stage in run.stages) else 1


async def _run(options: argparse.Namespace, progress: Console) -> report.Run:
    target = await probe(
        options.url,
        model=options.model,
        api_key=options.api_key,
        keep_alive=options.keep_alive,
        idle_timeout_seconds=options.timeout,
    )
    workload: Workload = options.workload
    session = _Session(options, target=target, workload=workload)
    with report.ProgressView(progress, options.schedule) as view:
        stages = await session.run(view)
    return report.Run(
        target=target,
        workload=workload,
        warmup_seconds=options.warmup,
        stages=tuple(stages),
        interrupted=session.interrupted.is_set(),
        prompts_file=options.prompts,
        last_error=session.last_error,
    )


class _Session:
    """The stages of one run, until the last has ended, the requests are used up, or Ctrl-C."""

    def __init__(self, options: argparse.Namespace, *, target: Target, workload: Workload) -> None:
        self._stages: tuple[schedule.Stage, ...] = options.schedule
        self._warmup_seconds: float = options.warmup
        self._loop = ClosedLoop(
            target,
            workload,
            streams=self._stages[0].streams,
            most_requests=options.max_requests,
        )
        self.interrupted = asyncio.Event()

    @property
    def last_error(self) -> str | None:
        """Tell what the last failed request failed of; None if none failed."""
        error = self._loop.last_error
        return str(error) if error else None

    async def run(self, view: report.ProgressView) -> list[Measurement]:
        """Run the stages and return a measurement for each that was begun."""
        self._watch_signals()
        measured = []
        async with self._loop as loop:
            for number, stage in enumerate(self._stages):
                loop.set_concurrency(stage.streams)
                view.begin(number)
                await self._wait(self._warmup_seconds)
                async with loop.window() as window:
                    await self._measure(window, seconds=stage.seconds, view=view)
                measured.append(window.result)
                if self._is_over():
                    break
        return measured

    async def _measure(self, window: Window, *, seconds: float, view: report.ProgressView) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        while (left := seconds - (clock() - begun)) > 0 and not self._is_over():
            await self._wait(min(left, _REFRESH_SECONDS))
            view.update(window, elapsed_seconds=clock() - begun)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.interrupted.wait()
        except TimeoutError:
            return

    def _is_over(self) -> bool:
        return self.interrupted.is_set() or self._loop.is_exhausted

    def _watch_signals(self) -> None:
        events = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            self.interrupted.set()
            events.remove_signal_handler(number)  # a second Ctrl-C ends at once

        for number in (signal.SIGINT, signal.SIGTERM):
            events.add_signal_handler(number, stop, number)


def _print(run: report.Run, *, json_path: str | None, progress: Console) -> None:
    people = progress if json_path == "-" else Console()
    people.print(report.build_table(run))
    people.print(report.build_acceptance(run), highlight=False)
    if run.last_error is not None:
        progress.print(f"last error: {run.last_error}", highlight=False, markup=False)
    if json_path == "-":
        print(report.to_json(run))
    elif json_path:
        Path(json_path).write_text(report.to_json(run) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if options.schedule is None:
        options.schedule = (schedule.Stage(options.concurrency, options.duration),)
    if options.json not in (None, "-") and not Path(options.json).parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    options.api_key = None
    if options.api_key_env is not None:
        options.api_key = os.environ.get(options.api_key_env)
        if not options.api_key:
            parser.error(f"--api-key-env: the variable {options.api_key_env} is not set")
    try:
        Target(url=options.url, model="", api_key=options.api_key)
        options.workload = _build_workload(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _build_workload(options: argparse.Namespace) -> Workload:
    """Build the workload; raises ValueError where options do not go together."""
    if options.prompts is not None and options.turns is not None:
        raise ValueError("--turns is for generated prompts: in a file, its lines tell the turns")
    if (options.long_share > 0) != (options.long_prompt is not None):
        raise ValueError("give --long-share and --long-prompt together, like 0.1 and 4000")
    return Workload(
        prompt=options.prompt_tokens,
        output=options.output_tokens,
        seed=options.seed,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        turns=options.turns or 1,
        long_share=options.long_share,
        long_prompt=options.long_prompt,
        scripts=() if options.prompts is None else read_prompts(Path(options.prompts)),
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdecode-load",
        description="Hold a number of streams on an OpenAI-compatible vLLM, and measure it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--model", help="default: the first that the server lists")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--schedule",
        type=_argument(schedule.parse_schedule),
        metavar="STREAMS:DURATION,…",
        help="stages one after the other, like 1:60s,8:60s,32:2m",
    )
    load.add_argument("--concurrency", type=_argument(_streams), default=1, metavar="STREAMS")
    add("--duration", type=_argument(schedule.parse_duration), default=60.0, help="default: 60s")
    add(
        "--warmup",
        type=_argument(schedule.parse_duration),
        default=0.0,
        help="of each stage, before its duration and not measured (default: 0s)",
    )
    for name, default in (("--prompt-tokens", "32"), ("--output-tokens", "64")):
        add(
            name,
            type=_argument(Lengths.parse),
            default=default,
            metavar="LENGTHS",
            help="N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA (default: %(default)s)",
        )
    _add_conversations(parser)
    add("--seed", type=int, default=secrets.randbelow(2**31), help="default: drawn, and reported")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    boolean = argparse.BooleanOptionalAction
    add("--ignore-eos", action=boolean, default=True, help="always the full output length")
    add("--keep-alive", action=boolean, default=True, help="one connection for many requests")
    add(
        "--timeout",
        type=_argument(schedule.parse_duration),
        default=120.0,
        help="longest wait for the next token (default: 120s)",
    )
    add("--max-requests", type=_argument(_requests), help="end after so many requests")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    return parser


def _add_conversations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON Lines, taken in order and again from the start; instead of generated prompts",
    )
    group.add_argument(
        "--turns",
        type=_argument(_turns),
        metavar="N",
        help="of each generated conversation: every answer is appended, so the context grows",
    )
    group.add_argument(
        "--long-share",
        type=_argument(_share),
        default=0.0,
        metavar="SHARE",
        help="of the conversations that open with a generated prompt of --long-prompt (like 0.1)",
    )
    group.add_argument(
        "--long-prompt",
        type=_argument(Lengths.parse),
        metavar="LENGTHS",
        help="tokens of a long prompt, written as for --prompt-tokens",
    )


def _argument(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Let argparse show the sentence of a ValueError, which it otherwise swallows."""

    def read_argument(text: str) -> _Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_argument


def _streams(text: str) -> int:
    return schedule.parse_schedule(f"{text}:1s")[0].streams


def _turns(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_TURNS:
        raise ValueError(f"{text!r} is no number of turns: give 1 to {MOST_TURNS}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is no share: give a number from 0 to 1, like 0.1")
    return share


def _requests(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is no number of requests: give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
