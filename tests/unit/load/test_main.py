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
