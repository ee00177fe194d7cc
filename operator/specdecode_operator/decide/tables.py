"""Which table files should be there, which arm each pod follows, and who has taken them.

A pod's kubelet refreshes mounted files at once when the pod's annotations change, and only after
a minute otherwise; so every write is followed by annotations, repeated for pods that have not
acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api import metadata
from specdecode_operator.domain.decision import AnnotatePod
from specdecode_operator.domain.observation import Acknowledgement, ObservedPod, ObservedTables
from specdecode_operator.domain.table import KTable, TableFile

BUMPS_AFTER_SECONDS: Final = (0.0, 1.0, 3.0, 10.0)
ARM_NUMBERS: Final = {metadata.ARM_STABLE: 0, metadata.ARM_CANARY: 1, metadata.ARM_OFF: 2}


@dataclass(frozen=True)
class WantedTables:
    """Both files as they should be; canary is None where no pod follows it."""

    stable: TableFile
    canary: TableFile | None
    changed: bool
    written_at: datetime

    def file_of(self, arm: str) -> TableFile:
        """Return the file that an arm follows."""
        return self.canary if arm == metadata.ARM_CANARY and self.canary else self.stable


def plan_tables(
    *,
    stable: KTable,
    canary: KTable | None,
    enabled: bool,
    reason: str,
    observed: ObservedTables | None,
    least_generation: int,
    now: datetime,
) -> WantedTables:
    """Plan the files: what is there stays where its content is right, else the next generation.

    `least_generation` is the last one known from status, so that a deleted or hand-edited
    ConfigMap does not make the counter start again.
    """
    there = observed or ObservedTables(None, None, 0, None)
    generation = max(there.generation, least_generation) + 1
    new_stable = _keep_or_write(there.stable, stable, enabled, generation, reason)
    new_canary = (
        _keep_or_write(there.canary, canary, enabled, generation, reason) if canary else None
    )
    changed = new_stable != there.stable or new_canary != there.canary
    written_at = now if changed or there.written_at is None else there.written_at
    return WantedTables(new_stable, new_canary, changed, written_at)


def _keep_or_write(
    there: TableFile | None, table: KTable, enabled: bool, generation: int, reason: str
) -> TableFile:
    if there is not None and there.table == table and there.enabled == enabled:
        return there
    return TableFile(table=table, generation=generation, enabled=enabled, reason=reason)


def is_acknowledged(ack: Acknowledgement | None, arm: str, tables: WantedTables) -> bool:
    """Tell whether an engine reports the table that its arm should have."""
    if ack is None or not ack.live or ack.arm != ARM_NUMBERS[arm]:
        return False
    if arm == metadata.ARM_OFF:
        return True
    file = tables.file_of(arm)
    same = ack.generation == file.generation and ack.fingerprint == file.fingerprint
    return same and not ack.stale


def plan_annotations(
    *,
    pods: Sequence[ObservedPod],
    arms: Mapping[str, str],
    acknowledgements: Mapping[str, Acknowledgement],
    tables: WantedTables,
    now: datetime,
) -> tuple[AnnotatePod, ...]:
    """Plan the pods' annotations: the arm, the generation, and bumps for those that lag."""
    planned: list[AnnotatePod] = []
    for pod in pods:
        arm = arms.get(pod.name)
        if arm is None or pod.deleting:
            continue
        generation = str(tables.file_of(arm).generation)
        wanted = {
            metadata.ANNOTATION_ARM: arm,
            metadata.ANNOTATION_TABLE_GENERATION: generation,
            metadata.ANNOTATION_TABLE_BUMP: pod.table_bump,
        }
        there = {
            metadata.ANNOTATION_ARM: pod.arm,
            metadata.ANNOTATION_TABLE_GENERATION: pod.table_generation,
            metadata.ANNOTATION_TABLE_BUMP: pod.table_bump,
        }
        if not is_acknowledged(acknowledgements.get(pod.name), arm, tables):
            wanted[metadata.ANNOTATION_TABLE_BUMP] = _bump(generation, tables.written_at, now)
        if wanted != there:
            planned.append(AnnotatePod(pod.name, wanted))
    return tuple(planned)


def _bump(generation: str, written_at: datetime, now: datetime) -> str:
    age_seconds = (now - written_at).total_seconds()
    attempts = sum(1 for due in BUMPS_AFTER_SECONDS if age_seconds >= due)
    return f"{generation}.{attempts}"


def next_bump(written_at: datetime, now: datetime) -> timedelta | None:
    """Return when the next bump is due, None when all were made."""
    age_seconds = (now - written_at).total_seconds()
    due = next((d for d in BUMPS_AFTER_SECONDS if d > age_seconds), None)
    return None if due is None else timedelta(seconds=due - age_seconds)
