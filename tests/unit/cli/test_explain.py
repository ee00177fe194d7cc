"""`specdecode explain`: the live object's choice of K in words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import CellStatus, Status
from specdecode_operator.cli import explain_text, main
from specdecode_operator.domain.observation import ObjectKey

AT = datetime(2030, 1, 1, 12, 30, tzinfo=UTC)
KEY = ObjectKey("prod", "chat")
SPEC: dict[str, Any] = {
    "spec": {
        "model": {"name": "org/model"},
        "speculation": {"method": "eagle3", "draftModel": "org/draft", "numSpeculativeTokens": 7},
        "tuning": {"minGainPercent": 2},
    }
}


def cell(batch: int, k: int, rate: float, *, mean_batch: float | None = None) -> CellStatus:
    return CellStatus(
        batch=batch,
        k=k,
        tokens_per_second=rate,
        mean_batch=mean_batch or batch,
        steps=3000,
        measured_at=AT,
    )


def status(*cells: CellStatus, **more: Any) -> Status:
    raw: dict[str, Any] = {
        "phase": "Idle",
        "mode": "Auto",
        "active": {
            "speculation": "On",
            "table": "7x16,3",
            "kTable": [[1, 16, 7], [17, 64, 3]],
            "tableGeneration": 12,
        },
        "tuning": {"cells": [c.to_json() for c in cells]},
        **more,
    }
    return Status.model_validate(raw)


def explain(given: Status, *, batch: int | None = None) -> str:
    return explain_text.describe(KEY, SPEC, given, batch=batch)


@pytest.mark.parametrize(
    ("situation", "cells", "said"),
    [
        (
            "the best of those measured",
            [cell(8, 7, 900), cell(8, 3, 810)],
            "batch 5-8: K=7. Best of 2 measured here: K=3 is next, -10.0 %.",
        ),
        (
            "a lead below the least gain",
            [cell(8, 7, 900), cell(8, 3, 909)],
            "batch 5-8: K=7. K=3 is +1.0 %, less than minGainPercent 2.",
        ),
        (
            "a lead that was not taken",
            [cell(8, 7, 900), cell(8, 3, 990)],
            "batch 5-8: K=7. K=3 is +10.0 % and was not taken: Held.",
        ),
        (
            "at equal batch the other order holds",
            [cell(8, 7, 900, mean_batch=8), cell(8, 3, 880, mean_batch=6)],
            "K=3 is +19.6 % and was not taken",
        ),
        ("only the K in force", [cell(8, 7, 900)], "No other K was measured here yet."),
        ("only others", [cell(8, 3, 900)], "It was not measured here, others were."),
    ],
)
def test_what_decided_is_told(situation: str, cells: list[CellStatus], said: str) -> None:
    tuned = {
        "type": "Tuned",
        "status": "False",
        "reason": "Held",
        "message": "Wait.",
        "lastTransitionTime": AT,
    }
    assert said in explain(status(*cells, conditions=[tuned])), situation


def test_batches_without_a_measurement_go_together() -> None:
    told = explain(status(cell(8, 7, 900)))
    assert "batch 1-4: K=7. Nothing was measured here; it is the spec's kTable." in told
    assert "batch 17-64: K=3. Nothing was measured here" in told


def test_one_batch_may_be_asked_for() -> None:
    told = explain(status(cell(8, 7, 900), cell(32, 3, 2000)), batch=20)
    assert "batch 17-32: K=3" in told
    assert "batch 5-8" not in told


def test_a_batch_beyond_the_table_has_its_last_k() -> None:
    assert "batch 129-256: K=3" in explain(status(), batch=200)


def test_every_cell_is_shown_with_its_evidence() -> None:
    told = explain(status(cell(8, 7, 912.345), cell(8, 3, 810)))
    assert "K=7      912.3 tok/s at mean batch 8, 3000 steps, 2030-01-01 12:30Z  in force" in told


def test_speculation_off_is_told_with_its_reason() -> None:
    given = status(
        active={"speculation": "Off"},
        conditions=[
            {
                "type": "SpeculationEnabled",
                "status": "False",
                "reason": "Quarantined",
                "message": "Fell after an illegal memory access.",
                "lastTransitionTime": AT,
            }
        ],
    )
    told = explain(given)
    assert "No K is in force" in told
    assert "SpeculationEnabled=False Quarantined: Fell after" in told


def test_an_object_that_was_never_seen_is_told_so() -> None:
    told = explain(Status())
    assert "Nothing was measured yet." in told
    assert "No table is in force" in told


def test_a_recommendation_and_a_trial_are_shown() -> None:
    given = status(
        tuning={
            "recommendation": {
                "table": "3",
                "kTable": [[1, 64, 3]],
                "expectedGainPercent": 4.2,
                "why": "batch 5-8: K 7 → 3",
                "at": AT,
            }
        }
    )
    assert "Recommended: 3, +4.2 %: batch 5-8: K 7 → 3" in explain(given)


def test_a_batch_below_1_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "chat", "--batch", "0"]) == 1
    assert "--batch takes a batch size from 1 on" in capsys.readouterr().err


def test_without_an_api_server_it_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    assert main.main(["explain", "chat"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err
