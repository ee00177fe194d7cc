"""What the generator learns of a server before it loads it."""

import pytest

from specdecode_load.probe import probe
from specdecode_load.target import ErrorKind, RequestError
from tests.support.sse_server import Failure, SseServer


async def test_the_first_model_is_taken_and_the_tokenizer_measured() -> None:
    with SseServer(models=("first", "second"), characters_per_token=4) as server:
        target = await probe(server.url)
        assert target.model == "first"
        assert target.tokens_per_character == 0.25
        assert (await probe(server.url, model="second")).model == "second"
        assert server.requests[-1]["model"] == "second"


async def test_a_server_that_counts_nothing_is_taken_to_have_a_token_for_each_character() -> None:
    with SseServer(continuous_usage=False, final_usage=False) as server:
        assert (await probe(server.url)).tokens_per_character == 1.0


async def test_the_address_may_end_in_v1_and_the_key_is_sent() -> None:
    with SseServer(api_key="secret") as server:
        assert (await probe(f"{server.url}/v1/", api_key="secret")).model
        with pytest.raises(RequestError, match="401") as caught:
            await probe(server.url, api_key="guess")
        assert caught.value.kind is ErrorKind.HTTP_4XX


async def test_a_server_without_models_says_to_name_one() -> None:
    with SseServer(models=()) as server, pytest.raises(RequestError, match="name one"):
        await probe(server.url)


async def test_a_server_that_fails_is_not_taken() -> None:
    with SseServer() as server:
        server.fail_next(Failure("status", status=500))
        with pytest.raises(RequestError, match="500"):
            await probe(server.url)
