"""Deltas from raw samples: resets, restarts, late series, gaps, doubles, and odd numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.domain.observation import Series
from specdecode_operator.estimate.counters import (
    Counters,
    NoEstimate,
    Window,
    metrics_health,
    to_window,
)
from tests.support.samples import cell, heartbeat, mixed_cell, samples_of, series

STEPS = "specdecode_steps_total"
NAN = math.nan


def steps(*samples: tuple[float, float], **labels: object) -> Series:
    return series(STEPS, samples, **{"batch": 8, "k": 3, "arm": 0, **labels})


def window_of(*found: Series, start: float = 0, end: float = 100) -> Window:
    window = to_window(samples_of(*found), start=start, end=end)
    assert isinstance(window, Window)
    return window


def steps_in(*found: Series, start: float = 0, end: float = 100) -> float:
    return sum(c.steps for c in window_of(*found, start=start, end=end).cells)


GROWTH = {
    "grows evenly": ([steps((0, 100), (5, 110), (10, 130))], 30),
    "falls at a restart: that interval and the two beside it are lost, the rest counts": (
        [steps((0, 100), (5, 110), (10, 130), (15, 7), (20, 27), (25, 50))],
        10 + 23,
    ),
    "another counter of the engine fell: a hidden restart": (
        [
            series("specdecode_engine_iterations_total", [(0, 900), (5, 950), (10, 990), (15, 3)]),
            steps((0, 100), (5, 110), (10, 140), (15, 300)),
        ],
        10,
    ),
    "appears late while its engine was scraped: it began at 0": (
        [heartbeat([0, 5, 10]), steps((10, 40))],
        40,
    ),
    "is there at the first scrape: it began at its value": (
        [heartbeat([0, 5]), steps((0, 5000), (5, 5010))],
        10,
    ),
    "is new with a new pod: nobody knows what it did before": (
        [heartbeat([0, 5, 10], pod="old"), steps((10, 40), (15, 45))],
        5,
    ),
    "staleness marker in between": ([steps((0, 100), (5, NAN), (10, 130))], 30),
    "infinite and negative samples": (
        [steps((0, 100), (5, math.inf), (7, -3), (10, 130))],
        30,
    ),
    "samples in any order, some twice": (
        [steps((10, 130), (0, 100), (10, 130), (5, 110), (5, 110))],
        30,
    ),
    "a gap of a minute is bridged": ([steps((0, 100), (60, 700), (65, 750))], 650),
    "stands still": ([steps((0, 100), (5, 100), (10, 100))], 0),
    "is huge but grows little": ([steps((0, 1e9), (5, 1e9 + 10))], 10),
    "two pods": ([steps((0, 0), (5, 10)), steps((1, 50), (6, 70), pod="b")], 30),
    "two engines of one pod": ([steps((0, 0), (5, 10)), steps((0, 50), (5, 70), engine=1)], 30),
    "one pod scraped by two Prometheus jobs counts once": (
        [
            steps((0, 0), (5, 10), (10, 20), job="a"),
            steps((1, 1), (6, 12), job="b"),
        ],
        20,
    ),
    "the pod came back with another address": (
        [
            steps((0, 0), (5, 10), instance="10.0.0.1"),
            steps((20, 0), (25, 7), instance="10.0.0.2"),
        ],
        17,
    ),
    "labels that are no numbers": ([steps((0, 0), (5, 10)), steps((0, 0), (5, 9), k="x")], 10),
}


@pytest.mark.parametrize("situation", GROWTH)
def test_steps_counted_when_a_series(situation: str) -> None:
    found, expected = GROWTH[situation]
    assert steps_in(*found) == pytest.approx(expected)


def test_a_window_lies_between_the_first_scrape_inside_and_the_last() -> None:
    found = steps((0, 0), (5, 10), (10, 30), (15, 70), (20, 150))
    window = window_of(found, start=4, end=16)
    assert (window.start, window.end, window.scrapes) == (5, 15, 3)
    assert window.cells[0].steps == 60


def test_an_engine_busy_for_longer_than_the_clock_ran_is_not_believed() -> None:
    labels = {"batch": 8, "k": 3, "arm": 0}
    seconds = series("specdecode_step_seconds_total", [(0, 0), (5, 4), (10, 9e6)], **labels)
    window = window_of(seconds, steps((0, 0), (5, 10), (10, 1e9)))
    assert (window.cells[0].seconds, window.cells[0].steps) == (4, 10)


def test_every_counter_lands_in_its_field() -> None:
    moments = [0.0, 5.0, 10.0]
    window = window_of(
        *cell(moments, batch=8, k=3, steps=10, step_seconds=0.02, step_tokens=20),
        *mixed_cell(moments, batch=16, steps=5, step_tokens=30),
        series("specdecode_at_risk_per_position_total", [(0, 0), (10, 90)], position=1),
        series("specdecode_accepted_per_position_total", [(0, 0), (10, 60)], position=1),
        heartbeat(moments),
    )
    decoded, mixed = window.cells[0], window.mixed[0]
    assert (decoded.batch, decoded.k, decoded.arm) == (8, 3, 0)
    assert (decoded.steps, decoded.seconds) == (20, pytest.approx(0.4))
    assert (decoded.tokens, decoded.requests, decoded.context_tokens) == (400, 160, 16000)
    assert (mixed.batch, mixed.steps, mixed.tokens, mixed.prefill_tokens) == (16, 10, 300, 320)
    assert (window.at_risk, window.accepted) == ({1: 90}, {1: 60})
    assert (window.iterations, window.pods, window.seconds) == (20, ("a",), 10)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((), Reason.NOT_SCRAPED),
        ((series("up", [(0, 1), (5, 1)]),), Reason.NOT_SCRAPED),
        ((steps((0, 10)),), Reason.COLLECTING),
        ((steps((200, 10), (205, 20)),), Reason.COLLECTING),
    ],
)
def test_no_data_is_said_with_its_reason(found: tuple[Series, ...], reason: Reason) -> None:
    window = to_window(samples_of(*found), start=0, end=100)
    assert isinstance(window, NoEstimate)
    assert window.reason == reason


HEALTH = {
    "every ready pod is fresh": ({"a": 98, "b": 99}, ["a", "b"], None),
    "a pod that is not ready may be absent": ({"a": 98}, ["a"], None),
    "no pod is ready": ({"a": 98}, [], Reason.NO_READY_PODS),
    "nothing at all": ({}, ["a", "b"], Reason.NOT_SCRAPED),
    "only pods that are gone": ({"old": 99}, ["a"], Reason.NOT_SCRAPED),
    "all too old": ({"a": 50, "b": 60}, ["a", "b"], Reason.STALE),
    "one ready pod is missing": ({"a": 98}, ["a", "b"], Reason.PARTIAL),
    "one ready pod is too old": ({"a": 98, "b": 10}, ["a", "b"], Reason.PARTIAL),
}


@pytest.mark.parametrize("situation", HEALTH)
def test_health_of_metrics_when(situation: str) -> None:
    last, ready, expected = HEALTH[situation]
    found = [heartbeat([moment - 5, moment], pod=pod) for pod, moment in last.items()]
    health = metrics_health(samples_of(*found), ready, now=100, max_age_seconds=30)
    assert (None if health is None else health.reason) == expected


def test_a_partial_scrape_names_the_pods() -> None:
    samples = samples_of(heartbeat([95, 99]))
    health = metrics_health(samples, ["a", "b", "c", "d", "e"], now=100, max_age_seconds=30)
    assert health is not None
    assert "4 of 5" in health.message
    assert "b, c, d and 1 more" in health.message


odd = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e12), st.integers(0, 10**6)
)
names = st.sampled_from(
    [
        STEPS,
        "specdecode_step_seconds_total",
        "specdecode_mixed_step_seconds_total",
        "specdecode_at_risk_per_position_total",
        "specdecode_engine_iterations_total",
        "up",
    ]
)


@st.composite
def any_series(draw: st.DrawFn) -> Series:
    samples = draw(st.lists(st.tuples(st.one_of(odd, st.integers(0, 100)), odd), max_size=8))
    labels = draw(
        st.dictionaries(
            st.sampled_from(["pod", "engine", "batch", "k", "arm", "position", "job"]),
            st.sampled_from(["0", "1", "8", "x", ""]),
        )
    )
    return Series(draw(names), labels, tuple((float(t), float(v)) for t, v in samples))


@given(st.lists(any_series(), max_size=6), odd, odd)
def test_odd_samples_never_raise_and_never_give_negative_or_endless_deltas(
    found: list[Series], start: float, end: float
) -> None:
    counters = Counters.of(samples_of(*found))
    window = counters.window(start=float(start), end=float(end))
    counters.parts(start=float(start), end=float(end), count=3)
    if isinstance(window, Window):
        for delta in (*window.cells, *window.mixed):
            assert delta.steps >= 0
            assert 0 <= delta.seconds <= 1.5 * window.seconds * 7 * 7 + 30 * 7 * 7
        assert all(x >= 0 and math.isfinite(x) for x in window.at_risk.values())


@given(
    st.lists(st.tuples(st.floats(0.5, 20), st.integers(0, 50)), min_size=3, max_size=20),
    st.integers(1, 6),
)
def test_the_parts_of_a_window_sum_up_to_it(growth: list[tuple[float, int]], count: int) -> None:
    moment, value, samples = 0.0, 0.0, []
    for gap, more in growth:
        samples.append((moment, value))
        moment, value = moment + gap, value + more
    counters = Counters.of(samples_of(steps(*samples)))
    whole = counters.window(start=0, end=1e6)
    assert isinstance(whole, Window)
    parts = counters.parts(start=0, end=1e6, count=count)
    assert len(parts) == count
    total = sum(c.steps for part in parts for c in part.cells)
    assert total == pytest.approx(sum(c.steps for c in whole.cells))
