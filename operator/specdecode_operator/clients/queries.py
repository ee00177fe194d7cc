"""The PromQL that the operator asks, each with its unit and what it is for.

Raw samples only: sums and rates over several pods hide resets, gaps and the sample size from
the estimators. What comes from an object's name is escaped twice: for RE2 and for the string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Labels:
    """How this Prometheus names things: the labels of namespace and pod, and extra matchers.

    `matchers` is PromQL such as `cluster="eu", replica="0"`.
    """

    namespace: str = "namespace"
    pod: str = "pod"
    matchers: str = ""


@dataclass(frozen=True)
class Query:
    """One named question: which series, in which unit, and what for."""

    series: str
    unit: str
    description: str


ENGINE_SAMPLES = Query(
    series='__name__=~"specdecode_.*"',
    unit="as each metric says",
    description="All that the plugin exports: steps, step time, tokens, acceptance, heartbeat.",
)
REQUESTS_RUNNING = Query(
    series='__name__="vllm:num_requests_running"',
    unit="requests",
    description="Requests in the running batch; iterations that stand still meanwhile are a hang.",
)
REQUESTS_WAITING = Query(
    series='__name__="vllm:num_requests_waiting"',
    unit="requests",
    description="Requests that wait for a place in the batch.",
)
SCRAPES_UP = Query(
    series='__name__="up"',
    unit="1 = scraped, 0 = the scrape failed",
    description="Whether Prometheus reaches the pods at all.",
)


def range_vector(
    query: Query, *, labels: Labels, namespace: str, pods_regex: str, seconds: int
) -> str:
    """Write the PromQL for the raw samples of some pods over the last `seconds`."""
    matchers = [
        query.series,
        f"{labels.namespace}={quote(namespace)}",
        f"{labels.pod}=~{quote(pods_regex)}",
    ]
    if labels.matchers.strip():
        matchers.append(labels.matchers.strip().strip(","))
    return f"{{{','.join(matchers)}}}[{seconds}s]"


def engine_samples(
    namespace: str, pods_regex: str, seconds: int, *, labels: Labels | None = None
) -> str:
    """Write the PromQL for all plugin samples of some pods over the last `seconds`."""
    return range_vector(
        ENGINE_SAMPLES,
        labels=labels or Labels(),
        namespace=namespace,
        pods_regex=pods_regex,
        seconds=seconds,
    )


def pods_regex(names: Iterable[str]) -> str:
    """Write the RE2 expression that matches exactly these pods; PromQL anchors it itself."""
    return "|".join(re.escape(name) for name in sorted(names))


def quote(text: str) -> str:
    """Write a PromQL string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
