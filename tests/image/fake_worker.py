"""Drives vLLM's own scheduler, with the plugin's hooks, and a worker that makes up its tokens.

Run by the engine's Python, with the target and draft model and `sync` or `async` as arguments.
What no CPU engine does is reached so: scheduling a step ahead, preemption, aborts in flight.
Prints what vLLM counted itself and what the plugin exported, as JSON.
"""

import json
import os
import random
import sys
from collections import deque
from typing import Any

import torch
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS = 60  # of 16 tokens: too few for all requests at once, so some are preempted
REQUESTS = 40
ABORTED = 5


def build_scheduler(target: str, draft: str, *, is_async: bool) -> Any:
    """Build the scheduler as the engine core does, without an engine."""
    config = AsyncEngineArgs(
        model=target,
        served_model_name=["chat"],
        max_num_seqs=16,
        max_model_len=1024,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        scheduler_cls="specdecode_vllm.scheduler.make_scheduler",
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 7,
            "num_speculative_tokens_per_batch_size": [[1, 12, 7], [13, 13, 3], [14, 16, 1]],
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = BLOCKS
    attention = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


class Run:
    """One course of requests through the scheduler."""

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self._scheduler = scheduler
        self._is_async = is_async
        self._chance = random.Random(7)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._names = [f"request-{number}" for number in range(REQUESTS)]
        self.counted = {"tokens": 0, "drafts": 0, "draft_tokens": 0, "passes": 0, "preempted": 0}
        self.accepted = [0] * 7

    def execute(self) -> None:
        """Send all requests and step until they are done."""
        for name in self._names:
            self._add(name)
        while self._scheduler.has_unfinished_requests() or self._in_flight:
            self._step()
            if self.counted["passes"] > 5000:
                raise SystemExit("the requests do not end")

    def _add(self, name: str) -> None:
        parameters = SamplingParams(
            max_tokens=self._chance.randint(1, 60), temperature=0, ignore_eos=True
        )
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[5] * self._chance.randint(1, 70),
                sampling_params=parameters,
                pooling_params=None,
            )
        )

    def _step(self) -> None:
        output = self._scheduler.schedule()
        self.counted["passes"] += 1
        self.counted["preempted"] += len(output.preempted_req_ids or ())
        self._in_flight.append((output, self._sample(output)))
        if self.counted["passes"] % 9 == 0 and self.counted["passes"] // 9 <= ABORTED:
            running = self._scheduler.running
            if running:
                name = self._chance.choice(running).request_id
                self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        is_ahead = self._is_async and output.total_num_scheduled_tokens > 0
        while len(self._in_flight) > (1 if is_ahead else 0):
            self._update(*self._in_flight.popleft())
        if not self._is_async:
            self._propose(output)

    def _sample(self, output: Any) -> Any:
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

    def _propose(self, output: Any) -> None:
        names = [name for name in output.num_scheduled_tokens if name in self._scheduler.requests]
        drafts = [[6] * output.num_spec_tokens_to_schedule for _ in names]
        self._scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


def read_plugin() -> dict[str, Any]:
    """Collect the plugin's samples as [labels, value] by name; of positions only the value."""
    samples: dict[str, Any] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("specdecode_") and not sample.name.endswith("_created"):
                samples.setdefault(sample.name, []).append([sample.labels, sample.value])
    return samples


def main() -> None:
    """Run the course and print both accounts."""
    target, draft, mode = sys.argv[1:]
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    scheduler = build_scheduler(target, draft, is_async=mode == "async")
    run = Run(scheduler, is_async=mode == "async")
    run.execute()
    print(
        json.dumps(
            {
                "mode": mode,
                "scheduler": type(scheduler).__name__,
                "vllm": {**run.counted, "accepted": run.accepted},
                "plugin": read_plugin(),
            }
        )
    )


if __name__ == "__main__":
    main()
