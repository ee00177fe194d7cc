"""One engine as vLLM runs it: continuous batching, KV blocks, drafts, acceptance, step time.

`advance` computes one step; it is compiled, so that a step costs microseconds in virtual time and
leaves the cores to the server in real time. It follows vLLM's V1 scheduler: running requests first,
then waiting ones in order of arrival, one token budget for prefill chunks and decodes, preemption
of the latest when KV blocks run out, K by the number of requests in the step. Drafts are cut at the
longest context and at the token budget, never to what a request may still emit: what is accepted
beyond its max_tokens counts as accepted and is thrown away. What is not followed: prefix caching,
encoders, structured output, and that 0.33 leaves drafting out where no request of the step can use
it.

Requests live in a table of fixed size, one row each, so that nothing is allocated per step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from specdecode_sim import cost as costs

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK_TOKENS = 16  # vLLM's KV block on CUDA
NO_SPECULATION = -1  # K of an engine that was started without speculation
_IDLE = NO_SPECULATION - 1  # in place of K_BEFORE: no step before this one

# Rows of State.counts.
RUNNING, WAITING_FIRST, WAITING, BLOCKS_USED, K_BEFORE, ARM_BEFORE, PREEMPTIONS, COUNTS = range(8)


class State(NamedTuple):
    """All that one engine knows; arrays by request have `capacity` rows."""

    counts: Ints
    prompt: Ints  # tokens of the prompt
    output: Ints  # tokens after which the request ends
    computed: Ints  # tokens whose KV is there
    generated: Ints
    draft: Ints  # draft tokens to be verified by the next step
    group: Ints  # quality group of that draft
    blocks: Ints
    preempted: Ints  # how often so far
    scheduled: Ints  # tokens in the present step
    ease: Floats  # exponent on the draw: 1 as the curve says, below 1 less is accepted
    slow: Floats  # one value: the present slow deviation of step times, in logarithms
    running: Ints  # request rows in the order of their admission
    waiting: Ints  # ring of request rows


class Limits(NamedTuple):
    """Start-up limits of one engine; without end a request waits that never fits.

    So `max_model_tokens` must fit into `kv_blocks`.
    """

    max_requests: int
    max_batched_tokens: int
    max_model_tokens: int
    kv_blocks: int
    adaptive: bool  # adaptive verification


class Conditions(NamedTuple):
    """What makes steps and drafts differ from the plain cost and curve; relative figures."""

    context_per_doubling: float
    context_reference: float
    step_noise: float
    slow_noise: float
    slow_seconds: float


class Step(NamedTuple):
    """What one step did; arrays are reused by the next."""

    emitted_rows: Ints  # requests that emitted, the first `emitters` of them
    emitted_tokens: Ints
    emitted_drafted: Ints  # draft tokens verified for it, 0 in prefill
    emitted_accepted: Ints
    is_finished: NDArray[np.bool_]
    numbers: Floats  # see the indexes below
    at_risk: Ints  # drafts by position
    accepted: Ints
    depths: Ints  # by group: draft tokens verified under adaptive verification


# Indexes of Step.numbers.
(
    SECONDS,
    BATCH,
    K,
    ARM,
    TOKENS,
    CONTEXT_TOKENS,
    PREFILL_TOKENS,
    EMITTERS,
    DRAFTS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    NUMBERS,
) = range(12)


def build_state(limits: Limits, *, capacity: int) -> State:
    """Make an idle engine for at most `capacity` requests, waiting ones among them."""
    counts = np.zeros(COUNTS, dtype=np.int64)
    counts[K_BEFORE] = _IDLE

    def rows() -> Ints:
        return np.zeros(capacity, dtype=np.int64)

    return State(
        counts,
        prompt=rows(),
        output=rows(),
        computed=rows(),
        generated=rows(),
        draft=rows(),
        group=rows(),
        blocks=rows(),
        preempted=rows(),
        scheduled=rows(),
        ease=np.ones(capacity),
        slow=np.zeros(1),
        running=np.zeros(limits.max_requests, dtype=np.int64),
        waiting=rows(),
    )


def build_step(limits: Limits, *, positions: int, groups: int) -> Step:
    """Make room for what a step reports."""
    return Step(
        emitted_rows=np.zeros(limits.max_requests, dtype=np.int64),
        emitted_tokens=np.zeros(limits.max_requests, dtype=np.int64),
        emitted_drafted=np.zeros(limits.max_requests, dtype=np.int64),
        emitted_accepted=np.zeros(limits.max_requests, dtype=np.int64),
        is_finished=np.zeros(limits.max_requests, dtype=np.bool_),
        numbers=np.zeros(NUMBERS),
        at_risk=np.zeros(max(1, positions), dtype=np.int64),
        accepted=np.zeros(max(1, positions), dtype=np.int64),
        depths=np.zeros(groups, dtype=np.int64),
    )


@njit(cache=True)
def submit(state: State, row: int, prompt: int, output: int, ease: float) -> None:
    """Put a request, in a free row, at the end of the waiting ones; lengths in tokens."""
    state.prompt[row] = prompt
    state.output[row] = output
    state.computed[row] = 0
    state.generated[row] = 0
    state.draft[row] = 0
    state.blocks[row] = 0
    state.preempted[row] = 0
    state.ease[row] = ease
    capacity = state.waiting.size
    end = (state.counts[WAITING_FIRST] + state.counts[WAITING]) % capacity
    state.waiting[end] = row
    state.counts[WAITING] += 1


@njit(cache=True)
def abort(state: State, row: int) -> None:
    """Take a request out, wherever it is: its client went away."""
    for i in range(state.counts[RUNNING]):
        if state.running[i] == row:
            _remove_running(state, i)
            _free_blocks(state, row)
            return
    capacity = state.waiting.size
    first, kept = state.counts[WAITING_FIRST], 0
    for i in range(state.counts[WAITING]):
        other = state.waiting[(first + i) % capacity]
        if other != row:
            state.waiting[(first + kept) % capacity] = other
            kept += 1
    state.counts[WAITING] = kept


@njit(cache=True)
def is_busy(state: State) -> bool:
    """Tell whether a step would have anything to compute."""
    return bool(state.counts[RUNNING] + state.counts[WAITING] > 0)


@njit(cache=True)
def kv_usage(state: State, limits: Limits) -> float:
    """Return the share of KV blocks in use."""
    return float(state.counts[BLOCKS_USED] / limits.kv_blocks)


@njit(cache=True)
def advance(
    state: State,
    limits: Limits,
    cost: costs.Cost,
    conditions: Conditions,
    survival: Floats,
    lookup: Ints,
    arm: int,
    ease: float,
    chance: np.random.Generator,
    step: Step,
) -> None:
    """Compute one step; K for the next drafts is `lookup[requests in the step]`.

    `ease` is the engine's, on top of each request's and its context's.

    `survival` has a row per group and a column per position (`acceptance.build_survival`);
    `lookup` holds NO_SPECULATION everywhere when there is none. The step carries K and arm that
    its predecessor decided, since it verifies that one's drafts.
    """
    numbers = step.numbers
    numbers[:] = 0.0
    step.at_risk[:] = 0
    step.accepted[:] = 0
    _schedule(state, limits)
    batch = 0
    for i in range(state.counts[RUNNING]):
        batch += state.scheduled[state.running[i]] > 0
    if batch == 0:
        return
    k_next = lookup[min(batch, lookup.size - 1)]
    _count_drafts(state, numbers)
    if limits.adaptive:
        _trim_drafts(state, cost, survival, step, costs.draft_milliseconds(cost, batch, k_next))
    decode_tokens = 0
    emitters = 0
    for i in range(state.counts[RUNNING]):
        row = state.running[i]
        tokens = state.scheduled[row]
        if tokens == 0:
            continue
        known = state.prompt[row] + state.generated[row]
        numbers[CONTEXT_TOKENS] += known
        if not _is_decode(state.prompt[row], known, state.computed[row]):
            numbers[PREFILL_TOKENS] += tokens
            state.computed[row] += tokens
            if state.computed[row] < known:
                continue
            emitted, drafted, accepted = 1, 0, 0
        else:
            drafted = tokens - 1
            decode_tokens += tokens
            own = ease * state.ease[row] * _context_ease(conditions, known)
            accepted = 0
            if drafted > 0:
                draw = chance.random()
                if own != 1.0:
                    draw = draw**own if own > 0.0 else 1.0
                group = state.group[row]
                while accepted < drafted and survival[group, accepted] > draw:
                    accepted += 1
                _count_positions(step.at_risk, step.accepted, drafted, accepted)
                numbers[ACCEPTED_TOKENS] += accepted
            state.computed[row] += 1 + accepted
            emitted = 1 + accepted
        left = min(state.output[row] - state.generated[row], limits.max_model_tokens - known)
        emitted = min(emitted, left)
        state.generated[row] += emitted
        state.computed[row] = min(state.computed[row], state.prompt[row] + state.generated[row] - 1)
        state.draft[row] = max(k_next, 0)
        state.group[row] = int(chance.random() * survival.shape[0])
        step.emitted_rows[emitters] = row
        step.emitted_tokens[emitters] = emitted
        step.emitted_drafted[emitters] = drafted
        step.emitted_accepted[emitters] = accepted
        step.is_finished[emitters] = left <= emitted
        numbers[TOKENS] += emitted
        emitters += 1
    numbers[SECONDS] = (
        costs.step_milliseconds(
            cost, decode_tokens, batch, numbers[PREFILL_TOKENS], numbers[CONTEXT_TOKENS], k_next
        )
        / 1000.0
    )
    numbers[SECONDS] *= noise(state.slow, conditions, numbers[SECONDS], 1.0, chance)
    numbers[BATCH] = batch
    numbers[EMITTERS] = emitters
    was_idle = state.counts[K_BEFORE] == _IDLE
    numbers[K] = max(k_next if was_idle else state.counts[K_BEFORE], 0)
    numbers[ARM] = arm if was_idle else state.counts[ARM_BEFORE]
    state.counts[K_BEFORE] = k_next
    state.counts[ARM_BEFORE] = arm
    _remove_finished(state, step, emitters)
    if not is_busy(state):
        state.counts[K_BEFORE] = _IDLE


@njit(cache=True)
def _schedule(state: State, limits: Limits) -> None:
    budget = limits.max_batched_tokens
    i = 0
    has_preempted = False
    while i < state.counts[RUNNING]:
        row = state.running[i]
        known = state.prompt[row] + state.generated[row]
        wanted = known - state.computed[row]
        if wanted == 1:
            wanted += state.draft[row]
        tokens = min(wanted, budget)
        tokens = min(tokens, max(1, limits.max_model_tokens - 1 - state.computed[row]))
        has_room = state.computed[row] + tokens <= state.blocks[row] * BLOCK_TOKENS
        while not has_room and not _take_blocks(state, limits, row, tokens):
            last = state.running[state.counts[RUNNING] - 1]
            _preempt(state)
            has_preempted = True
            if last == row:
                tokens = -1
                break
        if tokens < 0:
            break
        state.scheduled[row] = tokens
        budget -= tokens
        i += 1
    while (
        not has_preempted
        and state.counts[WAITING] > 0
        and state.counts[RUNNING] < limits.max_requests
        and budget > 0
    ):
        row = state.waiting[state.counts[WAITING_FIRST]]
        known = state.prompt[row] + state.generated[row]
        free = limits.kv_blocks - state.counts[BLOCKS_USED]
        if (known + BLOCK_TOKENS - 1) // BLOCK_TOKENS > free:
            return  # vLLM admits a request only when its whole input fits
        tokens = min(known, budget)
        _take_blocks(state, limits, row, tokens)
        state.counts[WAITING_FIRST] = (state.counts[WAITING_FIRST] + 1) % state.waiting.size
        state.counts[WAITING] -= 1
        state.running[state.counts[RUNNING]] = row
        state.counts[RUNNING] += 1
        state.scheduled[row] = tokens
        budget -= tokens


@njit(cache=True)
def _take_blocks(state: State, limits: Limits, row: int, tokens: int) -> bool:
    needed = (state.computed[row] + tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - state.blocks[row]
    if needed <= 0:
        return True
    if state.counts[BLOCKS_USED] + needed > limits.kv_blocks:
        return False
    state.blocks[row] += needed
    state.counts[BLOCKS_USED] += needed
    return True


@njit(cache=True)
def _preempt(state: State) -> None:
    """Send the latest running request back to the head of the waiting ones, its KV lost."""
    row = state.running[state.counts[RUNNING] - 1]
    state.counts[RUNNING] -= 1
    _free_blocks(state, row)
    state.computed[row] = 0
    state.draft[row] = 0
    capacity = state.waiting.size
    state.counts[WAITING_FIRST] = (state.counts[WAITING_FIRST] - 1) % capacity
    state.waiting[state.counts[WAITING_FIRST]] = row
    state.counts[WAITING] += 1
    state.counts[PREEMPTIONS] += 1
    state.preempted[row] += 1


@njit(cache=True)
def _remove_finished(state: State, step: Step, emitters: int) -> None:
    """Take out the requests that ended; emitters come in the order of the running ones."""
    kept = emitter = 0
    for i in range(state.counts[RUNNING]):
        row = state.running[i]
        if emitter < emitters and step.emitted_rows[emitter] == row:
            emitter += 1
            if step.is_finished[emitter - 1]:
                _free_blocks(state, row)
                continue
        state.running[kept] = row
        kept += 1
    state.counts[RUNNING] = kept


@njit(cache=True)
def _remove_running(state: State, index: int) -> None:
    for i in range(index, state.counts[RUNNING] - 1):
        state.running[i] = state.running[i + 1]
    state.counts[RUNNING] -= 1


@njit(cache=True)
def _free_blocks(state: State, row: int) -> None:
    state.counts[BLOCKS_USED] -= state.blocks[row]
    state.blocks[row] = 0


@njit(cache=True)
def _context_ease(conditions: Conditions, context: int) -> float:
    if conditions.context_per_doubling == 0.0:
        return 1.0
    doublings = math.log2(max(context, 1) / conditions.context_reference)
    return max(0.0, 1.0 - conditions.context_per_doubling * doublings)


@njit(cache=True)
def noise(
    slow: Floats,
    conditions: Conditions,
    seconds: float,
    concentration: float,
    chance: np.random.Generator,
) -> float:
    """Return the noise's factor: independent by step, times a slow Ornstein-Uhlenbeck one.

    It is of one step, `seconds` long, or of several together. `concentration`, the sum of their
    squared seconds over the square of their sum, tells how far independent ones average out: 1 for
    one step, 1/n for n that are alike. `slow` holds the slow one's logarithm from call to call.
    """
    deviation = 0.0
    if conditions.slow_noise > 0.0:
        kept = math.exp(-seconds / conditions.slow_seconds)
        fresh = conditions.slow_noise * math.sqrt(1.0 - kept * kept)
        slow[0] = slow[0] * kept + fresh * chance.standard_normal()
        deviation += slow[0]
    if conditions.step_noise > 0.0:
        variance = conditions.step_noise**2
        mean = variance / 2.0
        if concentration < 1.0:  # a lognormal of the sum's own mean and variance
            variance = math.log1p(math.expm1(variance) * concentration)
        deviation += mean - variance / 2.0 + math.sqrt(variance) * chance.standard_normal()
    return math.exp(deviation)


@njit(cache=True)
def _count_positions(at_risk: Ints, hits: Ints, drafted: int, accepted: int) -> None:
    """Count one draft: at risk at each position up to its first rejection, accepted before it."""
    for position in range(accepted):
        at_risk[position] += 1
        hits[position] += 1
    if accepted < drafted:
        at_risk[accepted] += 1


# Helpers of the inner loop take numbers and arrays: a State handed on costs its reference counts.
@njit(cache=True)
def _is_decode(prompt: int, known: int, computed: int) -> bool:
    """Tell a decode, drafts or not, from a prefill chunk or a recompute."""
    return computed >= prompt and known - computed == 1


@njit(cache=True)
def _count_drafts(state: State, numbers: Floats) -> None:
    """Count drafts as vLLM does: as scheduled, before adaptive verification leaves some out."""
    for i in range(state.counts[RUNNING]):
        row = state.running[i]
        known = state.prompt[row] + state.generated[row]
        if state.scheduled[row] < 2 or not _is_decode(
            state.prompt[row], known, state.computed[row]
        ):
            continue
        numbers[DRAFTS] += 1
        numbers[DRAFT_TOKENS] += state.scheduled[row] - 1


@njit(cache=True)
def _trim_drafts(
    state: State, cost: costs.Cost, survival: Floats, step: Step, drafting: float
) -> None:
    """Adaptive verification: keep the draft tokens that pay for their time across the batch.

    Tokens of all drafts are ranked by their chance to survive; of all prefixes of that ranking the
    one of best goodput, expected tokens over step time, is kept. `drafting` is the part of the step
    time, in milliseconds, that verifying less does not save. Groups share a chance, so a depth
    per group says it all.
    """
    groups, positions = survival.shape
    members = np.zeros((groups, positions), dtype=np.int64)
    tokens = _count_members(state, members)
    step.depths[:] = 0
    if tokens == 0:
        return
    depths = np.zeros(groups, dtype=np.int64)
    expected = float(tokens)
    best = expected / (costs.verify_milliseconds(cost, tokens) + drafting)
    while True:
        chosen, chosen_chance = -1, 0.0
        for group in range(groups):
            depth = depths[group]
            if depth == positions or members[group, depth] == 0:
                continue
            if survival[group, depth] > chosen_chance:
                chosen, chosen_chance = group, survival[group, depth]
        if chosen < 0:
            break
        added = members[chosen, depths[chosen]]
        tokens += added
        expected += added * chosen_chance
        depths[chosen] += 1
        goodput = expected / (costs.verify_milliseconds(cost, tokens) + drafting)
        if goodput > best:
            best = goodput
            step.depths[:] = depths
    for i in range(state.counts[RUNNING]):
        row = state.running[i]
        known = state.prompt[row] + state.generated[row]
        if state.scheduled[row] > 0 and _is_decode(state.prompt[row], known, state.computed[row]):
            state.scheduled[row] = min(state.scheduled[row], 1 + step.depths[state.group[row]])


@njit(cache=True)
def _count_members(state: State, members: Ints) -> int:
    """Count draft tokens by group and position; return the decodes of the step."""
    decodes = 0
    for i in range(state.counts[RUNNING]):
        row = state.running[i]
        known = state.prompt[row] + state.generated[row]
        if state.scheduled[row] == 0 or not _is_decode(
            state.prompt[row], known, state.computed[row]
        ):
            continue
        decodes += 1
        for position in range(min(state.scheduled[row] - 1, members.shape[1])):
            members[state.group[row], position] += 1
    return decodes
