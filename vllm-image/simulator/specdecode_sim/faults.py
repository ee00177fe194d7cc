"""Faults by scenario: what goes wrong, under which combination, and how the engine ends by it.

A scenario is a YAML file. Each fault has a mean time of exposure: the time in which its conditions
hold, drawn once from the seed, exponential as crashes of one cause are. An engine that dies does so
as vLLM does: the log lines, the termination message (written by the plugin's own handler), and a
main process that exits 0.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

logger = logging.getLogger("vllm.v1.engine.core")

NonNegative = Annotated[float, Field(ge=0)]


class Kind(enum.StrEnum):
    """What goes wrong."""

    ILLEGAL_MEMORY_ACCESS = "illegal-memory-access"
    CUDA_OUT_OF_MEMORY = "cuda-out-of-memory"
    DEVICE_ASSERT = "device-assert"
    HOST_OUT_OF_MEMORY = "host-out-of-memory"
    HANG = "hang"
    ACCEPTANCE_COLLAPSE = "acceptance-collapse"
    CORRUPTED_OUTPUT = "corrupted-output"


class Report(enum.StrEnum):
    """How a dying worker tells: an exception in Python, or natively, where only the log has it."""

    EXCEPTION = "exception"
    ASYNCHRONOUS = "asynchronous"


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


class Conditions(_Part):
    """What must hold for a fault to be possible; absent means whatever."""

    adaptive_verification: bool | None = None
    graphs: tuple[str, ...] | None = None
    speculation: bool | None = None
    min_k: int | None = None
    min_running: int | None = None
    node: str | None = None
    file: Path | None = None  # exists


class Fault(_Part):
    """One fault; `mean_seconds` 0 is at once."""

    kind: Kind
    when: Conditions = Conditions()
    mean_seconds: NonNegative = 0.0
    report: Report = Report.EXCEPTION
    ease: NonNegative = 0.0  # of an acceptance collapse


class Scenario(_Part):
    """What goes wrong with one engine; times in seconds."""

    seed: int = 0
    slow_start_seconds: NonNegative = 0.0
    refuse_configuration: str | None = None
    speed_by_node: dict[str, float] = {}  # of the GPU, 1 = as the profile; needs NODE_NAME
    faults: tuple[Fault, ...] = ()


class ScenarioError(ValueError):
    """A scenario file that cannot be followed."""


def load_scenario(path: Path) -> Scenario:
    """Read a scenario; raises ScenarioError with what to change."""
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text("utf-8")) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ScenarioError(f"scenario {path}: {error}") from error


@dataclass(frozen=True)
class Situation:
    """The engine as its faults see it."""

    adaptive: bool
    graphs: str
    speculation: bool
    k: int
    running: int


class EngineFault(Exception):
    """The engine is to die by this fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.kind.value)
        self.fault = fault


class Faults:
    """Follows one engine's exposure to the faults of a scenario."""

    def __init__(self, scenario: Scenario, *, node: str = "", seed: int = 0) -> None:
        chance = random.Random(f"{scenario.seed}:{seed}")
        self._node = node
        self._left = {
            number: chance.expovariate(1.0) * fault.mean_seconds
            for number, fault in enumerate(scenario.faults)
        }
        self._scenario = scenario
        self._is_hung = False
        self.ease = 1.0
        self.is_corrupted = False

    def expose(self, situation: Situation, seconds: float) -> None:
        """Let `seconds` pass in this situation; raises EngineFault when the engine is to die."""
        for number, fault in enumerate(self._scenario.faults):
            if number not in self._left or not self._holds(fault.when, situation):
                continue
            self._left[number] -= seconds
            if self._left[number] <= 0:
                del self._left[number]
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.ACCEPTANCE_COLLAPSE:
                self.ease = fault.ease
            case Kind.CORRUPTED_OUTPUT:
                self.is_corrupted = True
            case Kind.HANG:
                self._is_hung = True
            case _:
                raise EngineFault(fault)

    async def hold(self) -> None:
        """Wait for ever once the engine hangs."""
        if self._is_hung:
            await asyncio.Event().wait()

    def _holds(self, when: Conditions, now: Situation) -> bool:
        return all(
            (
                when.adaptive_verification in (None, now.adaptive),
                when.graphs is None or now.graphs in when.graphs,
                when.speculation in (None, now.speculation),
                when.min_k is None or now.k >= when.min_k,
                when.min_running is None or now.running >= when.min_running,
                when.node in (None, self._node),
                when.file is None or when.file.exists(),
            )
        )


# What CUDA and PyTorch say; facts of their messages, as public crash reports show them.
_CUDA_NOTE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect."
)
_MESSAGES = {
    Kind.ILLEGAL_MEMORY_ACCESS: (
        f"CUDA error: an illegal memory access was encountered\n{_CUDA_NOTE}"
    ),
    Kind.DEVICE_ASSERT: f"CUDA error: device-side assert triggered\n{_CUDA_NOTE}",
    Kind.CUDA_OUT_OF_MEMORY: "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 is full.",
}


class AcceleratorError(RuntimeError):
    """As PyTorch's error of this name."""


class OutOfMemoryError(RuntimeError):
    """As PyTorch's error of this name."""


# A traceback names the module too, and what is read from it should be what PyTorch would write.
AcceleratorError.__module__ = OutOfMemoryError.__module__ = "torch"


def end_engine(fault: Fault) -> None:
    """Write to log and termination message what vLLM writes when its engine dies of a fault.

    A host out of memory ends the process here, as the kernel does.
    """
    if fault.kind is Kind.HOST_OUT_OF_MEMORY:
        os.kill(os.getpid(), signal.SIGKILL)
    message = _MESSAGES[fault.kind]
    if fault.report is Report.ASYNCHRONOUS:
        print(
            "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
            f"  what():  {message}",
            file=sys.stderr,
            flush=True,
        )
        logging.getLogger("vllm.v1.executor.multiproc_executor").error(
            "Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
        )
        error: Exception = RuntimeError("cancelled")
    else:
        is_memory = fault.kind is Kind.CUDA_OUT_OF_MEMORY
        error = (OutOfMemoryError if is_memory else AcceleratorError)(message)
    try:
        _raise(error)
    except RuntimeError:
        logger.exception("EngineCore encountered a fatal error.")
    logging.getLogger("vllm.v1.engine.async_llm").error(
        "AsyncLLM output_handler failed.\n%s",
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root "
        "cause.",
    )


def _raise(error: Exception) -> NoReturn:
    raise error


def refuse_configuration(error: Exception) -> None:
    """Log a refused configuration as an engine that failed to start."""
    logger.error("EngineCore failed to start.", exc_info=error)


def from_environment(environment: Mapping[str, str]) -> Scenario:
    """Read the scenario that SPECDECODE_SIM_SCENARIO names, or none."""
    path = environment.get("SPECDECODE_SIM_SCENARIO")
    return load_scenario(Path(path)) if path else Scenario()
