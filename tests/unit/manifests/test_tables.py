"""The ConfigMap of tables: what is written is what is read, and what is not ours is nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.domain.observation import ObservedTables
from specdecode_operator.domain.table import KTable, TableFile
from specdecode_operator.manifests.tables import build_tables, parse_table_file, read_tables
from tests.unit.manifests.builders import KEY, UID

NOW = datetime(2026, 11, 5, 12, 0, 0, 123456, tzinfo=UTC)
STABLE = TableFile(KTable.from_rows([[1, 16, 7], [17, 64, 3]]), 12, enabled=True, reason="a")
CANARY = TableFile(KTable.constant(1, 64), 13, enabled=False, reason="é")
CASES = json.loads(
    (Path(__file__).parents[2] / "data" / "tables_contract.json").read_text(encoding="utf-8")
)["cases"]


def built(canary: TableFile | None = None) -> dict[str, Any]:
    return build_tables(KEY, UID, stable=STABLE, canary=canary, written_at=NOW)


def test_the_config_map_has_the_name_that_pods_mount_and_one_key_per_arm() -> None:
    assert built()["metadata"]["name"] == "chat-spec-tables"
    assert built()["data"].keys() == {"stable.json"}
    assert built(CANARY)["data"].keys() == {"stable.json", "canary.json"}


def test_what_was_written_is_what_is_read_back() -> None:
    assert read_tables(built(CANARY)) == ObservedTables(STABLE, CANARY, 13, NOW)
    assert read_tables(built()) == ObservedTables(STABLE, None, 12, NOW)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_file_is_read_as_the_engine_reads_it(case: dict[str, Any]) -> None:
    seen = parse_table_file(case["text"])
    refused = case["expect"].get("reason")
    # What an engine was started with is not the ConfigMap's to know.
    if refused is not None and refused != "outside-envelope":
        assert seen is None
    else:
        assert seen is not None
    if refused is None and seen is not None:
        assert seen.fingerprint == case["expect"]["fingerprint"]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"metadata": {"annotations": None}, "data": None},
        {"metadata": {"annotations": {"specdecode.io/written-at": "yesterday"}}},
        {"metadata": {"annotations": {"specdecode.io/written-at": "2026-11-05T12:00:00"}}},
        {"data": {"stable.json": "", "canary.json": "[]"}},
    ],
)
def test_a_config_map_edited_by_hand_reads_as_nothing(raw: dict[str, Any]) -> None:
    assert read_tables(raw) == ObservedTables(None, None, 0, None)


def test_one_bad_file_does_not_hide_the_other() -> None:
    raw = built(CANARY)
    raw["data"]["stable.json"] = raw["data"]["stable.json"][:-5]
    assert read_tables(raw) == ObservedTables(None, CANARY, 13, NOW)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4)
    ),
    max_leaves=8,
)
ALMOST = st.fixed_dictionaries(
    {"schema": st.just(1) | JSON, "generation": st.integers() | JSON, "enabled": st.booleans()},
    optional={
        "rows": st.lists(st.lists(st.integers(-1, 9), max_size=4), max_size=3),
        "reason": JSON,
    },
)


@given(st.text(max_size=40) | (JSON | ALMOST).map(json.dumps))
def test_reading_never_fails(text: str) -> None:
    parse_table_file(text)


@given(st.integers(0, 2**40), st.booleans(), st.text(max_size=20))
def test_any_file_of_ours_comes_back_whole(generation: int, enabled: bool, reason: str) -> None:
    file = TableFile(STABLE.table, generation, enabled, reason)
    assert parse_table_file(file.to_json()) == file
