"""What is known of a terminated (or hung) engine container."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class FaultClass(StrEnum):
    """Why an engine ended, as its first fatal line in time says."""

    ILLEGAL_MEMORY_ACCESS = "illegal-memory-access"
    CUDA_OUT_OF_MEMORY = "cuda-out-of-memory"
    OOM_KILLED = "oom-killed"
    DEVICE_ASSERT = "device-assert"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    GPU_HARDWARE = "gpu-hardware"
    CONFIG_REFUSED = "config-refused"
    PROBE_KILLED = "probe-killed"
    EVICTED = "evicted"
    GRACEFUL_SHUTDOWN = "graceful-shutdown"
    ENGINE_CRASH = "engine-crash"
    ENGINE_HANG = "engine-hang"


class FaultAction(StrEnum):
    """What to do about it."""

    SPEC_OFF = "SpecOff"
    REVERT_CHANGE = "RevertChange"
    REPORT = "Report"
    HAND_OVER = "HandOver"
    NONE = "None"


@dataclass(frozen=True)
class Termination:
    """How a container ended, from its status."""

    exit_code: int | None
    signal: int | None
    reason: str
    message: str
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True)
class Evidence:
    """Everything the classifier may look at.

    `log` is this boot's log, oldest line first, None where it was not read or is gone; bad bytes
    were already replaced. `hang` means that the container never ended. `events` are the pod's
    and the node's, each as "Reason: message".
    """

    termination: Termination | None
    log: str | None = None
    pod_reason: str = ""
    deletion_requested: bool = False
    ever_ready: bool = False
    hang: bool = False
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class FaultContext:
    """What the operator knows of the workload when it chooses an action."""

    speculation: bool
    ever_ready: bool
    change_in_flight: bool
    earlier_faults_with_speculation_off: int = 0


@dataclass(frozen=True)
class Classification:
    """The classifier's answer; `line` is the first fatal line without prefixes, or None."""

    fault_class: FaultClass
    line: str | None
    reported_by: str = ""
