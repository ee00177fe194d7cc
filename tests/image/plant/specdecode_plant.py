"""Plants faults in the engine, so that its fall can be tested.

A CPU has no CUDA to fail, so the error that a GPU's worker raises is raised, from where it is
raised: everything after it (the log, the engine's death, the server's exit code) is vLLM's own.
Never part of the image.
"""

import os
from pathlib import Path
from typing import Any

WORKER = "SPECDECODE_PLANT_IMA"
ENGINE = "SPECDECODE_PLANT_ENGINE_IMA"
MISSING = "SPECDECODE_PLANT_MISSING"
MESSAGE = """\
CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in \
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, \
so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def register() -> None:
    """Plant what the environment asks for; called more than once in each process of vLLM."""
    if seed := os.environ.get(WORKER):
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        _let_fail(WorkerWrapperBase, Path(seed))
    if seed := os.environ.get(ENGINE):
        # A single GPU's worker lives in the engine's process; a CPU's never does.
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        _let_fail(MultiprocExecutor, Path(seed))
    if name := os.environ.get(MISSING):
        from vllm.v1.core.sched.output import SchedulerOutput

        SchedulerOutput.__dataclass_fields__.pop(name, None)


def _let_fail(owner: Any, seed: Path) -> None:
    """Let `execute_model` fail once the seed is there; it is taken away: one file, one crash."""
    original = owner.execute_model
    if getattr(original, "is_planted", False):
        return

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if seed.exists():
            import torch

            seed.unlink(missing_ok=True)
            raise torch.AcceleratorError(MESSAGE)
        return original(self, *args, **kwargs)

    execute_model.is_planted = True  # type: ignore[attr-defined]
    owner.execute_model = execute_model
