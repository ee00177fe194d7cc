"""The plugin's metric table: names, labels and types are the contract with the operator.

Samples go through prometheus_client into the files of PROMETHEUS_MULTIPROC_DIR, which vLLM's
own /metrics merges over its processes. That mode knows no Info and needs `mostrecent` gauges.
Label children are created before their first increment, or rate() would not see it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from specdecode_vllm import live
from specdecode_vllm import table as tables

COMMON_LABELS = ("model_name", "engine")
STEP_COUNTERS = {
    "specdecode_steps": "Decode-only steps.",
    "specdecode_step_seconds": "Wall time of decode-only steps.",
    "specdecode_step_tokens": "Tokens emitted by decode-only steps, after trimming.",
    "specdecode_step_requests": "Requests, summed over decode-only steps.",
    "specdecode_step_context_tokens": "Context tokens, summed over decode-only steps.",
}
MIXED_COUNTERS = {
    "specdecode_mixed_steps": "Steps with any prefill token.",
    "specdecode_mixed_step_seconds": "Wall time of steps with any prefill token.",
    "specdecode_mixed_step_tokens": "Tokens emitted by steps with any prefill token.",
    "specdecode_mixed_step_requests": "Requests, summed over steps with any prefill token.",
    "specdecode_mixed_step_prefill_tokens": "Prefill tokens of these steps.",
}
TABLE_GAUGES = {
    "specdecode_table_generation": "Generation of the table in force, 0 before the first.",
    "specdecode_table_fingerprint": "48-bit identity of the table in force, 0 before the first.",
    "specdecode_table_arm": "Arm in force: 0 stable, 1 canary, 2 kill switch.",
    "specdecode_table_stale": "1 while a file is refused and the table in force stays.",
    "specdecode_table_enabled": "1 while what is in force lets the engine draft.",
    "specdecode_table_clamped_rows": "Rows lowered to what was captured at start-up.",
}
ERROR_PLACES = ("features", "schedule", "update", "reload", "metrics", "termination")
RELOAD_REASONS = ("table", "arm")


class EngineLabels(NamedTuple):
    """How vLLM labels this engine's own metrics."""

    model_name: str
    engine: str


class Step(NamedTuple):
    """One finished step. `k` and `arm` were decided when its drafts were proposed."""

    batch: int
    k: int
    arm: int
    seconds: float
    tokens: int
    context_tokens: int
    prefill_tokens: int

    @property
    def is_mixed(self) -> bool:
        """Tell whether the step computed any prefill token."""
        return self.prefill_tokens > 0


class EngineMetrics:
    """All metrics of one engine; make one per process."""

    def __init__(self, labels: EngineLabels, registry: CollectorRegistry = REGISTRY) -> None:
        self._labels = labels
        self._registry = registry
        self._step = self._counters(STEP_COUNTERS, "batch", "k", "arm")
        self._mixed = self._counters(MIXED_COUNTERS, "batch", "arm")
        self._cells: dict[tuple[object, ...], list[Counter]] = {}
        self._at_risk = self._counter(
            "specdecode_at_risk_per_position",
            "Drafts that had this position and whose earlier ones were all accepted.",
            "position",
        )
        self._accepted = self._counter(
            "specdecode_accepted_per_position",
            "Drafts at risk at this position that were accepted there.",
            "position",
        )
        self._positions: list[tuple[Counter, Counter]] = []
        self._gauges = {name: self._gauge(name, text) for name, text in TABLE_GAUGES.items()}
        self._reloads = self._reasons("specdecode_table_reloads", "Changes of what is in force.")
        self._rejects = self._reasons("specdecode_table_rejects", "Refused arm or table files.")
        self._iterations = self._counter(
            "specdecode_engine_iterations", "Scheduling passes of the engine: its heartbeat."
        ).labels(*self._labels)
        self._errors = self._counter(
            "specdecode_plugin_errors", "Errors of the plugin, all caught.", "where"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*COMMON_LABELS, *labels), registry=self._registry)

    def _counters(self, texts: Mapping[str, str], *labels: str) -> list[Counter]:
        return [self._counter(name, text, *labels) for name, text in texts.items()]

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(
            name,
            text,
            (*COMMON_LABELS, *labels),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    def _reasons(self, name: str, text: str) -> Counter:
        return self._counter(name, text, "reason")

    def announce(self, info: Mapping[str, str]) -> None:
        """Export the effective configuration, and every child whose labels are known now."""
        gauge = self._gauge(
            "specdecode_plugin_info", "Effective configuration of the engine.", *info
        )
        gauge.labels(*self._labels, *info.values()).set(1)
        for where in ERROR_PLACES:
            self._errors.labels(*self._labels, where)
        for reason in RELOAD_REASONS:
            self._reloads.labels(*self._labels, reason)
        for reason in live.REJECT_REASONS:
            self._rejects.labels(*self._labels, reason)

    def create_positions(self, count: int) -> None:
        """Create the children of draft positions 0..count-1."""
        for position in range(len(self._positions), count):
            labels = (*self._labels, str(position))
            self._positions.append((self._at_risk.labels(*labels), self._accepted.labels(*labels)))

    def create_cells(self, in_force: live.InForce, *, max_batch: int, static_k: int) -> None:
        """Create the step children that `in_force` can reach; `static_k` is K without a table."""
        arm = int(in_force.arm)
        for bucket, ks in reachable_cells(in_force.lookup or (static_k,) * (max_batch + 1)):
            self._cell(self._mixed, bucket, arm)
            for k in ks:
                self._cell(self._step, bucket, k, arm)

    def _cell(self, counters: list[Counter], *labels: int) -> list[Counter]:
        key = (len(labels), *labels)
        cell = self._cells.get(key)
        if cell is None:
            values = (*self._labels, *map(str, labels))
            cell = self._cells[key] = [counter.labels(*values) for counter in counters]
        return cell

    def count_iteration(self) -> None:
        """Count one scheduling pass."""
        self._iterations.inc()

    def count_step(self, step: Step) -> None:
        """Count one finished step in its cell."""
        bucket = tables.batch_bucket(step.batch)
        if step.is_mixed:
            cell = self._cell(self._mixed, bucket, step.arm)
            last = step.prefill_tokens
        else:
            cell = self._cell(self._step, bucket, step.k, step.arm)
            last = step.context_tokens
        amounts = (1, step.seconds, step.tokens, step.batch, last)
        for counter, amount in zip(cell, amounts, strict=True):
            counter.inc(amount)

    def count_positions(self, at_risk: list[int], accepted: list[int]) -> None:
        """Count drafts at risk and accepted, both by position."""
        self.create_positions(len(at_risk))
        for (risk_child, accepted_child), risk, hits in zip(
            self._positions, at_risk, accepted, strict=False
        ):
            if risk:
                risk_child.inc(risk)
            if hits:
                accepted_child.inc(hits)

    def show_table(self, in_force: live.InForce) -> None:
        """Export what is in force; this is the acknowledgement the operator waits for."""
        table = in_force.table
        values = (
            table.generation if table else 0,
            table.fingerprint if table else 0,
            int(in_force.arm),
            int(in_force.stale),
            int(in_force.enabled),
            in_force.clamped_rows,
        )
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.labels(*self._labels).set(value)

    def count_reload(self, reason: str) -> None:
        """Count a change of what is in force; `reason` is one of RELOAD_REASONS."""
        self._reloads.labels(*self._labels, reason).inc()

    def count_reject(self, reason: str) -> None:
        """Count a refused file; `reason` is one of live.REJECT_REASONS."""
        self._rejects.labels(*self._labels, reason).inc()

    def count_error(self, where: str) -> None:
        """Count an error that the plugin caught; `where` is one of ERROR_PLACES."""
        self._errors.labels(*self._labels, where).inc()


def reachable_cells(lookup: tuple[int, ...]) -> list[tuple[int, set[int]]]:
    """List each batch bucket with the K values its steps can carry.

    A step's K was decided one step earlier, when the batch may have been a neighbour's.
    """
    by_bucket: dict[int, set[int]] = {}
    for batch, k in enumerate(lookup):
        if batch:
            by_bucket.setdefault(tables.batch_bucket(batch), set()).add(k)
    buckets = list(by_bucket)
    return [
        (bucket, set().union(*(by_bucket[near] for near in buckets[max(0, i - 1) : i + 2])))
        for i, bucket in enumerate(buckets)
    ]
