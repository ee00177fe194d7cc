"""The scheduler factory for `--scheduler-cls specdecode_vllm.scheduler.make_scheduler`.

vLLM calls whatever the name resolves to, after the configuration is final: so a function can
take the very class vLLM would have taken and put the hooks around its two methods. Whatever the
plugin lacks or gets wrong, vLLM's own scheduler runs on: the hooks are gated by what is there,
wrapped, counted and logged once.
"""

import copy
import logging
import os
import time
from collections.abc import Collection
from typing import Any

from specdecode_vllm import __version__, edges, follow, live, metrics, steps

logger = logging.getLogger("vllm.specdecode")

# What counting steps reads. Without them tables are followed all the same: the kill switch must
# not hang on a counter.
SCHEDULER_ATTRIBUTES = ("requests", "running", "num_spec_tokens", "log_stats")
OUTPUT_ATTRIBUTES = (
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_invalid_spec_tokens",
)
CACHED_REQUESTS_ATTRIBUTES = ("resumed_req_ids", "num_computed_tokens")
# What following a table needs.
LOOKUP_ATTRIBUTE = "dynamic_sd_lookup"
LIVE_OUTPUT_ATTRIBUTE = "num_spec_tokens_to_schedule"
# The V1 runner's drafters that take K by the step; the others assert that it is the greatest one.
METHODS_OF_V1 = frozenset({"ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash"})
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Build vLLM's own choice of scheduler, with the plugin's hooks where they fit."""
    config = kwargs.get("vllm_config") or args[0]
    base = choose_scheduler_class(config.scheduler_config)
    scheduler = build_hooked_class(base)(*args, **kwargs)
    try:
        scheduler.specdecode = Hooks.attach(scheduler, config)
    except Exception:
        logger.exception("specdecode plugin: inert, it could not attach to the scheduler")
    return scheduler


def choose_scheduler_class(scheduler_config: Any) -> type:
    """Return the class vLLM takes when no --scheduler-cls is given."""
    own = copy.copy(scheduler_config)
    own.scheduler_cls = None
    return own.get_scheduler_cls()  # type: ignore[no-any-return]


def build_hooked_class(base: Any) -> Any:
    """Derive a class whose schedule() and update_from_output() call the hooks, once attached."""

    class SpecdecodeScheduler(base):  # type: ignore[misc]
        specdecode: "Hooks | None" = None

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            hooks = self.specdecode
            if hooks is None:
                return super().schedule(*args, **kwargs)
            in_force = hooks.take_table(self)
            output = super().schedule(*args, **kwargs)
            hooks.scheduled(self, output, in_force)
            return output

        def update_from_output(
            self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            hooks = self.specdecode
            update = super().update_from_output
            if hooks is None:
                return update(scheduler_output, model_runner_output, *args, **kwargs)
            hooks.before_update(self, scheduler_output, model_runner_output)
            result = update(scheduler_output, model_runner_output, *args, **kwargs)
            hooks.after_update(self, scheduler_output, result)
            return result

    SpecdecodeScheduler.__name__ = SpecdecodeScheduler.__qualname__ = f"Specdecode{base.__name__}"
    return SpecdecodeScheduler


class Hooks:
    """What runs around the scheduler's methods; nothing here raises."""

    def __init__(
        self,
        *,
        table: live.LiveTable,
        sink: metrics.EngineMetrics,
        held: edges.Edges,
        observer: steps.StepObserver | None,
    ) -> None:
        self._table = table
        self._sink = sink
        self._edges = held
        self._observer = observer
        self._reported: set[str] = set()

    @classmethod
    def attach(cls, scheduler: Any, config: Any) -> "Hooks | None":
        """Build the hooks for a scheduler and start following its table; None when inert.

        Raises what vLLM's objects raise when they are not as known, once that is counted.
        """
        if os.environ.get(RUST_FRONT_END, "0") not in ("", "0"):
            logger.error(
                "specdecode plugin: inert, the Rust front end's /metrics shows nothing of the "
                "plugin, so nobody could tell what is in force: unset %s",
                RUST_FRONT_END,
            )
            return None
        engine = Engine(scheduler, config)
        sink = metrics.EngineMetrics(engine.labels)
        try:
            return cls._attach(engine, sink)
        except Exception:
            sink.count_error("features")
            raise

    @classmethod
    def _attach(cls, engine: "Engine", sink: metrics.EngineMetrics) -> "Hooks":
        if why := engine.withdraw_table():
            logger.warning("specdecode plugin: the start-up table is dropped: %s", why)
        sink.announce(engine.info)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            logger.warning("specdecode plugin: no PROMETHEUS_MULTIPROC_DIR, nothing is exported")
        if not engine.follows_tables:
            logger.warning("specdecode plugin: no table is followed: %s", engine.why_static)
        observer = None
        if missing := engine.missing_attributes:
            logger.error("specdecode plugin: no steps are counted, vLLM lacks %s", missing)
            sink.count_error("features")
        else:
            observer = steps.StepObserver(
                sink, counts_positions=engine.shows_verified_lengths, clock=time.perf_counter
            )
        table = live.LiveTable(live.Sources.from_environment(), engine.limits)
        hooks = cls(table=table, sink=sink, held=build_edges(engine), observer=observer)
        follow.start_following(
            table,
            sink,
            max_batch=engine.max_batch,
            static_k=engine.k_max,
            positions=engine.k_max if observer and engine.shows_verified_lengths else 0,
            on_error=hooks.report,
        )
        logger.info("specdecode plugin %s attached: %s", __version__, engine.info)
        return hooks

    def take_table(self, scheduler: Any) -> live.InForce:
        """Hand what is in force to the scheduler, between two steps."""
        in_force = self._table.in_force
        if in_force.lookup is not None:
            try:
                scheduler.dynamic_sd_lookup = self._edges.choose(in_force.lookup)
            except Exception as error:
                scheduler.dynamic_sd_lookup = in_force.lookup
                self.report("schedule", error)
        return in_force

    def scheduled(self, scheduler: Any, output: Any, in_force: live.InForce) -> None:
        """Observe a schedule() that ran under `in_force`."""
        try:
            self._sink.count_iteration()
            self._edges.note(len(output.num_scheduled_tokens))
            if self._observer is not None:
                k = getattr(output, LIVE_OUTPUT_ATTRIBUTE, scheduler.num_spec_tokens)
                self._observer.after_schedule(scheduler, output, k=k, arm=int(in_force.arm))
        except Exception as error:
            self.report("schedule", error)

    def before_update(self, scheduler: Any, output: Any, runner_output: Any) -> None:
        """Observe sampled tokens before vLLM takes them in."""
        if self._observer is not None:
            try:
                self._observer.before_update(scheduler, output, runner_output)
            except Exception as error:
                self.report("update", error)

    def after_update(self, scheduler: Any, output: Any, result: Any) -> None:
        """Observe a finished step."""
        if self._observer is not None:
            try:
                self._observer.after_update(scheduler, output, result)
            except Exception as error:
                self.report("update", error)

    def report(self, where: str, error: Exception) -> None:
        """Count an error, and log the first one of each place."""
        try:
            self._sink.count_error(where)
            if where not in self._reported:
                self._reported.add(where)
                logger.error("specdecode plugin: error in %s, counted", where, exc_info=error)
        except Exception:  # nothing is left to tell it with
            return


def build_edges(engine: "Engine") -> edges.Edges:
    """Build the hysteresis that the environment asks for; a senseless wish is logged and off."""
    try:
        margin = edges.read_margin()
    except ValueError as error:
        logger.error("specdecode plugin: K is not held at row edges: %s", error)
        margin = 0
    limits = engine.limits
    return edges.Edges(margin=margin, captured_tokens=limits.captured_tokens if limits else None)


class Engine:
    """What the plugin needs to know of the engine, read by feature and not by version."""

    def __init__(self, scheduler: Any, config: Any) -> None:
        self._scheduler = scheduler
        self._config = config
        self._speculation = getattr(config, "speculative_config", None)
        self.k_max = int(getattr(scheduler, "num_spec_tokens", 0) or 0)
        self.max_batch = int(config.scheduler_config.max_num_seqs)

    @property
    def labels(self) -> metrics.EngineLabels:
        """Return the labels vLLM puts on its own metrics of this engine."""
        parallel = self._config.parallel_config
        return metrics.EngineLabels(
            model_name=str(self._config.model_config.served_model_name),
            engine=str(getattr(parallel, "data_parallel_index", 0) or 0),
        )

    @property
    def missing_attributes(self) -> list[str]:
        """List what vLLM lacks of all that counting steps reads."""
        from vllm.v1.core.sched import output

        cached = getattr(output.CachedRequestData, "__dataclass_fields__", {})
        return [
            *(name for name in SCHEDULER_ATTRIBUTES if not hasattr(self._scheduler, name)),
            *(name for name in OUTPUT_ATTRIBUTES if name not in self._output_fields),
            *(name for name in CACHED_REQUESTS_ATTRIBUTES if name not in cached),
        ]

    @property
    def _output_fields(self) -> Collection[str]:
        from vllm.v1.core.sched.output import SchedulerOutput

        return getattr(SchedulerOutput, "__dataclass_fields__", {})

    def withdraw_table(self) -> str | None:
        """Take back a start-up table that would end the engine; return why, None to leave it.

        vLLM from 0.33 on does so itself: what is left there, it can follow.
        """
        lookup = getattr(self._scheduler, LOOKUP_ATTRIBUTE, None)
        if lookup is None or self.runner != "V1" or self.method in METHODS_OF_V1:
            return None
        setattr(self._scheduler, LOOKUP_ATTRIBUTE, None)
        return f"on the V1 runner {self.method} drafts {self.k_max} tokens or fails"

    @property
    def why_static(self) -> str:
        """Say why no table sets K, for those who wonder."""
        if self._speculation is None:
            return "speculation is off"
        if not hasattr(self._scheduler, LOOKUP_ATTRIBUTE):
            return f"this vLLM has no {LOOKUP_ATTRIBUTE}"
        if LIVE_OUTPUT_ATTRIBUTE not in self._output_fields:
            return f"this vLLM has no {LIVE_OUTPUT_ATTRIBUTE}"
        return (
            f"K stays {self.k_max}; the engine started without "
            "num_speculative_tokens_per_batch_size, or vLLM dropped it (data parallelism, method)"
        )

    @property
    def follows_tables(self) -> bool:
        """Tell whether live tables set this engine's K."""
        lookup = getattr(self._scheduler, LOOKUP_ATTRIBUTE, None)
        return lookup is not None and LIVE_OUTPUT_ATTRIBUTE in self._output_fields

    @property
    def limits(self) -> live.Limits | None:
        """Return what live tables must keep to; None where vLLM follows no table."""
        if not self.follows_tables:
            return None
        lookup = getattr(self._scheduler, LOOKUP_ATTRIBUTE)
        return live.Limits(
            envelope=frozenset(self._start_up_ks() or lookup[1:]),
            max_batch=len(lookup) - 1,
            captured_tokens=self._captured_tokens(),
        )

    def _start_up_ks(self) -> set[int]:
        rows = getattr(self._speculation, "num_speculative_tokens_per_batch_size", None) or ()
        return {min(int(row[2]), self.k_max) for row in rows}

    def _captured_tokens(self) -> int | None:
        compilation = self._config.compilation_config
        size = getattr(compilation, "max_cudagraph_capture_size", None)
        return int(size) if size and self.cudagraph_mode != "NONE" else None

    @property
    def cudagraph_mode(self) -> str:
        """Return the graph mode after vLLM's own rewriting."""
        mode = getattr(self._config.compilation_config, "cudagraph_mode", None)
        return str(getattr(mode, "name", mode or "NONE"))

    @property
    def uses_adaptive_verification(self) -> bool:
        """Tell whether the engine trims drafts before it verifies them."""
        return bool(getattr(self._speculation, "enable_adaptive_verification", False))

    @property
    def shows_verified_lengths(self) -> bool:
        """Tell whether scheduled drafts are what is verified: not so under trimming."""
        return self._speculation is not None and not self.uses_adaptive_verification

    @property
    def runner(self) -> str:
        """Return the model runner's name: V1 or V2."""
        return "V2" if getattr(self._config, "use_v2_model_runner", False) else "V1"

    @property
    def method(self) -> str:
        """Return the drafting method, `none` without speculation."""
        return str(getattr(self._speculation, "method", None) or "none")

    @property
    def info(self) -> dict[str, str]:
        """Return the labels of specdecode_plugin_info."""
        import vllm

        return {
            "version": __version__,
            "vllm_version": str(getattr(vllm, "__version__", "unknown")),
            "runner": self.runner,
            "method": self.method,
            "k_max": str(self.k_max),
            "live_table": str(self.follows_tables).lower(),
            "cudagraph_mode": self.cudagraph_mode,
            "adaptive_verification": str(self.uses_adaptive_verification).lower(),
        }
