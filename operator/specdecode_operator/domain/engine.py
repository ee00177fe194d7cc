"""What each engine can do: one table by vLLM version, method and parallelism.

What the engine refuses or silently drops, the operator refuses loudly first. Facts are from the
sources of vllm 0.33.0 and from runs of 0.32.0 on a CPU; see docs/design.
"""

from __future__ import annotations

import re
from typing import Final

from specdecode_operator.api.v1alpha1 import Engine, Method

_VERSION_IN_TAG = re.compile(r"(\d+\.\d+\.\d+)")

# Methods that draft with a model of their own.
METHODS_WITH_DRAFT_MODEL: Final = frozenset(
    {Method.EAGLE, Method.EAGLE3, Method.DRAFT_MODEL, Method.DFLASH, Method.DSPARK}
)


def engine_version_of(engine: Engine) -> str | None:
    """Return vLLM's version: the field, else the one in the image's tag, else None."""
    if engine.version:
        return engine.version
    tag = (engine.image or "").rpartition(":")[2]
    match = _VERSION_IN_TAG.search(tag)
    return match.group(1) if match else None
