"""The engine in real time: the model's steps, each lasting as long as the profile says.

Steps follow planned ends, not pauses: what the event loop is late with one step it catches up in
the next ones. Where the machine cannot keep up at all, the lag says so: busy time over planned
time. A run whose lag is above LAG_LIMIT measured the machine and not the profile.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

import specdecode_vllm
from specdecode_sim import __version__, arguments, faults, metrics, model
from specdecode_sim.acceptance_record import AcceptanceRecord
from specdecode_sim.arguments import Options
from specdecode_sim.profile import Profile
from specdecode_vllm import follow, live
from specdecode_vllm import metrics as plugin_metrics

logger = logging.getLogger("vllm.specdecode_sim")

LAG_LIMIT = 0.03
MOST_BEHIND_SECONDS = 0.25  # a step this late is not caught up: it counts as lag
MOST_REQUESTS = 4096  # waiting ones among them

OnOutput = Callable[[int, str | None], None]
"""Called with the number of new tokens, and why the request has ended if it has."""


@dataclass
class Request:
    """One request in the engine; times are of time.monotonic."""

    row: int
    prompt_tokens: int
    max_tokens: int
    on_output: OnOutput
    arrived_at: float
    after_step: int  # steps computed before it came: what they emitted was never its own
    started_at: float | None = None
    first_at: float | None = None
    last_at: float = 0.0
    output_tokens: int = 0
    acceptance: AcceptanceRecord | None = None


class EngineDeadError(Exception):
    """The engine has ended: requests fail as they do behind vLLM's dead engine."""


class Engine:
    """Runs steps while requests are there; all of it on one event loop.

    Making it raises arguments.ConfigRefusedError for a model length that the profile's KV cache
    does not hold.
    """

    def __init__(
        self,
        options: Options,
        profile: Profile,
        *,
        registry: CollectorRegistry,
        vllm_version: str,
        faults: faults.Faults,
        time_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.options = options
        self.profile = profile
        self.faults = faults
        self.time_scale = time_scale
        speculation = options.speculation
        self._k_max = speculation.k_max if speculation else 0
        self._cost = profile.build_cost(
            graphs=options.graphs, captured_tokens=options.captured_tokens
        )
        self._conditions = profile.build_conditions()
        kv_blocks = profile.kv_tokens // model.BLOCK_TOKENS
        arguments.check_model_length(
            options.max_model_tokens, kv_tokens=kv_blocks * model.BLOCK_TOKENS
        )
        positions = max(self._k_max, 1)
        self._survival = profile.build_survival(positions=positions)
        self._limits = model.Limits(
            max_requests=options.max_requests,
            max_batched_tokens=options.max_batched_tokens,
            max_model_tokens=options.max_model_tokens,
            kv_blocks=kv_blocks,
            adaptive=bool(speculation and speculation.adaptive),
        )
        self._state = model.build_state(self._limits, capacity=MOST_REQUESTS)
        self._step = model.build_step(
            self._limits, positions=positions, groups=self._survival.shape[0]
        )
        self._chance = np.random.default_rng(seed)
        self._free_rows = list(range(MOST_REQUESTS - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        self._queued: collections.deque[Request] = collections.deque()  # not yet in any step
        self._steps = 0
        self._arrival = asyncio.Event()
        self.vllm = metrics.VllmMetrics(
            registry,
            model_name=options.served_name,
            max_model_tokens=options.max_model_tokens,
            k_max=self._k_max if speculation else None,
            cache_config=self._cache_config(),
        )
        self._plugin = _Plugin(self, registry, vllm_version) if options.has_plugin else None
        self._static_lookup = np.full(
            2, self._k_max if speculation else model.NO_SPECULATION, dtype=np.int64
        )
        self._planned_seconds = 0.0
        self._busy_seconds = 0.0
        self._preemptions = 0
        self._started_at = time.monotonic()
        self._lag = _LagMetrics(registry, time_scale, profile)
        self.is_dead = False
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the model before the first request waits for it."""
        limits = self._limits._replace(max_requests=1)
        state = model.build_state(limits, capacity=2)
        model.submit(state, 0, 2, 2, 1.0)
        for _ in range(3):
            self._advance(state, np.full(2, self._k_max, dtype=np.int64), arm=0)
        model.submit(state, 1, 2, 2, 1.0)
        model.abort(state, 1)
        model.kv_usage(state, limits)

    def _cache_config(self) -> dict[str, str]:
        tokens = self.profile.kv_tokens
        return {
            **metrics.CACHE_CONFIG,
            "block_size": str(model.BLOCK_TOKENS),
            "effective_attention_block_size": str(model.BLOCK_TOKENS),
            "num_gpu_blocks": str(self._limits.kv_blocks),
            "kv_cache_size_tokens": str(tokens),
            "kv_cache_max_concurrency": str(tokens / self.options.max_model_tokens),
        }

    @property
    def uptime_seconds(self) -> float:
        """Return the seconds since the engine was made."""
        return time.monotonic() - self._started_at

    @property
    def running(self) -> int:
        """Return the number of requests that run."""
        return int(self._state.counts[model.RUNNING])

    def submit(
        self, *, prompt_tokens: int, max_tokens: int, ease: float, on_output: OnOutput
    ) -> Request:
        """Take a request in; `on_output` is called on the event loop after each step of it.

        Raises EngineDeadError when the engine has ended, OverflowError when too many wait.
        """
        if self.is_dead:
            raise EngineDeadError
        if not self._free_rows:
            raise OverflowError(f"{MOST_REQUESTS} requests run and wait")
        row = self._free_rows.pop()
        request = Request(
            row, prompt_tokens, max_tokens, on_output, time.monotonic(), after_step=self._steps
        )
        self._queued.append(request)
        if self._k_max and self.options.request_metrics != "none":
            detailed = self.options.request_metrics == "detailed"
            request.acceptance = AcceptanceRecord(self._k_max, detailed)
        self._requests[row] = request
        model.submit(self._state, row, prompt_tokens, max_tokens, ease)
        self._arrival.set()
        return request

    def abort(self, request: Request) -> None:
        """Give a request up; nothing happens when it has ended already."""
        if self._requests.get(request.row) is request:
            model.abort(self._state, request.row)
            self._end(request, "abort")

    async def run(self) -> None:
        """Compute steps for ever; raises faults.EngineFault when the engine is to die."""
        while True:
            if not model.is_busy(self._state):
                self._show_queue()
                self._arrival.clear()
                await self._arrival.wait()
            await self._run_busy()

    async def _run_busy(self) -> None:
        """Compute steps until nothing is left to do."""
        began = planned = time.monotonic()
        updated_at = began
        planned_before = self._planned_seconds
        busy_before = self._busy_seconds
        while model.is_busy(self._state):
            in_force = self._plugin.in_force if self._plugin else None
            lookup, arm = self._lookup(in_force)
            self._advance(self._state, lookup, arm=arm)
            self._steps += 1
            self._note_started(time.monotonic())
            seconds = float(self._step.numbers[model.SECONDS]) * self.time_scale
            self.faults.expose(self._situation(), seconds)
            planned += seconds
            self._planned_seconds += seconds
            await asyncio.sleep(max(0.0, planned - time.monotonic()))
            await self.faults.hold()
            now = time.monotonic()
            if now - planned > MOST_BEHIND_SECONDS:
                planned = now
            self._busy_seconds = busy_before + now - began
            self._deliver(now, now - updated_at)
            updated_at = now
        # An idle engine is not behind: what was caught up to within a step is no lag.
        late = self._planned_seconds - planned_before
        self._busy_seconds = busy_before + max(late, time.monotonic() - began)

    def _lookup(self, in_force: live.InForce | None) -> tuple[model.Ints, int]:
        if self._plugin is None or in_force is None:
            return self._static_lookup, 0
        if in_force.lookup is None:
            return self._static_lookup, int(in_force.arm)
        return self._plugin.lookup_array(in_force), int(in_force.arm)

    def _advance(self, state: model.State, lookup: model.Ints, *, arm: int) -> None:
        drift = self.profile.acceptance.drift_per_hour * self.uptime_seconds / 3600.0
        model.advance(
            state,
            self._limits,
            self._cost,
            self._conditions,
            self._survival,
            lookup,
            arm,
            max(0.0, 1.0 - drift) * self.faults.ease,
            self._chance,
            self._step,
        )

    def _situation(self) -> faults.Situation:
        speculation = self.options.speculation
        return faults.Situation(
            adaptive=bool(speculation and speculation.adaptive),
            graphs=self.options.graphs,
            speculation=speculation is not None,
            k=int(self._step.numbers[model.K]),
            running=self.running,
        )

    def _deliver(self, now: float, seconds: float) -> None:
        """Hand out what the step emitted and count it."""
        step, numbers = self._step, self._step.numbers
        if self._plugin:
            self._plugin.count(step, seconds)
        preemptions = int(self._state.counts[model.PREEMPTIONS])
        self.vllm.count_iteration(
            prompt_tokens=int(numbers[model.PREFILL_TOKENS]),
            tokens=int(numbers[model.TOKENS]),
            preemptions=preemptions - self._preemptions,
        )
        self._preemptions = preemptions
        self.vllm.count_drafts(
            drafts=int(numbers[model.DRAFTS]),
            draft_tokens=int(numbers[model.DRAFT_TOKENS]),
            accepted=int(numbers[model.ACCEPTED_TOKENS]),
            by_position=step.accepted.tolist(),
        )
        self._show_queue()
        self._lag.show(self._planned_seconds, self._busy_seconds)
        emitters = int(numbers[model.EMITTERS])
        if self._k_max and self.options.request_metrics != "none":
            self._record_acceptance(emitters)
        rows = step.emitted_rows[:emitters].tolist()
        tokens = step.emitted_tokens[:emitters].tolist()
        finished = step.is_finished[:emitters].tolist()
        earlier: dict[float, int] = {}  # requests by the time of their last output
        for row, count, is_finished in zip(rows, tokens, finished, strict=True):
            request = self._emitter(row)
            if request is None:
                continue
            request.output_tokens += count
            if request.first_at is None:
                request.first_at = now
                self.vllm.note_first_token(now - request.arrived_at)
            else:
                earlier[request.last_at] = earlier.get(request.last_at, 0) + 1
            request.last_at = now
            if is_finished:
                self._end(request, "length")
            request.on_output(count, "length" if is_finished else None)
        for last_at, requests in earlier.items():
            self.vllm.note_outputs(now - last_at, requests=requests)

    def _emitter(self, row: int) -> Request | None:
        """Return whose row it was in the step; None where its client went away meanwhile.

        The row may have been given to a new request since.
        """
        request = self._requests.get(row)
        return request if request is not None and request.after_step < self._steps else None

    def _note_started(self, now: float) -> None:
        """Note which waiting requests the step took in; they come in their order of arrival."""
        while self._queued:
            request = self._queued[0]
            is_there = self._requests.get(request.row) is request
            if is_there and self._state.computed[request.row] == 0:
                break
            request.started_at = now
            self._queued.popleft()

    def _record_acceptance(self, emitters: int) -> None:
        step = self._step
        columns = (step.emitted_rows, step.emitted_drafted, step.emitted_accepted)
        rows = zip(*(column[:emitters].tolist() for column in columns), strict=True)
        for row, drafted, accepted in rows:
            request = self._emitter(row)
            if request is not None and request.acceptance is not None:
                request.acceptance.count(drafted, accepted)

    def _end(self, request: Request, reason: str) -> None:
        del self._requests[request.row]
        self._free_rows.append(request.row)
        now = time.monotonic()
        started = request.started_at if request.started_at is not None else now
        first = request.first_at if request.first_at is not None else now
        self.vllm.count_request(
            metrics.FinishedRequest(
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                max_tokens=request.max_tokens,
                queue_seconds=started - request.arrived_at,
                prefill_seconds=first - started,
                decode_seconds=max(0.0, request.last_at - first),
                total_seconds=now - request.arrived_at,
                preemptions=int(self._state.preempted[request.row]),
                finish_reason=reason,
            )
        )

    def _show_queue(self) -> None:
        counts = self._state.counts
        self.vllm.show_queue(
            running=int(counts[model.RUNNING]),
            waiting=int(counts[model.WAITING]),
            kv_usage=model.kv_usage(self._state, self._limits),
        )

    def die(self) -> None:
        """Fail all requests; later ones raise EngineDeadError."""
        self.is_dead = True
        for request in list(self._requests.values()):
            self._end(request, "error")
            request.on_output(0, "error")


class _Plugin:
    """The plugin's table and metrics around the simulated scheduler."""

    def __init__(self, engine: Engine, registry: CollectorRegistry, vllm_version: str) -> None:
        options, speculation = engine.options, engine.options.speculation
        self._sink = plugin_metrics.EngineMetrics(
            plugin_metrics.EngineLabels(model_name=options.served_name, engine="0"), registry
        )
        limits = None
        k_max = speculation.k_max if speculation else 0
        captured = None
        if options.graphs != "NONE":
            captured = options.captured_tokens or engine.profile.times.captured_tokens
        if speculation and speculation.rows:
            limits = live.Limits(
                envelope=speculation.envelope,
                max_batch=options.max_requests,
                captured_tokens=captured,
            )
        self._counts_positions = speculation is not None and not speculation.adaptive
        self._table = live.LiveTable(live.Sources.from_environment(), limits)
        self._sink.announce(
            {
                "version": specdecode_vllm.__version__,
                "vllm_version": vllm_version,
                "runner": "V2",
                "method": speculation.method if speculation else "none",
                "k_max": str(k_max),
                "live_table": str(limits is not None).lower(),
                "cudagraph_mode": options.graphs,
                "adaptive_verification": str(bool(speculation and speculation.adaptive)).lower(),
            }
        )
        self.reloader = follow.start_following(
            self._table,
            self._sink,
            max_batch=options.max_requests,
            static_k=k_max,
            positions=k_max if self._counts_positions else 0,
            on_error=self._report,
        )
        self._array: tuple[live.InForce, model.Ints] | None = None

    @property
    def in_force(self) -> live.InForce:
        """Return the table in force, picked up between two steps."""
        return self._table.in_force

    def lookup_array(self, in_force: live.InForce) -> model.Ints:
        """Return K by batch as an array."""
        if self._array is None or self._array[0] is not in_force:
            self._array = (in_force, np.array(in_force.lookup, dtype=np.int64))
        return self._array[1]

    def count(self, step: model.Step, seconds: float) -> None:
        """Count a finished step as the plugin's observer does."""
        numbers = step.numbers
        self._sink.count_iteration()
        if numbers[model.BATCH] == 0:
            return
        self._sink.count_step(
            plugin_metrics.Step(
                batch=int(numbers[model.BATCH]),
                k=int(numbers[model.K]),
                arm=int(numbers[model.ARM]),
                seconds=seconds,
                tokens=int(numbers[model.TOKENS]),
                context_tokens=int(numbers[model.CONTEXT_TOKENS]),
                prefill_tokens=int(numbers[model.PREFILL_TOKENS]),
            )
        )
        if self._counts_positions and numbers[model.DRAFTS]:
            self._sink.count_positions(step.at_risk.tolist(), step.accepted.tolist())

    def _report(self, where: str, error: Exception) -> None:
        self._sink.count_error(where)
        logger.error("error in %s", where, exc_info=error)


class _LagMetrics:
    """Planned against real step time, for whoever judges a run."""

    def __init__(self, registry: CollectorRegistry, time_scale: float, profile: Profile) -> None:
        self._planned = Counter(
            "specdecode_sim_planned_seconds", "Step time as planned.", registry=registry
        )
        self._busy = Counter(
            "specdecode_sim_busy_seconds", "Time in which steps were due.", registry=registry
        )
        Gauge(
            "specdecode_sim_info",
            "1; the profile, and by how much time is stretched.",
            ("version", "profile", "time_scale"),
            registry=registry,
        ).labels(__version__, profile.name, f"{time_scale:g}").set(1)
        self._shown = (0.0, 0.0)

    def show(self, planned: float, busy: float) -> None:
        """Export the sums so far."""
        self._planned.inc(max(0.0, planned - self._shown[0]))
        self._busy.inc(max(0.0, busy - self._shown[1]))
        self._shown = (planned, max(busy, self._shown[1]))
