"""What one pass worked out: everything that its status and its actions are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import FallStatus, RevisionInputs
from specdecode_operator.decide.fall import Answer
from specdecode_operator.decide.rollout import Hold, Pods, Target
from specdecode_operator.decide.tables import WantedTables
from specdecode_operator.decide.tuning import TuningResult
from specdecode_operator.domain.decision import Event


@dataclass(frozen=True)
class Facts:
    """Intermediate results of one pass.

    `target` is None where nothing may start; `serving` is the revision that serves after this
    pass, `inputs` what it was made from; `replicas` the pods wanted of each revision; `arms` the
    arm of each pod that can follow one.
    """

    answer: Answer
    fall: FallStatus | None
    refused: Hold | None
    target: Target | None
    counts: Mapping[str, Pods]
    replicas: Mapping[str, int]
    serving: str
    inputs: RevisionInputs
    rolling: bool
    tuning: TuningResult
    arms: Mapping[str, str]
    tables: WantedTables
    live: Hold | None
    acknowledged: int
    events: tuple[Event, ...]
