"""What each engine can do: one table by vLLM version and method.

What the engine refuses or silently drops, the operator refuses loudly first. What versions differ
in is `features`, a copy of vllm-image/features.yaml, which is proven in installed environments;
what methods differ in is here, from the sources of vllm 0.33.0 and runs of 0.32.0 on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.api.v1alpha1 import (
    CudagraphMode,
    Engine,
    LiveTable,
    Method,
    Plugin,
    RevisionInputs,
    Speculation,
    Switch,
)

from . import features

_VERSION_IN_TAG = re.compile(r"(\d+\.\d+\.\d+)")
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# Images made from vllm-image/ are called so; any other name may hide anything.
OUR_IMAGES: Final = "specdecode-"

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


# Graphs that hold a mixed batch: under adaptive verification vLLM turns FULL into
# FULL_AND_PIECEWISE (READ in 0.32.0 and 0.33.0).
GRAPHS_OF_MIXED_BATCHES: Final = frozenset({CudagraphMode.FULL, CudagraphMode.FULL_AND_PIECEWISE})


class Feature(StrEnum):
    """What versions differ in; the words of vllm-image/features.yaml, which explains them."""

    DYNAMIC_K = "dynamicK"
    ADAPTIVE_VERIFICATION = "adaptiveVerification"
    UNIFORM_BATCH_GRAPHS = "uniformBatchGraphs"
    TRUNCATED_DRAFTS = "truncatedDrafts"


@dataclass(frozen=True)
class Capabilities:
    """What one vLLM version can do with one method; nothing where the version is not known.

    `live_table`: it follows K by batch size, which the plugin makes live. `adaptive_graphs`:
    adaptive verification may stand beside graphs of mixed batches.
    """

    known: bool
    live_table: bool
    adaptive_verification: bool
    adaptive_graphs: bool
    runner_v2_default: bool
    notes: tuple[str, ...] = ()


NOTHING: Final = Capabilities(
    known=False,
    live_table=False,
    adaptive_verification=False,
    adaptive_graphs=False,
    runner_v2_default=False,
)


def capabilities(version: str | None, method: Method, *, our_image: bool = False) -> Capabilities:
    """Look up what an engine can do; `version` as `engine_version_of` gives it.

    Features that are ours count only for `our_image`. The runner is the one that vLLM chooses on
    CUDA; on a CPU it is always V1.
    """
    origins = _find_origins(version)
    if origins is None:
        return NOTHING
    has = {f for f in Feature if origins[f] == "upstream" or (our_image and origins[f] == "ours")}
    on_v2 = method not in METHODS_ON_V1_ONLY
    # A drafter of whole blocks writes nonsense when it is asked for less.
    cuts = method is not Method.DSPARK or Feature.TRUNCATED_DRAFTS in has
    return Capabilities(
        known=True,
        live_table=Feature.DYNAMIC_K in has and on_v2 and cuts,
        adaptive_verification=Feature.ADAPTIVE_VERIFICATION in has
        and method not in METHODS_WITHOUT_ADAPTIVE_VERIFICATION,
        adaptive_graphs=Feature.UNIFORM_BATCH_GRAPHS in has,
        runner_v2_default=on_v2,
        notes=(_NOTES[method],) if method in _NOTES else (),
    )


def capabilities_of(engine: Engine, method: Method) -> Capabilities:
    """Look up what the engine of a spec can do with a method."""
    return capabilities(engine_version_of(engine), method, our_image=is_our_image(engine))


def has_live_table(inputs: RevisionInputs) -> bool:
    """Tell whether the engine is started with a table, so that K can change while it runs."""
    return inputs.engine.plugin is not Plugin.NONE and _takes_table(inputs)


def has_fixed_table(inputs: RevisionInputs) -> bool:
    """Tell whether vLLM itself follows the user's table, fixed at start: without the plugin."""
    return inputs.engine.plugin is Plugin.NONE and _takes_table(inputs)


def _takes_table(inputs: RevisionInputs) -> bool:
    speculation = inputs.speculation
    return (
        speculation is not None
        and inputs.engine.live_table is LiveTable.PREFERRED
        and capabilities_of(inputs.engine, speculation.method).live_table
    )


def find_crash(engine: Engine, speculation: Speculation) -> str | None:
    """Say what to change where a combination is known to end in memory faults; else None.

    A version that is not known counts as one without the fix.
    """
    adaptive = speculation.adaptive_verification is Switch.ENABLED
    if not adaptive or speculation.cudagraph_mode not in GRAPHS_OF_MIXED_BATCHES:
        return None
    if capabilities_of(engine, speculation.method).adaptive_graphs:
        return None
    return (
        f"vLLM {engine_version_of(engine) or 'of an unknown version'} is not known to survive "
        f"adaptive verification beside {speculation.cudagraph_mode.value} graphs: illegal memory "
        "accesses under load, fixed upstream on 2026-10-27. Set spec.speculation.cudagraphMode to "
        "FULL_DECODE_ONLY, or spec.speculation.adaptiveVerification to Disabled."
    )


def choose_plugin(engine: Engine, *, can_inject: bool) -> Plugin:
    """Return how the engine comes by the plugin: as asked, else as its image needs it."""
    if engine.plugin is not None:
        return engine.plugin
    return Plugin.INJECT if can_inject and not is_our_image(engine) else Plugin.IMAGE


def is_our_image(engine: Engine) -> bool:
    """Tell by its name whether an image was made from vllm-image/."""
    repository = (engine.image or "").partition("@")[0]
    return repository.rpartition("/")[2].startswith(OUR_IMAGES)


def _find_origins(version: str | None) -> Mapping[str, str] | None:
    """Return the line of a version, or of the next older one of the same minor."""
    wanted = _to_release(version or "")
    known = {_to_release(text): origins for text, origins in features.VERSIONS.items()}
    older = [release for release in known if release[:2] == wanted[:2] and release <= wanted]
    return known[max(older)] if older else None


def _to_release(version: str) -> tuple[int, ...]:
    match = _RELEASE.match(version)
    return tuple(int(number) for number in match.groups()) if match else ()


def engine_version_of(engine: Engine) -> str | None:
    """Return vLLM's version: the field, else the one in the image's tag, else None."""
    if engine.version:
        return engine.version
    tag = (engine.image or "").rpartition(":")[2]
    match = _VERSION_IN_TAG.search(tag)
    return match.group(1) if match else None
