"""Acceptance in groups keeps the published curve, whatever the spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_sim import acceptance

CURVES = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8).map(np.cumprod)


@settings(deadline=None, max_examples=50)
@given(curve=CURVES, spread=st.floats(0.0, 3.0))
def test_groups_have_the_curve_as_their_mean(curve: list[float], spread: float) -> None:
    survival = acceptance.build_survival(list(curve), spread=spread)
    assert survival.mean(axis=0) == pytest.approx(curve, abs=1e-6)
    assert (np.diff(survival, axis=1) <= 1e-12).all()


def test_without_spread_all_groups_are_alike() -> None:
    survival = acceptance.build_survival([0.7, 0.5], spread=0.0)
    assert np.ptp(survival, axis=0) == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("curve", [[0.5, 0.6], [1.1], [-0.1]])
def test_a_curve_that_rises_or_leaves_0_to_1_is_refused(curve: list[float]) -> None:
    with pytest.raises(ValueError, match="must fall"):
        acceptance.build_survival(curve)


def test_mean_acceptance_length_counts_the_target_s_own_token() -> None:
    assert acceptance.mean_acceptance_length([0.5, 0.25], 2) == 1.75
