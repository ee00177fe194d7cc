"""Table files, arms and annotations: what is written, and who counts as having taken it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from specdecode_operator.api import metadata
from specdecode_operator.decide import tables
from specdecode_operator.domain.observation import Acknowledgement, ObservedTables
from specdecode_operator.domain.table import KTable, TableFile
from tests.support.builders import NOW, build_pod

SEVEN = KTable.constant(7, 64)
THREE = KTable.constant(3, 64)


def plan(stable: KTable = SEVEN, **changes: object) -> tables.WantedTables:
    facts: dict[str, object] = {
        "canary": None,
        "enabled": True,
        "reason": "in force",
        "observed": ObservedTables(TableFile(SEVEN, 4, True, "in force"), None, 4, NOW),
        "least_generation": 4,
        "now": NOW + timedelta(minutes=1),
    }
    return tables.plan_tables(stable=stable, **{**facts, **changes})  # type: ignore[arg-type]


def acknowledge(file: TableFile, **changes: object) -> Acknowledgement:
    facts: dict[str, object] = {
        "generation": file.generation,
        "fingerprint": file.fingerprint,
        "stale": False,
        "arm": 0,
        "enabled": file.enabled,
        "live": True,
        "engine_version": "0.33.0",
        "method": "eagle3",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
    }
    return Acknowledgement(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_right_file_stays_with_its_generation() -> None:
    planned = plan()
    assert not planned.changed
    assert (planned.stable.generation, planned.written_at) == (4, NOW)


def test_another_table_is_the_next_generation() -> None:
    planned = plan(THREE)
    assert planned.changed
    assert planned.stable.generation == 5


def test_the_kill_switch_is_another_generation_of_the_same_rows() -> None:
    planned = plan(enabled=False)
    assert (planned.stable.table, planned.stable.enabled) == (SEVEN, False)
    assert planned.stable.generation == 5


def test_a_deleted_config_map_goes_on_counting() -> None:
    assert plan(observed=None).stable.generation == 5


def test_an_unreadable_file_is_written_anew() -> None:
    assert plan(observed=ObservedTables(None, None, 0, None)).changed


ACKNOWLEDGEMENTS = {
    "all right": ("stable", {}, True),
    "an older generation": ("stable", {"generation": 3}, False),
    "a hand-edited content": ("stable", {"fingerprint": 1}, False),
    "stale: it refused the file": ("stable", {"stale": True}, False),
    "another arm": ("stable", {"arm": 1}, False),
    "no live table": ("stable", {"live": False}, False),
    "the kill switch needs no generation": ("off", {"arm": 2, "generation": 0}, True),
    "the kill switch not taken yet": ("off", {"arm": 0}, False),
}


@pytest.mark.parametrize("situation", ACKNOWLEDGEMENTS)
def test_who_has_taken_the_table(situation: str) -> None:
    arm, changes, expected = ACKNOWLEDGEMENTS[situation]
    planned = plan()
    ack = acknowledge(planned.stable, **changes)
    assert tables.is_acknowledged(ack, arm, planned) is expected


def test_who_does_not_answer_has_not_taken_it() -> None:
    assert not tables.is_acknowledged(None, "stable", plan())


@pytest.mark.parametrize(
    ("seconds", "bump"), [(0, "5.1"), (0.9, "5.1"), (1, "5.2"), (3.5, "5.3"), (10, "5.4")]
)
def test_pods_that_lag_are_bumped_again(seconds: float, bump: str) -> None:
    written = plan(THREE, now=NOW)
    (action,) = tables.plan_annotations(
        pods=[build_pod("p", "r", table_generation="5")],
        arms={"p": "stable"},
        acknowledgements={},
        tables=written,
        now=NOW + timedelta(seconds=seconds),
    )
    assert action.annotations[metadata.ANNOTATION_TABLE_BUMP] == bump


def test_a_pod_that_has_taken_it_is_left_alone() -> None:
    written = plan(THREE, now=NOW)
    assert not tables.plan_annotations(
        pods=[build_pod("p", "r", table_generation="5", table_bump="5.1")],
        arms={"p": "stable"},
        acknowledgements={"p": acknowledge(written.stable)},
        tables=written,
        now=NOW + timedelta(minutes=1),
    )


def test_a_new_pod_is_stamped() -> None:
    written = plan()
    (action,) = tables.plan_annotations(
        pods=[build_pod("p", "r", arm="stable")],
        arms={"p": "off"},
        acknowledgements={},
        tables=written,
        now=NOW,
    )
    assert action.annotations[metadata.ANNOTATION_ARM] == "off"
    assert action.annotations[metadata.ANNOTATION_TABLE_GENERATION] == "4"
