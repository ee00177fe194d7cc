"""The user's pod template laid over ours, by the rules of Kubernetes' strategic merge.

Maps are merged, lists by the merge keys of the pod's API, null deletes, `$patch` replaces or
deletes. What the operator must know to be true (selector labels, arguments, image, the table's
delivery, the crash evidence) cannot be changed here: another field of the spec sets it, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from specdecode_operator.api import metadata
from specdecode_operator.domain import refusal
from specdecode_operator.errors import InvalidSpecError

from . import inject

FIELD: Final = "spec.engine.podTemplate"

# Lists that are merged item by item, and the field that names an item; others are replaced whole.
MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}
# Kubernetes replaces these; a user who adds one never means to take another away.
APPENDED: Final = frozenset({"tolerations"})
# Items and maps that hold one of several kinds: naming another kind takes the old one away.
ONE_OF: Final = {
    "preStop": frozenset({"exec", "httpGet", "sleep", "tcpSocket"}),
    "postStart": frozenset({"exec", "httpGet", "sleep", "tcpSocket"}),
    "startupProbe": frozenset({"exec", "grpc", "httpGet", "tcpSocket"}),
    "livenessProbe": frozenset({"exec", "grpc", "httpGet", "tcpSocket"}),
    "readinessProbe": frozenset({"exec", "grpc", "httpGet", "tcpSocket"}),
}
KEEPS_ONLY_NAMED: Final = frozenset({"volumes", "env", "resourceClaims"})

_DIRECTIVE: Final = "$patch"
_TOP: Final = {"metadata": frozenset({"labels", "annotations"}), "spec": None}


def apply_overlay(template: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template with the user's overlay merged in; neither argument is changed.

    Raises InvalidSpecError, with the field's path, for what cannot be merged or is managed.
    """
    _check_shape(overlay)
    merged = merge(template, overlay, path=FIELD)
    before, after = _managed(template), _managed(merged)
    for what in {**before, **after}:
        if before.get(what) != after.get(what):
            raise InvalidSpecError(f"{FIELD} changes {what}: {_advice(what)}")
    return merged


def merge(base: Mapping[str, Any], patch: Mapping[str, Any], *, path: str) -> dict[str, Any]:
    """Merge a map into another by the rules of strategic merge.

    Raises InvalidSpecError where the two differ in kind or a directive is unknown.
    """
    directive = patch.get(_DIRECTIVE)
    if directive not in (None, "replace", "delete"):
        raise InvalidSpecError(f"{path}.{_DIRECTIVE} is {directive!r}: use replace or delete")
    merged = {} if directive == "replace" else dict(base)
    for key, value in patch.items():
        where = f"{path}.{key}"
        if key == _DIRECTIVE:
            continue
        if key.startswith("$"):
            raise InvalidSpecError(f"{where} is not supported: of the directives use $patch")
        if value is None or _is_deletion(value):
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(merged.get(key), value, key=key, path=where)
    return merged


def _merge_value(base: Any, value: Any, *, key: str, path: str) -> Any:
    if base is not None and _kind(base) != _kind(value):
        raise InvalidSpecError(f"{path} must be a {_kind(base)}, not a {_kind(value)}")
    if isinstance(value, Mapping):
        rivals = ONE_OF.get(key, frozenset())
        if rivals & value.keys():
            base = {k: v for k, v in (base or {}).items() if k not in rivals - value.keys()}
        return merge(base or {}, value, path=path)
    if isinstance(value, list):
        return _merge_list(base or [], value, key=key, path=path)
    return value


def _merge_list(base: Sequence[Any], patch: Sequence[Any], *, key: str, path: str) -> list[Any]:
    replaces = {_DIRECTIVE: "replace"} in patch
    items = [item for item in patch if item != {_DIRECTIVE: "replace"}]
    kept = [] if replaces else list(base)
    if key in APPENDED:
        return kept + [item for item in items if item not in kept]
    if key not in MERGE_KEYS:
        return items
    for position, item in enumerate(items):
        _merge_item(kept, item, key=key, path=f"{path}[{position}]")
    return kept


def _merge_item(kept: list[Any], item: Any, *, key: str, path: str) -> None:
    """Put one item of a keyed list into the list: merged into its namesake, or at the end."""
    name = MERGE_KEYS[key]
    if not isinstance(item, Mapping) or not isinstance(item.get(name), str | int):
        raise InvalidSpecError(
            f"{path} must be a map with `{name}`, which says what it is laid over"
        )
    position = next((i for i, old in enumerate(kept) if old[name] == item[name]), None)
    if _is_deletion(item):
        if position is not None:
            del kept[position]
        return
    if position is None:
        kept.append(merge({}, item, path=path))
        return
    base = kept[position]
    if key in KEEPS_ONLY_NAMED and item.keys() != {name}:
        base = {k: v for k, v in base.items() if k in item}
    kept[position] = merge(base, item, path=path)


def _check_shape(overlay: Mapping[str, Any]) -> None:
    for key, value in overlay.items():
        if key not in _TOP:
            raise InvalidSpecError(f"{FIELD}.{key} is not known: it holds metadata and spec")
        if not isinstance(value, Mapping):
            raise InvalidSpecError(f"{FIELD}.{key} must be a map, not a {_kind(value)}")
        allowed = _TOP[key]
        unknown = sorted(value.keys() - allowed) if allowed is not None else []
        if unknown:
            raise InvalidSpecError(
                f"{FIELD}.metadata.{unknown[0]} is not supported: set labels and annotations only"
            )


def _managed(template: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what an overlay must leave as it is, by the words of the message."""
    meta, spec = template.get("metadata") or {}, template.get("spec") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    engine = _find(spec.get("containers"), "name", metadata.ENGINE_CONTAINER) or {}
    injected = {
        "the container that brings the plugin": _find(
            spec.get("initContainers"), "name", inject.CONTAINER
        ),
        f"the volume {inject.VOLUME}": _find(spec.get("volumes"), "name", inject.VOLUME),
        f"the mount at {inject.FOLDER}": _find(
            engine.get("volumeMounts"), "mountPath", inject.FOLDER
        ),
    }
    if injected["the container that brings the plugin"] is not None:
        injected["the engine's command"] = engine.get("command")
    return {
        **injected,
        **{
            f"the label {label}": labels.get(label)
            for label in (metadata.LABEL_OBJECT, metadata.LABEL_REVISION)
        },
        f"the annotation {metadata.ANNOTATION_ARM}": annotations.get(metadata.ANNOTATION_ARM),
        "the engine container's name": engine.get("name"),
        "the engine's args": engine.get("args"),
        "the engine's image": engine.get("image"),
        "the engine's port": _find(engine.get("ports"), "containerPort", metadata.ENGINE_PORT),
        "the engine's terminationMessagePath": engine.get("terminationMessagePath"),
        **{
            f"the variable {variable['name']}": variable
            for variable in engine.get("env") or []
            if refusal.find_variable_refusal(variable["name"]) is not None
        },
        **{
            f"the volume {name}": _find(spec.get("volumes"), "name", name)
            for name in (metadata.TABLES_VOLUME, metadata.POD_VOLUME)
        },
        **{
            f"the mount at {folder}": _find(engine.get("volumeMounts"), "mountPath", folder)
            for folder in (metadata.TABLES_FOLDER, metadata.POD_FOLDER)
        },
    }


def _advice(what: str) -> str:
    return {
        "the engine's args": "use spec.engine.extraArgs",
        "the engine's image": "use spec.engine.image",
        "the engine container's name": f"keep the container `{metadata.ENGINE_CONTAINER}`",
    }.get(what, "the operator needs it as it is, leave it out")


def _find(items: Any, key: str, value: object) -> Any:
    return next((item for item in items or [] if item.get(key) == value), None)


def _is_deletion(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "map"
    return "list" if isinstance(value, list) else "plain value"
