"""What a server shows of itself, as one JSON value: its metric families and its answers' shapes.

The same requests go to the real engine and to the simulated one; values are reduced to JSON types,
except those that clients branch on.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# Members whose value is part of the contract, not its type alone.
CONSTANTS = ("object", "role", "finish_reason", "type", "param", "code", "owned_by", "detail")
# Labels whose values are part of the contract: enumerations.
ENUMERATIONS = (
    *("finished_reason", "source", "reason", "sleep_state", "where"),
    *("position", "method", "handler", "status"),
)
PROMPT = {"model": "chat", "prompt": "to be described", "max_tokens": 6, "temperature": 0}
MESSAGES = [{"role": "user", "content": "to be described"}]
CHAT = {"model": "chat", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
WHOLE = {"ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True)
class Ask:
    """One request; `body` is sent as it stands where it is bytes."""

    method: str
    path: str
    body: dict[str, Any] | bytes | None = None


ASKS: dict[str, Ask] = {
    "health": Ask("GET", "/health"),
    "version": Ask("GET", "/version"),
    "models": Ask("GET", "/v1/models"),
    "completion": Ask("POST", "/v1/completions", PROMPT | WHOLE),
    "completion of token ids": Ask(
        "POST", "/v1/completions", PROMPT | WHOLE | {"prompt": [5, 6, 7]}
    ),
    "completion stream": Ask("POST", "/v1/completions", PROMPT | WHOLE | {"stream": True}),
    "completion stream with usage": Ask("POST", "/v1/completions", PROMPT | WHOLE | USAGE),
    "completion stream with continuous usage": Ask(
        "POST", "/v1/completions", PROMPT | WHOLE | USAGE | {"stream_options": CONTINUOUS}
    ),
    "chat": Ask("POST", "/v1/chat/completions", CHAT | WHOLE),
    "chat stream with usage": Ask("POST", "/v1/chat/completions", CHAT | WHOLE | USAGE),
    "unknown model": Ask("POST", "/v1/completions", PROMPT | {"model": "another"}),
    "unknown model of a chat": Ask("POST", "/v1/chat/completions", CHAT | {"model": "another"}),
    "bad JSON": Ask("POST", "/v1/completions", b'{"model": "chat", '),
    "no object": Ask("POST", "/v1/completions", b"[1]"),
    "prompt missing": Ask("POST", "/v1/completions", {"model": "chat"}),
    "messages missing": Ask("POST", "/v1/chat/completions", {"model": "chat"}),
    "prompt too long": Ask("POST", "/v1/completions", PROMPT | {"prompt": [5] * 2000}),
    "more tokens than fit": Ask("POST", "/v1/completions", PROMPT | {"max_tokens": 5000}),
    "no tokens wanted": Ask("POST", "/v1/completions", PROMPT | {"max_tokens": -1}),
    "tokens of a wrong type": Ask("POST", "/v1/completions", PROMPT | {"max_tokens": "six"}),
    "wrong method": Ask("GET", "/v1/completions"),
    "unknown path": Ask("GET", "/v1/unknown"),
}


def describe_answers(url: str) -> dict[str, Any]:
    """Ask everything in ASKS, in order, and describe the answers by name."""
    return {name: _describe_answer(url, ask) for name, ask in ASKS.items()}


def _describe_answer(url: str, ask: Ask) -> dict[str, Any]:
    data = ask.body if isinstance(ask.body, bytes | None) else json.dumps(ask.body).encode()
    request = urllib.request.Request(
        url + ask.path, data, {"Content-Type": "application/json"}, method=ask.method
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, headers, content = reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        status, headers, content = error.code, error.headers, error.read()
    kind = headers.get("Content-Type")
    is_stream = kind is not None and kind.startswith("text/event-stream")
    return {
        "status": status,
        "content_type": kind,
        "body": _describe_stream(content) if is_stream else _describe_body(content),
    }


def _describe_body(content: bytes) -> Any:
    return describe_value(json.loads(content)) if content else None


def _describe_stream(content: bytes) -> list[Any]:
    """List each kind of chunk in the order in which it first comes."""
    kinds: list[Any] = []
    for event in content.decode().split("\n\n"):
        if not event:
            continue
        text = event.removeprefix("data: ")
        kind = text if text == "[DONE]" else describe_value(json.loads(text))
        if kind not in kinds:
            kinds.append(kind)
    return kinds


def describe_value(value: Any, name: str = "") -> Any:
    """Reduce a JSON value to the types of its members; `name` is the member it stands in."""
    if isinstance(value, dict):
        return {key: describe_value(member, key) for key, member in sorted(value.items())}
    if isinstance(value, list):
        kinds: list[Any] = []
        for member in value:
            if (kind := describe_value(member)) not in kinds:
                kinds.append(kind)
        return kinds
    return {"is": value} if name in CONSTANTS and value is not None else type(value).__name__


def describe_metrics(text: str) -> dict[str, Any]:
    """Describe each metric family by its type, its label names and its bucket bounds."""
    return {
        family.name: _describe_family(family)
        for family in text_string_to_metric_families(text)
        if family.samples
    }


def _describe_family(family: Any) -> dict[str, Any]:
    names = sorted({key for sample in family.samples for key in sample.labels if key != "le"})
    described: dict[str, Any] = {
        "type": family.type,
        "samples": sorted({sample.name for sample in family.samples}),
        "labels": {name: _values(family, name) for name in names},
    }
    if family.type == "histogram":
        bounds = {sample.labels["le"] for sample in family.samples if "le" in sample.labels}
        described["buckets"] = sorted(bounds, key=float)
    return described


def _values(family: Any, name: str) -> list[str] | None:
    """List the values of an enumeration; None where any value may stand."""
    if name not in ENUMERATIONS or family.name == "specdecode_plugin_info":
        return None
    return sorted({sample.labels[name] for sample in family.samples})
