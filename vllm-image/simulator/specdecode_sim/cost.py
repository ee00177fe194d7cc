"""Step time of a simulated GPU, in milliseconds, by what a step computes.

    T = launch(graphs) + weights + experts·(1 − e^(−n/experts_tokens)) + token·n
        + knee·max(0, n − knee_tokens) + context·(context tokens / 1000) + prefill·p
        + drafting(requests, K) + uncaptured, if the step does not fit the captured graphs

n: target tokens in the step, batch·(K+1) when all draft; p: prefill tokens. `weights` is the floor
of reading them from memory, `experts` the part of an MoE that grows with the experts touched,
`token` and `knee` the two sides of the roofline. The jump beyond the captured CUDA graphs is a step
and not a slope: a public curve goes from 20 to 104 ms there (vLLM blog, 2026-08-14, figure 2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import njit


class Cost(NamedTuple):
    """Parameters of one engine; times in milliseconds."""

    launch: float
    weights: float
    experts: float = 0.0
    experts_tokens: float = 1.0
    token: float = 0.0
    knee: float = 0.0
    knee_tokens: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0  # each step, also at K=0: one pass of the drafter keeps its cache true
    draft_pass: float = 0.0  # each further draft token (0 where one pass drafts the whole block)
    draft_request: float = 0.0  # each request in the step
    draft_request_pass: float = 0.0  # each request and further draft token
    captured_tokens: float = math.inf
    uncaptured: float = 0.0


@njit(cache=True)
def verify_milliseconds(cost: Cost, tokens: float) -> float:
    """Return the time of the target model for `tokens` decode tokens, drafts among them."""
    time = cost.launch + cost.weights + cost.token * tokens
    time += cost.experts * (1.0 - math.exp(-tokens / cost.experts_tokens))
    if tokens > cost.knee_tokens:
        time += cost.knee * (tokens - cost.knee_tokens)
    if tokens > cost.captured_tokens:
        time += cost.uncaptured
    return time


@njit(cache=True)
def draft_milliseconds(cost: Cost, requests: float, k: int) -> float:
    """Return the time of drafting K tokens; K=0 still runs one pass, K=-1 is speculation off."""
    if k < 0:
        return 0.0
    passes = max(0, k - 1)
    return (
        cost.draft
        + cost.draft_pass * passes
        + requests * (cost.draft_request + cost.draft_request_pass * passes)
    )


@njit(cache=True)
def step_milliseconds(
    cost: Cost, tokens: float, requests: float, prefill: float, context: float, k: int
) -> float:
    """Return the time of one step: `tokens` decode tokens, then drafting K for `requests`.

    `prefill` and `context` are tokens too. Prefill chunks run beside the decode graphs: their
    price is in `prefill`, and only decode tokens can leave what was captured.
    """
    time = verify_milliseconds(cost, tokens) + draft_milliseconds(cost, requests, k)
    return time + cost.prefill * prefill + cost.context * context / 1000.0
