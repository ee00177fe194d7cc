"""The plugin in a real engine behind two API servers: one account of all that either served.

What one server does, on the real engine and the simulated one, is tested in tests/contract; here
stands what only the real one has. The tests run in the order they stand in; the last ends it.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.image.running_engine import K_MAX, START_TABLE, Difference, Rows, RunningEngine
from tests.support.engine import make_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

DESCENDING: Rows = [[1, 4, 7], [5, 16, 3], [17, 64, 1]]
OTHERWISE: Rows = [[1, 4, 2], [5, 16, 5], [17, 64, 3]]
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
API_SERVERS = 2
REQUESTS = 48
CHANGES = 10
ACKNOWLEDGED_SECONDS = 1.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    files = make_engine(with_plant=True)
    pair = files.models["high"]
    config = {
        "method": "draft_model",
        "model": str(pair.draft),
        "num_speculative_tokens": K_MAX,
        "num_speculative_tokens_per_batch_size": START_TABLE,
    }
    running = RunningEngine(
        files,
        tmp_path_factory.mktemp("engine") / "high",
        f"--speculative-config={json.dumps(config)}",
        f"--api-server-count={API_SERVERS}",
        "--per-request-spec-decode-metrics=detailed",
        model=pair.target,
    )
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def test_it_says_what_it_is_once_for_both_servers(engine: RunningEngine) -> None:
    assert len(engine.find_processes("VLLM::APIServer")) == API_SERVERS
    assert engine.scrape().labels("specdecode_plugin_info") == {
        "model_name": "chat",
        "engine": "0",
        "version": "0.1.0",
        "vllm_version": "0.32.0",
        "runner": "V1",
        "method": "draft_model",
        "k_max": "7",
        "live_table": "true",
        "cudagraph_mode": "NONE",
        "adaptive_verification": "false",
    }


def test_a_change_is_in_force_and_acknowledged_within_a_second(engine: RunningEngine) -> None:
    with engine.load(4):
        seconds = [engine.apply([[1, 64, k]]) for _ in range(CHANGES // 2) for k in (7, 1)]
    assert sorted(seconds)[CHANGES // 2] <= ACKNOWLEDGED_SECONDS, seconds


def test_either_server_shows_the_same_account(engine: RunningEngine) -> None:
    generation = engine.write_table([[1, 64, 3]])
    engine.wait_for(**{"specdecode_table_generation": generation, "vllm:num_requests_running": 0})
    with ThreadPoolExecutor(8) as readers:  # each a connection of its own, to whichever answers
        scrapes = list(readers.map(lambda _: engine.scrape(), range(24)))
    assert {one.total("specdecode_table_generation") for one in scrapes} == {generation}
    assert {one.total("specdecode_engine_iterations_total") for one in scrapes} == {
        scrapes[0].total("specdecode_engine_iterations_total")
    }


def test_the_counters_are_those_of_vllm_and_of_each_request_while_k_varies(
    engine: RunningEngine,
) -> None:
    engine.apply(DESCENDING)
    engine.wait_for(**{"vllm:num_requests_running": 0})
    before = engine.scrape()
    answers = ask_many_while_tables_change(engine)
    engine.wait_for(**{"vllm:num_requests_running": 0})
    seen = Difference(before, engine.scrape())
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    emitted = seen.total("specdecode_step_tokens_total")
    emitted += seen.total("specdecode_mixed_step_tokens_total")
    assert emitted == seen.total("vllm:generation_tokens_total") == tokens
    at_risk = seen.by_label("specdecode_at_risk_per_position_total", "position")
    accepted = seen.by_label("specdecode_accepted_per_position_total", "position")
    assert (at_risk, accepted) == count_positions(answers)
    assert at_risk["0"] == seen.total(DRAFTS)
    assert accepted == seen.by_label(ACCEPTED_BY_POSITION, "position")
    assert len({max(steps_of(one)["per_step_drafted"], default=0) for one in answers}) > 2
    assert engine.scrape().total("specdecode_plugin_errors_total") == 0


def ask_many_while_tables_change(engine: RunningEngine) -> list[dict[str, Any]]:
    """Complete short texts, two tables taking turns; return vLLM's answers."""
    with ThreadPoolExecutor(8) as streams:
        asked = [
            streams.submit(engine.ask, f"request {number}", tokens=3 + number % 30)
            for number in range(REQUESTS)
        ]
        while not all(one.done() for one in asked):
            engine.apply(OTHERWISE)
            engine.apply(DESCENDING)
        return [one.result() for one in asked]


def steps_of(answer: dict[str, Any]) -> dict[str, list[int]]:
    """Return vLLM's own account of a request's steps."""
    account = answer["metrics"]["speculative_decoding"]
    return {name: account.get(name) or [] for name in ("per_step_drafted", "per_step_accepted")}


def count_positions(
    answers: list[dict[str, Any]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Count drafts at risk and accepted by position, as the requests' own accounts have them."""
    at_risk: dict[str, float] = {}
    accepted: dict[str, float] = {}
    for answer in answers:
        steps = steps_of(answer)
        for drafted, hits in zip(*steps.values(), strict=True):
            for position in range(min(hits + 1, drafted)):
                at_risk[str(position)] = at_risk.get(str(position), 0) + 1
            for position in range(hits):
                accepted[str(position)] = accepted.get(str(position), 0) + 1
    return at_risk, accepted


def test_the_pairs_acceptance_is_what_the_landscape_needs(engine: RunningEngine) -> None:
    engine.apply([[1, 64, 1]])
    with engine.load(16):
        engine.observe(3, k=1)
        seen = engine.observe(60, k=1)
    accepted = seen.total("specdecode_accepted_per_position_total", position=0)
    at_risk = seen.total("specdecode_at_risk_per_position_total", position=0)
    assert accepted / at_risk == pytest.approx(0.77, abs=0.06)


def test_a_killed_api_server_ends_the_engine_and_is_told(engine: RunningEngine) -> None:
    assert engine.termination_log.read_text() == ""
    os.kill(engine.find_processes("VLLM::APIServer")[0], signal.SIGKILL)
    assert engine.process.wait(timeout=90) == 1
    report = json.loads(engine.termination_log.read_text())
    assert report["cause"] == "engine-crash"
    assert "died with exit code -9" in report["line"]
    assert "died with exit code -9" in engine.log
