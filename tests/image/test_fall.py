"""How the real engine falls: what each process's end leaves in message, exit code and log.

Each case starts an engine of its own, without speculation: the falls are the same.
"""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.image.running_engine import RunningEngine
from tests.support.engine import make_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ENDS_SECONDS = 90
MEMORY_FAULT = "CUDA error: an illegal memory access was encountered"


def send(signal_number: signal.Signals, title: str) -> Callable[[RunningEngine], None]:
    def send_to(engine: RunningEngine) -> None:
        os.kill(engine.find_process(title), signal_number)

    return send_to


def send_to_main(signal_number: signal.Signals) -> Callable[[RunningEngine], None]:
    return lambda engine: engine.process.send_signal(signal_number)


def plant_in_engine(engine: RunningEngine) -> None:
    (engine.folder / "plant-engine").touch()


@dataclass(frozen=True)
class Fall:
    """What ends, and what is left of it; `cause` None means that no process could tell."""

    end: Callable[[RunningEngine], None]
    exit_code: int
    cause: str | None
    line: str
    logged: str


FALLS = {
    "a memory fault in the engine's process": Fall(
        plant_in_engine, 0, "illegal-memory-access", MEMORY_FAULT, MEMORY_FAULT
    ),
    "a worker that aborts": Fall(
        send(signal.SIGABRT, "VLLM::Worker"), 0, "engine-crash", "unexpectedly", "unexpectedly"
    ),
    "a worker that is killed": Fall(
        send(signal.SIGKILL, "VLLM::Worker"), 0, "engine-crash", "unexpectedly", "unexpectedly"
    ),
    "an engine process that aborts": Fall(
        send(signal.SIGABRT, "VLLM::EngineCore"), 0, "engine-crash", "unexpectedly", "unexpectedly"
    ),
    "an engine process that is killed": Fall(
        send(signal.SIGKILL, "VLLM::EngineCore"), 0, "engine-crash", "unexpectedly", "unexpectedly"
    ),
    "a main process that aborts": Fall(send_to_main(signal.SIGABRT), -6, None, "", ""),
    "a main process that is killed": Fall(send_to_main(signal.SIGKILL), -9, None, "", ""),
}


@pytest.mark.parametrize("situation", FALLS)
def test_a_fall(situation: str, tmp_path: Path) -> None:
    fall = FALLS[situation]
    files = make_engine(with_plant=True)
    engine = RunningEngine(
        files,
        tmp_path / "engine",
        model=files.models["high"].draft,
        environment={
            "SPECDECODE_PLANT_ENGINE_IMA": str(tmp_path / "engine" / "plant-engine"),
            # The plugin loses its steps, not the engine: each of these serves all the same.
            "SPECDECODE_PLANT_MISSING": "num_invalid_spec_tokens",
        },
    )
    try:
        engine.wait_until_ready()
        assert len(engine.complete("it serves", tokens=10)) > 0
        scrape = engine.scrape()
        assert scrape.total("specdecode_plugin_errors_total", where="features") == 1
        assert scrape.total("specdecode_engine_iterations_total") > 0
        assert scrape.total("specdecode_steps_total") == 0
        with engine.load(2):
            fall.end(engine)
            exit_code = engine.process.wait(timeout=ENDS_SECONDS)
        told = engine.termination_log.read_text()
        print(f"{situation}: exit {exit_code}, message {told}")
        assert exit_code == fall.exit_code
        report: dict[str, Any] = json.loads(told or "{}")
        assert report.get("cause") == fall.cause
        assert fall.line in report.get("line", "")
        assert fall.logged in engine.log
    finally:
        engine.stop()
