"""The hooks in vLLM's own scheduler under a made-up worker: both accounts must agree exactly."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Account = dict[str, Any]

IMAGE = Path(__file__).parents[2] / "vllm-image"
PLUGIN = IMAGE / "plugin"
MAKE_ENGINE = IMAGE / "engine" / "make-engine"
WORKER = Path(__file__).parent / "fake_worker.py"
TABLE = (
    '{"schema": 1, "generation": 3, "enabled": true, "rows": [[1, 4, 7], [5, 8, 3], [9, 16, 1]]}'
)


@pytest.fixture(scope="module", params=["sync", "async"])
def account(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Account:
    made = json.loads(subprocess.run([MAKE_ENGINE], stdout=subprocess.PIPE, check=True).stdout)
    folder = tmp_path_factory.mktemp("tables")
    (folder / "stable.json").write_text(TABLE)
    pair = made["models"]["high"]
    answer = subprocess.run(
        [f"{made['venv']}/bin/python", WORKER, pair["target"], pair["draft"], request.param],
        env={
            **os.environ,
            "PYTHONPATH": str(PLUGIN),
            "SPECDECODE_TABLES": str(folder),
            "SPECDECODE_ARM": str(folder / "arm"),
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    printed: Account = json.loads(answer.stdout.splitlines()[-1])
    assert printed["mode"] == request.param
    return printed


def test_the_scheduler_is_the_one_vllm_would_have_taken(account: Account) -> None:
    expected = {"sync": "SpecdecodeScheduler", "async": "SpecdecodeAsyncScheduler"}
    assert account["scheduler"] == expected[account["mode"]]


def test_every_token_and_draft_is_counted_once_through_preemptions_and_aborts(
    account: Account,
) -> None:
    counted = account["vllm"]
    assert counted["preempted"] > 0
    assert total(account, "step_tokens") + total(account, "mixed_step_tokens") == counted["tokens"]
    assert total(account, "engine_iterations") == counted["passes"]
    assert by_label(account, "accepted_per_position", "position") == {
        str(position): count for position, count in enumerate(counted["accepted"])
    }
    assert by_label(account, "at_risk_per_position", "position")["0"] == counted["drafts"]
    assert total(account, "plugin_errors") == 0


def test_steps_carry_the_ks_of_the_table(account: Account) -> None:
    by_k = by_label(account, "steps", "k")
    assert {k for k, steps in by_k.items() if steps} == {"7", "3", "1"}


def samples(account: Account, name: str) -> list[tuple[dict[str, str], float]]:
    return [(labels, value) for labels, value in account["plugin"][f"specdecode_{name}_total"]]


def total(account: Account, name: str) -> float:
    return sum(value for _, value in samples(account, name))


def by_label(account: Account, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in samples(account, name):
        sums[labels[label]] = sums.get(labels[label], 0) + value
    return sums
