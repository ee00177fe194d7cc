"""What the tuner's parts hand to one another: its input, its outcome, and the pass in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import (
    EstimateStatus,
    ExperimentStatus,
    TuningMode,
    TuningStatus,
)
from specdecode_operator.domain.decision import Event
from specdecode_operator.domain.observation import MetricsSamples
from specdecode_operator.domain.table import Envelope, KTable
from specdecode_operator.errors import InvalidTableError
from specdecode_operator.estimate import load
from specdecode_operator.estimate.counters import Counters

_LEAST_REACH: Final = timedelta(seconds=60)
_REACH_BLOCKS: Final = 3

_FOR_ENGINES: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class TuningInput:
    """All that one pass of the tuner may look at.

    `acknowledged`: every pod reports the table in force. `hold`: why nothing may be started.
    `samples` should go back by `reach(min_block)`, and over an open block. `estimate` is the
    stored one, which stays while it has not moved.
    """

    now: datetime
    mode: TuningMode
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    spec_table: KTable
    envelope: Envelope
    min_k: int
    min_gain_percent: float
    min_steps: int
    min_block: timedelta
    cooldown: timedelta
    samples: MetricsSamples
    acknowledged: bool
    hold: str | None = None
    estimate: EstimateStatus = field(default_factory=EstimateStatus)


@dataclass(frozen=True)
class TuningOutcome:
    """What one pass decided: the table wanted in stable.json, the memory, what to tell."""

    table: KTable
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    estimate: EstimateStatus
    reason: Reason
    message: str
    events: tuple[Event, ...]
    requeue_after: timedelta


@dataclass(frozen=True)
class TunerState:
    """A pass as far as it has come; `accepted` is the table without the open experiment."""

    inputs: TuningInput
    counters: Counters
    accepted: KTable
    tuning: TuningStatus
    experiment: ExperimentStatus | None
    events: tuple[Event, ...] = ()

    @property
    def now(self) -> float:
        """The pass's moment in unix seconds."""
        return self.inputs.now.timestamp()

    @property
    def block_seconds(self) -> float:
        """The least length of a block."""
        return max(self.inputs.min_block.total_seconds(), 1.0)

    @property
    def changed_at(self) -> datetime:
        """From when on samples belong to the table in force; in the memory None until then."""
        return self.tuning.last_change_at or self.inputs.now

    @property
    def table(self) -> KTable:
        """The table wanted in force."""
        if self.experiment is None:
            return self.accepted
        return KTable.from_rows(self.experiment.to_rows)

    def remember(self, **changes: object) -> TunerState:
        """Change fields of the tuner's memory."""
        return replace(self, tuning=self.tuning.model_copy(update=changes))

    def tell(self, reason: str, message: str) -> TunerState:
        """Add an Event."""
        return replace(self, events=(*self.events, Event(reason, message)))

    def ends(self, reason: Reason, message: str) -> TuningOutcome:
        """Make this state the outcome of the pass."""
        return TuningOutcome(
            table=self.table,
            tuning=self.tuning,
            experiment=self.experiment,
            estimate=load.figures_now(self.counters, now=self.now, stored=self.inputs.estimate),
            reason=reason,
            message=message,
            events=self.events,
            requeue_after=self._pause(),
        )

    def _pause(self) -> timedelta:
        """Wait for the engines, else for the rest of an open block, else for a load that moves."""
        if self.tuning.last_change_at is None:
            return _FOR_ENGINES
        seconds = self.block_seconds / 3
        if self.experiment is not None and self.experiment.judged_from is not None:
            passed = (self.inputs.now - self.experiment.judged_from).total_seconds()
            seconds = self.block_seconds - passed
        return timedelta(seconds=min(max(seconds, 2.0), 30.0))


def reach(min_block: timedelta) -> timedelta:
    """Tell how far back samples must go for a measurement outside of an experiment."""
    return max(_LEAST_REACH, _REACH_BLOCKS * min_block)


def read_rows(rows: Sequence[Sequence[int]]) -> KTable | None:
    """Read a table back from status; None where there is none or it breaks an invariant."""
    try:
        return KTable.from_rows(rows) if rows else None
    except InvalidTableError:
        return None
