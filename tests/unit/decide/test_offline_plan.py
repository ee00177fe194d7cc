"""The table for a benchmark in hand."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from specdecode_operator.decide.offline_plan import (
    ROW_PRICE,
    OfflinePlan,
    choose_by_bucket,
    plan_offline,
)
from specdecode_operator.estimate.surface import Measurement, Surface, fit_surface
from specdecode_operator.estimate.surface_prior import Arm
from tests.bench import tables

Rates = dict[float, dict[Arm, float]]
PUBLIC = {table.name: table for table in tables.load_tables()}


def surface_of(rates: Rates) -> Surface:
    surface = fit_surface(
        Measurement(batch, arm, rate) for batch, by_k in rates.items() for arm, rate in by_k.items()
    )
    assert isinstance(surface, Surface)
    return surface


def plan(rates: Rates, **options: object) -> OfflinePlan:
    return plan_offline(surface_of(rates), **options)  # type: ignore[arg-type]


def rows_of(planned: OfflinePlan) -> list[list[int]]:
    assert planned.table is not None
    return planned.table.to_rows()


@pytest.mark.parametrize(
    ("situation", "rates", "rows"),
    [
        ("one load", {8: {1: 100, 3: 120}}, [[1, 8, 3]]),
        ("the same K everywhere", {1: {1: 10, 3: 12}, 64: {1: 100, 3: 120}}, [[1, 64, 3]]),
        (
            "K falls at a bucket's edge",
            {1: {1: 10, 3: 14}, 2: {1: 20, 3: 25}, 4: {1: 40, 3: 36}, 8: {1: 80, 3: 60}},
            [[1, 2, 3], [3, 8, 1]],
        ),
        (
            "K rises with the batch",
            {4: {1: 100, 3: 90}, 8: {1: 200, 3: 190}, 16: {1: 300, 3: 350}},
            [[1, 8, 1], [9, 16, 3]],
        ),
        (
            "a lead within the noise writes no row",
            {1: {1: 100, 3: 120}, 2: {1: 200.5, 3: 200}, 4: {1: 400, 3: 440}},
            [[1, 4, 3]],
        ),
        (
            "two loads of one bucket share a row",
            {65: {1: 100, 3: 120}, 128: {1: 150, 3: 148}},
            [[1, 128, 3]],
        ),
        ("K=0 is an arm when it was measured", {1: {0: 100, 3: 80}}, [[1, 1, 0]]),
        (
            "no power of two",
            {30: {1: 100, 3: 120}, 90: {1: 200, 3: 100}},
            [[1, 32, 3], [33, 90, 1]],
        ),
    ],
)
def test_a_table_is_made(situation: str, rates: Rates, rows: list[list[int]]) -> None:
    found = rows_of(plan(rates))
    if situation == "no power of two":  # the edge may lie at either bound between the loads
        assert found in (rows, [[1, 64, 3], [65, 90, 1]])
    else:
        assert found == rows


def test_off_is_chosen_at_one_load_and_the_table_keeps_a_k_there() -> None:
    planned = plan({1: {None: 100, 3: 200}, 64: {None: 1000, 3: 950}})
    assert [choice.arm for choice in planned.by_load] == [3, None]
    assert rows_of(planned) == [[1, 64, 3]]
    assert planned.speculation


def test_off_wins_when_it_beats_the_table_over_all_loads() -> None:
    planned = plan({1: {None: 100, 3: 101}, 64: {None: 1000, 3: 800}})
    assert not planned.speculation
    assert rows_of(planned) == [[1, 64, 3]]


def test_where_off_is_not_measured_speculation_stays_on() -> None:
    planned = plan({1: {1: 100, 3: 120}})
    assert planned.speculation
    assert planned.gain_log is None


def test_without_any_k_there_is_no_table_and_speculation_is_off() -> None:
    planned = plan({1: {None: 100}, 8: {None: 500}})
    assert planned.table is None
    assert not planned.speculation
    assert [choice.arm for choice in planned.by_load] == [None, None]


def test_occupancy_decides_between_loads_of_unequal_weight() -> None:
    rates: Rates = {1: {None: 100, 3: 150}, 64: {None: 1000, 3: 800}}
    assert plan(rates, occupancy={1: 9, 64: 1}).speculation
    assert not plan(rates, occupancy={1: 1, 64: 9}).speculation


def test_a_hole_must_promise_more_than_its_mean_to_be_chosen() -> None:
    rates: Rates = {90: {None: 2445, 3: 3000}, 110: {None: 2892, 1: 3185, 3: 3300}}
    surface = surface_of({**rates, 128: {None: 3413, 3: 3413}})
    at_128 = surface.estimates_at(128)
    assert at_128[1].tokens_per_second > at_128[3].tokens_per_second
    assert plan_offline(surface).by_load[-1].arm is None


def test_equal_goodput_is_off_then_the_smaller_k() -> None:
    assert plan({128: {None: 3413, 1: 3413, 3: 3413}}).by_load[0].arm is None
    assert plan({128: {1: 3413, 3: 3413}}).by_load[0].arm == 1


def test_a_table_keeps_to_the_smallest_k_that_may_be_used() -> None:
    assert rows_of(plan({1: {0: 200, 1: 150, 3: 100}}, min_k=1)) == [[1, 1, 1]]


def test_adjacent_rows_differ_by_no_more_than_the_step() -> None:
    rates: Rates = {
        b: {k: 100 + 10 * k * (1 if b < 8 else -1) for k in range(1, 6)} for b in (1, 4, 16, 64)
    }
    for step in (1, 2):
        rows = rows_of(plan(rates, max_row_step=step))
        assert all(abs(one[2] - other[2]) <= step for one, other in pairwise(rows))
    assert rows_of(plan(rates))[0][2] == 5


def test_the_chosen_path_is_the_best_of_all() -> None:
    chance = random.Random(1)
    for _ in range(200):
        values = [{k: chance.gauss(0, 0.02) for k in (1, 3, 7)} for _ in range(5)]

        def score(path: tuple[int, ...], values: list[dict[int, float]] = values) -> float:
            changes = sum(one != other for one, other in pairwise(path))
            return sum(v[k] for v, k in zip(values, path, strict=True)) - 0.01 * changes

        best = max(product((1, 3, 7), repeat=5), key=score)
        assert choose_by_bucket(values, row_price=0.01) == best


@pytest.mark.parametrize("name", PUBLIC)
def test_on_a_published_table_each_choice_is_the_best_arm(name: str) -> None:
    table = PUBLIC[name]
    planned = tables.plan(table.rows)
    assert all(loss.scored and loss.share <= 0.01 for loss in tables.losses_of(table, planned))


@pytest.mark.parametrize("name", PUBLIC)
def test_on_a_published_table_simplicity_costs_no_load_more_than_two_rows(name: str) -> None:
    planned = tables.plan(PUBLIC[name].rows)
    if planned.table is None:
        return
    buckets = [1 << (int(choice.batch) - 1).bit_length() for choice in planned.by_load]
    for choice, bucket in zip(planned.by_load, buckets, strict=True):
        if buckets.count(bucket) == 1:
            best = max(w for arm, w in choice.worth.items() if arm is not None)
            k = planned.table.k_at(int(choice.batch))
            assert best - choice.worth[k] <= 2 * ROW_PRICE + 0.003


@pytest.mark.parametrize("name", [name for name, table in PUBLIC.items() if table.is_broad])
def test_with_half_the_cells_the_mean_loss_is_within_three_percent(name: str) -> None:
    assert tables.mean_loss(tables.measure_halved(PUBLIC[name], seeds=10)) <= 0.03


def test_half_the_cells_are_removed_and_each_load_and_arm_keeps_one() -> None:
    table = next(table for table in PUBLIC.values() if table.is_broad)
    for seed in range(20):
        kept = tables.halve(table.rows, random.Random(seed))
        assert {row.batch for row in kept} == {row.batch for row in table.rows}
        assert {row.arm for row in kept} == {row.arm for row in table.rows}
        cells = {(row.batch, row.arm) for row in table.rows}
        assert len({(row.batch, row.arm) for row in kept}) == len(cells) - len(cells) // 2
