"""vLLM's command line, as far as a simulated engine acts by it; the rest is taken and named.

Refusals are vLLM's: an unknown flag ends with 2 before anything starts, a configuration that cannot
be served raises ConfigRefusedError, which ends the start as vLLM's own ValueError does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NoReturn

FULL_KINDS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
GRAPH_MODES = (*FULL_KINDS, "PIECEWISE", "NONE")
TABLE_METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark", "suffix")
DEFAULT_MAX_REQUESTS = 256
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_MODEL_TOKENS = 32768


class ConfigRefusedError(ValueError):
    """A configuration that vLLM does not start with."""


def refuse(reason: str) -> NoReturn:
    """Refuse a configuration from here, where a traceback shows that it is one."""
    raise ConfigRefusedError(reason)


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


class _Switch(argparse.Action):
    """Stores True for `--x` and False for `--no-x`."""

    def __call__(
        self, _: object, namespace: argparse.Namespace, __: object, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not str(option).startswith("--no-"))


class _Ignore(argparse.Action):
    """Takes a flag that the simulator does nothing by, and keeps its name."""

    def __call__(
        self, _: object, namespace: argparse.Namespace, __: object, option: str | None = None
    ) -> None:
        namespace.ignored = [*namespace.ignored, str(option)]


def read_flags(version: str) -> list[list[str]]:
    """List the flags of `vllm serve`, all names of one flag together; the newest if unknown."""
    content = resources.files("specdecode_sim").joinpath("vllm_flags.json").read_text("utf-8")
    by_version: dict[str, list[list[str]]] = json.loads(content)
    return by_version.get(version) or by_version[max(by_version)]


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read the arguments behind `vllm serve`; exits with 2 as vLLM's parser does.

    Raises ConfigRefusedError for what parses and cannot be served.
    """
    parser = _build_parser(read_flags(environment.get("SPECDECODE_SIM_VLLM_VERSION", "")))
    known = parser.parse_args([_plain(argument) for argument in arguments])
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
        ignored=tuple(known.ignored),
    )


def check_model_length(max_model_tokens: int, *, kv_tokens: int) -> None:
    """Refuse a model length of which not one request fits; raises ConfigRefusedError as vLLM.

    An engine that took it would let such a request wait for ever.
    """
    if max_model_tokens > kv_tokens:
        raise ConfigRefusedError(
            "To serve at least one request with the model's max seq len "
            f"({max_model_tokens}), KV cache for {max_model_tokens} tokens is needed, which is "
            f"larger than the available KV cache of {kv_tokens} tokens. Based on the available "
            f"memory, the estimated maximum model length is {kv_tokens}. Try increasing "
            "`gpu_memory_utilization` (in the simulator: the profile's kv_tokens) or decreasing "
            "`max_model_len` when initializing the engine."
        )


def _build_parser(flags: Sequence[Sequence[str]]) -> argparse.ArgumentParser:
    """Make a parser of all flags, with vLLM's abbreviations and short forms."""
    parser = _Parser(prog="vllm serve")
    parser.set_defaults(ignored=[])
    parser.add_argument("model_tag", nargs="?")
    ours = _settings()
    for names in flags:
        if "--help" in names:
            continue
        is_switch = any(name.startswith("--no-") for name in names)
        ignored = {"action": _Ignore, "nargs": 0 if is_switch else "*", "dest": "ignored"}
        parser.add_argument(*names, **ours.get(names[0], ignored))
    return parser


def _settings() -> dict[str, dict[str, Any]]:
    """Return how argparse takes each flag that the simulator acts by."""
    return {
        "--model": {},
        "--served-model-name": {"nargs": "+"},
        "--host": {"default": "0.0.0.0"},
        "--port": {"type": int, "default": 8000},
        "--max-model-len": {"type": int, "default": DEFAULT_MODEL_TOKENS},
        "--max-num-seqs": {"type": int, "default": DEFAULT_MAX_REQUESTS},
        "--max-num-batched-tokens": {"type": int, "default": DEFAULT_BATCHED_TOKENS},
        "--shutdown-timeout": {"type": float, "default": 0.0},
        "--stream-interval": {"type": int, "default": 1},
        "--api-key": {"nargs": "*"},
        "--enforce-eager": {"action": _Switch, "nargs": 0, "default": False},
        "--scheduler-cls": {},
        "--speculative-config": {"type": _json_object},
        "--compilation-config": {"type": _json_object, "default": {}},
        "--per-request-spec-decode-metrics": {
            "choices": ("none", "summary", "detailed"),
            "default": "none",
        },
    }


def _plain(argument: str) -> str:
    """Write a flag as argparse knows it: vLLM takes `_` for `-`, `--a.b=c` for JSON, `-O3`."""
    if argument.startswith("-O") and argument[2:].lstrip("=").isdigit():
        return "--optimization-level=" + argument[2:].lstrip("=")
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.partition(".")[0].replace("_", "-") + equals + value


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
