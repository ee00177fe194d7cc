"""Condition types and reasons, typed, and the rule for their transition times."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from .v1alpha1 import Condition


class ConditionType(StrEnum):
    """Conditions of a SpecDecodeDeployment, in the order in which they are shown."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    METRICS_AVAILABLE = "MetricsAvailable"
    TABLE_APPLIED = "TableApplied"
    TUNED = "Tuned"
    SPECULATION_ENABLED = "SpeculationEnabled"
    DEGRADED = "Degraded"


class Reason(StrEnum):
    """Why a condition has its status. Users alert on these: change none."""

    # Ready, Progressing
    PODS_READY = "PodsReady"
    PODS_NOT_READY = "PodsNotReady"
    SCALED_TO_ZERO = "ScaledToZero"
    ROLLING_OUT = "RollingOut"
    ROLLED_OUT = "RolledOut"
    TOO_FEW_REPLICAS = "TooFewReplicas"
    PAUSED = "Paused"
    # Refusals and start-up failures
    INVALID_SPEC = "InvalidSpec"
    IMAGE_NOT_SET = "ImageNotSet"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    ENGINE_START_FAILED = "EngineStartFailed"
    UNSCHEDULABLE = "Unschedulable"
    # Metrics
    SCRAPED = "Scraped"
    PROMETHEUS_UNAVAILABLE = "PrometheusUnavailable"
    NOT_CONFIGURED = "PrometheusNotConfigured"
    NOT_SCRAPED = "NotScraped"
    STALE = "Stale"
    PARTIAL = "PartiallyScraped"
    NO_PLUGIN = "NoPlugin"
    NO_READY_PODS = "NoReadyPods"
    # Tables
    APPLIED = "Applied"
    WAITING_FOR_ENGINES = "WaitingForEngines"
    TABLE_REFUSED = "TableRefused"
    NOT_LIVE = "NotLive"
    UNKNOWN_ENGINE = "UnknownEngineVersion"
    # Tuning
    TUNING_OFF = "TuningOff"
    ADVISING = "Advising"
    EXPLORING = "Exploring"
    CONVERGED = "Converged"
    NO_TRAFFIC = "NoTraffic"
    COLLECTING = "Collecting"
    HELD = "Held"
    DOES_NOT_PAY = "SpeculationDoesNotPay"
    # Why there is no number, beside NoTraffic and Collecting
    BAD_DATA = "BadData"
    OUT_OF_RANGE = "OutOfRange"
    NOTHING_ACCEPTED = "NothingAccepted"
    VARYING_K = "VaryingK"
    ADAPTIVE_VERIFICATION = "AdaptiveVerification"
    # Speculation
    SPECULATING = "Speculating"
    NOT_ASKED_FOR = "NotAskedFor"
    KILL_SWITCH = "KillSwitch"
    QUARANTINED = "Quarantined"
    # Degraded
    HEALTHY = "Healthy"
    ILLEGAL_MEMORY_ACCESS = "IllegalMemoryAccess"
    NOT_SPECULATION = "NotSpeculation"
    ENGINE_CRASHED = "EngineCrashed"


def find_condition(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """Return the condition of a type, or None where it is not there yet."""
    return next((c for c in conditions if c.type == kind), None)


def set_condition(conditions: Sequence[Condition], wanted: Condition) -> tuple[Condition, ...]:
    """Put a condition among others; its transition time moves only when its status flips."""
    stored = find_condition(conditions, wanted.type)
    if stored is not None and stored.status == wanted.status:
        wanted = wanted.model_copy(update={"last_transition_time": stored.last_transition_time})
    order = {kind.value: position for position, kind in enumerate(ConditionType)}
    kept = [c for c in conditions if c.type != wanted.type]
    return tuple(sorted([*kept, wanted], key=lambda c: order.get(c.type, len(order))))
