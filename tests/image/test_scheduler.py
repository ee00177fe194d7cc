"""The hooks in vLLM's own schedulers under a made-up worker: both accounts must agree exactly.

The same code runs on the scheduler of the engine under test and on that of the image's vLLM, one
step at a time and a step ahead.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

IMAGE = Path(__file__).parents[2] / "vllm-image"
PLUGIN = IMAGE / "plugin"
MAKE_ENGINE = IMAGE / "engine" / "make-engine"
WORKER = Path(__file__).parent / "fake_worker.py"
VERSIONS = ("0.32.0", "0.33.0")
TABLE = [7] * 4 + [3] * 4 + [1] * 8  # K by batch, from 1 on
MARGIN = 2  # of the situation "held edges"


@dataclass(frozen=True)
class Account:
    """What one situation left behind."""

    fields: dict[str, Any]

    @property
    def counted(self) -> Counter[str]:
        return Counter(self.fields["counted"])

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [tuple(sample) for sample in self.fields["plugin"].get(f"specdecode_{name}", ())]

    def total(self, name: str) -> float:
        return sum(value for _, value in self.samples(f"{name}_total"))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for labels, value in self.samples(f"{name}_total"):
            sums[labels[label]] = sums.get(labels[label], 0) + value
        return {key: value for key, value in sums.items() if value}

    @property
    def info(self) -> dict[str, str]:
        ((labels, _),) = self.samples("plugin_info")
        return labels

    @property
    def said(self) -> str:
        return "\n".join(self.fields["said"])

    @property
    def ks(self) -> set[int]:
        return {k for _, k in self.fields["decisions"]}


@dataclass(frozen=True)
class Course:
    """The situations as one vLLM went through them."""

    version: str
    mode: str
    accounts: dict[str, Account]

    def __getitem__(self, situation: str) -> Account:
        return self.accounts[situation]


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    command = [sys.executable, MAKE_ENGINE, "--with-next"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    printed: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return printed


@pytest.fixture(
    scope="module",
    params=[(version, mode) for version in VERSIONS for mode in ("sync", "async")],
    ids="-".join,
)
def course(
    request: pytest.FixtureRequest,
    made: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Course:
    version, mode = request.param
    folder = tmp_path_factory.mktemp("tables")
    written = tmp_path_factory.mktemp("course") / "course.json"
    pair = made["models"]["high"]
    sources = [made["next"]] if version == VERSIONS[1] else []
    subprocess.run(
        [f"{made['venv']}/bin/python", WORKER, pair["target"], pair["draft"], mode, written],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*sources, str(PLUGIN)]),
            "SPECDECODE_TABLES": str(folder),
            "SPECDECODE_ARM": str(folder / "arm"),
            "HF_HUB_OFFLINE": "1",
        },
        check=True,
    )
    played = json.loads(written.read_text())
    assert (played["vllm"].split("+")[0], played["mode"]) == (version, mode)
    accounts = {name: Account(fields) for name, fields in played["accounts"].items()}
    return Course(version, mode, accounts)


def test_the_scheduler_is_the_one_vllm_would_have_taken(course: Course) -> None:
    expected = {"sync": "SpecdecodeScheduler", "async": "SpecdecodeAsyncScheduler"}
    names = {account.fields["scheduler"] for account in course.accounts.values()}
    assert names == {expected[course.mode]}


@pytest.mark.parametrize("situation", ["a table", "swapped tables", "held edges", "static K"])
def test_every_token_draft_and_step_is_counted_once_through_preemptions_and_aborts(
    course: Course, situation: str
) -> None:
    account = course[situation]
    counted = account.counted
    assert counted["preempted"] > 0
    assert account.total("step_tokens") + account.total("mixed_step_tokens") == counted["tokens"]
    assert account.total("engine_iterations") == counted["passes"]
    assert account.by_label("accepted_per_position", "position") == by_position(
        account.fields["accepted"]
    )
    assert account.by_label("at_risk_per_position", "position")["0"] == counted["drafts"]
    assert account.total("plugin_errors") == 0


@pytest.mark.parametrize("situation", ["a table", "swapped tables", "held edges", "static K"])
def test_drafts_at_risk_are_those_of_vllms_account_of_each_request(
    course: Course, situation: str
) -> None:
    account = course[situation]
    at_risk = account.by_label("at_risk_per_position", "position")
    assert at_risk == by_position(account.fields["at_risk"])


@pytest.mark.parametrize("situation", ["a table", "swapped tables", "held edges", "static K"])
def test_a_decode_step_counts_under_the_k_that_was_decided_one_step_before(
    course: Course, situation: str
) -> None:
    account = course[situation]
    cells = Counter[str]()
    for labels, value in account.samples("steps_total"):
        cells[f"{labels['batch']}/{labels['k']}"] += int(value)
    assert +cells == Counter(account.fields["cells"])


def test_k_is_what_the_table_says(course: Course) -> None:
    decisions = course["a table"].fields["decisions"]
    assert course["a table"].ks == {7, 3, 1}
    assert all(k == TABLE[batch - 1] for batch, k in decisions)
    assert course["a table"].info["live_table"] == "true"


def test_swapped_tables_and_the_disabled_one_take_turns(course: Course) -> None:
    assert course["swapped tables"].ks == {7, 3, 1, 0}


def test_held_edges_leave_a_row_only_when_the_batch_is_beyond_by_more_than_the_margin(
    course: Course,
) -> None:
    decisions = course["held edges"].fields["decisions"]
    held = [(batch, k) for batch, k in decisions if k != TABLE[batch - 1]]
    assert held
    assert all(k in TABLE[max(0, batch - 1 - MARGIN) : batch + MARGIN] for batch, k in held)


def test_a_senseless_margin_is_told_and_holds_nothing(course: Course) -> None:
    account = course["a senseless margin"]
    assert "SPECDECODE_EDGE_MARGIN must be" in account.said
    assert all(k == TABLE[batch - 1] for batch, k in account.fields["decisions"])


def test_a_static_k_is_exported_as_such_and_said(course: Course) -> None:
    account = course["static K"]
    assert (account.info["live_table"], account.info["k_max"]) == ("false", "7")
    assert account.by_label("steps", "k").keys() == {"7"}
    assert "no table is followed: K stays 7" in account.said


def test_without_speculation_steps_and_tokens_are_exported(course: Course) -> None:
    account = course["no speculation"]
    assert (account.info["method"], account.info["live_table"]) == ("none", "false")
    assert account.by_label("steps", "k").keys() == {"0"}
    tokens = account.total("step_tokens") + account.total("mixed_step_tokens")
    assert tokens == account.counted["tokens"]
    assert account.by_label("at_risk_per_position", "position") == {}
    assert "speculation is off" in account.said


def test_where_vllm_dropped_the_table_k_is_static_and_the_plugin_says_so(course: Course) -> None:
    account = course["data parallel"]
    assert account.info["live_table"] == "false"
    assert account.ks == {7}
    assert "or vllm dropped it" in account.said.lower()


def test_a_drafter_that_follows_no_table_is_given_none(course: Course) -> None:
    account = course["a method that follows no table"]
    assert (account.info["method"], account.info["live_table"]) == ("ngram_gpu", "false")
    assert account.ks == {7}
    assert account.by_label("steps", "k").keys() == {"7"}
    is_withdrawn = "the start-up table is dropped" in account.said
    assert is_withdrawn == (course.version == "0.32.0")  # 0.33 drops it itself


def test_without_a_field_that_steps_need_tables_are_followed_and_the_heart_beats_but_no_step_counts(
    course: Course,
) -> None:
    account = course["outputs without voided drafts"]
    assert account.ks == {7, 3, 1}
    assert account.info["live_table"] == "true"
    assert account.total("steps") == 0
    assert account.total("engine_iterations") == account.counted["passes"]
    assert account.by_label("plugin_errors", "where") == {"features": 1}
    assert "vLLM lacks ['num_invalid_spec_tokens']" in account.said


def test_without_the_field_of_k_no_table_is_followed_and_steps_are_counted(course: Course) -> None:
    account = course["outputs without K"]
    assert account.info["live_table"] == "false"
    assert account.total("steps") > 0
    assert "this vLLM has no num_spec_tokens_to_schedule" in account.said


def test_hooks_that_fail_leave_every_request_served_and_are_counted_and_told_once(
    course: Course,
) -> None:
    account = course["an observer that fails"]
    assert account.counted["tokens"] == course["a table"].counted["tokens"]
    assert account.by_label("plugin_errors", "where") == {"schedule": account.counted["passes"]}
    assert account.total("engine_iterations") == account.counted["passes"]
    assert account.said.count("error in schedule") == 1


def test_beside_the_rust_front_end_the_plugin_is_inert_and_says_what_to_change(
    course: Course,
) -> None:
    account = course["the Rust front end"]
    assert account.counted["tokens"] > 0
    assert account.fields["plugin"] == {}
    assert "unset VLLM_USE_RUST_FRONTEND" in account.said


def by_position(counts: list[int]) -> dict[str, float]:
    return {str(position): count for position, count in enumerate(counts) if count}
