"""Drives vLLM's own scheduler, with the plugin's hooks, and a worker that makes up its tokens.

Run by the engine's Python, with the target and draft model, `sync` or `async`, and the file to
write as arguments; the vLLM that is imported decides whose scheduler it is. What no CPU engine does
is reached so: scheduling a step ahead, preemption, aborts in flight, a vLLM that lacks what the
plugin reads.
Writes for each situation what vLLM counted itself and what the plugin exported, as JSON: threads
that follow the tables of earlier situations log to standard output until the end.
"""

import json
import logging
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

FACTORY = "specdecode_vllm.scheduler.make_scheduler"
BLOCKS = 60  # of 16 tokens: too few for all requests at once, so some are preempted
K_MAX = 7
START_TABLE = [[1, 12, 7], [13, 13, 3], [14, 16, 1]]
TABLES = ([[1, 4, 7], [5, 8, 3], [9, 16, 1]], [[1, 8, 3], [9, 16, 7]])
SWAP_PASSES = 4


@dataclass(frozen=True)
class Situation:
    """How the engine is set up, and what its vLLM lacks."""

    method: str = "draft_model"
    table: bool = True
    swaps: bool = False
    missing_field: str = ""
    breaks_observer: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


SITUATIONS = {
    "a table": Situation(),
    "swapped tables": Situation(swaps=True),
    "held edges": Situation(environment={"SPECDECODE_EDGE_MARGIN": "2"}),
    "a senseless margin": Situation(environment={"SPECDECODE_EDGE_MARGIN": "wide"}),
    "static K": Situation(table=False),
    "no speculation": Situation(method="none"),
    "data parallel": Situation(arguments={"data_parallel_size": 2}),
    "a method that follows no table": Situation(method="ngram_gpu"),
    "outputs without voided drafts": Situation(missing_field="num_invalid_spec_tokens"),
    "outputs without K": Situation(missing_field="num_spec_tokens_to_schedule"),
    "an observer that fails": Situation(breaks_observer=True),
    "the Rust front end": Situation(environment={"VLLM_USE_RUST_FRONTEND": "1"}),
}


def build_speculation(situation: Situation, draft: str) -> dict[str, Any] | None:
    """Build --speculative-config."""
    if situation.method == "none":
        return None
    speculation: dict[str, Any] = {"method": situation.method, "num_speculative_tokens": K_MAX}
    if situation.method == "draft_model":
        speculation["model"] = draft
    if situation.table:
        speculation["num_speculative_tokens_per_batch_size"] = START_TABLE
    return speculation


def build_scheduler(
    target: str,
    speculation: dict[str, Any] | None,
    *,
    is_async: bool,
    factory: str | None = FACTORY,
    max_num_seqs: int = 16,
    blocks: int = BLOCKS,
    **arguments: Any,
) -> Any:
    """Build the scheduler as the engine core does, without an engine."""
    if speculation is not None:
        arguments.setdefault("per_request_spec_decode_metrics", "detailed")
    config = AsyncEngineArgs(
        model=target,
        served_model_name=["chat"],
        max_num_seqs=max_num_seqs,
        max_model_len=1024,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        scheduler_cls=factory,
        speculative_config=speculation,
        **arguments,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


class Run:
    """One course of requests through the scheduler; each phase can be called by itself."""

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self._scheduler = scheduler
        self._is_async = is_async
        self._chance = random.Random(7)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._requests: list[Request] = []
        self._previous_k: int | None = None
        self.counted = Counter[str]()
        self.accepted = [0] * K_MAX
        self.decisions: list[tuple[int, int]] = []  # batch and K as decided, step by step
        self.cells = Counter[str]()  # "batch bucket/K": decode-only steps

    @property
    def is_done(self) -> bool:
        """Tell whether all requests have ended."""
        return not (self._scheduler.has_unfinished_requests() or self._in_flight)

    def add(self, *, prompt_tokens: int, output_tokens: int) -> None:
        """Send a request."""
        request = Request(
            request_id=f"request-{len(self._requests)}",
            prompt_token_ids=[5] * prompt_tokens,
            sampling_params=SamplingParams(
                max_tokens=output_tokens, temperature=0, ignore_eos=True
            ),
            pooling_params=None,
        )
        self._requests.append(request)
        self._scheduler.add_request(request)

    def add_mixture(self, count: int) -> None:
        """Send requests of unequal length, very short ones among them."""
        for _ in range(count):
            self.add(
                output_tokens=self._chance.randint(1, 60), prompt_tokens=self._chance.randint(1, 70)
            )

    def abort_one(self) -> None:
        """Abort a running request, with its step in flight."""
        if self._scheduler.running:
            name = self._chance.choice(self._scheduler.running).request_id
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        """Schedule a step and make up its tokens."""
        computed = {name: one.num_computed_tokens for name, one in self._scheduler.requests.items()}
        output = self._scheduler.schedule()
        self.counted["passes"] += 1
        self.counted["preempted"] += len(output.preempted_req_ids or ())
        if output.num_scheduled_tokens:
            self._note(output, computed)
        self._in_flight.append((output, self.sample(output)))
        return output

    def _note(self, output: Any, computed: dict[str, int]) -> None:
        batch, k = len(output.num_scheduled_tokens), output.num_spec_tokens_to_schedule
        drafts = output.scheduled_spec_decode_tokens
        is_decode_only = all(
            computed[name] >= self._scheduler.requests[name].num_prompt_tokens
            and tokens - len(drafts.get(name, ())) == 1
            for name, tokens in output.num_scheduled_tokens.items()
        )
        if is_decode_only:
            verified = k if self._previous_k is None else self._previous_k
            self.cells[f"{1 << (batch - 1).bit_length()}/{verified}"] += 1
        self._previous_k = k
        self.decisions.append((batch, k))

    def update(self, output: Any) -> None:
        """Take in all steps but the one that an asynchronous engine leaves in flight."""
        is_ahead = self._is_async and output.total_num_scheduled_tokens > 0
        while len(self._in_flight) > (1 if is_ahead else 0):
            self._update(*self._in_flight.popleft())
        if not self._is_async:
            self.propose(output)

    def sample(self, output: Any) -> Any:
        """Make up the tokens of a step: a drawn part of each draft is accepted."""
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if self._scheduler.requests[name].is_prefill_chunk:
                sampled.append([])
            else:
                sampled.append([6] * (1 + self._chance.randint(0, drafted)))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def _update(self, output: Any, runner_output: Any) -> None:
        for outputs in self._scheduler.update_from_output(output, runner_output).values():
            self.counted["tokens"] += sum(len(one.new_token_ids) for one in outputs.outputs)
            stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
            if stats:
                self.counted["drafts"] += stats.num_drafts
                self.counted["draft_tokens"] += stats.num_draft_tokens
                for position, count in enumerate(stats.num_accepted_tokens_per_pos):
                    self.accepted[position] += count

    def propose(self, output: Any) -> None:
        """Hand the drafts for the next step to the scheduler."""
        k = output.num_spec_tokens_to_schedule
        names = [name for name in output.num_scheduled_tokens if name in self._scheduler.requests]
        self._scheduler.update_draft_token_ids(DraftTokenIds(names, [[6] * k for _ in names]))

    def read_at_risk(self) -> list[int]:
        """Count drafts at risk by position from vLLM's own account of each request's steps."""
        at_risk = [0] * K_MAX
        for request in self._requests:
            account = request.spec_decode_metrics
            if account is None:
                continue
            for drafted, hits in zip(
                account.per_step_drafted, account.per_step_accepted, strict=True
            ):
                for position in range(min(hits + 1, drafted)):
                    at_risk[position] += 1
        return at_risk


def run_course(run: Run, scheduler: Any, tables: Path, *, swaps: bool) -> None:
    """Send requests and step until all have ended, aborting some and swapping tables."""
    run.add_mixture(40)
    generation = 0
    while not run.is_done:
        passes = run.counted["passes"]
        if swaps and passes % SWAP_PASSES == 0:
            generation += 1
            write_table(tables, generation, enabled=generation % 3 != 0)
            scheduler.specdecode._table.poll()
        output = run.schedule()
        if passes % 9 == 0 and 0 < passes < 50:
            run.abort_one()
        run.update(output)
        if passes > 5000:
            raise SystemExit("the requests do not end")


def write_table(tables: Path, generation: int, *, enabled: bool = True) -> None:
    """Write one of the tables."""
    rows = TABLES[generation % len(TABLES)]
    content = {"schema": 1, "generation": generation, "enabled": enabled, "rows": rows}
    (tables / "stable.json").write_text(json.dumps(content))


@contextmanager
def arranged(situation: Situation) -> Iterator[None]:
    """Bring vLLM, the plugin and the environment into a situation, and back."""
    from specdecode_vllm import steps

    fields = SchedulerOutput.__dataclass_fields__
    taken = {name: fields.pop(name) for name in (situation.missing_field,) if name in fields}
    after_schedule = steps.StepObserver.after_schedule
    if situation.breaks_observer:
        steps.StepObserver.after_schedule = fail  # type: ignore[method-assign]
    os.environ.update(situation.environment)
    try:
        yield
    finally:
        for name in situation.environment:
            del os.environ[name]
        steps.StepObserver.after_schedule = after_schedule  # type: ignore[method-assign]
        fields.update(taken)


def fail(*args: Any, **kwargs: Any) -> None:
    """Fail as something would that vLLM has changed."""
    raise AttributeError("planted")


class Said(logging.Handler):
    """Keeps what the plugin logs."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def read_plugin() -> dict[str, Any]:
    """Collect the plugin's samples as [labels, value] by name."""
    samples: dict[str, Any] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("specdecode_") and not sample.name.endswith("_created"):
                samples.setdefault(sample.name, []).append([sample.labels, sample.value])
    return samples


def forget_plugin() -> None:
    """Let the next scheduler of this process register its metrics anew."""
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith("specdecode_") for name in names):
            REGISTRY.unregister(collector)


def play(situation: Situation, target: str, draft: str, *, is_async: bool) -> dict[str, Any]:
    """Run the course in a situation; return all accounts of it."""
    tables = Path(os.environ["SPECDECODE_TABLES"])
    write_table(tables, 2)
    said = Said()
    logger = logging.getLogger("vllm.specdecode")
    logger.addHandler(said)
    with arranged(situation):
        scheduler = build_scheduler(
            target, build_speculation(situation, draft), is_async=is_async, **situation.arguments
        )
        run = Run(scheduler, is_async=is_async)
        run_course(run, scheduler, tables, swaps=situation.swaps)
    logger.removeHandler(said)
    plugin = read_plugin()
    forget_plugin()
    return {
        "scheduler": type(scheduler).__name__,
        "counted": run.counted,
        "accepted": run.accepted,
        "at_risk": run.read_at_risk(),
        "decisions": run.decisions,
        "cells": run.cells,
        "plugin": plugin,
        "said": said.lines,
    }


def main() -> None:
    """Play every situation and write the accounts."""
    target, draft, mode, path = sys.argv[1:]
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    import vllm

    accounts = {
        name: play(situation, target, draft, is_async=mode == "async")
        for name, situation in SITUATIONS.items()
    }
    course = {"vllm": vllm.__version__, "mode": mode, "accounts": accounts}
    Path(path).write_text(json.dumps(course))


if __name__ == "__main__":
    main()
