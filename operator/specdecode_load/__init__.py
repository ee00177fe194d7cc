"""A closed-loop load generator for any OpenAI-compatible vLLM server.

A figure for tokens a second means little without a load that stays the same while the engine
changes under it. Here every stream sends its next request the moment the last one has ended, so
the number of running requests is held, and the engine's speed is what moves. It stands apart from
the operator (and imports nothing of it): who measures must not be who tunes.

    target = await probe("http://127.0.0.1:8000")
    async with ClosedLoop(target, Workload(seed=7), streams=8) as loop:
        async with loop.window() as window:
            await asyncio.sleep(30)
        loop.set_concurrency(32)
    print(window.result.tokens_per_second)

`BackgroundLoop` is the same for callers that do not live in an event loop.
"""

from specdecode_load.acceptance import Acceptance
from specdecode_load.background import BackgroundLoop
from specdecode_load.lengths import Lengths
from specdecode_load.loop import ClosedLoop, run_stage
from specdecode_load.measure import Measurement, Window
from specdecode_load.probe import probe
from specdecode_load.prompts import read_prompts
from specdecode_load.spread import Distribution, Spread
from specdecode_load.target import ErrorKind, RequestError, Target
from specdecode_load.workload import Workload

__all__ = [
    "Acceptance",
    "BackgroundLoop",
    "ClosedLoop",
    "Distribution",
    "ErrorKind",
    "Lengths",
    "Measurement",
    "RequestError",
    "Spread",
    "Target",
    "Window",
    "Workload",
    "probe",
    "read_prompts",
    "run_stage",
]
