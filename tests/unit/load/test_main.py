"""The command as a user runs it: a process of its own against a real server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_load.main import main
from tests.support.sse_server import Failure, Pace, SseServer


@pytest.fixture
def server() -> Iterator[SseServer]:
    with SseServer(pace=Pace(0.01, 0.01, 2)) as running:
        yield running


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capfd.readouterr()
    return status, out, err


def test_json_stands_alone_on_standard_output(
    server: SseServer, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", server.url, "--schedule", "1:0.5s,4:0.5s", "--seed", "7", "--json", "-"]
    status, out, err = run(capfd, *arguments, "--output-tokens", "uniform:4:8")
    values: dict[str, Any] = json.loads(out)
    assert status == 0
    assert values["schema"] == 1
    assert values["workload"]["seed"] == 7
    assert values["interrupted"] is False
    assert [stage["streams"] for stage in values["stages"]] == [1, 4]
    assert all(stage["outputTokens"] > 0 for stage in values["stages"])
    assert set(values["stages"][0]["ttftSeconds"]) == {"count", "mean", "p50", "p90", "p99"}
    assert "stage 2/2: 4 streams" in err
    assert "tok/s" in err


def test_the_table_is_for_people_and_the_file_for_programs(
    server: SseServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load.json"
    arguments = ["--url", server.url, "--concurrency", "2", "--duration", "0.5s"]
    status, out, _ = run(capfd, *arguments, "--output-tokens", "4", "--json", str(path))
    assert status == 0
    assert "tok/s" in out
    assert "none" in out
    assert json.loads(path.read_text())["stages"][0]["requests"] > 0


def test_the_load_ends_with_its_requests(
    server: SseServer, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", server.url, "--duration", "1h", "--max-requests", "5", "--json", "-"]
    status, out, _ = run(capfd, *arguments, "--output-tokens", "4", "--no-keep-alive")
    assert status == 0
    assert json.loads(out)["stages"][0]["requests"] == 5
    assert len(server.requests) == 1 + 5  # and one that measured the tokenizer
    assert server.connections == 2 + 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_what_was_measured(server: SseServer, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "specdecode_load.main", "--url", server.url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--schedule", "2:1h,4:1h", "--json", "-"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while len(server.requests) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    values = json.loads(out)
    assert process.returncode == 130
    assert values["interrupted"] is True
    assert len(values["stages"]) == 1
    assert values["stages"][0]["outputTokens"] > 0


def test_a_server_that_is_not_there_is_told_in_a_sentence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with SseServer() as gone:
        url = gone.url
    status, out, err = run(capfd, "--url", url, "--duration", "1s")
    assert status == 1
    assert out == ""
    assert f"nothing listens at {url}" in err


def test_a_server_that_gives_no_token_is_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with SseServer() as server:
        server.pass_next()  # the one that measures the tokenizer
        server.fail_next(Failure("status", status=503), times=1000)
        status, out, _ = run(capfd, "--url", server.url, "--duration", "0.3s")
    assert status == 1
    assert "http5xx:" in out


WRONG = {
    "a schedule": (["--schedule", "8x"], "write STREAMS:DURATION"),
    "a length": (["--prompt-tokens", "normal:1:2"], "uniform:LOW:HIGH"),
    "streams": (["--concurrency", "0"], "from 1 to 4096"),
    "both forms of load": (["--schedule", "1:1s", "--concurrency", "2"], "not allowed with"),
    "an address": (["--url", "localhost:8000"], "http://HOST:PORT"),
    "a folder": (["--json", "/no/such/folder/x.json"], "no such folder"),
    "a key that is not set": (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
    "turns": (["--turns", "0"], "give 1 to"),
    "a share": (["--long-share", "10%"], "from 0 to 1"),
    "a share without a length": (["--long-share", "0.1"], "--long-prompt together"),
    "a file that is not there": (["--prompts", "/no/such/file"], "cannot be read"),
    "turns of a file": (["--prompts", "x", "--turns", "2"], "its lines tell the turns"),
    "requests": (["--max-requests", "0"], "1 or more"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_option_is_refused_with_what_to_write(
    arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert sentence in capfd.readouterr().err


def short(server: SseServer, *more: str) -> list[str]:
    return [
        "--url",
        server.url,
        "--max-requests",
        "4",
        "--output-tokens",
        "6",
        "--json",
        "-",
        *more,
    ]


def test_acceptance_that_the_engine_does_not_tell_is_not_zero(
    server: SseServer, capfd: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capfd, *short(server))
    values = json.loads(out)["stages"][0]["acceptance"]
    assert values == {
        "note": "not reported by the engine",
        "meanAcceptanceLength": None,
        "draftAcceptanceRate": None,
    }
    assert "not reported by the engine" in err
    assert "--per-request-spec-decode-metrics summary" in err


def test_acceptance_by_request_is_in_the_table_and_in_the_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
    with SseServer(metrics=[{"speculative_decoding": told}]) as server:
        _, out, err = run(capfd, *short(server))
    values = json.loads(out)["stages"][0]["acceptance"]
    assert values["requestsWithDrafts"] == 4
    assert values["acceptedTokens"] == 24
    assert values["meanAcceptanceLength"]["p50"] == 2.5
    assert values["draftAcceptanceRate"]["mean"] == 0.5
    assert values["note"] is None
    assert "2.50" in err
    assert "0.50" in err


def test_a_file_of_prompts_is_sent(
    server: SseServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once", "max_tokens": 3}\n{"turns": ["Hi", "So"]}\n')
    status, out, _ = run(capfd, *short(server, "--prompts", str(path)))
    assert status == 0
    first, second, third, fourth = server.requests[1:]
    assert (first["prompt"], first["max_tokens"]) == ("Once", 3)
    assert [message["content"] for message in second["messages"]] == ["Hi"]
    assert [message["content"] for message in third["messages"]] == ["Hi", "xxxxxx", "So"]
    assert fourth["prompt"] == "Once"
    workload = json.loads(out)["workload"]
    assert (workload["promptsFile"], workload["prompts"], workload["turns"]) == (str(path), 2, None)


def test_the_last_error_is_told_in_the_servers_words(
    server: SseServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server.pass_next()
    server.fail_next(Failure("status", status=400))
    _, out, err = run(capfd, *short(server))
    assert "planted" in json.loads(out)["lastError"]
    assert "last error: the server answered 400" in err
