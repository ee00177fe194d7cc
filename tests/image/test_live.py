"""What is in force as arm and table files come, change, break and go."""

import json
import os
import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from specdecode_vllm import live, reload

LIMITS = live.Limits(envelope=frozenset({0, 1, 3, 7}), max_batch=8, captured_tokens=None)
Mounts = live.Sources


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    (tmp_path / "tables").mkdir()
    return live.Sources(tables_folder=tmp_path / "tables", arm_file=tmp_path / "arm")


def table_json(*, k: int, generation: int = 1, enabled: bool = True) -> str:
    rows = [[1, 4, k], [5, 8, 1]]
    return json.dumps({"schema": 1, "generation": generation, "enabled": enabled, "rows": rows})


def write_table(mounts: Mounts, text: str, *, name: str = "stable.json") -> None:
    draft = mounts.tables_folder / f".{name}"
    draft.write_text(text)
    draft.replace(mounts.tables_folder / name)


def ks(in_force: live.InForce) -> tuple[int, int]:
    assert in_force.lookup is not None
    return in_force.lookup[1], in_force.lookup[8]


def test_without_a_file_the_engine_starts_at_k_0_and_is_not_stale(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    assert table.poll() is None
    assert table.in_force == live.InForce(lookup=(0,) * 9)
    assert not table.in_force.enabled


def test_a_table_is_taken_when_it_appears(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    write_table(mounts, table_json(k=7))
    assert table.poll() is None
    assert ks(table.in_force) == (7, 1)
    assert table.in_force.enabled


def test_a_lower_generation_is_taken_too(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    for generation, k in ((9, 7), (2, 3)):
        write_table(mounts, table_json(k=k, generation=generation))
        table.poll()
    assert table.in_force.table is not None
    assert table.in_force.table.generation == 2
    assert ks(table.in_force) == (3, 1)


def test_a_change_that_keeps_the_file_time_is_seen(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    for k in (7, 3):
        write_table(mounts, table_json(k=k))
        os.utime(mounts.tables_folder / "stable.json", (1_000_000, 1_000_000))
        table.poll()
    assert ks(table.in_force) == (3, 1)


def test_a_swapped_symlink_is_followed_as_a_mounted_config_map_swaps(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    folder = mounts.tables_folder
    (folder / "stable.json").symlink_to("..data/stable.json")
    for version, k in (("..v1", 7), ("..v2", 3)):
        (folder / version).mkdir()
        (folder / version / "stable.json").write_text(table_json(k=k))
        (folder / "..tmp").symlink_to(version)
        (folder / "..tmp").rename(folder / "..data")
        table.poll()
        assert ks(table.in_force) == (k, 1)


def test_a_disabled_table_is_k_0_everywhere(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    write_table(mounts, table_json(k=7, enabled=False))
    table.poll()
    assert ks(table.in_force) == (0, 0)
    assert not table.in_force.enabled


@pytest.mark.parametrize(
    ("text", "arm", "expected"),
    [
        ("", live.Arm.STABLE, (7, 1)),
        ("stable", live.Arm.STABLE, (7, 1)),
        ("canary\n", live.Arm.CANARY, (3, 1)),
        ("off", live.Arm.OFF, (0, 0)),
    ],
)
def test_the_arm_chooses(
    mounts: Mounts, text: str, arm: live.Arm, expected: tuple[int, int]
) -> None:
    write_table(mounts, table_json(k=7))
    write_table(mounts, table_json(k=3), name="canary.json")
    mounts.arm_file.write_text(text)
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    assert table.in_force.arm is arm
    assert ks(table.in_force) == expected


def test_the_kill_switch_keeps_the_table_and_gives_it_back(mounts: Mounts) -> None:
    write_table(mounts, table_json(k=7, generation=4))
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    before = table.in_force
    mounts.arm_file.write_text("off")
    table.poll()
    assert ks(table.in_force) == (0, 0)
    assert table.in_force.table == before.table
    assert not table.in_force.enabled
    mounts.arm_file.write_text("stable")
    table.poll()
    assert table.in_force == before


def test_the_kill_switch_needs_no_table(mounts: Mounts) -> None:
    mounts.arm_file.write_text("off")
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    assert (table.in_force.arm, ks(table.in_force)) == (live.Arm.OFF, (0, 0))


def corrupt(mounts: Mounts) -> None:
    write_table(mounts, "{")


def go_outside(mounts: Mounts) -> None:
    write_table(mounts, table_json(k=5))


def remove(mounts: Mounts) -> None:
    (mounts.tables_folder / "stable.json").unlink()


def replace_by_folder(mounts: Mounts) -> None:
    remove(mounts)
    (mounts.tables_folder / "stable.json").mkdir()


def name_unknown_arm(mounts: Mounts) -> None:
    mounts.arm_file.write_text("Stable")


def follow_absent_canary(mounts: Mounts) -> None:
    mounts.arm_file.write_text("canary")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (corrupt, "not-json"),
        (go_outside, "outside-envelope"),
        (remove, live.MISSING),
        (replace_by_folder, live.UNREADABLE),
        (name_unknown_arm, live.ARM),
        (follow_absent_canary, live.MISSING),
    ],
)
def test_what_is_refused_leaves_the_table_in_force(
    mounts: Mounts, damage: Callable[[Mounts], None], reason: str
) -> None:
    write_table(mounts, table_json(k=7))
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    before = table.in_force
    damage(mounts)
    refusal = table.poll()
    assert refusal is not None
    assert refusal.reason == reason
    assert (table.in_force.arm, table.in_force.lookup) == (before.arm, before.lookup)
    assert table.in_force.stale


def test_a_refusal_is_told_once_and_again_for_another_content(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    told = []
    for text in ("{", "{", "[", "[", table_json(k=7), "["):
        write_table(mounts, text)
        told.append(table.poll() is not None)
    assert told == [True, False, True, False, False, True]


def test_a_good_file_ends_staleness(mounts: Mounts) -> None:
    table = live.LiveTable(mounts, LIMITS)
    for text in ("{", table_json(k=7)):
        write_table(mounts, text)
        table.poll()
    assert not table.in_force.stale


def test_a_broken_table_does_not_lift_the_kill_switch(mounts: Mounts) -> None:
    mounts.arm_file.write_text("off")
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    write_table(mounts, "{")
    mounts.arm_file.write_text("stable")
    table.poll()
    assert (table.in_force.arm, ks(table.in_force)) == (live.Arm.OFF, (0, 0))
    assert table.in_force.stale


def test_an_arm_file_that_vanishes_does_not_lift_the_kill_switch(mounts: Mounts) -> None:
    write_table(mounts, table_json(k=7))
    mounts.arm_file.write_text("off")
    table = live.LiveTable(mounts, LIMITS)
    table.poll()
    mounts.arm_file.unlink()
    table.poll()
    assert (table.in_force.arm, ks(table.in_force)) == (live.Arm.OFF, (0, 0))


def test_rows_beyond_the_captured_tokens_are_clamped_and_keep_the_files_fingerprint(
    mounts: Mounts,
) -> None:
    write_table(mounts, table_json(k=7))
    limits = live.Limits(LIMITS.envelope, LIMITS.max_batch, captured_tokens=16)
    table, unlimited = live.LiveTable(mounts, limits), live.LiveTable(mounts, LIMITS)
    table.poll()
    unlimited.poll()
    assert ks(table.in_force) == (3, 1)
    assert table.in_force.clamped_rows == 1
    assert table.in_force.table == unlimited.in_force.table


def test_the_last_row_is_clamped_for_the_batches_beyond_its_end(mounts: Mounts) -> None:
    rows = '{"schema": 1, "generation": 1, "enabled": true, "rows": [[1, 2, 7]]}'
    write_table(mounts, rows)
    limits = live.Limits(LIMITS.envelope, LIMITS.max_batch, captured_tokens=16)
    table = live.LiveTable(mounts, limits)
    table.poll()
    assert ks(table.in_force) == (1, 1)


@pytest.mark.parametrize(
    ("text", "arm"),
    [("", live.Arm.STABLE), ("canary", live.Arm.CANARY), ("off", live.Arm.STABLE)],
)
def test_an_engine_that_follows_no_table_tells_its_arm_and_no_kill_switch(
    mounts: Mounts, text: str, arm: live.Arm
) -> None:
    write_table(mounts, table_json(k=7))
    mounts.arm_file.write_text(text)
    table = live.LiveTable(mounts, None)
    table.poll()
    assert table.in_force == live.InForce(arm=arm)


def test_the_mounts_come_from_the_environment_and_have_defaults() -> None:
    given = {"SPECDECODE_TABLES": "/a", "SPECDECODE_ARM": "/b"}
    assert live.Sources.from_environment(given) == live.Sources(Path("/a"), Path("/b"))
    assert live.Sources.from_environment({}) == live.Sources(
        Path("/etc/specdecode/tables"), Path("/etc/specdecode/pod/arm")
    )


def test_the_reloader_follows_the_files_by_itself(mounts: Mounts) -> None:
    changes: queue.Queue[live.InForce] = queue.Queue()
    refusals: queue.Queue[str] = queue.Queue()
    reloader = reload.Reloader(
        live.LiveTable(mounts, LIMITS),
        on_change=lambda _, after: changes.put(after),
        on_refusal=lambda refusal: refusals.put(refusal.reason),
        on_error=lambda where, error: pytest.fail(f"{where}: {error}"),
        poll_seconds=0.01,
    )
    reloader.start()
    try:
        write_table(mounts, table_json(k=7))
        assert ks(changes.get(timeout=10)) == (7, 1)
        write_table(mounts, "{")
        assert refusals.get(timeout=10) == "not-json"
        assert changes.get(timeout=10).stale
    finally:
        reloader.stop()
        reloader.join(timeout=10)
    assert not reloader.is_alive()


def test_a_callback_that_fails_is_reported_and_the_reloader_goes_on(mounts: Mounts) -> None:
    errors: list[tuple[str, Exception]] = []

    def fail(before: live.InForce, after: live.InForce) -> None:
        raise RuntimeError("planted")

    table = live.LiveTable(mounts, LIMITS)
    reloader = reload.Reloader(
        table,
        on_change=fail,
        on_refusal=lambda refusal: None,
        on_error=lambda where, error: errors.append((where, error)),
    )
    write_table(mounts, table_json(k=7))
    reloader.poll()
    write_table(mounts, table_json(k=3))
    reloader.poll()
    assert [where for where, _ in errors] == ["reload", "reload"]
    assert ks(table.in_force) == (3, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0.2),
        ("0.05", 0.05),
        ("often", 0.2),
        ("0", 0.01),
        ("-3", 0.01),
        ("nan", 0.2),
        ("inf", 0.2),
    ],
)
def test_how_often_the_files_are_read_can_be_asked_for(text: str, seconds: float) -> None:
    assert reload.read_poll_seconds({"SPECDECODE_POLL_SECONDS": text}) == seconds
