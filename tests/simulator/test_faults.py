"""A simulated engine ends as the real one does: the classifier knows each fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_load import BackgroundLoop, Lengths, Target, Workload
from specdecode_operator.decide import faults
from specdecode_operator.domain.evidence import Evidence, FaultClass, Termination
from specdecode_operator.domain.lever import inputs_of
from specdecode_operator.manifests.arguments import build_arguments
from specdecode_sim.profile import FOLDER
from tests.image.running_engine import free_port
from tests.support.builders import build_spec
from tests.support.simulated_server import SimulatedServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

MEMORY = "illegal-memory-access"
CRASH_PUBLIC: Mapping[str, Any] = {
    "kind": MEMORY,
    "when": {"adaptiveVerification": True, "graphs": ["FULL_AND_PIECEWISE"], "minRunning": 4},
    "meanSeconds": 0.05,
}

Start = Callable[..., SimulatedServer]
"""Called with faults, and changes of the spec's speculation."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers with the command line that the operator renders."""
    servers: list[SimulatedServer] = []

    def start_one(
        *fault_list: Mapping[str, Any],
        scenario: Mapping[str, Any] | None = None,
        kv_tokens: int = 1_000_000,
        **speculation: Any,
    ) -> SimulatedServer:
        port = free_port()
        inputs = inputs_of(
            build_spec(
                model={"servedName": "chat"},
                engine={"drainTimeout": "1s"},
                speculation={"method": "dspark", **speculation},
            )
        )
        known = {"--host": "127.0.0.1", "--port": str(port)}
        arguments = [
            f"{name}={known[name]}" if (name := flag.partition("=")[0]) in known else flag
            for flag in build_arguments(inputs)
        ]
        server = SimulatedServer(
            tmp_path / f"server-{len(servers)}",
            arguments,
            port=port,
            scenario={"faults": [dict(fault) for fault in fault_list], **(scenario or {})},
            profile=_quick_profile(tmp_path, kv_tokens=kv_tokens),
        )
        servers.append(server)
        return server

    yield start_one
    for server in servers:
        server.stop()


def _quick_profile(folder: Path, *, kv_tokens: int) -> str:
    """Write the default profile without its start-up time; return its path."""
    fields = yaml.safe_load((FOLDER / "llama8b-a100.yaml").read_text("utf-8"))
    path = folder / "quick.yaml"
    path.write_text(yaml.safe_dump({**fields, "start_seconds": 0.0, "kv_tokens": kv_tokens}))
    return str(path)


@contextmanager
def _load(server: SimulatedServer, streams: int) -> Iterator[BackgroundLoop]:
    """Send requests however the server fares."""
    workload = Workload(output=Lengths("fixed", 64))
    with BackgroundLoop(Target(server.url, "chat"), workload, streams=streams) as loop:
        yield loop


def classify(server: SimulatedServer, *, code: int, ever_ready: bool = True) -> FaultClass:
    """Classify the ending as the operator does from the container's status and its log."""
    killed = code < 0
    termination = Termination(
        exit_code=128 - code if killed else code,
        signal=-code if killed else None,
        reason="OOMKilled" if killed else ("Error" if code else "Completed"),
        message=server.termination_log.read_text(),
        started_at=None,
        finished_at=None,
    )
    evidence = Evidence(termination=termination, ever_ready=ever_ready)
    return faults.classify(evidence, log=[server.log]).fault_class


def wait_for_end(server: SimulatedServer) -> int:
    return server.process.wait(timeout=30)


# ------------------------------------------------------------------------------ crashes


def test_the_public_crash_needs_both_levers_and_load_and_is_told(start: Start) -> None:
    server = start(CRASH_PUBLIC, adaptiveVerification="Enabled")
    server.wait_until_ready()
    server.apply([[1, 64, 7]])
    server.complete("one request is no load", tokens=300)
    assert server.process.poll() is None
    with _load(server, 8):
        code = wait_for_end(server)
    report = json.loads(server.termination_log.read_text())
    assert code == 0
    assert report["cause"] == MEMORY
    assert report["line"].endswith("CUDA error: an illegal memory access was encountered")
    assert classify(server, code=code) is FaultClass.ILLEGAL_MEMORY_ACCESS


@pytest.mark.parametrize(
    "levers",
    [
        pytest.param({"adaptiveVerification": "Disabled"}, id="verification not adaptive"),
        pytest.param(
            {"adaptiveVerification": "Enabled", "cudagraphMode": "FULL_DECODE_ONLY"},
            id="graphs of the decode only",
        ),
    ],
)
def test_either_lever_alone_serves(start: Start, levers: dict[str, str]) -> None:
    server = start({**CRASH_PUBLIC, "meanSeconds": 0.0}, **levers)
    server.wait_until_ready()
    server.apply([[1, 64, 7]])
    with server.load(8):
        server.observe(30)
    assert server.process.poll() is None


def test_a_fault_reported_natively_stands_in_the_log_alone(start: Start) -> None:
    server = start({"kind": MEMORY, "report": "asynchronous"})
    server.wait_until_ready()
    with _load(server, 2):
        code = wait_for_end(server)
    assert code == 0
    assert MEMORY not in server.termination_log.read_text()
    assert "illegal memory access" not in server.termination_log.read_text()
    assert classify(server, code=code) is FaultClass.ILLEGAL_MEMORY_ACCESS


@pytest.mark.parametrize(
    ("kind", "cause", "fault_class"),
    [
        ("cuda-out-of-memory", "cuda-out-of-memory", FaultClass.CUDA_OUT_OF_MEMORY),
        ("device-assert", "device-assert", FaultClass.DEVICE_ASSERT),
    ],
)
def test_a_device_error_is_told(
    start: Start, kind: str, cause: str, fault_class: FaultClass
) -> None:
    server = start({"kind": kind})
    server.wait_until_ready()
    with _load(server, 2):
        code = wait_for_end(server)
    assert code == 0
    assert json.loads(server.termination_log.read_text())["cause"] == cause
    assert classify(server, code=code) is fault_class


def test_where_the_host_has_no_memory_the_kernel_kills_without_a_word(start: Start) -> None:
    server = start({"kind": "host-out-of-memory"})
    server.wait_until_ready()
    with _load(server, 2):
        code = wait_for_end(server)
    assert code == -9
    assert server.termination_log.read_text() == ""
    assert classify(server, code=code) is FaultClass.OOM_KILLED


def test_a_refused_configuration_ends_the_start_with_1(start: Start) -> None:
    server = start(scenario={"refuseConfiguration": "the drafter does not fit the target"})
    code = wait_for_end(server)
    report = json.loads(server.termination_log.read_text())
    assert code == 1
    assert report["cause"] == "config-refused"
    assert "the drafter does not fit the target" in report["line"]
    assert classify(server, code=code, ever_ready=False) is FaultClass.CONFIG_REFUSED


def test_a_model_length_beyond_the_kv_cache_ends_the_start_with_1(start: Start) -> None:
    server = start(kv_tokens=512)
    code = wait_for_end(server)
    report = json.loads(server.termination_log.read_text())
    assert code == 1
    assert report["cause"] == "config-refused"
    assert "the estimated maximum model length is 512" in report["line"]
    assert classify(server, code=code, ever_ready=False) is FaultClass.CONFIG_REFUSED


def test_requests_in_flight_fail_when_the_engine_dies(start: Start) -> None:
    server = start({"kind": MEMORY, "when": {"minRunning": 4}})
    server.wait_until_ready()
    with _load(server, 6) as loop:
        window = loop.start_window()
        wait_for_end(server)
        wait_until(lambda: window.result.error_count >= 4, what="failed requests", seconds=20)


# -------------------------------------------------------------------- worse than a crash


def test_a_hang_looks_healthy_while_its_iterations_stand_still(
    start: Start, tmp_path: Path
) -> None:
    trigger = tmp_path / "hang"
    server = start({"kind": "hang", "when": {"file": str(trigger)}})
    server.wait_until_ready()
    with _load(server, 4):
        server.observe(10)
        trigger.touch()
        iterations = _wait_until_still(server)
        assert server.scrape().total("vllm:num_requests_running") > 0
        assert server._is_ready()  # /health answers 200
        assert server.scrape().total("specdecode_engine_iterations_total") == iterations
        server.process.terminate()
        assert wait_for_end(server) == 0


def _wait_until_still(server: SimulatedServer) -> float:
    """Wait until two looks apart by many steps' time see the same number of iterations."""
    seen: list[float] = []

    def is_still() -> bool:
        seen.append(server.scrape().total("specdecode_engine_iterations_total"))
        return len(seen) > 5 and len(set(seen[-5:])) == 1

    wait_until(is_still, what="iterations to stand still", seconds=20)
    return seen[-1]


def test_a_slow_start_is_late_and_then_serves(start: Start) -> None:
    server = start(scenario={"slowStartSeconds": 2.0})
    wait_until(lambda: "slow start" in server.log, what="the word of it", seconds=20)
    assert not server._is_ready()
    server.wait_until_ready()
    assert server.complete("late", tokens=4)


def test_acceptance_collapses_where_the_scenario_says_so(start: Start, tmp_path: Path) -> None:
    trigger = tmp_path / "collapse"
    collapse = {"kind": "acceptance-collapse", "ease": 0.0, "when": {"file": str(trigger)}}
    server = start(collapse)
    server.wait_until_ready()
    server.apply([[1, 64, 3]])
    with server.load(4):
        before = server.observe(60)
        trigger.touch()
        server.observe(3)
        after = server.observe(60)
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    assert before.total(accepted) > 0
    assert after.total("vllm:spec_decode_num_drafts_total") > 0
    assert after.total(accepted) == 0


def test_corrupted_output_differs_in_text_and_in_nothing_else(start: Start, tmp_path: Path) -> None:
    trigger = tmp_path / "corrupt"
    server = start({"kind": "corrupted-output", "when": {"file": str(trigger)}})
    server.wait_until_ready()
    good = server.complete("what is silent corruption?", tokens=40)
    assert server.complete("what is silent corruption?", tokens=40) == good
    trigger.touch()
    bad = server.complete("what is silent corruption?", tokens=40)
    assert bad != good
    assert server._is_ready()
