"""Reasons not to act, as ordered lists of one-purpose functions; the first that speaks holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import LiveTable, Plugin, RevisionInputs, Spec
from specdecode_operator.decide.rollout import Hold
from specdecode_operator.domain import engine
from specdecode_operator.domain.observation import MetricsAbsent, MetricsSamples
from specdecode_operator.estimate.counters import NoEstimate


@dataclass(frozen=True)
class Situation:
    """What the checks look at."""

    spec: Spec
    inputs: RevisionInputs
    falling: bool
    rolling: bool
    ready_pods: int
    metrics: MetricsSamples | MetricsAbsent | NoEstimate


WITHOUT_PLUGIN: Final = (
    "no live control, no kill switch, nothing is measured or tuned, and the cause of a crash is "
    "known from the log alone. Inject or Image brings all of it"
)

Check = Callable[[Situation], Hold | None]


def check_falling(at: Situation) -> Hold | None:
    """Nothing is tuned while speculation is being switched off, or is quarantined."""
    if at.falling:
        return Hold(Reason.QUARANTINED, "speculation is off after an illegal memory access")
    return None


def find_no_live_control(inputs: RevisionInputs) -> Hold | None:
    """Say why a revision follows no live table; None where it does."""
    if inputs.speculation is None:
        return Hold(Reason.NOT_ASKED_FOR, "speculation is off: there is no K")
    if inputs.engine.plugin is Plugin.NONE:
        return Hold(Reason.NOT_LIVE, f"{_say_what_runs(inputs)}: {WITHOUT_PLUGIN}")
    if inputs.engine.live_table is LiveTable.OFF:
        return Hold(Reason.NOT_LIVE, "engine.liveTable is Off: no live control, no kill switch")
    version = engine.engine_version_of(inputs.engine)
    can = engine.capabilities_of(inputs.engine, inputs.speculation.method)
    if not can.known:
        return Hold(
            Reason.UNKNOWN_ENGINE,
            f"engine version {version or 'unknown'}: no live control and no kill switch. Set "
            "engine.version to one that this operator knows",
        )
    if not can.live_table:
        return Hold(
            Reason.NOT_LIVE,
            f"vLLM {version} follows no live table with method {inputs.speculation.method}: no "
            "live control, no kill switch",
        )
    return None


def _say_what_runs(inputs: RevisionInputs) -> str:
    """Say what an engine without the plugin does with the user's table."""
    assert inputs.speculation is not None
    if engine.has_fixed_table(inputs) and inputs.speculation.k_table:
        return "engine.plugin is None, K follows kTable inside vLLM and an edit restarts the pods"
    k = inputs.speculation.num_speculative_tokens
    if inputs.speculation.k_table:
        version = engine.engine_version_of(inputs.engine) or "of an unknown version"
        return f"engine.plugin is None, vLLM {version} is given no kTable and drafts {k} always"
    return f"engine.plugin is None, vLLM drafts {k} always"


def check_live_control(at: Situation) -> Hold | None:
    """K can be changed only where the engine follows a live table."""
    return find_no_live_control(at.inputs)


def check_rollout(at: Situation) -> Hold | None:
    """One change at a time."""
    if at.rolling:
        return Hold(Reason.ROLLING_OUT, "a change that needs restarts is under way")
    return None


def check_paused(at: Situation) -> Hold | None:
    """The user said so."""
    if at.spec.rollout.paused:
        return Hold(Reason.PAUSED, "spec.rollout.paused is true")
    return None


def check_ready_pods(at: Situation) -> Hold | None:
    """Without a Ready pod there is nothing to measure."""
    if at.ready_pods == 0:
        return Hold(Reason.NO_READY_PODS, "no engine is Ready")
    return None


def check_metrics(at: Situation) -> Hold | None:
    """No data is no result: nothing changes."""
    if isinstance(at.metrics, MetricsAbsent | NoEstimate):
        return Hold(Reason(at.metrics.reason), at.metrics.message)
    return None


BEFORE_TUNING: Final[tuple[Check, ...]] = (
    check_falling,
    check_live_control,
    check_rollout,
    check_paused,
    check_ready_pods,
    check_metrics,
)


def first_hold(checks: tuple[Check, ...], situation: Situation) -> Hold | None:
    """Return the first reason not to act, None where nothing speaks against it."""
    return next((hold for check in checks if (hold := check(situation))), None)
