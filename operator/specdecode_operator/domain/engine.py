"""What each engine can do: one table by vLLM version, method and parallelism.

What the engine refuses or silently drops, the operator refuses loudly first. Facts are from the
sources of vllm 0.33.0 and from runs of 0.32.0 on a CPU; see docs/design.
"""

from __future__ import annotations

import re
from typing import Final

from specdecode_operator.api.v1alpha1 import Engine, LiveTable, Method, RevisionInputs

_VERSION_IN_TAG = re.compile(r"(\d+\.\d+\.\d+)")

# Methods that draft with a model of their own.
METHODS_WITH_DRAFT_MODEL: Final = frozenset(
    {Method.EAGLE, Method.EAGLE3, Method.DRAFT_MODEL, Method.DFLASH, Method.DSPARK}
)

# V1's proposer for it wants a fixed K: 0.33 drops the table, 0.32 keeps it and dies of an assert.
METHODS_WITHOUT_LIVE_TABLE: Final = frozenset({Method.SUFFIX})


def has_live_table(inputs: RevisionInputs) -> bool:
    """Tell whether the engine is started with a table, so that K can change while it runs."""
    speculation = inputs.speculation
    return (
        speculation is not None
        and inputs.engine.live_table is LiveTable.PREFERRED
        and speculation.method not in METHODS_WITHOUT_LIVE_TABLE
    )


def engine_version_of(engine: Engine) -> str | None:
    """Return vLLM's version: the field, else the one in the image's tag, else None."""
    if engine.version:
        return engine.version
    tag = (engine.image or "").rpartition(":")[2]
    match = _VERSION_IN_TAG.search(tag)
    return match.group(1) if match else None
