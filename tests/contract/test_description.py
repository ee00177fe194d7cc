"""Both servers show what the contract says, name by name; a difference on either side fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.describe import ASKS, describe_answers, describe_metrics
from tests.contract.servers import CONTRACT
from tests.image.running_engine import RunningServer

WRITTEN: dict[str, Any] = json.loads(CONTRACT.read_text("utf-8"))
# Families that only one side can have as they are, and why.
EXCEPTIONS = {
    "specdecode_sim_info": "the simulator says that it is one",
    "specdecode_sim_planned_seconds": "its lag",
    "specdecode_sim_busy_seconds": "its lag",
}
Described = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def described(server: RunningServer) -> Described:
    """Describe the answers first: asking is the load that the metrics then show."""
    server.apply([[1, 64, 7]])
    answers = describe_answers(server.url)
    return {"answers": answers, "metrics": describe_metrics(server.read_metrics())}


@pytest.mark.parametrize("name", ASKS)
def test_an_answer_is_as_the_contract_says(described: Described, name: str) -> None:
    assert described["answers"][name] == WRITTEN["answers"][name]


@pytest.mark.parametrize("name", sorted(WRITTEN["metrics"].keys() - EXCEPTIONS.keys()))
def test_a_metric_is_as_the_contract_says(described: Described, name: str) -> None:
    assert described["metrics"].get(name) == WRITTEN["metrics"][name]


def test_there_are_no_other_metrics(described: Described) -> None:
    assert described["metrics"].keys() - WRITTEN["metrics"].keys() <= EXCEPTIONS.keys()
