"""The K-table keeps its invariants whatever is done to it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.domain import table
from specdecode_operator.domain.table import Envelope, KTable, Row
from specdecode_operator.errors import InvalidTableError

CONTRACT = json.loads(
    (Path(__file__).parents[2] / "data" / "tables_contract.json").read_text("utf-8")
)["cases"]

MAX_BATCH = 4096
STARTS = [batch for batch in range(1, MAX_BATCH + 1) if table.is_row_start(batch)]
BOUNDS = [2**n for n in range(13)]

batches = st.integers(1, 2 * MAX_BATCH)
some_ks = st.integers(0, 16)


@st.composite
def tables(draw: st.DrawFn) -> KTable:
    starts = sorted(draw(st.sets(st.sampled_from(STARTS[1:]), max_size=6)) | {1})
    ks = draw(st.lists(some_ks, min_size=len(starts), max_size=len(starts)))
    return KTable.from_starts(
        list(zip(starts, ks, strict=True)), draw(st.integers(1, 2 * MAX_BATCH))
    )


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    return Envelope.of(draw(st.sets(st.integers(0, 20), max_size=5)), draw(st.integers(1, 16)))


# ----------------------------------------------------------------------------- buckets


def test_rows_start_at_1_or_one_above_a_power_of_two() -> None:
    assert STARTS[:8] == [1, 2, 3, 5, 9, 17, 33, 65]
    assert not table.is_row_start(0)
    assert not table.is_row_start(4)


@given(batches)
def test_a_bucket_holds_its_batch_and_begins_at_a_row_start(batch: int) -> None:
    bound = table.bucket_of(batch)
    assert table.bucket_first(bound) <= batch <= bound
    assert table.is_row_start(table.bucket_first(bound))


@given(st.floats(1, 10_000))
def test_a_mean_batch_falls_into_the_bucket_of_the_next_whole_batch(batch: float) -> None:
    bound = table.bucket_of(batch)
    assert batch <= bound
    assert bound == 1 or batch > bound / 2


# -------------------------------------------------------------------------- invariants


@given(tables())
def test_every_batch_has_one_row(a_table: KTable) -> None:
    assert a_table.rows[0].first == 1
    assert all(before.last + 1 == after.first for before, after in pairwise(a_table.rows))
    assert all(row.first <= row.last for row in a_table.rows)


@given(tables(), batches)
def test_a_batch_gets_the_k_of_its_row_and_the_last_row_holds_beyond_its_end(
    a_table: KTable, batch: int
) -> None:
    row = next((r for r in a_table.rows if r.first <= batch <= r.last), a_table.rows[-1])
    assert a_table.k_at(batch) == row.k


@given(tables())
def test_the_list_form_comes_back_as_the_same_table(a_table: KTable) -> None:
    assert KTable.from_rows(a_table.to_rows()) == a_table


BAD_ROWS = {
    "no row": ([], "give one that starts at batch 1"),
    "a first row that starts late": ([[2, 4, 1]], "let it start at 1"),
    "a gap": ([[1, 2, 1], [5, 8, 1]], "rows must follow on one another"),
    "an overlap": ([[1, 4, 1], [3, 8, 1]], "rows must follow on one another"),
    "a row that ends before it starts": ([[1, 0, 1]], "ends at 0 before its start 1"),
    "a start off the buckets": ([[1, 3, 1], [4, 8, 1]], "rows start at 1 or 2^n + 1"),
    "a negative K": ([[1, 4, -1]], "it must be 0 or more"),
    "a row of two": ([[1, 4]], "a row is not [first, last, K]"),
    "a row of four": ([[1, 4, 1, 1]], "a row is not [first, last, K]"),
}


@pytest.mark.parametrize("situation", BAD_ROWS)
def test_rows_that_break_an_invariant_are_refused_with_what_to_change(situation: str) -> None:
    rows, sentence = BAD_ROWS[situation]
    with pytest.raises(InvalidTableError) as refusal:
        KTable.from_rows(rows)
    assert sentence in str(refusal.value)


@given(st.lists(st.tuples(*[st.integers(-1, 40)] * 3), max_size=4))
def test_any_rows_give_a_sound_table_or_a_refusal(rows: list[tuple[int, int, int]]) -> None:
    try:
        made = KTable.from_rows(rows)
    except InvalidTableError:
        return
    assert [row.first for row in made.rows] == [1, *(row.last + 1 for row in made.rows[:-1])]
    assert all(table.is_row_start(row.first) for row in made.rows)


# ---------------------------------------------------------------------------- one bucket


@given(tables(), st.sampled_from(BOUNDS), some_ks)
def test_setting_one_bucket_changes_that_bucket_and_no_other(
    a_table: KTable, bound: int, k: int
) -> None:
    changed = a_table.with_bucket(bound, k)
    for batch in STARTS + BOUNDS:
        # Beyond the end of the table the last row holds: there the change may reach on.
        if batch > max(a_table.max_batch, bound):
            continue
        inside = table.bucket_of(batch) == bound
        assert changed.k_at(batch) == (k if inside else a_table.k_at(batch))


@given(tables(), st.sampled_from(BOUNDS), some_ks)
def test_setting_one_bucket_leaves_no_two_neighbours_alike(
    a_table: KTable, bound: int, k: int
) -> None:
    changed = a_table.with_bucket(bound, k)
    assert all(before.k != after.k for before, after in pairwise(changed.rows))
    assert changed.max_batch >= a_table.max_batch


# ------------------------------------------------------------------------------ envelope


@given(st.sets(st.integers(-3, 30)), st.integers(1, 16))
def test_an_envelope_holds_0_and_k_max_and_nothing_beyond(wanted: set[int], k_max: int) -> None:
    envelope = Envelope.of(wanted, k_max)
    assert envelope.ks[0] == 0
    assert envelope.k_max == k_max
    assert list(envelope.ks) == sorted(set(envelope.ks))
    assert {k for k in wanted if 0 <= k <= k_max} <= set(envelope.ks)


@pytest.mark.parametrize(("k_max", "ks"), [(1, (0, 1)), (3, (0, 1, 2, 3)), (7, (0, 1, 4, 7))])
def test_without_wanted_values_an_envelope_is_small(k_max: int, ks: tuple[int, ...]) -> None:
    assert Envelope.of([], k_max).ks == ks


@given(envelopes(), st.integers(0, 20), st.integers(0, 3))
def test_neighbours_are_the_nearest_values_that_may_be_chosen(
    envelope: Envelope, k: int, min_k: int
) -> None:
    for neighbour in envelope.neighbours(k, min_k):
        assert neighbour in envelope.ks
        assert neighbour != k
        assert neighbour >= min_k
        low, high = sorted((k, neighbour))
        assert not [x for x in envelope.ks if low < x < high and x >= min_k]


@given(tables(), envelopes())
def test_clamping_to_an_envelope_never_raises_a_k(a_table: KTable, envelope: Envelope) -> None:
    clamped = a_table.clamped_to(envelope)
    assert clamped.ks <= set(envelope.ks)
    for before, after in zip(a_table.rows, clamped.rows, strict=True):
        assert after.k <= before.k
        assert not [k for k in envelope.ks if after.k < k <= before.k]


@given(envelopes(), st.integers(1, 512))
def test_the_start_up_table_names_every_k_of_the_envelope_at_the_top(
    envelope: Envelope, max_num_seqs: int
) -> None:
    rows = table.build_start_table(envelope, max_num_seqs)
    assert rows[0][0] == 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(rows))
    assert [k for _, _, k in rows] == sorted(envelope.ks, reverse=True)
    top = max(max_num_seqs, len(envelope.ks))
    assert {k for first, last, k in rows if last > top - len(envelope.ks)} == set(envelope.ks)


# -------------------------------------------------------------------------- for people


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[1, 64, 7]], "7"),
        ([[1, 16, 7], [17, 256, 1]], "7x16,1"),
        ([[1, 16, 7], [17, 64, 3], [65, 256, 1]], "7x16,3x64,1"),
    ],
)
def test_a_table_is_short_for_people(rows: list[list[int]], text: str) -> None:
    assert KTable.from_rows(rows).compact() == text


# ---------------------------------------------------------------- the file, as both sides


SOUND = [case for case in CONTRACT if "rows" in case["expect"]]


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case["name"])
def test_the_engine_and_the_operator_name_a_table_by_the_same_number(case: dict) -> None:
    said = json.loads(case["text"])
    file = table.TableFile(
        table=KTable.from_rows(said["rows"]),
        generation=said["generation"],
        enabled=said["enabled"],
        reason=said.get("reason", ""),
    )
    assert file.fingerprint == case["expect"]["fingerprint"]


def test_the_operators_own_file_is_one_the_contract_knows() -> None:
    (case,) = [case for case in SOUND if case["name"] == "the table of the design"]
    made = table.TableFile(
        table=KTable((Row(1, 16, 7), Row(17, 64, 3), Row(65, 256, 1))),
        generation=12,
        enabled=True,
        reason="experiment 8f2c",
    )
    assert json.loads(made.to_json()) == json.loads(case["text"])


@given(tables(), st.booleans(), st.integers(0, 10**6), st.text(max_size=20))
def test_generation_and_reason_do_not_change_the_number(
    a_table: KTable, enabled: bool, generation: int, reason: str
) -> None:
    file = table.TableFile(a_table, generation=generation, enabled=enabled, reason=reason)
    assert file.fingerprint == table.fingerprint(a_table, enabled=enabled)
    assert 0 <= file.fingerprint < 2**48
    assert file.fingerprint != table.fingerprint(a_table, enabled=not enabled)
