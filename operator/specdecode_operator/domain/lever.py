"""Levers and changes, and what a revision of the engine is: its inputs, hashed and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from enum import StrEnum
from typing import Final, TypeVar

from specdecode_operator.api.v1alpha1 import (
    Engine,
    Fingerprint,
    RevisionInputs,
    Spec,
    Speculation,
    Switch,
)

from .engine import engine_version_of, find_crash, has_fixed_table
from .table import Envelope, KTable, Row

T = TypeVar("T", Engine, Speculation)


class Lever(StrEnum):
    """What can change about a running object; KTable needs a restart without the plugin only."""

    K_TABLE = "KTable"
    ENVELOPE = "Envelope"
    NUM_SPECULATIVE_TOKENS = "NumSpeculativeTokens"
    ADAPTIVE_VERIFICATION = "AdaptiveVerification"
    CUDAGRAPH_MODE = "CudagraphMode"
    SPECULATION = "Speculation"
    IMAGE = "Image"
    MODEL = "Model"
    ENGINE = "Engine"


# Safest first: what takes risk away before what adds it, the user's image last.
_ORDER: Final = (
    Lever.SPECULATION,
    Lever.CUDAGRAPH_MODE,
    Lever.ADAPTIVE_VERIFICATION,
    Lever.ENVELOPE,
    Lever.NUM_SPECULATIVE_TOKENS,
    Lever.MODEL,
    Lever.ENGINE,
    Lever.K_TABLE,
    Lever.IMAGE,
)


def inputs_of(spec: Spec, *, speculation: bool = True) -> RevisionInputs:
    """Take from a spec what a revision is made from; `speculation=False` is spec-off."""
    return RevisionInputs(
        model=spec.model,
        engine=spec.engine,
        speculation=spec.speculation if speculation else None,
    )


def revision_hash(inputs: RevisionInputs) -> str:
    """Name a revision: 10 hex digits over its inputs, not over the operator's defaults."""
    text = json.dumps(inputs.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def envelope_of(speculation: Speculation) -> Envelope:
    """Return the K values that the engine prepares for these inputs."""
    return Envelope.of(speculation.envelope, speculation.num_speculative_tokens)


def spec_table(speculation: Speculation, max_num_seqs: int) -> KTable:
    """Return the user's kTable, or K_max at every batch where none is given.

    Raises InvalidTableError where the rows break an invariant.
    """
    rows = speculation.k_table
    if not rows:
        return KTable.constant(speculation.num_speculative_tokens, max_num_seqs)
    return KTable.from_starts([(row.min_batch, row.k) for row in rows], max_num_seqs)


def fixed_table(inputs: RevisionInputs) -> KTable | None:
    """Return the table that an engine without live control runs; None with speculation off.

    That is the user's where vLLM itself follows it, else K_max at every batch.
    Raises InvalidTableError where the rows break an invariant.
    """
    speculation = inputs.speculation
    if speculation is None:
        return None
    if has_fixed_table(inputs):
        return spec_table(speculation, inputs.engine.max_num_seqs)
    return KTable.constant(speculation.num_speculative_tokens, inputs.engine.max_num_seqs)


def rows_to_table(rows: list[list[int]]) -> KTable | None:
    """Read a table back from status, None where there is none."""
    return KTable(tuple(Row(*row) for row in rows)) if rows else None


def differing_levers(old: RevisionInputs, new: RevisionInputs) -> tuple[Lever, ...]:
    """List what differs between two revisions, safest first."""
    return tuple(
        lever for lever in _ORDER if _with_lever(old, new, lever).to_json() != old.to_json()
    )


def next_step(
    old: RevisionInputs, new: RevisionInputs, *, without: Collection[Fingerprint] = ()
) -> tuple[Lever, RevisionInputs] | None:
    """Return the first single change on the way from old to new, None where nothing differs.

    Levers that only make sense together (an envelope above the new K_max) move together, and so
    do those between which only a fingerprint of `without` lies.
    """
    levers = differing_levers(old, new)
    for lever in levers:
        candidate = _with_lever(old, new, lever)
        if is_consistent(candidate) and fingerprint_of(candidate) not in without:
            return lever, candidate
    return (levers[0], new) if levers else None


def is_consistent(inputs: RevisionInputs) -> bool:
    """Tell whether an intermediate step would be accepted.

    K values within K_max, adaptive verification with full graphs, no combination that crashes.
    """
    speculation = inputs.speculation
    if speculation is None:
        return True
    full = speculation.cudagraph_mode.value.startswith("FULL")
    needs_full = speculation.adaptive_verification is Switch.ENABLED
    ks = (*speculation.envelope, *(row.k for row in speculation.k_table))
    fits = all(k <= speculation.num_speculative_tokens for k in ks)
    crashes = find_crash(inputs.engine, speculation) is not None
    return fits and (full or not needs_full) and not crashes


def fingerprint_of(inputs: RevisionInputs) -> Fingerprint | None:
    """Return the configuration as quarantine knows it; None with speculation off."""
    speculation = inputs.speculation
    if speculation is None:
        return None
    return Fingerprint(
        image=inputs.engine.image or "",
        engine_version=engine_version_of(inputs.engine) or "",
        method=speculation.method,
        draft_model=speculation.draft_model or "",
        cudagraph_mode=speculation.cudagraph_mode,
        adaptive_verification=speculation.adaptive_verification,
        num_speculative_tokens=speculation.num_speculative_tokens,
    )


def levers_digest(spec: Spec) -> str:
    """Digest what a user may edit to leave a quarantine: image, version and speculation levers."""
    return revision_hash(
        inputs_of(spec).model_copy(
            update={"engine": Engine(image=spec.engine.image, version=spec.engine.version)}
        )
    )


def _with_lever(old: RevisionInputs, new: RevisionInputs, lever: Lever) -> RevisionInputs:
    """Return old with one lever taken from new."""
    model, engine, speculation = old.model, old.engine, old.speculation
    if (speculation is None) != (new.speculation is None):
        if lever is Lever.SPECULATION:
            speculation = new.speculation
    elif speculation is not None and new.speculation is not None:
        fields = _SPECULATION_FIELDS.get(lever, ())
        if lever is Lever.ENGINE and engine.plugin is not new.engine.plugin:
            # The plugin's absence takes the table among the inputs, its return takes it out.
            fields = ("k_table",)
        speculation = _copy(speculation, new.speculation, fields)
    if lever is Lever.MODEL:
        model = new.model
    elif lever is Lever.IMAGE:
        engine = _copy(engine, new.engine, ("image", "version"))
    elif lever is Lever.ENGINE:
        engine = _copy(new.engine, engine, ("image", "version"))
    # Validated anew: whether the table belongs to the inputs depends on the engine.
    return RevisionInputs(model=model, engine=engine, speculation=speculation)


_SPECULATION_FIELDS: Final = {
    Lever.CUDAGRAPH_MODE: ("cudagraph_mode",),
    Lever.ADAPTIVE_VERIFICATION: ("adaptive_verification",),
    Lever.ENVELOPE: ("envelope",),
    Lever.NUM_SPECULATIVE_TOKENS: ("num_speculative_tokens",),
    Lever.MODEL: ("method", "draft_model"),
    Lever.K_TABLE: ("k_table",),
}


def _copy(old: T, new: T, fields: tuple[str, ...]) -> T:
    return old.model_copy(update={field: getattr(new, field) for field in fields})
