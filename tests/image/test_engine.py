"""The plugin in a real engine: what is drafted follows the files, counters agree with vLLM's own.

One engine, started once; the tests run in the order they stand in, and the last one ends it.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.image.running_engine import K_MAX, START_TABLE, Difference, Rows, RunningEngine
from tests.support.engine import Engine, make_engine
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

EVERYWHERE_7: Rows = [[1, 64, 7]]
DESCENDING: Rows = [[1, 4, 7], [5, 16, 3], [17, 64, 1]]
OTHERWISE: Rows = [[1, 4, 2], [5, 16, 5], [17, 64, 3]]
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"


@pytest.fixture(scope="module")
def engine_files() -> Engine:
    return make_engine(with_plant=True)


@pytest.fixture(scope="module")
def engine(
    engine_files: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    pair = engine_files.models["high"]
    config = {
        "method": "draft_model",
        "model": str(pair.draft),
        "num_speculative_tokens": K_MAX,
        "num_speculative_tokens_per_batch_size": START_TABLE,
    }
    running = RunningEngine(
        engine_files,
        tmp_path_factory.mktemp("engine") / "high",
        f"--speculative-config={json.dumps(config)}",
        model=pair.target,
    )
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def test_it_says_what_it_is_and_drafts_nothing_before_the_first_table(
    engine: RunningEngine,
) -> None:
    info = engine.scrape().labels("specdecode_plugin_info")
    assert info == {
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
    with engine.load(1):
        seen = engine.observe(20)
    assert seen.total(DRAFTS) == 0
    assert seen.by_label("specdecode_steps_total", "k").keys() == {"0"}
    assert seen.total("specdecode_engine_iterations_total") >= 20
    engine.wait_for(specdecode_table_generation=0, specdecode_table_stale=0)


@pytest.mark.parametrize("streams", [1, 8, 32])
def test_what_is_drafted_follows_the_table_and_its_live_changes(
    engine: RunningEngine, streams: int
) -> None:
    with engine.load(streams):
        for rows in (DESCENDING, OTHERWISE):
            engine.apply(rows)
            k = next(row[2] for row in rows if row[0] <= streams <= row[1])
            engine.observe(3, k=k)  # drafts of the table before are behind it
            seen = engine.observe(25, k=k)
            assert seen.total(DRAFT_TOKENS) / seen.total(DRAFTS) == pytest.approx(k, abs=0.5)
            by_k = seen.by_label("specdecode_steps_total", "k")
            assert by_k[str(k)] >= 0.8 * sum(by_k.values())


def test_the_table_can_switch_drafting_off_and_on(engine: RunningEngine) -> None:
    with engine.load(2):
        engine.apply(EVERYWHERE_7)
        engine.observe(5, k=7)
        engine.apply(EVERYWHERE_7, enabled=False)
        engine.wait_for(specdecode_table_enabled=0)
        engine.observe(3, k=0)
        assert engine.observe(15, k=0).total(DRAFTS) == 0
        engine.apply(EVERYWHERE_7)
        assert engine.observe(5, k=7).total(DRAFTS) > 0


def test_the_arm_chooses_the_table_and_is_the_kill_switch(engine: RunningEngine) -> None:
    engine.apply(EVERYWHERE_7)
    generation = engine.write_table([[1, 64, 3]], arm="canary")
    with engine.load(2):
        engine.set_arm("canary")
        engine.wait_for(specdecode_table_arm=1, specdecode_table_generation=generation)
        engine.observe(5, k=3, arm=1)
        engine.set_arm("off")
        engine.wait_for(specdecode_table_arm=2, specdecode_table_enabled=0)
        engine.observe(3, k=0, arm=2)
        assert engine.observe(15, k=0, arm=2).total(DRAFTS) == 0
        engine.set_arm("stable")
        engine.wait_for(specdecode_table_arm=0, specdecode_table_generation=generation - 1)
        assert engine.observe(5, k=7, arm=0).total(DRAFTS) > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "not-json", id="empty"),
        pytest.param('{"schema": 1, "gener', "not-json", id="torn"),
        pytest.param('{"schema": 1}', "fields", id="incomplete"),
        pytest.param(
            '{"schema": 1, "generation": 9000, "enabled": true, "rows": [[1, 64, 4]]}',
            "outside-envelope",
            id="outside the envelope",
        ),
    ],
)
def test_a_bad_file_leaves_the_table_in_force_and_says_so(
    engine: RunningEngine, text: str, reason: str
) -> None:
    engine.apply(EVERYWHERE_7)
    before = engine.scrape()
    engine.write_text(text)
    engine.wait_for(
        specdecode_table_stale=1,
        specdecode_table_generation=before.total("specdecode_table_generation"),
        specdecode_table_fingerprint=before.total("specdecode_table_fingerprint"),
    )
    rejects = engine.scrape().total("specdecode_table_rejects_total", reason=reason)
    assert rejects == before.total("specdecode_table_rejects_total", reason=reason) + 1
    with engine.load(1):
        assert engine.observe(3, k=7).total(DRAFTS) > 0
    engine.apply(EVERYWHERE_7)


def test_no_text_differs_however_k_moves(engine: RunningEngine) -> None:
    engine.apply(EVERYWHERE_7, enabled=False)
    expected = engine.complete("no text differs", tokens=150)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for k in (7, 2, 0, 5, 1, 3):
                engine.apply([[1, 64, k]])

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        texts = {engine.complete("no text differs", tokens=150) for _ in range(2)}
    finally:
        ended.set()
        swapper.join()
    assert texts == {expected}


def test_the_counters_agree_with_vllms_own(engine: RunningEngine) -> None:
    engine.apply(DESCENDING)
    engine.wait_for(**{"vllm:num_requests_running": 0})
    before = engine.scrape()
    with ThreadPoolExecutor(8) as streams:  # 13 tokens: drafts are shortened near the end
        for number in range(40):
            streams.submit(engine.complete, f"request {number}", tokens=13)
    engine.wait_for(**{"vllm:num_requests_running": 0})
    seen = Difference(before, engine.scrape())
    decoded = seen.total("specdecode_step_tokens_total")
    mixed = seen.total("specdecode_mixed_step_tokens_total")
    assert decoded + mixed == seen.total("vllm:generation_tokens_total") == 40 * 13
    prefilled = seen.total("specdecode_mixed_step_prefill_tokens_total")
    assert prefilled == seen.total("vllm:prompt_tokens_total")
    at_risk = seen.by_label("specdecode_at_risk_per_position_total", "position")
    accepted = seen.by_label("specdecode_accepted_per_position_total", "position")
    assert at_risk["0"] == seen.total(DRAFTS)
    assert accepted == seen.by_label(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    )
    for position in range(1, len(accepted)):
        earlier, later = str(position - 1), str(position)
        assert accepted[later] <= at_risk[later] <= accepted[earlier]
    assert engine.scrape().total("specdecode_plugin_errors_total") == 0


def test_the_pairs_acceptance_is_what_the_landscape_needs(engine: RunningEngine) -> None:
    engine.apply([[1, 64, 1]])
    with engine.load(16):
        engine.observe(3, k=1)
        seen = engine.observe(60, k=1)
    accepted = seen.total("specdecode_accepted_per_position_total", position=0)
    at_risk = seen.total("specdecode_at_risk_per_position_total", position=0)
    assert accepted / at_risk == pytest.approx(0.77, abs=0.06)


def test_a_memory_fault_in_the_worker_is_told_although_the_server_exits_with_0(
    engine: RunningEngine,
) -> None:
    assert engine.termination_log.read_text() == ""
    engine.apply(EVERYWHERE_7)
    with engine.load(2):
        engine.observe(3, k=7)
        engine.plant.touch()
        message = wait_until(
            engine.termination_log.read_text, what="a termination message", seconds=30
        )
        exit_code = engine.process.wait(timeout=60)
    report = json.loads(message)
    assert report["cause"] == "illegal-memory-access"
    assert report["line"].endswith("CUDA error: an illegal memory access was encountered")
    assert json.loads(engine.termination_log.read_text()) == report
    assert exit_code == 0


def test_without_speculation_steps_tokens_and_heartbeat_are_counted(
    engine_files: Engine, tmp_path: Path
) -> None:
    running = RunningEngine(engine_files, tmp_path / "off", model=engine_files.models["high"].draft)
    try:
        running.set_arm("canary")
        running.write_table(EVERYWHERE_7, arm="canary")
        running.wait_until_ready()
        with running.load(4):
            seen = running.observe(20)
        scrape = running.scrape()
        info = scrape.labels("specdecode_plugin_info")
        assert (info["method"], info["live_table"], info["k_max"]) == ("none", "false", "0")
        assert seen.by_label("specdecode_steps_total", "k").keys() == {"0"}
        assert seen.by_label("specdecode_steps_total", "arm").keys() == {"1"}
        assert seen.total("specdecode_step_tokens_total") > 0
        assert seen.total("specdecode_engine_iterations_total") >= 20
        assert scrape.by_label("specdecode_at_risk_per_position_total", "position") == {}
        assert scrape.total("specdecode_table_generation") == 0
        assert scrape.total("specdecode_plugin_errors_total") == 0
    finally:
        running.stop()
