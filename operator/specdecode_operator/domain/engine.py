"""What each engine can do: one table by vLLM version and method.

What the engine refuses or silently drops, the operator refuses loudly first. Facts are from the
sources of vllm 0.33.0 and from runs of 0.32.0 on a CPU; see docs/design.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.v1alpha1 import Engine, LiveTable, Method, RevisionInputs

_VERSION_IN_TAG = re.compile(r"(\d+\.\d+\.\d+)")
_MINOR = re.compile(r"(\d+)\.(\d+)\.")

KNOWN_MINORS: Final = frozenset({(0, 32), (0, 33)})

# The V2 runner has no proposer for it, and V1's wants a fixed K: 0.33 drops the table, 0.32 keeps
# it and dies of an assert.
METHODS_ON_V1_ONLY: Final = frozenset({Method.SUFFIX})
# Adaptive verification weighs the drafter's logits, which these do not have; and it needs V2.
METHODS_WITHOUT_ADAPTIVE_VERIFICATION: Final = METHODS_ON_V1_ONLY | {Method.NGRAM}

_NOTES: Final[Mapping[Method, str]] = {
    Method.DRAFT_MODEL: "on the V2 runner drafts always run to numSpeculativeTokens: a smaller K "
    "saves verification only",
    Method.MTP: "numSpeculativeTokens must be a multiple of the model's n_predict",
    Method.DFLASH: "drafting costs the same at every K above 0",
    Method.DSPARK: "numSpeculativeTokens below the checkpoint's block size gives invalid output",
    Method.SUFFIX: "runs on the V1 runner, which follows no table",
}


@dataclass(frozen=True)
class Capabilities:
    """What one vLLM version can do with one method; nothing where the version is not known."""

    known: bool
    live_table: bool
    adaptive_verification: bool
    runner_v2_default: bool
    notes: tuple[str, ...] = ()


def capabilities(version: str | None, method: Method) -> Capabilities:
    """Look up what an engine can do; `version` as `engine_version_of` gives it.

    The runner is the one that vLLM chooses on CUDA; on a CPU it is always V1.
    """
    match = _MINOR.match(version or "")
    if match is None or (int(match[1]), int(match[2])) not in KNOWN_MINORS:
        return Capabilities(
            known=False, live_table=False, adaptive_verification=False, runner_v2_default=False
        )
    return Capabilities(
        known=True,
        live_table=method not in METHODS_ON_V1_ONLY,
        adaptive_verification=method not in METHODS_WITHOUT_ADAPTIVE_VERIFICATION,
        runner_v2_default=method not in METHODS_ON_V1_ONLY,
        notes=(_NOTES[method],) if method in _NOTES else (),
    )


def has_live_table(inputs: RevisionInputs) -> bool:
    """Tell whether the engine is started with a table, so that K can change while it runs."""
    speculation = inputs.speculation
    return (
        speculation is not None
        and inputs.engine.live_table is LiveTable.PREFERRED
        and capabilities(engine_version_of(inputs.engine), speculation.method).live_table
    )


def engine_version_of(engine: Engine) -> str | None:
    """Return vLLM's version: the field, else the one in the image's tag, else None."""
    if engine.version:
        return engine.version
    tag = (engine.image or "").rpartition(":")[2]
    match = _VERSION_IN_TAG.search(tag)
    return match.group(1) if match else None
