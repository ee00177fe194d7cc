"""Mode Advise: measure under the user's table, change nothing, recommend what would be better."""

from __future__ import annotations

import math

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import RecommendationStatus
from specdecode_operator.decide import planner
from specdecode_operator.decide.present import measure_present, to_present
from specdecode_operator.decide.tuner_state import TunerState, TuningOutcome, read_rows
from specdecode_operator.domain.table import bucket_first
from specdecode_operator.estimate.counters import NoEstimate
from specdecode_operator.estimate.goodput import Rate, busy_seconds_by_batch


def advise(state: TunerState) -> TuningOutcome:
    """Measure, and keep the recommendation up to date."""
    found = measure_present(state)
    if isinstance(found, NoEstimate):
        return state.ends(Reason(found.reason), found.message)
    state, present = found
    stored = state.tuning.recommendation
    advice = planner.recommend_table(
        [present, *_other_presents(state, present)],
        table=state.accepted,
        min_gain_percent=state.inputs.min_gain_percent,
        weights=_occupancy(state),
        stored=None if stored is None else read_rows(stored.k_table),
    )
    state = _recommend(state, advice)
    said = _message(state, present, advice)
    payoff = planner.does_speculation_pay(present, min_gain_percent=state.inputs.min_gain_percent)
    if isinstance(payoff, NoEstimate) or payoff.pays:
        return state.ends(Reason.ADVISING, said)
    return state.ends(Reason.DOES_NOT_PAY, f"{payoff.message}; {said}")


def _other_presents(state: TunerState, present: planner.Present) -> list[planner.Present]:
    """List other buckets in which the table's K was measured at today's acceptance."""
    others = []
    for cell in state.tuning.cells:
        k = state.accepted.k_at(bucket_first(cell.batch))
        fresh = planner.is_fresh(cell, mean_batch=cell.mean_batch, first=present.first)
        if cell.batch != present.batch and cell.k == k and fresh:
            rate = Rate(cell.tokens_per_second, cell.mean_batch)
            others.append(
                to_present(state, batch=cell.batch, k=k, rate=rate, survival=present.survival)
            )
    return others


def _occupancy(state: TunerState) -> dict[int, float]:
    window = state.counters.window(start=-math.inf, end=math.inf)
    return {} if isinstance(window, NoEstimate) else busy_seconds_by_batch(window)


def _recommend(state: TunerState, advice: planner.Advice | None) -> TunerState:
    """Store the advice; what is stored stays while table and gain are about the same."""
    stored = state.tuning.recommendation
    if advice is None:
        return state.remember(recommendation=None)
    gain = round(advice.gain_percent, 1)
    same_table = stored is not None and stored.k_table == advice.table.to_rows()
    if stored is not None and same_table and abs(stored.expected_gain_percent - gain) < 1:
        return state
    new = RecommendationStatus(
        table=advice.table.compact(),
        k_table=advice.table.to_rows(),
        expected_gain_percent=gain,
        why=advice.why,
        at=state.inputs.now,
    )
    state = state.remember(recommendation=new)
    if same_table:
        return state
    return state.tell("TableRecommended", f"table {new.table}: {gain:+.1f} % ({new.why})")


def _message(state: TunerState, present: planner.Present, advice: planner.Advice | None) -> str:
    if advice is not None:
        return f"table {advice.table.compact()}: {advice.gain_percent:+.1f} % ({advice.why})"
    if len({cell.k for cell in state.tuning.cells}) < 2:
        return (
            f"only K={present.k} was measured, so the step time of another K is not known: "
            "mode Auto tries them, or a kTable with two values of K shows it"
        )
    return f"no table is known to be better than {state.accepted.compact()} by the minimum gain"
