"""Drives vLLM's own scheduler through one request at a time and prints the drafts of each step.

Run by the engine's Python with the target model, the draft model and the requests as JSON: prompt,
output and longest context in tokens, K, and whether all drafts are accepted or none.
"""

import json
import sys
from typing import Any

import torch
from vllm import SamplingParams, __version__
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS = 100  # of 16 tokens


def build_scheduler(target: str, draft: str, *, k: int, max_model_len: int) -> Any:
    """Build the scheduler as the engine core does, without an engine."""
    config = AsyncEngineArgs(
        model=target,
        max_num_seqs=4,
        max_model_len=max_model_len,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": k,
            "num_speculative_tokens_per_batch_size": [[1, 4, k]],
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = False
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


def run(scheduler: Any, wanted: dict[str, Any]) -> list[list[int]]:
    """Return draft tokens, accepted and emitted ones of each step until the request has ended."""
    parameters = SamplingParams(max_tokens=wanted["output"], temperature=0, ignore_eos=True)
    request = Request(
        request_id="one",
        prompt_token_ids=[5] * wanted["prompt"],
        sampling_params=parameters,
        pooling_params=None,
    )
    scheduler.add_request(request)
    steps = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        drafted = len(output.scheduled_spec_decode_tokens.get("one", ()))
        accepted = drafted if wanted["is_accepted"] else 0
        sampled = ModelRunnerOutput(
            req_ids=["one"],
            req_id_to_index={"one": 0},
            sampled_token_ids=[[6] * (1 + accepted)],
        )
        before = request.num_output_tokens
        outputs = scheduler.update_from_output(output, sampled)
        counted = sum(
            one.scheduler_stats.spec_decoding_stats.num_accepted_tokens
            for one in outputs.values()
            if one.scheduler_stats and one.scheduler_stats.spec_decoding_stats
        )
        steps.append([drafted, counted, request.num_output_tokens - before])
        if "one" in scheduler.requests:
            drafts = [[6] * output.num_spec_tokens_to_schedule]
            scheduler.update_draft_token_ids(DraftTokenIds(["one"], drafts))
    return steps


def main() -> None:
    """Run each request through a scheduler of its own."""
    target, draft, requests = sys.argv[1:]
    steps = []
    for wanted in json.loads(requests):
        scheduler = build_scheduler(
            target, draft, k=wanted["k"], max_model_len=wanted["max_model_len"]
        )
        steps.append(run(scheduler, wanted))
    print(json.dumps({"vllm": __version__, "steps": steps}))


if __name__ == "__main__":
    main()
