"""The ConfigMap of K-tables, mounted into every pod, and how it is read back.

Reading is strict and never fails: a file that somebody edited by hand is either exactly what the
engine's plugin would take or None, and None is written anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeGuard

from specdecode_operator.api import metadata
from specdecode_operator.domain.observation import ObjectKey, ObservedTables
from specdecode_operator.domain.table import SCHEMA, KTable, TableFile
from specdecode_operator.errors import InvalidTableError

from . import owner

STABLE_FILE: Final = "stable.json"
CANARY_FILE: Final = "canary.json"
MAX_FILE_BYTES: Final = 64 * 1024
_REQUIRED: Final = frozenset({"schema", "generation", "enabled", "rows"})
_OPTIONAL: Final = frozenset({"reason"})


def build_tables(
    key: ObjectKey,
    uid: str,
    *,
    stable: TableFile,
    canary: TableFile | None,
    written_at: datetime,
) -> dict[str, Any]:
    """Build the ConfigMap; `written_at` (with its time zone) is kept as an annotation."""
    files = {STABLE_FILE: stable} if canary is None else {STABLE_FILE: stable, CANARY_FILE: canary}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.build_metadata(
            key,
            uid,
            name=metadata.tables_name(key.name),
            annotations={metadata.ANNOTATION_WRITTEN_AT: written_at.isoformat()},
        ),
        "data": {name: file.to_json() for name, file in files.items()},
    }


def read_tables(raw: Mapping[str, Any]) -> ObservedTables:
    """Read the ConfigMap as the API server holds it; whatever cannot be read is None.

    The generation is the higher one of the two files, 0 where neither can be read.
    """
    data = raw.get("data") or {}
    stable, canary = (parse_table_file(data.get(name)) for name in (STABLE_FILE, CANARY_FILE))
    annotations = (raw.get("metadata") or {}).get("annotations") or {}
    return ObservedTables(
        stable=stable,
        canary=canary,
        generation=max((file.generation for file in (stable, canary) if file), default=0),
        written_at=_parse_time(annotations.get(metadata.ANNOTATION_WRITTEN_AT)),
    )


def parse_table_file(text: object) -> TableFile | None:
    """Read one file as strictly as the engine does, None for anything else."""
    if not isinstance(text, str) or len(text.encode(errors="replace")) > MAX_FILE_BYTES:
        return None
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    if not _is_well_formed(fields):
        return None
    try:
        table = KTable.from_rows(fields["rows"])
    except InvalidTableError:
        return None
    return TableFile(
        table=table,
        generation=fields["generation"],
        enabled=fields["enabled"],
        reason=fields.get("reason", ""),
    )


def _is_well_formed(fields: object) -> TypeGuard[dict[str, Any]]:
    """Tell whether keys and types are as agreed; the rows' own rules are the table's."""
    if not isinstance(fields, dict) or not _REQUIRED <= fields.keys() <= _REQUIRED | _OPTIONAL:
        return False
    schema, generation, rows = fields["schema"], fields["generation"], fields["rows"]
    return (
        _is_integer(schema)
        and schema == SCHEMA
        and _is_integer(generation)
        and generation >= 0
        and isinstance(fields["enabled"], bool)
        and isinstance(fields.get("reason", ""), str)
        and isinstance(rows, list)
        and all(isinstance(row, list) and all(map(_is_integer, row)) for row in rows)
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_time(value: object) -> datetime | None:
    try:
        parsed = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return parsed if parsed is not None and parsed.tzinfo is not None else None
