"""Which load the engines serve now, and the figures of it that the status shows."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Final

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import EstimateStatus

from .acceptance import (
    MIN_DRAFTS,
    PositionSurvival,
    Survival,
    estimate_clustered_survival,
    tokens_per_step,
)
from .counters import CellDelta, Counters, MixedDelta, NoEstimate, Window
from .goodput import ARM_STABLE, busy_seconds_by_batch, measure_goodput

_LEAST_SECONDS: Final = 10.0
_MOST_SECONDS: Final = 60.0
_LEAST_SCRAPES: Final = 4

_FIGURES_SECONDS: Final = 30.0
_FIGURES_MOVED: Final = 0.01
_FIGURES_AGE: Final = timedelta(minutes=5)


def recent_window(counters: Counters, *, now: float, seconds: float) -> Window | NoEstimate:
    """Return the last seconds (at least 10 and at most 60, four scrapes) up to the last scrape."""
    whole = counters.window(start=-math.inf, end=now)
    if isinstance(whole, NoEstimate):
        return whole
    scrape = whole.seconds / max(whole.scrapes - 1, 1)
    length = max(min(max(seconds, _LEAST_SECONDS), _MOST_SECONDS), _LEAST_SCRAPES * scrape)
    recent = counters.window(start=whole.end - length, end=now)
    return whole if isinstance(recent, NoEstimate) else recent


def busiest_batch(window: Window) -> int | None:
    """Return the batch bucket in which most of the busy time was spent, None without a step."""
    busy = busy_seconds_by_batch(window)
    return max(busy, key=lambda batch: busy[batch]) if busy else None


def mean_batch_at(window: Window, batch: int) -> float:
    """Return the mean batch inside a bucket; its bound where no step ran there."""
    deltas: list[CellDelta | MixedDelta] = [*window.cells, *window.mixed]
    inside = [d for d in deltas if d.batch == batch and d.arm == ARM_STABLE]
    steps, requests = sum(d.steps for d in inside), sum(d.requests for d in inside)
    return requests / steps if steps > 0 and requests > 0 else float(batch)


def first_acceptance(window: Window) -> PositionSurvival | None:
    """Return acceptance at the first position, None where too few drafts were seen."""
    survival = estimate_clustered_survival(window.drafts)
    return None if isinstance(survival, NoEstimate) else survival.positions[0]


def survival_now(counters: Counters, window: Window) -> Survival | None:
    """Return survival in a window as `estimate_survival_now` does, None where it cannot."""
    survival = estimate_survival_now(counters, window)
    return None if isinstance(survival, NoEstimate) else survival


def estimate_survival_now(counters: Counters, window: Window) -> Survival | NoEstimate:
    """Estimate survival in a window; positions with too few drafts there come from all samples.

    Without the plugin's counters vLLM's own are used, which tell it only while K is constant.
    """
    if counters.adaptive:
        return NoEstimate(
            Reason.ADAPTIVE_VERIFICATION,
            "The engine verifies only the drafts it expects to be accepted, so acceptance by "
            "position cannot be told: tokens per step and step time are what counts.",
        )
    whole = counters.window(start=-math.inf, end=math.inf)
    drafts = whole.drafts if isinstance(whole, Window) else window.drafts
    if drafts.at_risk.any():
        drafts = window.drafts.filled_from(drafts, least=MIN_DRAFTS)
        return estimate_clustered_survival(drafts)
    own = counters.own_drafts(start=window.start, end=window.end)
    return own if isinstance(own, NoEstimate) else estimate_clustered_survival(own)


def figures_now(counters: Counters, *, now: float, stored: EstimateStatus) -> EstimateStatus:
    """Estimate acceptance and goodput at the batch bucket with most time now.

    The stored figures stay until one of them moves by 1 % or they are five minutes old, and
    where nothing can be estimated.
    """
    recent = recent_window(counters, now=now, seconds=_FIGURES_SECONDS)
    batch = None if isinstance(recent, NoEstimate) else busiest_batch(recent)
    if isinstance(recent, NoEstimate) or batch is None:
        return stored
    measured = measure_goodput(recent, batch=batch, k=_commonest_k(recent, batch))
    if isinstance(measured, NoEstimate):
        return stored
    survival = estimate_clustered_survival(recent.drafts)
    positions = () if isinstance(survival, NoEstimate) else survival.positions
    figures = EstimateStatus(
        batch=batch,
        mean_acceptance_length=round(_mean_length(recent, adaptive=counters.adaptive), 2),
        acceptance=[round(position.survival, 3) for position in positions],
        goodput_tokens_per_second=rounded(measured.tokens_per_second),
        tokens_per_second_per_user=rounded(measured.tokens_per_second / measured.mean_batch),
        versus_spec_off_percent=stored.versus_spec_off_percent,
        measured_at=datetime.fromtimestamp(int(now), tz=UTC),
    )
    return figures if _has_moved(stored, figures) else stored


def rounded(value: float) -> float:
    """Round to four significant digits: more is noise, and every change is a write."""
    return float(f"{value:.4g}")


def _commonest_k(window: Window, batch: int) -> int:
    steps = {c.k: c.steps for c in window.cells if c.batch == batch and c.arm == ARM_STABLE}
    return max(steps, key=lambda k: steps[k], default=0)


def _mean_length(window: Window, *, adaptive: bool) -> float:
    """Return 1 + accepted ÷ drafts as it was, over all K that ran; under AV tokens per step."""
    if adaptive:
        emitted = tokens_per_step(window)
        return 1.0 if isinstance(emitted, NoEstimate) else emitted
    drafts = window.at_risk.get(0, 0.0)
    accepted = sum(window.accepted.values())
    return 1.0 + accepted / drafts if drafts > 0 else 1.0


def _has_moved(stored: EstimateStatus, new: EstimateStatus) -> bool:
    if stored.batch != new.batch or stored.measured_at is None or new.measured_at is None:
        return True
    if new.measured_at - stored.measured_at >= _FIGURES_AGE:
        return True
    pairs = (
        (stored.goodput_tokens_per_second, new.goodput_tokens_per_second),
        (stored.mean_acceptance_length, new.mean_acceptance_length),
    )
    return any(
        old is None or fresh is None or abs(fresh - old) > _FIGURES_MOVED * abs(old)
        for old, fresh in pairs
    )
