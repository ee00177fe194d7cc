"""Whatever happens to engines and scrapes, no counter seems to grow by more than it did."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.domain.observation import Series
from specdecode_operator.estimate.scrapes import read_scrapes
from tests.support.samples import series

SECONDS = 5.0
CELL = {"batch": 8, "k": 3, "arm": 0}
COUNTERS = (
    ("specdecode_engine_iterations_total", {}),
    ("specdecode_steps_total", CELL),
    ("specdecode_accepted_per_position_total", {"position": 0}),
)


@dataclass(frozen=True)
class History:
    """What one engine did between its scrapes, by counter, and what befell each scrape.

    A counter without growth yet is not there yet. `back` is the age, in scrapes, of an old page.
    """

    first: tuple[int, ...]
    growth: list[tuple[int, ...]]
    events: list[str]
    back: int
    created: bool

    def pages(self) -> list[list[float | None]]:
        """Return the true page of each scrape."""
        values: list[float | None] = [float(v) if v else None for v in self.first]
        pages = [values]
        for growth, event in zip(self.growth, self.events, strict=True):
            if event == "restart":
                values = [float(g // 2) if g // 2 else None for g in growth]
            else:
                values = [
                    (value or 0.0) + g if g or value is not None else None
                    for value, g in zip(values, growth, strict=True)
                ]
            pages.append(values)
        return pages

    def series(self, **labels: object) -> list[Series]:
        """Return the series that Prometheus holds."""
        pages = self.pages()
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        born: list[tuple[float, float]] = []
        began = 0.0
        for number, event in enumerate(["fine", *self.events]):
            page = pages[max(number - self.back, 0)] if event == "old page" else pages[number]
            began = SECONDS * number if event == "restart" else began
            for column, value in enumerate(page):
                if value is not None and event != "missed":
                    shown = math.nan if event == "marker" else value
                    found[column] += [(SECONDS * number, shown)] * (2 if event == "twice" else 1)
            if event != "missed":
                born.append((SECONDS * number, 1e6 + began))
        extra = [series("specdecode_steps_created", born, **CELL, **labels)]
        return [
            series(COUNTERS[column][0], samples, **COUNTERS[column][1], **labels)
            for column, samples in found.items()
        ] + (extra if self.created else [])


@st.composite
def histories(draw: st.DrawFn) -> History:
    count = draw(st.integers(2, 20))
    growth = st.tuples(*[st.integers(0, 60)] * len(COUNTERS))
    common = st.sampled_from(["fine", "fine", "fine", "restart", "missed", "twice", "marker"])
    events = draw(st.lists(common, min_size=count, max_size=count))
    if draw(st.booleans()):
        events[draw(st.integers(0, count - 1))] = "old page"
    return History(
        first=draw(st.tuples(*[st.sampled_from([0, 1, 50, 5000, 10**9])] * len(COUNTERS))),
        growth=draw(st.lists(growth, min_size=count, max_size=count)),
        events=events,
        back=draw(st.integers(1, 3)),
        created=draw(st.booleans()),
    )


def grown(found: list[Series]) -> dict[str, float]:
    scrapes = read_scrapes(found)
    sums: dict[str, float] = defaultdict(float)
    for key, amount in zip(scrapes.increments.key, scrapes.increments.amount, strict=True):
        assert amount > 0
        sums[scrapes.keys[key][0]] += amount
    return sums


def truth(history: History, column: int) -> int:
    return sum(growth[column] for growth in history.growth)


@given(histories())
def test_no_counter_grows_by_more_than_it_did(history: History) -> None:
    sums = grown(history.series())
    for column, (name, _) in enumerate(COUNTERS):
        assert sums[name] <= truth(history, column)


@given(histories(), histories())
def test_engines_of_one_pod_do_not_disturb_each_other(one: History, other: History) -> None:
    both = grown([*one.series(engine=0), *other.series(engine=1)])
    apart = grown(one.series(engine=0)), grown(other.series(engine=1))
    for name, _ in COUNTERS:
        assert both[name] == apart[0][name] + apart[1][name]


@given(histories())
def test_one_engine_that_two_jobs_scrape_counts_once(history: History) -> None:
    fine = replace(history, events=["fine"] * len(history.events))
    sums = grown([*history.series(job="a"), *fine.series(job="b")])
    for column, (name, _) in enumerate(COUNTERS):
        assert sums[name] <= truth(history, column)


@given(histories())
def test_without_mishaps_nothing_is_lost(history: History) -> None:
    fine = replace(history, events=["fine"] * len(history.events), created=True)
    sums = grown(fine.series())
    for column, (name, _) in enumerate(COUNTERS):
        seen = [page[column] or 0.0 for page in fine.pages()]
        assert sums[name] == seen[-1] - seen[0]


@given(
    st.lists(st.integers(0, 60), min_size=4, max_size=30),
    st.integers(0, 29),
    st.floats(-100, 100),
)
def test_a_clock_that_steps_makes_no_growth(growth: list[int], at: int, step: float) -> None:
    samples, value = [(0.0, 1000.0)], 1000.0
    for number, more in enumerate(growth, start=1):
        value += more
        samples.append((SECONDS * number + (step if number > at else 0.0), value))
    sums = grown([series(*("specdecode_steps_total", samples), **CELL)])
    assert 0 <= sums["specdecode_steps_total"] <= sum(growth)


def test_a_restart_that_no_fall_betrays_is_seen_in_the_moment_of_creation() -> None:
    steps = series("specdecode_steps_total", [(0, 5), (5, 10), (10, 90), (15, 95)], **CELL)
    born = series("specdecode_steps_created", [(0, 1), (5, 1), (10, 8), (15, 8)], **CELL)
    assert grown([steps])["specdecode_steps_total"] == 90
    assert grown([steps, born])["specdecode_steps_total"] == 0


def test_a_sample_that_no_engine_can_have_counted_is_not_believed() -> None:
    samples = [(0.0, 0.0), (5.0, 100.0), (10.0, 1e9), (15.0, 1e9 + 100)]
    sums = grown([series("specdecode_steps_total", samples, **CELL)])
    assert sums["specdecode_steps_total"] == 200


def test_counters_of_thousands_of_millions_keep_their_last_digits() -> None:
    samples = [(0.0, 4e12 + 1), (5.0, 4e12 + 8)]
    sums = grown([series("specdecode_accepted_per_position_total", samples, position=0)])
    assert sums["specdecode_accepted_per_position_total"] == 7


def test_labels_that_no_engine_has_are_passed_over() -> None:
    samples = [(0.0, 0.0), (5.0, 10.0)]
    odd = [
        {**CELL, "batch": 0},
        {**CELL, "batch": -8},
        {**CELL, "batch": 12},
        {**CELL, "batch": 10**9},
        {**CELL, "k": -1},
        {**CELL, "k": 1000},
        {**CELL, "arm": 7},
    ]
    assert not grown([series("specdecode_steps_total", samples, **labels) for labels in odd])
