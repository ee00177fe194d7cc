"""Both servers act alike: on table files and arms, in their texts and in their counters.

The tests run in the order they stand in.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.conftest import PROMPTS, TEXT_TOKENS, WithoutSpeculation
from tests.image.running_engine import Difference, Rows, RunningServer
from tests.support.waiting import wait_until

EVERYWHERE_7: Rows = [[1, 64, 7]]
DESCENDING: Rows = [[1, 4, 7], [5, 16, 3], [17, 64, 1]]
OTHERWISE: Rows = [[1, 4, 2], [5, 16, 5], [17, 64, 3]]
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
RELOADS = "specdecode_table_reloads_total"
SWAP_SECONDS = 0.05
SWAPS = 100
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def test_before_the_first_table_nothing_is_drafted(server: RunningServer) -> None:
    with server.load(2):
        seen = server.observe(10)
    assert seen.total(DRAFTS) == 0
    assert seen.by_label("specdecode_steps_total", "k").keys() == {"0"}
    server.wait_for(specdecode_table_generation=0, specdecode_table_stale=0)


@pytest.mark.parametrize("streams", [1, 8, 32])
def test_what_is_drafted_follows_the_table_and_its_live_changes(
    server: RunningServer, streams: int
) -> None:
    with server.load(streams, output_tokens=300):
        for rows in (DESCENDING, OTHERWISE):
            server.apply(rows)
            k = next(row[2] for row in rows if row[0] <= streams <= row[1])
            server.observe(3, k=k)  # drafts of the table before are behind it
            seen = server.observe(20, k=k)
            assert seen.total(DRAFT_TOKENS) / seen.total(DRAFTS) == pytest.approx(k, abs=0.5)
            by_k = seen.by_label("specdecode_steps_total", "k")
            # Where requests end together, the batch is small for a while.
            assert by_k[str(k)] > 0.5 * sum(by_k.values())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "not-json", id="empty"),
        pytest.param('{"schema": 1, "gener', "not-json", id="torn"),
        pytest.param(b"\xff\xfe\x00{", "not-json", id="not UTF-8"),
        pytest.param("[" * 60_000, "not-json", id="deeply nested"),
        pytest.param(" " * 65_537, "too-large", id="huge"),
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
    server: RunningServer, text: str | bytes, reason: str
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


def test_no_text_differs_from_speculation_off_while_tables_are_swapped_under_load(
    server: RunningServer, without_speculation: WithoutSpeculation
) -> None:
    server.apply(EVERYWHERE_7)
    before = server.scrape()
    ended = threading.Event()
    swapper = threading.Thread(target=_swap_tables, args=(server, ended))
    with server.load(6), ThreadPoolExecutor(4) as streams:
        swapper.start()
        try:
            texts = dict(
                zip(
                    PROMPTS,
                    streams.map(lambda text: server.complete(text, tokens=TEXT_TOKENS), PROMPTS),
                    strict=True,
                )
            )
            wait_until(
                lambda: Difference(before, server.scrape()).total(RELOADS) >= SWAPS,
                what=f"{SWAPS} tables in force one after the other",
                seconds=60,
            )
        finally:
            ended.set()
            swapper.join()
    assert texts == without_speculation.texts
    drafted_for = Difference(before, server.scrape()).by_label("specdecode_steps_total", "k")
    assert drafted_for.keys() == {"0", "1", "2", "3", "5", "7"}


def _swap_tables(server: RunningServer, ended: threading.Event) -> None:
    while not ended.is_set():
        for k in (7, 2, 0, 5, 1, 3):
            server.write_table([[1, 64, k]])
            ended.wait(SWAP_SECONDS)


def test_the_plugins_counters_agree_with_vllms_own(server: RunningServer) -> None:
    server.apply(DESCENDING)
    server.wait_for(**{"vllm:num_requests_running": 0})
    before = server.scrape()
    with ThreadPoolExecutor(8) as streams:
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


def test_without_speculation_steps_tokens_and_heartbeat_are_counted(
    without_speculation: WithoutSpeculation,
) -> None:
    info, seen = without_speculation.info, without_speculation.under_load
    assert (info["method"], info["live_table"], info["k_max"]) == ("none", "false", "0")
    assert seen.by_label("specdecode_steps_total", "k").keys() == {"0"}
    assert seen.by_label("specdecode_steps_total", "arm").keys() == {"1"}
    assert seen.total("specdecode_step_tokens_total") > 0
    assert seen.total("specdecode_engine_iterations_total") >= 20
    scrape = without_speculation.scrape
    assert scrape.by_label("specdecode_at_risk_per_position_total", "position") == {}
    assert scrape.total("specdecode_table_generation") == 0
    assert scrape.total("specdecode_plugin_errors_total") == 0
    assert "vllm:spec_decode_num_drafts" not in without_speculation.metrics
