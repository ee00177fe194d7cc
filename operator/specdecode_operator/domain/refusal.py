"""What a spec asks for that the API server's rules cannot see, as sentences for the user.

CEL refuses plain spellings; vLLM's parser takes many more (READ in the sources of 0.33.0): `_` for
`-`, `--flag=value`, unambiguous prefixes, dotted JSON (`--speculative-config.method`), one-dash
forms, `-O3`. What the engine refuses itself depends on its version, which CEL does not know.
No sentence repeats a value: it may be a secret.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from specdecode_operator.api import refused
from specdecode_operator.api.v1alpha1 import CudagraphMode, Engine, Spec, Speculation, Switch
from specdecode_operator.durations import parse_duration
from specdecode_operator.errors import InvalidTableError

from . import engine as engines
from . import lever

MAX_TIMEOUT_SECONDS: Final = 7 * 86_400
_DIGIT_FLAGS: Final = ("-n", "-r")


def find_refusals(spec: Spec) -> tuple[str, ...]:
    """List what must change before an engine is started from this spec; empty when nothing."""
    return (
        *_find_refused_arguments(spec.engine),
        *_find_refused_variables(spec.engine),
        *_find_bad_timeouts(spec.engine),
        *(_find_refused_speculation(spec, spec.speculation) if spec.speculation else ()),
    )


def resolve_flag(argument: str, among: Collection[str]) -> str | None:
    """Return the flag, of those given, that vLLM's parser may take an argument for.

    A prefix counts although it might be ambiguous: then vLLM refuses it anyway.
    """
    key = argument.partition("=")[0]
    if not key.startswith("-") or key == "--":
        return None
    key = key.partition(".")[0]
    if not key.startswith("--"):
        return _resolve_short_flag(key, among)
    key = "--" + key[2:].replace("_", "-")
    if key in among:
        return key
    return next((flag for flag in sorted(among) if flag.startswith(key)), None)


def _resolve_short_flag(key: str, among: Collection[str]) -> str | None:
    shorts = {short: flag for short, flag in refused.SHORT_FLAGS.items() if flag in among}
    if key in shorts or key == "-":
        return shorts.get(key)
    if key.startswith("-O"):
        key = "-O"
    elif key.startswith(_DIGIT_FLAGS):
        key = key[:2]
    return next((flag for short, flag in shorts.items() if short.startswith(key)), None)


def _find_refused_arguments(engine: Engine) -> Iterator[str]:
    for position, argument in enumerate(engine.extra_args):
        where = f"spec.engine.extraArgs[{position}]"
        flag = resolve_flag(argument, refused.REFUSED_FLAGS)
        if flag is not None:
            yield f"{where} gives {flag}: {refused.REFUSED_FLAGS[flag]}."
        elif argument == "--":
            yield f"{where} is `--`, after which vLLM takes no more flags: leave it out."
        elif _is_two_in_one(argument):
            yield f"{where} holds a flag and its value: write them as two entries, or with `=`."
        elif position == 0 and not argument.startswith("-"):
            yield f"{where} is no flag: begin with one, as in `--enable-prefix-caching`."


def _is_two_in_one(argument: str) -> bool:
    return argument.startswith("--") and any(c.isspace() for c in argument.partition("=")[0])


def _find_refused_variables(engine: Engine) -> Iterator[str]:
    for position, variable in enumerate(engine.env):
        instead = find_variable_refusal(variable.name)
        if instead is not None:
            yield f"spec.engine.env[{position}] sets {variable.name}: {instead}."


def find_variable_refusal(name: str) -> str | None:
    """Say what to do instead of setting a variable of the engine; None where it may be set."""
    prefixes = refused.REFUSED_VARIABLE_PREFIXES.items()
    return refused.REFUSED_VARIABLES.get(name) or next(
        (instead for prefix, instead in prefixes if name.startswith(prefix)), None
    )


def _find_bad_timeouts(engine: Engine) -> Iterator[str]:
    timeouts = {"startupTimeout": engine.startup_timeout, "drainTimeout": engine.drain_timeout}
    for field, text in timeouts.items():
        if parse_duration(text).total_seconds() > MAX_TIMEOUT_SECONDS:
            yield f"spec.engine.{field} is {text}: give at most 7d."


def _find_refused_speculation(spec: Spec, speculation: Speculation) -> Iterator[str]:
    try:
        lever.spec_table(speculation, spec.engine.max_num_seqs)
    except InvalidTableError as error:
        yield f"spec.speculation.kTable: {error}."
    if speculation.cudagraph_mode is not CudagraphMode.NONE:
        yield from _find_eager_refusals(spec.engine)
    if speculation.adaptive_verification is Switch.ENABLED:
        yield from _find_adaptive_verification_refusals(spec.engine, speculation)


def _find_eager_refusals(engine: Engine) -> Iterator[str]:
    for position, argument in enumerate(engine.extra_args):
        if resolve_flag(argument, {refused.EAGER}):
            yield (
                f"spec.engine.extraArgs[{position}] gives {refused.EAGER}, which records no CUDA "
                "graphs: leave it out, or set spec.speculation.cudagraphMode to NONE."
            )


def _find_adaptive_verification_refusals(engine: Engine, speculation: Speculation) -> Iterator[str]:
    disable = "set spec.speculation.adaptiveVerification to Disabled"
    version = engines.engine_version_of(engine)
    can = engines.capabilities_of(engine, speculation.method)
    if can.known and not can.adaptive_verification:
        yield (
            f"vLLM {version} has no adaptive verification for the method "
            f"{speculation.method.value}: {disable}, or choose another method."
        )
    for position, argument in enumerate(engine.extra_args):
        flag = resolve_flag(argument, refused.FLAGS_AGAINST_ADAPTIVE_VERIFICATION)
        if flag is not None:
            yield (
                f"spec.engine.extraArgs[{position}] gives {flag}, which vLLM refuses together "
                f"with adaptive verification: {disable}, or leave the flag out."
            )
    crash = engines.find_crash(engine, speculation)
    if crash is not None:
        yield crash
