"""The two servers that keep one contract: the real engine on the CPU and the simulated one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.image.running_engine import (
    K_MAX,
    START_TABLE,
    RunningEngine,
    RunningServer,
    build_flags,
    free_port,
)
from tests.support.engine import make_engine
from tests.support.simulated_server import SimulatedServer
from tests.support.simulator import Simulator

CONTRACT = Path(__file__).parents[1] / "data" / "engine_contract.json"
REAL_VERSION = "0.32.0"
# Tables are swapped faster in these tests than files are read by default.
ENVIRONMENT = {"SPECDECODE_POLL_SECONDS": "0.02"}


@contextmanager
def run_server(kind: str, folder: Path, *, speculation: bool = True) -> Iterator[RunningServer]:
    """Run the server of this kind, `real` or `simulator`, until the end of the block."""
    server = (_start_real if kind == "real" else _start_simulated)(folder, speculation)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _start_real(folder: Path, speculation: bool) -> RunningServer:
    engine = make_engine(with_plant=True)
    pair = engine.models["high"]
    flags = [_speculative_flag(str(pair.draft))] if speculation else []
    return RunningEngine(engine, folder, *flags, model=pair.target, environment=ENVIRONMENT)


def _start_simulated(folder: Path, speculation: bool) -> RunningServer:
    port = free_port()
    flags = [_speculative_flag("sim/draft")] if speculation else []
    fault = {"kind": "illegal-memory-access", "when": {"file": str(folder / "plant")}}
    return SimulatedServer(
        folder,
        ["sim/model", *build_flags(port), *flags],
        port=port,
        scenario={"faults": [fault]},
        environment={**ENVIRONMENT, "SPECDECODE_SIM_VLLM_VERSION": REAL_VERSION},
    )


def _speculative_flag(draft: str) -> str:
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": K_MAX,
        "num_speculative_tokens_per_batch_size": START_TABLE,
    }
    return f"--speculative-config={json.dumps(config)}"


def build_command(kind: str, *flags: str) -> list[str]:
    """Return the command line that starts a server of this kind with these flags alone."""
    if kind == "real":
        engine = make_engine(with_plant=True)
        return [str(engine.entrypoint), str(engine.models["high"].target), *flags]
    return [*Simulator().entrypoint(), "sim/model", *flags]
