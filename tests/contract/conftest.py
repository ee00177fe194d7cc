"""The servers of the contract tests: first one without speculation, whose course is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.contract.servers import run_server
from tests.image.running_engine import Difference, RunningServer, Scrape

KINDS = [
    pytest.param("simulator", marks=pytest.mark.server),
    pytest.param("real", marks=[pytest.mark.engine, pytest.mark.timeout(900)]),
]
PROMPTS = [f"text number {number} of those that must not differ" for number in range(8)]
TEXT_TOKENS = 100


@dataclass(frozen=True)
class WithoutSpeculation:
    """What a server without speculation showed until it was asked to end."""

    info: dict[str, str]
    under_load: Difference
    scrape: Scrape
    metrics: str
    texts: dict[str, str]
    exit_code: int
    termination_message: str


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Name the server: `simulator` or `real`."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def without_speculation(kind: str, tmp_path_factory: pytest.TempPathFactory) -> WithoutSpeculation:
    """Run a server without speculation through its course; it has ended when this returns."""
    folder = tmp_path_factory.mktemp("without") / kind
    with run_server(kind, folder, speculation=False) as server:
        server.set_arm("canary")
        server.write_table([[1, 64, 7]], arm="canary")
        server.wait_for(specdecode_table_arm=1)
        texts = {prompt: server.complete(prompt, tokens=TEXT_TOKENS) for prompt in PROMPTS}
        with server.load(4):
            under_load = server.observe(20, arm=1)
        metrics = server.read_metrics()
        server.process.terminate()
        exit_code = server.process.wait(timeout=60)
        return WithoutSpeculation(
            info=Scrape(metrics).labels("specdecode_plugin_info"),
            under_load=under_load,
            scrape=Scrape(metrics),
            metrics=metrics,
            texts=texts,
            exit_code=exit_code,
            termination_message=server.termination_log.read_text(),
        )


@pytest.fixture(scope="session")
def server(
    kind: str, without_speculation: WithoutSpeculation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Run the server that all contract tests share; the last of them ends it."""
    with run_server(kind, tmp_path_factory.mktemp("server") / kind) as running:
        yield running
