"""Which K is tried next, which table is advised, and whether speculation pays."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import CellStatus
from specdecode_operator.decide.planner import (
    Payoff,
    Present,
    choose_candidate,
    does_speculation_pay,
    find_luck,
    forecast_goodput,
    is_fresh,
    recommend_table,
    table_to_try,
)
from specdecode_operator.domain.table import Envelope, KTable, bucket_first, bucket_of
from specdecode_operator.estimate.acceptance import PositionSurvival, Survival, estimate_survival
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.goodput import Rate
from tests.support.closed_loop import HIGH_ACCEPTANCE, KS, LOW_ACCEPTANCE, Landscape

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def survival_with(hazard: float) -> Survival:
    at_risk = {position: 10_000 * hazard**position for position in range(7)}
    survival = estimate_survival(at_risk, {p: n * hazard for p, n in at_risk.items()})
    assert isinstance(survival, Survival)
    return survival


def measured(landscape: Landscape, batch: int, k: int, **changes: object) -> CellStatus:
    """The cell that the tuner writes after a block on a landscape without noise."""
    length = sum(landscape.hazard**position for position in range(k + 1))
    cell = CellStatus(
        batch=bucket_of(batch),
        k=k,
        tokens_per_second=landscape.at(batch, k),
        mean_batch=batch,
        steps=500,
        step_seconds=batch * length / landscape.at(batch, k),
        acceptance=landscape.hazard,
        measured_at=NOW,
    )
    return cell.model_copy(update=changes)


def present_at(
    landscape: Landscape, batch: int, k: int, *cells: CellStatus, min_k: int = 1
) -> Present:
    return Present(
        batch=bucket_of(batch),
        k=k,
        rate=Rate(landscape.at(batch, k), batch),
        survival=survival_with(landscape.hazard),
        cells=(*cells, measured(landscape, batch, k)),
        envelope=Envelope(KS),
        min_k=min_k,
    )


def cells_of(landscape: Landscape, batch: int, *ks: int) -> list[CellStatus]:
    return [measured(landscape, batch, k) for k in ks]


HIGH, LOW = HIGH_ACCEPTANCE, LOW_ACCEPTANCE
LEARNED = [*cells_of(HIGH, 1, 7, 5), *cells_of(HIGH, 8, 7, 5, 3, 2, 1)]

CANDIDATES = {
    "at K_max nothing is known: the only neighbour": (present_at(HIGH, 1, 7), 5),
    "both neighbours untried, the model knows high load wants fewer": (
        present_at(HIGH, 32, 3, *LEARNED),
        2,
    ),
    "both neighbours untried, the model knows low load wants more": (
        present_at(HIGH, 1, 3, *cells_of(HIGH, 8, 7, 3, 1), *cells_of(HIGH, 32, 3, 1)),
        5,
    ),
    "the other side was tried": (present_at(HIGH, 8, 5, *cells_of(HIGH, 8, 7)), 3),
    "beyond a neighbour that was about as good": (
        present_at(HIGH, 8, 3, *cells_of(HIGH, 8, 7, 5, 2)),
        1,
    ),
    "not beyond a neighbour that was clearly worse": (
        present_at(HIGH, 1, 7, measured(HIGH, 1, 5)),
        None,
    ),
    "not where a good model sees no hope": (
        present_at(HIGH, 64, 2, *LEARNED, *cells_of(HIGH, 64, 3), min_k=2),
        None,
    ),
    "all tried": (present_at(HIGH, 8, 3, *cells_of(HIGH, 8, 7, 5, 2, 1)), None),
    "K=0 only where it was asked for": (
        present_at(LOW, 64, 1, *cells_of(LOW, 64, 2), min_k=0),
        0,
    ),
    "from K=0 back to the least that is allowed": (present_at(LOW, 8, 0, min_k=1), 1),
    "again what was put back and now looks clearly better": (
        present_at(HIGH, 64, 2, *cells_of(HIGH, 64, 1, 3, 5, 7)),
        1,
    ),
    "again when acceptance has moved and no step time says what it would give now": (
        present_at(HIGH, 1, 7, measured(HIGH, 1, 5, acceptance=0.66, step_seconds=None)),
        5,
    ),
    "not again when acceptance has moved: a known step time is read with today's": (
        present_at(HIGH, 1, 7, measured(HIGH, 1, 5, acceptance=0.66)),
        None,
    ),
    "not again when acceptance has hardly moved": (
        present_at(HIGH, 1, 7, measured(HIGH, 1, 5, acceptance=0.71)),
        None,
    ),
    "again when the load has moved": (
        present_at(HIGH, 8, 1, *(measured(HIGH, 8, k, mean_batch=5.0) for k in (2, 3, 5, 7))),
        2,
    ),
}


@pytest.mark.parametrize("situation", CANDIDATES)
def test_the_k_to_try_next(situation: str) -> None:
    present, expected = CANDIDATES[situation]
    candidate = choose_candidate(present)
    assert (None if candidate is None else candidate.k) == expected


def test_a_measured_cell_is_shown_at_the_present_batch() -> None:
    cell = measured(HIGH, 8, 5, mean_batch=7.0, tokens_per_second=400.0)
    forecast = {f.k: f for f in forecast_goodput(present_at(HIGH, 8, 3, cell))}
    assert forecast[5].measured
    assert forecast[5].tokens_per_second == pytest.approx(400 * (8 / 7) ** 0.7)


def test_a_cell_is_read_with_todays_acceptance() -> None:
    """Its steps take as long as ever; what they emit has changed with the drafts."""
    lower = Landscape(hazard=0.5, goodput=HIGH.goodput)
    seconds = 8 * sum(0.75**i for i in range(6)) / HIGH.at(8, 5)
    present = present_at(lower, 8, 1, measured(HIGH, 8, 5))
    forecast = {f.k: f for f in forecast_goodput(present)}
    assert forecast[5].measured
    today = 8 * sum(0.5**i for i in range(6)) / seconds
    assert forecast[5].tokens_per_second == pytest.approx(today, rel=0.01)


def engine_cell(batch: int, k: int, *, luck: float = 1.0) -> CellStatus:
    """A cell of an engine whose step takes 10 ms, 0.1 ms a token and 0.5 ms a draft pass."""
    seconds = (0.010 + 0.0001 * batch * (k + 1) + 0.0005 * k) / luck
    tokens = batch * sum(0.7**position for position in range(k + 1)) / seconds
    return measured(HIGH, batch, k, step_seconds=seconds, tokens_per_second=tokens)


def test_a_lucky_block_is_seen_through_by_all_that_was_measured() -> None:
    fair = [engine_cell(batch, k) for batch in (8, 32) for k in (1, 2, 5)]
    luck = find_luck([*fair, engine_cell(8, 3, luck=1.06), engine_cell(32, 3)], 8)
    assert 0.01 < luck[3] < 0.06
    assert all(luck[k] < 0.01 for k in (1, 2, 5))


def test_two_cells_say_nothing_about_luck() -> None:
    assert find_luck([engine_cell(8, 1), engine_cell(8, 3, luck=1.06)], 8) == {}


def test_forecasts_of_a_supported_model_are_close_to_the_landscape() -> None:
    forecasts = forecast_goodput(present_at(HIGH, 32, 3, *LEARNED))
    for forecast in forecasts:
        truth = HIGH.at(32, forecast.k)
        assert forecast.tokens_per_second == pytest.approx(truth, rel=0.25)


TRIED_TABLES = {
    "a lower K takes the unmeasured rest of its row along": ("7", 8, 7, 5, [], "7x4,5"),
    "a higher K stays in its bucket": ("3", 8, 3, 5, [], "3x4,5x8,3"),
    "not over a bucket that was measured": ("7", 8, 7, 5, [32], "7x4,5x16,7"),
    "not over another row of the user": ("7x16,3", 8, 7, 5, [], "7x4,5x16,3"),
    "at the last bucket": ("7x32,3", 64, 3, 2, [], "7x32,2"),
}


@pytest.mark.parametrize("situation", TRIED_TABLES)
def test_the_table_to_try(situation: str) -> None:
    text, batch, k, to_k, buckets, expected = TRIED_TABLES[situation]
    present = present_at(HIGH, batch, k, *(measured(HIGH, b, 7) for b in buckets))
    assert table_to_try(table_of(text), present, to_k).compact() == expected


def table_of(text: str) -> KTable:
    """Read the short form: `7x16,3`."""
    first, starts = 1, []
    for part in text.split(","):
        k, _, last = part.partition("x")
        starts.append((first, int(k)))
        first = int(last or 0) + 1
    return KTable.from_starts(starts, 64)


@pytest.mark.parametrize(
    ("present", "pays", "source"),
    [
        (present_at(LOW, 64, 1, *cells_of(LOW, 64, 0, 2)), False, "(measured)"),
        (present_at(HIGH, 64, 1, *cells_of(HIGH, 64, 0, 2)), True, "(measured)"),
        (
            present_at(LOW, 64, 1, *cells_of(LOW, 64, 2, 3), *cells_of(LOW, 8, 1, 2, 3, 5, 7)),
            False,
            "(predicted, not measured)",
        ),
        (
            present_at(HIGH, 64, 1, *LEARNED, *cells_of(HIGH, 64, 2)),
            True,
            "(predicted, not measured)",
        ),
    ],
)
def test_whether_speculation_pays_is_told_with_its_source(
    present: Present, pays: bool, source: str
) -> None:
    payoff = does_speculation_pay(present, min_gain_percent=2)
    assert isinstance(payoff, Payoff)
    assert payoff.pays is pays
    assert source in payoff.message
    assert "speculation off itself was not measured" in payoff.message


def test_with_one_k_measured_nobody_knows_what_k_zero_would_do() -> None:
    payoff = does_speculation_pay(present_at(HIGH, 8, 7), min_gain_percent=2)
    assert isinstance(payoff, NoEstimate)


def advise(*presents: Present, table: str = "7", stored: str | None = None) -> str | None:
    advice = recommend_table(
        presents,
        table=table_of(table),
        min_gain_percent=2,
        weights={p.batch: 1.0 for p in presents},
        stored=None if stored is None else table_of(stored),
    )
    return None if advice is None else advice.table.compact()


def test_the_best_measured_k_of_each_bucket_is_advised_in_few_rows() -> None:
    cells = [*cells_of(HIGH, 8, 1, 2, 3, 5), *cells_of(HIGH, 32, 1, 2, 3, 5)]
    table = advise(present_at(HIGH, 8, 7, *cells), present_at(HIGH, 32, 7, *cells))
    assert table in ("7x4,1x8,7x16,1x32,7",)


def test_no_advice_on_a_k_outside_of_what_the_model_saw() -> None:
    cells = cells_of(HIGH, 8, 7) + cells_of(HIGH, 1, 7) + cells_of(HIGH, 32, 7)
    assert advise(present_at(HIGH, 64, 7, *cells)) is None


def test_advice_by_the_model_says_so_and_gives_the_gain() -> None:
    cells = [*cells_of(HIGH, 1, 7, 1), *cells_of(HIGH, 8, 7, 1), *cells_of(HIGH, 32, 7, 1)]
    advice = recommend_table(
        [present_at(HIGH, 64, 7, *cells)],
        table=table_of("7"),
        min_gain_percent=2,
        weights={64: 1.0},
    )
    assert advice is not None
    assert advice.table.k_at(64) in (1, 2)
    assert advice.gain_percent > 20
    assert "predicted" in advice.why


def test_no_advice_below_the_minimum_gain() -> None:
    assert advise(present_at(HIGH, 8, 1, *cells_of(HIGH, 8, 2, 3)), table="1") is None


def test_an_advice_stays_until_another_is_clearly_better() -> None:
    cells = cells_of(HIGH, 8, 1, 2, 3)
    present = present_at(HIGH, 8, 7, *cells)
    assert advise(present, stored="7x4,3x8,7") == "7x4,3x8,7"
    assert advise(present, stored="7x4,5x8,7") != "7x4,5x8,7"


odd = st.one_of(st.floats(), st.floats(1e-3, 1e9))
any_cell = st.builds(
    lambda batch, k, rate, mean, seconds, acceptance: CellStatus.model_construct(
        batch=batch,
        k=k,
        tokens_per_second=rate,
        mean_batch=mean,
        steps=100,
        step_seconds=seconds,
        acceptance=acceptance,
        measured_at=NOW,
    ),
    st.sampled_from([1, 2, 8, 64, 1024]),
    st.sampled_from(KS),
    odd,
    odd,
    st.one_of(st.none(), odd),
    st.one_of(st.none(), odd),
)


@given(
    st.lists(any_cell, max_size=10),
    st.sampled_from([1, 8, 64]),
    st.sampled_from(KS),
    st.floats(1e-3, 1e9),
    st.floats(0.5, 100),
    st.integers(0, 3),
)
def test_odd_cells_never_raise_and_a_candidate_is_always_allowed(
    cells: list[CellStatus], batch: int, k: int, rate: float, mean: float, min_k: int
) -> None:
    present = replace(
        present_at(HIGH, batch, k, min_k=min_k), rate=Rate(rate, mean), cells=tuple(cells)
    )
    candidate = choose_candidate(present)
    if candidate is not None:
        assert candidate.k in KS
        assert candidate.k >= min_k
        assert candidate.k != k
    does_speculation_pay(present, min_gain_percent=2)
    advice = recommend_table(
        [present],
        table=KTable.constant(k, 64),
        min_gain_percent=2,
        weights={present.batch: 1.0},
    )
    if advice is not None:
        assert advice.gain_percent >= 1.99
        assert advice.table.k_at(bucket_first(present.batch)) >= min_k


@given(any_cell, st.floats(0.1, 1e6), st.one_of(st.none(), st.floats(0, 1)))
def test_a_cell_without_numbers_is_never_fresh(
    cell: CellStatus, mean_batch: float, acceptance: float | None
) -> None:
    first = None if acceptance is None else seen(acceptance, drafts=100)
    if is_fresh(cell, mean_batch=mean_batch, first=first):
        assert math.isfinite(cell.tokens_per_second)
        assert cell.mean_batch > 0


def seen(acceptance: float, *, drafts: float) -> PositionSurvival:
    return PositionSurvival(drafts, acceptance, acceptance, 0.0, 1.0)


MOVED = {
    "0.1 over 200 drafts each is noise": (0.75, 200, True),
    "0.1 over 5000 drafts each has moved": (0.75, 5000, False),
    "0.2 over 200 drafts each has moved": (0.85, 200, False),
    "0.04 is never a move": (0.69, 10**6, True),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_cell_is_out_of_date_when_acceptance_moved_beyond_its_error(name: str) -> None:
    acceptance, drafts, fresh = MOVED[name]
    cell = measured(HIGH, 1, 3).model_copy(
        update={"acceptance": 0.65, "steps": drafts, "mean_batch": 1.0}
    )
    now = seen(acceptance, drafts=drafts)
    assert is_fresh(cell, mean_batch=1.0, first=now) is fresh
