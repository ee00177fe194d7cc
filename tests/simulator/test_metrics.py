"""The simulator's own ways to count say what prometheus_client's would."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from specdecode_sim import metrics

BOUNDS = (0.01, 0.1, 1.0)


def test_many_equal_observations_at_once_are_the_same_observations_one_by_one() -> None:
    together, apart = CollectorRegistry(), CollectorRegistry()
    bulk = metrics.BulkHistogram("test_seconds", BOUNDS, ("chat", "0"), together)
    single = Histogram(
        "test_seconds",
        "As vLLM's metric of this name.",
        metrics.ENGINE_LABELS,
        buckets=BOUNDS,
        registry=apart,
    ).labels("chat", "0")
    for value, count in ((0.005, 3), (0.01, 2), (0.5, 1), (9.0, 4), (0.25, 0)):
        bulk.observe(value, count)
        for _ in range(count):
            single.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        text = generate_latest(registry).decode()
        return sorted(line for line in text.splitlines() if "_created" not in line)

    assert lines(together) == lines(apart)


@pytest.mark.parametrize(
    ("max_model_tokens", "buckets"),
    [
        pytest.param(1, [1], id="one token"),
        pytest.param(7, [1, 2, 5], id="a few"),
        pytest.param(1024, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], id="between two bounds"),
        pytest.param(10, [1, 2, 5, 10], id="at a bound"),
    ],
)
def test_sizes_of_requests_are_cut_at_1_2_and_5_up_to_the_models_length(
    max_model_tokens: int, buckets: list[float]
) -> None:
    assert metrics.request_token_buckets(max_model_tokens) == buckets
