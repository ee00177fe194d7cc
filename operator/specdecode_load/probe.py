"""What has to be asked of a server before it can be loaded: its model, and its tokenizer's ratio.

The ratio turns a length in tokens into random text of about that length, for any tokenizer, without
loading it here; how many tokens the prompts really had is in every result.
"""

import contextlib
import random
from dataclasses import replace

from specdecode_load import workload
from specdecode_load.completion import complete, http_error, parse_object
from specdecode_load.connection import Connection, build_tls
from specdecode_load.conversation import COMPLETIONS, Ask, Sampling
from specdecode_load.target import ErrorKind, RequestError, Target

_SAMPLE_CHARACTERS = 64


async def probe(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    keep_alive: bool = True,
    idle_timeout_seconds: float = 120.0,
) -> Target:
    """Ask a server for what loading it needs; without `model` its first model is taken.

    Raises RequestError, with a sentence for the user, if the server cannot be loaded.
    """
    target = Target(
        url=url,
        model=model or "",
        api_key=api_key,
        keep_alive=keep_alive,
        idle_timeout_seconds=idle_timeout_seconds,
    )
    with contextlib.closing(Connection(target, tls=build_tls(target))) as connection:
        if model is None:
            target = replace(target, model=await _first_model(connection))
        ratio = await _tokens_per_character(connection, target.model)
    return replace(target, tokens_per_character=ratio)


async def _first_model(connection: Connection) -> str:
    body = bytearray()
    head = await connection.exchange(
        "GET", "/v1/models", receive=lambda head, part: body.extend(part)
    )
    if head.status != 200:
        raise http_error(head.status, bytes(body))
    models = parse_object(bytes(body)).get("data")
    if not isinstance(models, list) or not models:
        raise RequestError(ErrorKind.PROTOCOL, "the server lists no model: name one")
    return str(models[0]["id"])


async def _tokens_per_character(connection: Connection, model: str) -> float:
    """Measure it with a request for a single token: what the prompt came to is in its usage."""
    text = workload.random_text(random.Random(0), _SAMPLE_CHARACTERS)
    body = Sampling(model).build_body(prompt=text, output_tokens=1)
    completion = await complete(
        connection, Ask(COMPLETIONS, body), lambda tokens, ttft_seconds: None
    )
    return completion.prompt_tokens / len(text) if completion.prompt_tokens else 1.0
