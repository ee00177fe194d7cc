"""How both servers end: after a fault, when asked to, and over a flag that they do not know.

The last module of this folder: its first test ends the server that the others used.
"""

from __future__ import annotations

import json
import subprocess

from tests.contract.conftest import WithoutSpeculation
from tests.contract.servers import build_command
from tests.image.running_engine import RunningServer
from tests.support.waiting import wait_until


def test_a_memory_fault_is_told_although_the_server_exits_with_0(server: RunningServer) -> None:
    assert server.termination_log.read_text() == ""
    server.apply([[1, 64, 7]])
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
    assert "an illegal memory access was encountered" in server.log
    assert exit_code == 0


def test_asked_to_end_it_exits_with_0_and_reports_no_cause(
    without_speculation: WithoutSpeculation,
) -> None:
    assert without_speculation.exit_code == 0
    assert without_speculation.termination_message == ""


def test_an_unknown_flag_ends_with_2(kind: str) -> None:
    command = build_command(kind, "--no-such-flag=1")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "unrecognized arguments: --no-such-flag=1" in ended.stdout + ended.stderr
