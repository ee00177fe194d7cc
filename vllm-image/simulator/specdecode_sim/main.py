"""`specdecode-sim serve MODEL …`: the simulated engine with vLLM's command line.

What the simulator itself needs comes by environment, so that the command stays vLLM's:
SPECDECODE_SIM_PROFILE (a name or a file), _SCENARIO (a file), _TIME_SCALE (how many times slower
than the profile), _SPEED (of this pod's GPU, 1 = as the profile), _SEED, _VLLM_VERSION.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry

from specdecode_sim import __version__, arguments, faults, profile
from specdecode_sim.engine import Engine
from specdecode_sim.server import Server
from specdecode_vllm import termination

DEFAULT_VLLM_VERSION = "0.33.0"
DEFAULT_PROFILE = "llama8b-a100"
LOG_FORMAT = "(EngineCore pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] "

logger = logging.getLogger("vllm.specdecode_sim")


@dataclass(frozen=True)
class Settings:
    """What the environment says."""

    profile: str
    scenario: faults.Scenario
    time_scale: float
    speed: float
    seed: int
    vllm_version: str
    node: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Read the environment; raises ValueError for what is no number."""
        host = environment.get("HOSTNAME", "")
        seed = environment.get("SPECDECODE_SIM_SEED", "0")
        return cls(
            profile=environment.get("SPECDECODE_SIM_PROFILE", DEFAULT_PROFILE),
            scenario=faults.from_environment(environment),
            time_scale=float(environment.get("SPECDECODE_SIM_TIME_SCALE", "1")),
            speed=float(environment.get("SPECDECODE_SIM_SPEED", "1")),
            seed=int.from_bytes(f"{seed}:{host}".encode()[-7:], "big"),
            vllm_version=environment.get("SPECDECODE_SIM_VLLM_VERSION", DEFAULT_VLLM_VERSION),
            node=environment.get("NODE_NAME", ""),
        )


def main() -> None:
    """Serve until SIGTERM or the engine's end; exit as vLLM's main process does."""
    command, *rest = sys.argv[1:] or ["--help"]
    if command != "serve":
        sys.exit(f"usage: specdecode-sim serve MODEL [vLLM's options]\n\n{__doc__}")
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # vLLM has none
    logging.basicConfig(format=LOG_FORMAT + "%(message)s", datefmt="%m-%d %H:%M:%S")
    logging.getLogger("vllm").setLevel(logging.INFO)
    termination.install()
    try:
        settings = Settings.read(os.environ)
        options = arguments.parse(rest, os.environ)
        if settings.scenario.refuse_configuration:
            arguments.refuse(settings.scenario.refuse_configuration)
        speed = settings.speed * settings.scenario.speed_by_node.get(settings.node, 1.0)
        chosen = profile.load_profile(settings.profile).scaled(1.0 / speed)
    except (ValueError, LookupError) as error:
        faults.refuse_configuration(error)
        raise
    sys.exit(asyncio.run(_serve(settings, options, chosen)))


async def _serve(settings: Settings, options: arguments.Options, chosen: profile.Profile) -> int:
    registry = CollectorRegistry()
    _announce(settings, options, chosen)
    if settings.scenario.slow_start_seconds:
        logger.info("slow start: %g s more", settings.scenario.slow_start_seconds)
    await asyncio.sleep(chosen.start_seconds + settings.scenario.slow_start_seconds)
    engine = _build_engine(settings, options, chosen, registry)
    server = Server(engine, registry, version=settings.vllm_version)
    runner = web.AppRunner(server.build_app(), access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, backlog=4096).start()
    logger.info("Application startup complete, on port %d", options.port)
    steps = asyncio.create_task(engine.run())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({steps, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if steps.done():
        code = _end(engine, steps)
        await asyncio.sleep(0.1)  # failed requests get their answers
    else:
        await _drain(server, options.shutdown_seconds)
        code = 0
    steps.cancel()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), timeout=2.0)
    return code


def _build_engine(
    settings: Settings,
    options: arguments.Options,
    chosen: profile.Profile,
    registry: CollectorRegistry,
) -> Engine:
    """Make the engine; a configuration that it refuses ends the start as in `main`."""
    try:
        return Engine(
            options,
            chosen,
            registry=registry,
            vllm_version=settings.vllm_version,
            faults=faults.Faults(settings.scenario, node=settings.node, seed=settings.seed),
            time_scale=settings.time_scale,
            seed=settings.seed,
        )
    except arguments.ConfigRefusedError as error:
        faults.refuse_configuration(error)
        raise


def _announce(settings: Settings, options: arguments.Options, chosen: profile.Profile) -> None:
    logger.info(
        "specdecode-sim %s as vLLM %s: profile %s, time scale %g, %s",
        __version__,
        settings.vllm_version,
        chosen.name,
        settings.time_scale,
        options,
    )
    if options.ignored:
        logger.warning("the simulator does nothing by %s", ", ".join(options.ignored))


def _end(engine: Engine, steps: asyncio.Task[None]) -> int:
    """End as vLLM does after its engine died: requests fail, and the exit code is 0."""
    error = steps.exception()
    if isinstance(error, faults.EngineFault):
        faults.end_engine(error.fault)
        engine.die()
        return 0
    logger.error("the simulator itself failed", exc_info=error)
    return 70


async def _drain(server: Server, seconds: float) -> None:
    """Let running requests end, at most so many seconds; their connections end with them."""
    server.is_draining = True
    deadline = asyncio.get_running_loop().time() + seconds
    while server.open_requests and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)
