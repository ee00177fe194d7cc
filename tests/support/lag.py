"""How far simulated engines fell behind their planned step times: such a run measured the machine.

Planned and busy seconds are those of the simulator's counters (`Stack.read_step_seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping

StepSeconds = Mapping[str, tuple[float, float]]  # by pod: planned, and busy in real time


def worst_lag(after: StepSeconds, *, before: StepSeconds | None = None) -> float | None:
    """Return the largest busy ÷ planned - 1 of a pod between two readings.

    Without `before` it is since each pod's start; None where no step was planned.
    """
    lags = []
    for pod, (planned, busy) in after.items():
        planned_before, busy_before = (before or {}).get(pod, (0.0, 0.0))
        if planned > planned_before:
            lags.append((busy - busy_before) / (planned - planned_before) - 1.0)
    return max(lags, default=None)
