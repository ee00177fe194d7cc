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
from collections.abc import Callable
from typing import Any

from specdecode_vllm import __version__, follow, live, metrics, steps

logger = logging.getLogger("vllm.specdecode")

SCHEDULER_ATTRIBUTES = ("requests", "running", "num_spec_tokens", "schedule", "update_from_output")
OUTPUT_ATTRIBUTES = (
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_invalid_spec_tokens",
)
LIVE_OUTPUT_ATTRIBUTE = "num_spec_tokens_to_schedule"


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

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            hooks = self.specdecode
            if hooks is not None:
                hooks.before_update(self, scheduler_output, model_runner_output)
            result = super().update_from_output(scheduler_output, model_runner_output)
            if hooks is not None:
                hooks.after_update(self, scheduler_output, result)
            return result

    SpecdecodeScheduler.__name__ = SpecdecodeScheduler.__qualname__ = f"Specdecode{base.__name__}"
    return SpecdecodeScheduler


class Hooks:
    """What runs around the scheduler's methods; nothing here raises."""

    def __init__(
        self, *, table: live.LiveTable, sink: metrics.EngineMetrics, observer: steps.StepObserver
    ) -> None:
        self._table = table
        self._sink = sink
        self._observer = observer
        self._reported: set[str] = set()

    @classmethod
    def attach(cls, scheduler: Any, config: Any) -> "Hooks | None":
        """Build the hooks for a scheduler and start following its table; None when inert.

        Raises what vLLM's objects raise when they are not as known, once that is counted.
        """
        engine = Engine(scheduler, config)
        sink = metrics.EngineMetrics(engine.labels)
        try:
            return cls._attach(engine, sink)
        except Exception:
            sink.count_error("features")
            raise

    @classmethod
    def _attach(cls, engine: "Engine", sink: metrics.EngineMetrics) -> "Hooks | None":
        sink.announce(engine.info)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            logger.warning("specdecode plugin: no PROMETHEUS_MULTIPROC_DIR, nothing is exported")
        if engine.missing_attributes:
            logger.error("specdecode plugin: inert, vLLM lacks %s", engine.missing_attributes)
            sink.count_error("features")
            return None
        table = live.LiveTable(live.Sources.from_environment(), engine.limits)
        observer = steps.StepObserver(
            sink, counts_positions=engine.shows_verified_lengths, clock=time.perf_counter
        )
        hooks = cls(table=table, sink=sink, observer=observer)
        follow.start_following(
            table,
            sink,
            max_batch=engine.max_batch,
            static_k=engine.k_max,
            positions=engine.k_max if engine.shows_verified_lengths else 0,
            on_error=hooks.report,
        )
        logger.info("specdecode plugin %s attached: %s", __version__, engine.info)
        return hooks

    def take_table(self, scheduler: Any) -> live.InForce:
        """Hand what is in force to the scheduler, between two steps."""
        in_force = self._table.in_force
        if in_force.lookup is not None:
            scheduler.dynamic_sd_lookup = in_force.lookup
        return in_force

    def scheduled(self, scheduler: Any, output: Any, in_force: live.InForce) -> None:
        """Observe a schedule() that ran under `in_force`."""

        def observe() -> None:
            k = getattr(output, LIVE_OUTPUT_ATTRIBUTE, scheduler.num_spec_tokens)
            self._observer.after_schedule(scheduler, output, k=k, arm=int(in_force.arm))

        self._guard("schedule", observe)

    def before_update(self, scheduler: Any, output: Any, runner_output: Any) -> None:
        """Observe sampled tokens before vLLM takes them in."""
        self._guard(
            "update", lambda: self._observer.before_update(scheduler, output, runner_output)
        )

    def after_update(self, scheduler: Any, output: Any, result: Any) -> None:
        """Observe a finished step."""
        self._guard("update", lambda: self._observer.after_update(scheduler, output, result))

    def _guard(self, where: str, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception as error:
            self.report(where, error)

    def report(self, where: str, error: Exception) -> None:
        """Count an error, and log the first one of each place."""
        try:
            self._sink.count_error(where)
            if where not in self._reported:
                self._reported.add(where)
                logger.error("specdecode plugin: error in %s, counted", where, exc_info=error)
        except Exception:  # nothing is left to tell it with
            return


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
        """List what vLLM lacks of all that the hooks read."""
        from vllm.v1.core.sched.output import SchedulerOutput

        fields = getattr(SchedulerOutput, "__dataclass_fields__", {})
        return [name for name in SCHEDULER_ATTRIBUTES if not hasattr(self._scheduler, name)] + [
            name for name in OUTPUT_ATTRIBUTES if name not in fields
        ]

    @property
    def limits(self) -> live.Limits | None:
        """Return what live tables must keep to; None where vLLM follows no table."""
        from vllm.v1.core.sched.output import SchedulerOutput

        lookup = getattr(self._scheduler, "dynamic_sd_lookup", None)
        if lookup is None or LIVE_OUTPUT_ATTRIBUTE not in SchedulerOutput.__dataclass_fields__:
            return None
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
    def info(self) -> dict[str, str]:
        """Return the labels of specdecode_plugin_info."""
        import vllm

        return {
            "version": __version__,
            "vllm_version": str(getattr(vllm, "__version__", "unknown")),
            "runner": "V2" if getattr(self._config, "use_v2_model_runner", False) else "V1",
            "method": str(getattr(self._speculation, "method", None) or "none"),
            "k_max": str(self.k_max),
            "live_table": str(self.limits is not None).lower(),
            "cudagraph_mode": self.cudagraph_mode,
            "adaptive_verification": str(self.uses_adaptive_verification).lower(),
        }
