"""vLLM's own metrics: the names, types, labels and buckets of 0.32/0.33, fed by the simulation.

The contract test compares them with a real engine's /metrics. What a simulated engine has none of
(images, LoRA, an external cache) stays at 0, as it does there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Family = TypeVar("Family", Gauge, Counter)

ENGINE_LABELS = ("model_name", "engine")
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
LATENCY_BUCKETS = (*_LATENCY, 1920, 7680)
_FAST = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TOKEN_LATENCY_BUCKETS = (*_FAST, 20, 40, 80)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
FIRST_TOKEN_BUCKETS = (*_FIRST, 20, 40, 80, 160, 640, 2560)
ITERATION_BUCKETS = (1, *(2**n for n in range(3, 15)))
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "mm_cache_queries",
    "mm_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
)
# Metrics with one more label: name → (label, values).
SPLIT_GAUGES = {
    "num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
}
SPLIT_COUNTERS = {
    "prompt_tokens_by_source": (
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "source",
        ("device", "host", "disk", "p2p", "external_unspecified"),
    ),
    "request_success": ("finished_reason", FINISH_REASONS),
}
# Labels of vllm:cache_config_info where they say nothing of a simulated engine.
CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "False",
    "gpu_memory_utilization": "0.92",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_offloading_backend": "native",
    "kv_sharing_fast_prefill": "False",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_ssm_cache_dtype": "auto",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "replayssm_buffer_len": "16",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
    **dict.fromkeys(
        (
            *("cache_hit_alignment_tokens", "hash_block_size", "kv_cache_layout"),
            *("kv_cache_memory_bytes", "kv_offloading_size", "mamba_block_size"),
            *("mamba_page_size_padded", "num_cpu_blocks", "num_gpu_blocks_override"),
            *("prefix_match_unit", "skip_page_size_padded", "sliding_window"),
        ),
        "None",
    ),
}
HTTP_BUCKETS = (0.1, 0.5, 1)
_HTTP_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)
HTTP_FINE_BUCKETS = (*_HTTP_FINE, 7.5, 10, 30, 60)


def request_token_buckets(max_model_tokens: int) -> list[float]:
    """Return 1, 2, 5, 10, … up to the model's length, as vLLM cuts request sizes."""
    buckets: list[float] = []
    for power in range(int(math.log10(max(1, max_model_tokens))) + 1):
        for digit in (1, 2, 5):
            value = digit * 10**power
            if value <= max_model_tokens:
                buckets.append(value)
    return buckets


@dataclass(frozen=True)
class FinishedRequest:
    """Sizes in tokens and times in seconds of a request that has ended."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    finish_reason: str


class BulkHistogram(Collector):
    """A histogram that takes many equal observations at once: a step has one per request."""

    def __init__(
        self, name: str, bounds: Sequence[float], labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._bounds = (*bounds, math.inf)
        self._labels = labels
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int) -> None:
        """Count `count` observations of this value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family with its one child."""
        family = HistogramMetricFamily(self._name, _help(), labels=ENGINE_LABELS)
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric(self._labels, buckets=list(buckets), sum_value=self._sum)
        yield family


class VllmMetrics:
    """All `vllm:` and `http_` metrics of one server."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        max_model_tokens: int,
        k_max: int | None,
        cache_config: Mapping[str, str],
    ) -> None:
        self._registry = registry
        self._model_name = model_name
        self._labels = (model_name, "0")
        self._gauges = {name: self._gauge(name).labels(*self._labels) for name in GAUGES}
        self._counters = {name: self._counter(name).labels(*self._labels) for name in COUNTERS}
        self._waiting = self._split(Gauge, SPLIT_GAUGES)
        self._split_counters = self._split(Counter, SPLIT_COUNTERS)
        self._waiting["engine_sleep_state", "awake"].set(1)
        rejections = Counter(
            "vllm:admission_rejections", _help(), ("model_name", "reason"), registry=registry
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            rejections.labels(model_name, reason)
        self._create_histograms(request_token_buckets(max_model_tokens))
        self._create_speculation(k_max)
        info = {"engine": "0", **cache_config}
        gauge = Gauge("vllm:cache_config_info", _help(), tuple(info), registry=registry)
        gauge.labels(**info).set(1)
        self._create_http()

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(f"vllm:{name}", _help(), (*ENGINE_LABELS, *labels), registry=self._registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", _help(), (*ENGINE_LABELS, *labels), registry=self._registry)

    def _split(
        self, kind: type[Family], families: Mapping[str, tuple[str, Sequence[str]]]
    ) -> dict[tuple[str, str], Family]:
        children = {}
        for name, (label, values) in families.items():
            family = kind(f"vllm:{name}", _help(), (*ENGINE_LABELS, label), registry=self._registry)
            for value in values:
                children[name, value] = family.labels(*self._labels, value)
        return children

    def _create_histograms(self, sizes: Sequence[float]) -> None:
        buckets: dict[str, Sequence[float]] = {
            "request_prompt_tokens": sizes,
            "request_generation_tokens": sizes,
            "request_max_num_generation_tokens": sizes,
            "request_params_max_tokens": sizes,
            "request_prefill_kv_computed_tokens": sizes,
            "iteration_tokens_total": ITERATION_BUCKETS,
            "request_params_n": CHOICE_BUCKETS,
            "request_num_preemptions": PREEMPTION_BUCKETS,
            "time_to_first_token_seconds": FIRST_TOKEN_BUCKETS,
            "request_time_per_output_token_seconds": TOKEN_LATENCY_BUCKETS,
            "e2e_request_latency_seconds": LATENCY_BUCKETS,
            "request_queue_time_seconds": LATENCY_BUCKETS,
            "request_inference_time_seconds": LATENCY_BUCKETS,
            "request_prefill_time_seconds": LATENCY_BUCKETS,
            "request_decode_time_seconds": LATENCY_BUCKETS,
        }
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", _help(), ENGINE_LABELS, registry=self._registry, buckets=bounds
            ).labels(*self._labels)
            for name, bounds in buckets.items()
        }
        self._token_latency = BulkHistogram(
            "vllm:inter_token_latency_seconds",
            TOKEN_LATENCY_BUCKETS,
            self._labels,
            self._registry,
        )

    def _create_speculation(self, k_max: int | None) -> None:
        """Create what vLLM exports only with speculation; `k_max` None is without."""
        self._spec: list[Counter] = []
        self._per_position: list[Counter] = []
        if k_max is None:
            return
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self._spec.append(self._counter(f"spec_decode_{name}").labels(*self._labels))
        per_position = self._counter("spec_decode_num_accepted_tokens_per_pos", "position")
        self._per_position = [per_position.labels(*self._labels, str(n)) for n in range(k_max)]

    def _create_http(self) -> None:
        registry = self._registry
        self._http_requests = Counter(
            "http_requests", _help(), ("method", "status", "handler"), registry=registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            _help(),
            ("method", "handler"),
            registry=registry,
            buckets=HTTP_BUCKETS,
        )
        self._http_fine_seconds = Histogram(
            "http_request_duration_highr_seconds",
            _help(),
            registry=registry,
            buckets=HTTP_FINE_BUCKETS,
        )
        self._http_sizes = [
            Summary(f"http_{side}_size_bytes", _help(), ("handler",), registry=registry)
            for side in ("request", "response")
        ]

    def show_queue(self, *, running: int, waiting: int, kv_usage: float) -> None:
        """Export what runs and waits, and the share of KV blocks in use."""
        for gauge, value in zip(self._gauges.values(), (running, waiting, kv_usage), strict=True):
            gauge.set(value)
        self._waiting["num_requests_waiting_by_reason", "capacity"].set(waiting)

    def count_iteration(self, *, prompt_tokens: int, tokens: int, preemptions: int) -> None:
        """Count one step's tokens: prefilled, emitted, and how many requests were preempted."""
        self._histograms["iteration_tokens_total"].observe(prompt_tokens + tokens)
        self._counters["generation_tokens"].inc(tokens)
        if prompt_tokens:
            self._counters["prompt_tokens"].inc(prompt_tokens)
            self._split_counters["prompt_tokens_by_source", "local_compute"].inc(prompt_tokens)
            self._counters["prefix_cache_queries"].inc(prompt_tokens)
        if preemptions:
            self._counters["num_preemptions"].inc(preemptions)

    def count_drafts(
        self, *, drafts: int, draft_tokens: int, accepted: int, by_position: Sequence[int]
    ) -> None:
        """Count what one step verified; K=0 steps count nothing, as in vLLM."""
        if not drafts:
            return
        for counter, amount in zip(self._spec, (drafts, draft_tokens, accepted), strict=True):
            counter.inc(amount)
        for counter, hits in zip(self._per_position, by_position, strict=False):
            if hits:
                counter.inc(int(hits))

    def note_first_token(self, seconds: float) -> None:
        """Observe a request's time to its first token."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def note_outputs(self, seconds: float, *, requests: int) -> None:
        """Observe the time since the last output of so many: one per output, not per token."""
        self._token_latency.observe(seconds, requests)

    def count_request(self, request: FinishedRequest) -> None:
        """Count a request that has ended, however it did."""
        self._split_counters["request_success", request.finish_reason].inc()
        later_tokens = request.output_tokens - 1
        values = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.output_tokens,
            "request_max_num_generation_tokens": request.output_tokens,
            "request_params_max_tokens": request.max_tokens,
            "request_prefill_kv_computed_tokens": request.prompt_tokens,
            "request_params_n": 1,
            "request_num_preemptions": request.preemptions,
            "e2e_request_latency_seconds": request.total_seconds,
            "request_queue_time_seconds": request.queue_seconds,
            "request_inference_time_seconds": request.prefill_seconds + request.decode_seconds,
            "request_prefill_time_seconds": request.prefill_seconds,
            "request_decode_time_seconds": request.decode_seconds,
            "request_time_per_output_token_seconds": (
                request.decode_seconds / later_tokens if later_tokens > 0 else 0.0
            ),
        }
        for name, value in values.items():
            self._histograms[name].observe(value)

    def count_http(
        self, *, method: str, handler: str, status: int, seconds: float, sizes: tuple[int, int]
    ) -> None:
        """Count an answered request; `sizes` are bytes of request and response bodies."""
        self._http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._http_seconds.labels(method, handler).observe(seconds)
        self._http_fine_seconds.observe(seconds)
        for summary, size in zip(self._http_sizes, sizes, strict=True):
            summary.labels(handler).observe(size)


def _help() -> str:
    return "As vLLM's metric of this name."
