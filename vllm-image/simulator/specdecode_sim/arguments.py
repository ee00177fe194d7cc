"""vLLM's command line, as far as a simulated engine acts by it; the rest is taken and named.

Refusals are vLLM's: an unknown flag ends with 2 before anything starts, a configuration that cannot
be served raises ConfigRefusedError, which ends the start as vLLM's own ValueError does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

FULL_KINDS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
GRAPH_MODES = (*FULL_KINDS, "PIECEWISE", "NONE")
TABLE_METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark", "suffix")
DEFAULT_MAX_REQUESTS = 256
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_MODEL_TOKENS = 32768


class ConfigRefusedError(ValueError):
    """A configuration that vLLM does not start with."""


@dataclass(frozen=True)
class Speculation:
    """The speculative configuration; `rows` is the start-up table, None where K is static."""

    method: str
    k_max: int
    rows: tuple[tuple[int, int, int], ...] | None
    adaptive: bool

    @property
    def envelope(self) -> frozenset[int]:
        """Return the K values that the start-up table names."""
        return frozenset(min(k, self.k_max) for _, _, k in self.rows or ())


@dataclass(frozen=True)
class Options:
    """What one engine was started with."""

    model: str
    served_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_tokens: int = DEFAULT_MODEL_TOKENS
    max_requests: int = DEFAULT_MAX_REQUESTS
    max_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    shutdown_seconds: float = 0.0
    stream_interval: int = 1
    api_key: str | None = field(default=None, repr=False)
    graphs: str = "FULL_AND_PIECEWISE"
    captured_tokens: int | None = None  # None: as many as the profile says
    speculation: Speculation | None = None
    has_plugin: bool = False
    request_metrics: str = "none"
    ignored: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: vllm serve [model_tag] [options]\nvllm serve: error: {message}\n")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read the arguments behind `vllm serve`; exits with 2 as vLLM's parser does.

    Raises ConfigRefusedError for what parses and cannot be served.
    """
    parser = _Parser(prog="vllm serve", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=DEFAULT_MODEL_TOKENS)
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULT_MAX_REQUESTS)
    parser.add_argument("--max-num-batched-tokens", type=int, default=DEFAULT_BATCHED_TOKENS)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--api-key", nargs="*", default=None)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--scheduler-cls")
    parser.add_argument("--speculative-config", type=_json_object)
    parser.add_argument("--compilation-config", type=_json_object, default={})
    parser.add_argument(
        "--per-request-spec-decode-metrics", choices=("none", "summary", "detailed"), default="none"
    )
    known, others = parser.parse_known_args([_dashed(argument) for argument in arguments])
    if not (model := known.model_tag or known.model):
        parser.error("the simulator needs the name of a model to pretend to serve")
    compilation: dict[str, Any] = known.compilation_config
    graphs = "NONE" if known.enforce_eager else compilation.get("cudagraph_mode", "")
    graphs = str(graphs or "FULL_AND_PIECEWISE").upper()
    if graphs not in GRAPH_MODES:
        raise ConfigRefusedError(f"cudagraph_mode {graphs!r} is not one of {GRAPH_MODES}")
    keys = known.api_key or [environment.get("VLLM_API_KEY")]
    return Options(
        model=model,
        served_name=(known.served_model_name or [model])[0],
        host=known.host,
        port=known.port,
        max_model_tokens=known.max_model_len,
        max_requests=known.max_num_seqs,
        max_batched_tokens=known.max_num_batched_tokens,
        shutdown_seconds=known.shutdown_timeout,
        stream_interval=max(1, known.stream_interval),
        api_key=keys[0] or None,
        graphs=graphs,
        captured_tokens=_captured_tokens(compilation),
        speculation=_speculation(known.speculative_config, graphs),
        has_plugin=known.scheduler_cls == "specdecode_vllm.scheduler.make_scheduler",
        request_metrics=known.per_request_spec_decode_metrics,
        ignored=_check_flags(parser, others),
    )


def _dashed(argument: str) -> str:
    """Write a flag's name with dashes: vLLM takes `_` for `-` in names."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value


def _captured_tokens(compilation: Mapping[str, Any]) -> int | None:
    sizes = compilation.get("cudagraph_capture_sizes")
    if sizes:
        return int(max(sizes))
    size = compilation.get("max_cudagraph_capture_size")
    return int(size) if size else None


def _speculation(config: Mapping[str, Any] | None, graphs: str) -> Speculation | None:
    if config is None:
        return None
    method = str(config.get("method") or "")
    if method not in TABLE_METHODS:
        raise ConfigRefusedError(f"speculative method {method!r} is not known")
    k_max = config.get("num_speculative_tokens")
    if not isinstance(k_max, int) or k_max < 1:
        raise ConfigRefusedError("num_speculative_tokens must be an integer from 1")
    adaptive = bool(config.get("enable_adaptive_verification", False))
    if adaptive and graphs not in FULL_KINDS:
        raise ConfigRefusedError(
            f"adaptive verification needs a FULL kind of CUDA graphs, not cudagraph_mode {graphs}"
        )
    if adaptive and method == "ngram":
        raise ConfigRefusedError("adaptive verification needs a drafter that knows its confidence")
    rows = config.get("num_speculative_tokens_per_batch_size")
    return Speculation(
        method=method,
        k_max=k_max,
        rows=tuple((int(a), int(b), int(k)) for a, b, k in rows) if rows else None,
        adaptive=adaptive,
    )


def _check_flags(parser: argparse.ArgumentParser, others: Sequence[str]) -> tuple[str, ...]:
    """Return the flags that the simulator takes and does nothing by; refuse what is no flag."""
    flags = [other for other in others if other.startswith("-")]
    if others and not flags:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return tuple(flags)
