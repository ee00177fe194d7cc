"""The OpenAI-compatible server in front of a simulated engine, answering as vLLM's does.

A stream's chunks go to the connection straight from the engine's step: one task and one queue less
per token, which is what lets three pods with 256 streams each run on two cores.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from specdecode_sim import text
from specdecode_sim.engine import Engine, EngineDeadError, Request

DEFAULT_MAX_TOKENS = 16
REQUEST_TIMES = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
)
ERROR_KINDS = {400: "BadRequestError", 404: "NotFoundError"}
SCHEMA_ERROR = "Bad Request"
# What a simulated engine never has: vLLM's members of these names are there, and null.
NO_PARAMETERS = dict.fromkeys(("kv_transfer_params", "ec_transfer_params"))
NO_PROMPT = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
NO_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
NO_DETAILS = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
MAX_BODY_BYTES = 16 * 1024 * 1024
UNAUTHORIZED = {"error": "Unauthorized"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadRequest(Exception):
    """A request that vLLM answers with an error; `status` is HTTP's.

    `kind` is vLLM's word for it; what its schema refuses is a plain "Bad Request".
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = kind or ERROR_KINDS.get(status, "InternalServerError")

    def to_response(self) -> web.Response:
        """Return vLLM's error body."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return _json({"error": error}, status=self.status)


@dataclass(frozen=True)
class Job:
    """What a client asked for, checked."""

    is_chat: bool
    prompt: text.Prompt
    max_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Server:
    """Routes and answers of one engine."""

    def __init__(self, engine: Engine, registry: CollectorRegistry, *, version: str) -> None:
        self._engine = engine
        self._registry = registry
        self._version = version
        self._created = int(time.time())
        self._permission = f"modelperm-{uuid.uuid4().hex[:16]}"
        self._fingerprint = f"vllm-{version}-simulated"
        self.open_requests = 0
        self.is_draining = False

    def build_app(self) -> web.Application:
        """Build the application."""
        app = web.Application(middlewares=[self._observe], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health, allow_head=False)
        app.router.add_get("/ping", self._health, allow_head=False)
        app.router.add_get("/version", self._show_version, allow_head=False)
        app.router.add_get("/metrics", self._metrics, allow_head=False)
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.monotonic()
        is_known = request.match_info.route.resource is not None
        counted = request.path.startswith("/v1/") or not is_known
        try:
            is_allowed = not request.path.startswith("/v1/") or self._is_authorized(request)
            response = await handler(request) if is_allowed else _json(UNAUTHORIZED, status=401)
        except BadRequest as error:
            response = error.to_response()
        except web.HTTPException as error:
            response = _json({"detail": error.reason}, status=error.status)
        if self.is_draining:
            # As uvicorn does: the client's next request then goes to another pod.
            response.force_close()
        if counted:
            self._engine.vllm.count_http(
                method=request.method,
                handler=request.path if is_known else "none",
                status=response.status,
                seconds=time.monotonic() - began,
                sizes=(request.content_length or 0, response.content_length or 0),
            )
        return response

    def _is_authorized(self, request: web.Request) -> bool:
        key = self._engine.options.api_key
        return not key or request.headers.get("Authorization") == f"Bearer {key}"

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.is_dead else 200)

    async def _show_version(self, _: web.Request) -> web.Response:
        return _json({"version": self._version})

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, _: web.Request) -> web.Response:
        options = self._engine.options
        model = {
            "id": options.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_tokens,
            "permission": [
                {"id": self._permission, "created": self._created, **PERMISSION},
            ],
        }
        return _json({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        try:
            prompt = text.read_prompt(body.get("prompt"))
        except ValueError as error:
            raise BadRequest(f"{error} (parameter=prompt)", param="prompt") from error
        return await self._serve(request, body, prompt, is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        messages = body.get("messages")
        if not isinstance(messages, list):
            problem = "Field required" if messages is None else "Input should be a valid list"
            raise _schema_error("body.messages", problem)
        try:
            prompt = text.read_messages(messages)
        except ValueError as error:
            raise BadRequest(str(error), param="messages") from error
        return await self._serve(request, body, prompt, is_chat=True)

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            position = getattr(error, "pos", 0)
            raise BadRequest(
                f"1 validation error:\n  JSON decode error: {error}",
                param=f"body.{position}",
                kind=SCHEMA_ERROR,
            ) from error
        if not isinstance(body, dict):
            raise _schema_error("body", "Input should be a valid dictionary")
        name = self._engine.options.served_name
        if body.get("model", name) != name:
            raise BadRequest(
                f"The model `{body['model']}` does not exist. Valid aliases: {name}.",
                param="model",
                status=404,
            )
        return body

    async def _serve(
        self, request: web.Request, body: dict[str, Any], prompt: text.Prompt, *, is_chat: bool
    ) -> web.StreamResponse:
        job = self._read_job(body, prompt, is_chat=is_chat)
        self.open_requests += 1
        try:
            answer = _Answer(self._engine, job, fingerprint=self._fingerprint)
            return await (self._stream(request, answer) if job.stream else answer.whole())
        except EngineDeadError:
            raise BadRequest(
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                status=500,
            ) from None
        except OverflowError as error:
            raise BadRequest(str(error), status=503) from error
        finally:
            self.open_requests -= 1

    def _read_job(self, body: dict[str, Any], prompt: text.Prompt, *, is_chat: bool) -> Job:
        limit = self._engine.options.max_model_tokens
        if prompt.tokens >= limit:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains at least {prompt.tokens} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={prompt.tokens})",
                param="input_tokens",
            )
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise _schema_error("body.stream_options", "Input should be a valid dictionary")
        wanted = _read_max_tokens(body, default=limit if is_chat else DEFAULT_MAX_TOKENS)
        if wanted > limit:
            raise BadRequest(
                f"max_tokens={wanted} cannot be greater than max_model_len={limit}. Please request "
                f"fewer output tokens. (parameter=max_tokens, value={wanted})",
                param="max_tokens",
            )
        return Job(
            is_chat=is_chat,
            prompt=prompt,
            max_tokens=min(wanted, limit - prompt.tokens),
            stream=bool(body.get("stream", False)),
            include_usage=bool(options.get("include_usage", False)),
            continuous_usage=bool(options.get("continuous_usage_stats", False)),
        )

    async def _stream(self, request: web.Request, answer: _Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        try:
            first = await answer.first()
            if self.is_draining:
                response.force_close()
            await response.prepare(request)
            # The first chunk goes through aiohttp, which sends the headers with it.
            await response.write(first)
            if request.transport is not None:
                await answer.stream_to(request.transport)
                await response.write(answer.closing())
                await response.write_eof()
        finally:
            answer.abort()
        return response


class _Answer:
    """One completion on its way: engine outputs in, text out."""

    def __init__(self, engine: Engine, job: Job, *, fingerprint: str) -> None:
        self._engine = engine
        self._job = job
        self._fingerprint = fingerprint
        kind = "chatcmpl" if job.is_chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid.uuid4().hex[:16]}",
            "object": "chat.completion" if job.is_chat else "text_completion",
            "created": int(time.time()),
            "model": engine.options.served_name,
        }
        if job.is_chat and job.stream:
            self._head["object"] = "chat.completion.chunk"
        self._prefix = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._written = 0
        self._tokens = 0
        self._reason: str | None = None
        self._corrupted_from: int | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._request: Request = engine.submit(
            prompt_tokens=job.prompt.tokens,
            max_tokens=job.max_tokens,
            ease=engine.profile.ease_of(job.prompt.seed),
            on_output=self._on_output,
        )

    def abort(self) -> None:
        """Give the request up if it still runs."""
        self._engine.abort(self._request)

    def _on_output(self, tokens: int, reason: str | None) -> None:
        self._tokens += tokens
        self._reason = reason
        if self._engine.faults.is_corrupted and self._corrupted_from is None:
            self._corrupted_from = self._tokens - tokens
        if not self._begun.done():
            self._begun.set_result(None)
        interval = self._engine.options.stream_interval
        if self._transport is not None and (reason or self._tokens - self._written >= interval):
            if self._transport.is_closing():
                self._engine.abort(self._request)
                reason = "abort"
            else:
                self._write_chunk(self._transport)
        if reason is not None:
            self._finish()

    def _write_chunk(self, transport: asyncio.Transport) -> None:
        if self._reason != "error":
            chunk = self._chunk()
            transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    async def whole(self) -> web.Response:
        """Wait for the end and return the answer in one piece; raises EngineDeadError."""
        try:
            await self._done
        finally:
            self.abort()
        if self._reason == "error":
            raise EngineDeadError
        return _json({**self._head, **self._body()})

    async def first(self) -> bytes:
        """Wait for the first tokens and return what a stream starts with."""
        await self._begun
        opening = b""
        if self._job.is_chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            choices = [{**choice, "finish_reason": None}]
            prompt = dict.fromkeys(("prompt_token_ids", "prompt_text"))
            opening = _event(self._prefix, {"choices": choices, **prompt})
        return opening if self._reason == "error" else opening + self._chunk()

    async def stream_to(self, transport: asyncio.Transport) -> None:
        """Write chunks as the engine emits, until the end."""
        if self._written < self._tokens:
            self._write_chunk(transport)
        self._transport = transport
        await self._done

    def closing(self) -> bytes:
        """Return what a stream ends with."""
        if self._reason == "error":
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
            return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
        ending = b""
        if self._job.include_usage:
            ending = _event(self._prefix, self._final_usage())
        return ending + b"data: [DONE]\n\n"

    def _final_usage(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "choices": [],
            "usage": self._usage(),
            "system_fingerprint": self._fingerprint,
        }
        if (record := self._request.acceptance) is not None:
            fields["metrics"] = {"speculative_decoding": record.to_json()}
        return fields

    def _metrics(self) -> dict[str, Any] | None:
        """Return an answer's own metrics: times are null, as by default in vLLM."""
        record = self._request.acceptance
        if record is None:
            return None
        return {**dict.fromkeys(REQUEST_TIMES), "speculative_decoding": record.to_json()}

    def _chunk(self) -> bytes:
        words = json.dumps(self._text(self._written, self._tokens - self._written))
        self._written = self._tokens
        is_last = self._reason not in (None, "error")
        reason = f'"{self._reason}"' if is_last else "null"
        if self._job.is_chat:
            stop = '"stop_reason":null,' if is_last else ""
            content, tail = f'"delta":{{"content":{words}}}', f'{stop}"token_ids":null'
        else:
            tail = '"stop_reason":null,"prompt_token_ids":null,"token_ids":null'
            content = f'"text":{words}'
        return (
            f'data: {self._prefix},"choices":[{{"index":0,{content},"logprobs":null,'
            f'"finish_reason":{reason},{tail}}}]{self._chunk_ending(is_last)}}}\n\n'
        ).encode()

    def _chunk_ending(self, is_last: bool) -> str:
        """Return the members behind a chunk's choices, most often none."""
        job, ending = self._job, ""
        if job.continuous_usage:
            ending = f',"usage":{json.dumps(self._usage(), separators=(",", ":"))}'
        if is_last and not job.include_usage:
            ending += f',"system_fingerprint":"{self._fingerprint}"'
        return ending

    def _text(self, first: int, count: int) -> str:
        seed, broken = self._job.prompt.seed, self._corrupted_from
        if broken is None or broken >= first + count:
            return text.write_tokens(seed, first, count)
        good = max(0, broken - first)
        return text.write_tokens(seed, first, good) + text.write_tokens(
            seed, first + good, count - good, corrupted=True
        )

    def _body(self) -> dict[str, Any]:
        words = self._text(0, self._tokens)
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": self._reason,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
        body: dict[str, Any] = {
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": {**self._usage(), **NO_DETAILS},
            **NO_PARAMETERS,
            "metrics": self._metrics(),
        }
        if self._job.is_chat:
            choice["message"] = {"role": "assistant", "content": words, **NO_MESSAGE}
            return {**body, **NO_PROMPT, "prompt_text": None}
        choice |= {"text": words, **NO_PROMPT}
        return body

    def _usage(self) -> dict[str, int]:
        used = self._job.prompt.tokens
        return {
            "prompt_tokens": used,
            "total_tokens": used + self._tokens,
            "completion_tokens": self._tokens,
        }


def _event(prefix: str, fields: dict[str, Any]) -> bytes:
    rest = json.dumps(fields, separators=(",", ":"))[1:]
    return f"data: {prefix},{rest}\n\n".encode()


def _json(value: dict[str, Any], *, status: int = 200) -> web.Response:
    """Answer in JSON as vLLM does, without a charset."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def _schema_error(place: str, problem: str) -> BadRequest:
    message = f"1 validation error:\n  {{'loc': '{place}', 'msg': '{problem}'}}"
    return BadRequest(message, param=place, kind=SCHEMA_ERROR)


def _read_max_tokens(body: dict[str, Any], *, default: int) -> int:
    """Read how many tokens are wanted at most; raises BadRequest."""
    wanted = body.get("max_completion_tokens", body.get("max_tokens"))
    if wanted is None:
        return default
    try:
        tokens = int(wanted)
    except (TypeError, ValueError):
        raise _schema_error("body.max_tokens", "Input should be a valid integer") from None
    if tokens < 1:
        raise BadRequest(
            f"max_tokens must be at least 1, got {tokens}. (parameter=max_tokens, value={tokens})",
            param="max_tokens",
        )
    return tokens
