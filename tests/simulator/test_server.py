"""The simulated server where no contract with a CPU engine reaches: keys, endings, bad bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from specdecode_sim.arguments import Options
from specdecode_sim.engine import Engine
from specdecode_sim.faults import Faults, Scenario
from specdecode_sim.profile import load_profile
from specdecode_sim.server import Server

ASK = {"prompt": "any", "max_tokens": 400}
Client = TestClient[aiohttp.web.Request, aiohttp.web.Application]


@pytest.fixture
def engine() -> Engine:
    options = Options(model="m", served_name="chat", max_requests=8, api_key="sesame")
    return Engine(
        options,
        load_profile("llama8b-a100"),
        registry=CollectorRegistry(),
        vllm_version="0.33.0",
        faults=Faults(Scenario()),
    )


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    steps = asyncio.create_task(engine.run())
    server = Server(engine, CollectorRegistry(), version="0.33.0")
    headers = {"Authorization": "Bearer sesame"}
    async with TestClient(TestServer(server.build_app()), headers=headers) as made:
        yield made
    steps.cancel()


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer open", "sesame"])
async def test_without_the_key_only_health_and_metrics_answer(client: Client, key: str) -> None:
    headers = {"Authorization": key}
    refused = await client.get("/v1/models", headers=headers)
    assert (refused.status, await refused.json()) == (401, {"error": "Unauthorized"})
    for path in ("/health", "/metrics", "/version"):
        assert (await client.get(path, headers=headers)).status == 200


async def test_a_client_that_goes_away_frees_its_place(client: Client, engine: Engine) -> None:
    async with client.post("/v1/completions", json={**ASK, "stream": True}) as answer:
        await answer.content.readline()
        assert engine.running == 1
        answer.close()
    async with asyncio.timeout(10):
        while engine.running:
            await asyncio.sleep(0.01)


async def test_the_end_of_the_engine_reaches_streams_and_later_requests(
    client: Client, engine: Engine
) -> None:
    async with client.post("/v1/completions", json={**ASK, "stream": True}) as answer:
        await answer.content.readline()
        engine.die()
        events = (await answer.content.read()).decode().strip().split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 500
    assert events[-1] == "data: [DONE]"
    assert (await client.post("/v1/completions", json=ASK)).status == 500
    assert (await client.get("/health")).status == 503


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xff\xfe\x00", id="no text"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"prompt": [1, "a"]}', id="a prompt of mixed parts"),
        pytest.param(b'{"prompt": "x", "max_tokens": 0}', id="no token asked for"),
        pytest.param(b'{"prompt": "x", "stream": true, "stream_options": 3}', id="bad options"),
    ],
)
async def test_a_body_that_makes_no_sense_is_refused_and_nothing_breaks(
    client: Client, body: bytes
) -> None:
    answer = await client.post("/v1/completions", data=body)
    assert answer.status == 400
    assert (await answer.json())["error"]["code"] == 400
    assert (await client.post("/v1/completions", json={**ASK, "max_tokens": 2})).status == 200
