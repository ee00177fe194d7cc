"""Both servers act alike: on table files and arms, in their counters, and at their end.

The tests run in the order they stand in, and the last ones end the server.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.servers import build_command, run_server
from tests.image.running_engine import Difference, Rows, RunningServer
from tests.support.waiting import wait_until

EVERYWHERE_7: Rows = [[1, 64, 7]]
DESCENDING: Rows = [[1, 4, 7], [5, 16, 3], [17, 64, 1]]
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
KINDS = [
    pytest.param("simulator", marks=pytest.mark.server),
    pytest.param("real", marks=[pytest.mark.engine, pytest.mark.timeout(900)]),
]


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server") / request.param
    with run_server(request.param, folder) as running:
        yield running


def test_before_the_first_table_nothing_is_drafted(server: RunningServer) -> None:
    with server.load(2):
        seen = server.observe(10)
    assert seen.total(DRAFTS) == 0
    assert seen.by_label("specdecode_steps_total", "k").keys() == {"0"}
    server.wait_for(specdecode_table_generation=0, specdecode_table_stale=0)


@pytest.mark.parametrize(("streams", "k"), [(2, 7), (8, 3), (24, 1)])
def test_k_follows_the_batch_by_the_table(server: RunningServer, streams: int, k: int) -> None:
    server.apply(DESCENDING)
    with server.load(streams, output_tokens=300):
        server.observe(3, k=k)
        seen = server.observe(20, k=k)
    by_k = seen.by_label("specdecode_steps_total", "k")
    assert by_k[str(k)] >= 0.8 * sum(by_k.values())
    assert seen.total(DRAFT_TOKENS) / seen.total(DRAFTS) == pytest.approx(k, abs=0.5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "not-json", id="empty"),
        pytest.param('{"schema": 1, "gener', "not-json", id="torn"),
        pytest.param('{"schema": 1}', "fields", id="incomplete"),
        pytest.param(
            '{"schema": 1, "generation": "9000", "enabled": true, "rows": [[1, 64, 7]]}',
            "fields",
            id="of a wrong type",
        ),
        pytest.param(
            '{"schema": 2, "generation": 9000, "enabled": true, "rows": [[1, 64, 7]]}',
            "schema",
            id="of another schema",
        ),
        pytest.param(
            '{"schema": 1, "generation": 9000, "enabled": true, "rows": [[2, 64, 7]]}',
            "rows",
            id="with a gap",
        ),
        pytest.param(
            '{"schema": 1, "generation": 9000, "enabled": true, "rows": [[1, 64, 4]]}',
            "outside-envelope",
            id="outside the envelope",
        ),
    ],
)
def test_a_bad_file_is_refused_counted_and_leaves_the_table_in_force(
    server: RunningServer, text: str, reason: str
) -> None:
    server.apply(EVERYWHERE_7)
    before = server.scrape()
    server.write_text(text)
    server.wait_for(
        specdecode_table_stale=1,
        specdecode_table_generation=before.total("specdecode_table_generation"),
        specdecode_table_fingerprint=before.total("specdecode_table_fingerprint"),
    )
    after = server.scrape().by_label("specdecode_table_rejects_total", "reason")
    rejects = before.by_label("specdecode_table_rejects_total", "reason")
    assert after == {**rejects, reason: rejects[reason] + 1}
    with server.load(1):
        assert server.observe(3, k=7).total(DRAFTS) > 0
    server.apply(EVERYWHERE_7)


def test_the_arm_chooses_the_table_and_is_the_kill_switch(server: RunningServer) -> None:
    stable = server.write_table(EVERYWHERE_7)
    canary = server.write_table([[1, 64, 3]], arm="canary")
    server.wait_for(specdecode_table_generation=stable)
    with server.load(2):
        server.set_arm("canary")
        server.wait_for(specdecode_table_arm=1, specdecode_table_generation=canary)
        server.observe(5, k=3, arm=1)
        server.set_arm("off")
        server.wait_for(specdecode_table_arm=2, specdecode_table_enabled=0)
        server.observe(3, k=0, arm=2)
        assert server.observe(10, k=0, arm=2).total(DRAFTS) == 0
        server.set_arm("stable")
        server.wait_for(specdecode_table_arm=0, specdecode_table_generation=stable)
        assert server.observe(5, k=7, arm=0).total(DRAFTS) > 0


def test_a_disabled_table_stops_drafting_until_it_is_enabled(server: RunningServer) -> None:
    with server.load(2):
        server.apply(EVERYWHERE_7, enabled=False)
        server.wait_for(specdecode_table_enabled=0)
        server.observe(3, k=0)
        assert server.observe(10, k=0).total(DRAFTS) == 0
        server.apply(EVERYWHERE_7)
        assert server.observe(5, k=7).total(DRAFTS) > 0


def test_greedy_text_is_the_same_at_each_k(server: RunningServer) -> None:
    texts = set()
    for k in (0, 1, 7):
        server.apply([[1, 64, k]])
        texts.add(server.complete("the same text", tokens=60))
    assert len(texts) == 1


def test_the_plugins_counters_agree_with_vllms_own(server: RunningServer) -> None:
    server.apply(DESCENDING)
    server.wait_for(**{"vllm:num_requests_running": 0})
    before = server.scrape()
    with ThreadPoolExecutor(8) as streams:  # 13 tokens: drafts are shortened near the end
        list(streams.map(lambda n: server.complete(f"request {n}", tokens=13), range(24)))
    server.wait_for(**{"vllm:num_requests_running": 0})
    seen = Difference(before, server.scrape())
    emitted = seen.total("specdecode_step_tokens_total")
    emitted += seen.total("specdecode_mixed_step_tokens_total")
    assert emitted == seen.total("vllm:generation_tokens_total") == 24 * 13
    prefilled = seen.total("specdecode_mixed_step_prefill_tokens_total")
    assert prefilled == seen.total("vllm:prompt_tokens_total") > 0
    at_risk = seen.by_label("specdecode_at_risk_per_position_total", "position")
    accepted = seen.by_label("specdecode_accepted_per_position_total", "position")
    assert at_risk["0"] == seen.total(DRAFTS)
    assert accepted == seen.by_label(ACCEPTED_BY_POSITION, "position")
    assert sum(accepted.values()) == seen.total(ACCEPTED) <= seen.total(DRAFT_TOKENS)
    assert server.scrape().total("specdecode_plugin_errors_total") == 0


def test_what_a_request_leaves_is_counted_once(server: RunningServer) -> None:
    server.wait_for(**{"vllm:num_requests_running": 0})
    before = server.scrape()
    server.complete("counted once", tokens=20)
    seen = Difference(before, server.scrape())
    assert seen.by_label("vllm:request_success_total", "finished_reason") == {"length": 1}
    for name, total in (
        ("vllm:request_generation_tokens", 20),
        ("vllm:request_params_max_tokens", 20),
        ("vllm:request_params_n", 1),
    ):
        assert (seen.total(f"{name}_count"), seen.total(f"{name}_sum")) == (1, total)
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
    ):
        assert seen.total(f"{name}_count") == 1
    # Observed per output, which under speculation carries several tokens.
    assert 1 <= seen.total("vllm:inter_token_latency_seconds_count") <= 19


def test_no_counter_ever_falls(server: RunningServer) -> None:
    earlier = _read_counters(server)
    server.apply(DESCENDING)
    with server.load(6):
        server.observe(20)
    later = _read_counters(server)
    fallen = {name for name, value in earlier.items() if later.get(name, -1.0) < value}
    assert not fallen


def _read_counters(server: RunningServer) -> dict[tuple[str, str], float]:
    """Return the samples of counters, histograms and summaries by name and labels."""
    return {
        (sample.name, json.dumps(sample.labels, sort_keys=True)): sample.value
        for family in text_string_to_metric_families(server.read_metrics())
        if family.type in ("counter", "histogram", "summary")
        for sample in family.samples
    }


def test_a_memory_fault_is_told_although_the_server_exits_with_0(server: RunningServer) -> None:
    assert server.termination_log.read_text() == ""
    server.apply(EVERYWHERE_7)
    with server.load(2):
        server.observe(3, k=7)
        server.plant.touch()
        message = wait_until(
            server.termination_log.read_text, what="a termination message", seconds=30
        )
        exit_code = server.process.wait(timeout=60)
    report = json.loads(message)
    assert report.keys() == {"schema", "cause", "line", "process", "at"}
    assert (report["schema"], report["cause"]) == (1, "illegal-memory-access")
    assert report["line"].endswith("CUDA error: an illegal memory access was encountered")
    assert json.loads(server.termination_log.read_text()) == report
    assert exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_asked_to_end_it_exits_with_0_and_reports_no_cause(kind: str, tmp_path: Path) -> None:
    with run_server(kind, tmp_path / kind, speculation=False) as server:
        info = server.scrape().labels("specdecode_plugin_info")
        assert (info["method"], info["live_table"], info["k_max"]) == ("none", "false", "0")
        with server.load(3):
            seen = server.observe(10)
        assert seen.by_label("specdecode_steps_total", "k").keys() == {"0"}
        assert "vllm:spec_decode_num_drafts" not in server.read_metrics()
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0
        assert server.termination_log.read_text() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_flag_ends_with_2(kind: str) -> None:
    command = build_command(kind, "--no-such-flag=1")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "unrecognized arguments: --no-such-flag=1" in ended.stdout + ended.stderr
