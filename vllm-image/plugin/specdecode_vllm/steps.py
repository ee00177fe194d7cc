"""Turns what passes through vLLM's scheduler into step and position counts.

Drafts proposed at the end of one step are verified by the next, so K and arm are remembered
when they are decided and counted one step later. With async scheduling a step is scheduled
before the one ahead of it is finished: each step carries its own record from schedule() to
update_from_output(). Reads the scheduler's objects, never changes them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from specdecode_vllm.metrics import Step

MAX_RECORDS_IN_FLIGHT = 64

Clock = Callable[[], float]


class StepSink(Protocol):
    """What the observer counts into."""

    def count_step(self, step: Step) -> None:
        """Count one finished step."""

    def count_positions(self, at_risk: list[int], accepted: list[int]) -> None:
        """Count drafts at risk and accepted, both by position."""


class Decision(NamedTuple):
    """K and arm as one schedule() decided them."""

    k: int
    arm: int


@dataclass
class Record:
    """What is known of a step between its schedule() and its update_from_output()."""

    output: Any  # held, so that its id() stays its own
    decision: Decision
    scheduled_at: float
    batch: int
    prefill_tokens: int
    context_tokens: int
    draft_length: int  # of all its drafts; 0 where they differ or there are none
    counts_with_vllm: bool = False


class StepObserver:
    """Follows one scheduler; `counts_positions` is off where drafts are trimmed unseen."""

    def __init__(self, sink: StepSink, *, counts_positions: bool, clock: Clock) -> None:
        self._sink = sink
        self._counts_positions = counts_positions
        self._clock = clock
        self._in_flight: dict[int, Record] = {}
        self._previous: Decision | None = None
        self._updated_at: float | None = None  # None: the engine has been idle since
        self._has_partial_prefill = False

    def after_schedule(self, scheduler: Any, output: Any, *, k: int, arm: int) -> None:
        """Note a scheduled step; `k` and `arm` are what it decided for the next one."""
        batch = len(output.num_scheduled_tokens)
        if batch == 0:
            return
        decision = Decision(k=k, arm=arm)
        lengths = list(map(len, output.scheduled_spec_decode_tokens.values()))
        self._in_flight[id(output)] = Record(
            output=output,
            decision=self._previous or decision,
            scheduled_at=self._clock(),
            batch=batch,
            prefill_tokens=self._count_prefill_tokens(scheduler, output, sum(lengths)),
            context_tokens=sum(output.scheduled_cached_reqs.num_computed_tokens),
            draft_length=find_common_length(lengths),
        )
        self._previous = decision
        while len(self._in_flight) > MAX_RECORDS_IN_FLIGHT:
            del self._in_flight[next(iter(self._in_flight))]

    def before_update(self, scheduler: Any, output: Any, runner_output: Any) -> None:
        """Count drafts of unequal length; to be called first, vLLM trims the tokens in place."""
        drafts = output.scheduled_spec_decode_tokens
        record = self._in_flight.get(id(output))
        if record is None or not drafts or not self._counts_positions:
            return
        if record.draft_length and scheduler.log_stats and not output.num_invalid_spec_tokens:
            record.counts_with_vllm = True
            return
        lengths = _draft_lengths(scheduler.requests, output, runner_output)
        self._sink.count_positions(*count_positions(lengths))

    def after_update(self, scheduler: Any, output: Any, core_outputs: Any) -> None:
        """Count the finished step."""
        record = self._in_flight.pop(id(output), None)
        if record is None:
            return
        if record.counts_with_vllm:
            self._count_as_vllm(record.draft_length, core_outputs)
        now = self._clock()
        started_at = record.scheduled_at if self._updated_at is None else self._updated_at
        self._sink.count_step(
            Step(
                batch=record.batch,
                k=record.decision.k,
                arm=record.decision.arm,
                seconds=now - started_at,
                tokens=_count_tokens(core_outputs),
                context_tokens=record.context_tokens,
                prefill_tokens=record.prefill_tokens,
            )
        )
        is_busy = bool(self._in_flight) or bool(scheduler.running)
        self._updated_at = now if is_busy else None
        if not is_busy:
            self._previous = None

    def _count_as_vllm(self, length: int, core_outputs: Any) -> None:
        """Count positions by vLLM's sums: among drafts of one length they tell everything."""
        for outputs in core_outputs.values():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
            if stats:
                accepted = stats.num_accepted_tokens_per_pos[:length]
                self._sink.count_positions([stats.num_drafts, *accepted[:-1]], accepted)

    def _count_prefill_tokens(self, scheduler: Any, output: Any, draft_tokens: int) -> int:
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        fresh = {request.req_id for request in output.scheduled_new_reqs}
        fresh |= output.scheduled_cached_reqs.resumed_req_ids
        one_each = output.total_num_scheduled_tokens == len(scheduled) + draft_tokens
        if one_each and not fresh and not self._has_partial_prefill:
            return 0
        prefill_tokens = 0
        self._has_partial_prefill = False
        for request_id, tokens in scheduled.items():
            request = scheduler.requests[request_id]
            self._has_partial_prefill |= request.is_prefill_chunk
            own = tokens - len(drafts.get(request_id, ()))
            computed_before = request.num_computed_tokens - tokens
            is_prefill = computed_before < request.num_prompt_tokens or own > 1
            if is_prefill or request_id in fresh:
                prefill_tokens += own
        return prefill_tokens


def find_common_length(lengths: Sequence[int]) -> int:
    """Return the length of all drafts of a step, 0 where they differ or there are none."""
    return lengths[0] if lengths and lengths.count(lengths[0]) == len(lengths) else 0


def _draft_lengths(requests: Any, output: Any, runner_output: Any) -> Iterable[tuple[int, int]]:
    """Yield (draft tokens verified, accepted of them) as vLLM is about to count them."""
    voided = output.num_invalid_spec_tokens or {}
    sampled = runner_output.sampled_token_ids
    for request_id, draft in output.scheduled_spec_decode_tokens.items():
        request = requests.get(request_id)
        if request is None or request.is_finished() or _is_dropped(request):
            continue
        generated = sampled[runner_output.req_id_to_index[request_id]] if sampled else ()
        if generated:
            yield len(draft) - voided.get(request_id, 0), len(generated) - 1


def _is_dropped(request: Any) -> bool:
    """Tell whether vLLM throws away what this step sampled, the request having been preempted."""
    return getattr(request, "drop_stale_output", False) and request.num_stale_output_tokens > 0


def count_positions(lengths: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Spread (draft length, accepted) pairs into drafts at risk and accepted by position.

    A draft is at risk at a position it had if its earlier ones were all accepted; one shortened
    near max_tokens is at risk only where it still had a position (Kaplan-Meier's risk set).
    """
    rejected: list[int] = []  # by the position at which the draft was rejected
    whole: list[int] = []  # by length, drafts accepted to their end
    for drafted, hits in lengths:
        while drafted >= len(whole):
            rejected.append(0)
            whole.append(0)
        if hits < drafted:
            rejected[hits] += 1
        else:
            whole[drafted] += 1
    accepted = [0] * len(whole)
    for position in range(len(whole) - 2, -1, -1):
        longer = position + 1
        accepted[position] = accepted[longer] + rejected[longer] + whole[longer]
    at_risk = [hits + misses for hits, misses in zip(accepted, rejected, strict=True)]
    return at_risk[:-1], accepted[:-1]


def _count_tokens(core_outputs: Any) -> int:
    return sum(
        sum(map(len, map(attrgetter("new_token_ids"), outputs.outputs)))
        for outputs in core_outputs.values()
    )
