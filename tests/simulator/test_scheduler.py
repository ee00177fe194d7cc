"""Step for step, the engine model drafts, accepts and emits what vLLM's own scheduler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_sim import model
from tests.simulator.test_model import Bench, build_limits
from tests.support.engine import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MAKE_ENGINE = ROOT / "vllm-image" / "engine" / "make-engine"
DRIVER = Path(__file__).parent / "vllm_drafts.py"
VERSIONS = ("0.32.0", "0.33.0")

Json = dict[str, Any]


def a_request(**changes: Any) -> Json:
    plain = {"prompt": 16, "output": 40, "max_model_len": 256, "k": 7, "is_accepted": False}
    return {**plain, **changes}


REQUESTS = {
    "nothing accepted up to max_tokens": a_request(output=6),
    "all accepted, beyond max_tokens": a_request(output=12, is_accepted=True),
    "all accepted, up to max_tokens": a_request(output=17, is_accepted=True),
    "one token": a_request(output=1),
    "nothing accepted up to max_model_len": a_request(prompt=245, output=200),
    "all accepted up to max_model_len": a_request(prompt=230, output=200, is_accepted=True),
    "K=1": a_request(k=1, is_accepted=True, output=8),
}


@pytest.fixture(scope="module")
def made() -> Json:
    command = [sys.executable, MAKE_ENGINE, "--with-next"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    printed: Json = json.loads(answer.stdout.splitlines()[-1])
    return printed


@pytest.fixture(scope="module", params=VERSIONS)
def by_vllm(request: pytest.FixtureRequest, made: Json) -> dict[str, list[list[int]]]:
    pair = made["models"]["high"]
    sources = made["next"] if request.param == VERSIONS[1] else ""
    answer = subprocess.run(
        [
            f"{made['venv']}/bin/python",
            DRIVER,
            pair["target"],
            pair["draft"],
            json.dumps(list(REQUESTS.values())),
        ],
        env={**os.environ, "PYTHONPATH": sources, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    printed = json.loads(answer.stdout.splitlines()[-1])
    assert printed["vllm"].split("+")[0] == request.param
    return dict(zip(REQUESTS, printed["steps"], strict=True))


def simulate(wanted: Json) -> list[list[int]]:
    engine = Bench(
        build_limits(max_model_tokens=wanted["max_model_len"]),
        curve=(1.0 if wanted["is_accepted"] else 0.0,) * wanted["k"],
    )
    engine.submit(0, prompt=wanted["prompt"], output=wanted["output"])
    columns = (model.DRAFT_TOKENS, model.ACCEPTED_TOKENS, model.TOKENS)
    return [[int(numbers[c]) for c in columns] for numbers in engine.drain(wanted["k"])]


@pytest.mark.parametrize("situation", REQUESTS)
def test_a_request_takes_the_same_steps(
    situation: str, by_vllm: dict[str, list[list[int]]]
) -> None:
    assert simulate(REQUESTS[situation]) == by_vllm[situation]
