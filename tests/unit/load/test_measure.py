"""Percentiles and windows: no data is no figure."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_load.measure import Window
from specdecode_load.spread import Spread, percentile


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(samples: list[float], percent: float) -> None:
    assert percentile(sorted(samples), percent) == pytest.approx(np.percentile(samples, percent))


def test_no_samples_are_no_data_and_not_zero() -> None:
    assert Spread.of(array("d")) is None
    result = Window(streams=1, on_stop=lambda window: None).stop()
    assert result.ttft_seconds is None
    assert result.tpot_seconds is None
    assert (result.requests, result.output_tokens, result.error_count) == (0, 0, 0)


def test_a_window_that_has_ended_stays_as_it_was() -> None:
    stopped: list[Window] = []
    window = Window(streams=1, on_stop=stopped.append)
    window.output_tokens += 5
    first = window.stop()
    window.output_tokens += 5
    assert window.stop() is first
    assert window.result is first
    assert stopped == [window]
