"""From the object as the API server holds it to the models, and from their errors to sentences.

The schema refuses most of what is wrong before it is stored; what is stored may be older than the
schema. No sentence repeats a value: it may be a secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from .v1alpha1 import Spec

# Pydantic puts the branch of a union into the path. The spec's only unions are quantities.
_BRANCHES: Final = frozenset({"int", "str", "constrained-int", "constrained-str"})


def parse_spec(raw: Mapping[str, Any]) -> Spec:
    """Read the spec of a whole object. Raises pydantic.ValidationError."""
    return Spec.model_validate(raw.get("spec") or {})


def problems_of(error: ValidationError) -> tuple[str, ...]:
    """Turn an error of `parse_spec` into sentences, one for each field, with its path."""
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        steps = detail["loc"]
        if steps[-1:] and steps[-1] in _BRANCHES:
            found[_path(steps[:-1])] = "should be a quantity such as 2, 500m or 16Gi"
        else:
            found[_path(steps)] = _sentence(detail["type"], detail["msg"])
    return tuple(f"{path}: {sentence}." for path, sentence in found.items())


def _path(steps: Sequence[int | str]) -> str:
    return "spec" + "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps)


def _sentence(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "this operator knows no such field: take it out, or update the operator"
    if kind == "missing":
        return "must be set"
    return message[:1].lower() + message[1:]
