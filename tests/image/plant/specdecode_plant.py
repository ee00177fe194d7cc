"""Plants an illegal memory access in the engine's worker, so that its fall can be tested.

A CPU has no CUDA to fail, so the worker raises the error a GPU's worker raises, from where it
raises it: everything after it (the worker's log, the engine's death, the server's exit code)
is vLLM's own. Never part of the image.
"""

import os
from pathlib import Path
from typing import Any

VARIABLE = "SPECDECODE_PLANT_IMA"
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
    """Let workers fail at a step for which the file named by SPECDECODE_PLANT_IMA is there.

    The file is taken away by the worker that fails: one file, one crash.
    """
    if not os.environ.get(VARIABLE):
        return
    import torch
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    seed = Path(os.environ[VARIABLE])
    original = WorkerWrapperBase.execute_model
    if getattr(original, "is_planted", False):
        return

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if seed.exists():
            seed.unlink(missing_ok=True)
            raise torch.AcceleratorError(MESSAGE)
        return original(self, *args, **kwargs)

    execute_model.is_planted = True  # type: ignore[attr-defined]
    WorkerWrapperBase.execute_model = execute_model
