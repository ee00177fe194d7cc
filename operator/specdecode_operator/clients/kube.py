"""The API server: reads and writes of whole objects as JSON, nothing judged.

Writes pass a fence first: an operator that has lost its lease must not write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from specdecode_operator import errors
from specdecode_operator.api import metadata
from specdecode_operator.domain.decision import Event
from specdecode_operator.domain.observation import ObjectKey

from . import transport

PAGE_SIZE = 100
MAX_EVENT_MESSAGE_BYTES = 1024
# A line of an engine's log is seldom shorter; this many lines fill the bytes asked for.
_SHORT_LINE_BYTES = 64

Json = dict[str, Any]

_PLURALS = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Event"): "events",
    ("v1", "Node"): "nodes",
    ("v1", "Pod"): "pods",
    ("v1", "Service"): "services",
    ("apps/v1", "Deployment"): "deployments",
    ("apps/v1", "ReplicaSet"): "replicasets",
    ("coordination.k8s.io/v1", "Lease"): "leases",
    ("monitoring.coreos.com/v1", "PodMonitor"): "podmonitors",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    (metadata.API_VERSION, metadata.KIND): metadata.PLURAL,
}
_API_VERSIONS = {kind: api_version for api_version, kind in _PLURALS}


class KubeClient:
    """Typed questions to the API server; safe to use from many threads.

    Every method raises TransientError or a child of PermanentError and nothing else. `namespaces`
    empty means all of them. `may_write` is asked before each write.
    """

    def __init__(
        self,
        connection: transport.Transport,
        *,
        namespaces: Sequence[str] = (),
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._connection = connection
        self._namespaces = tuple(namespaces)
        self._may_write = may_write

    def get_object(self, key: ObjectKey) -> Json | None:
        """Read one SpecDecodeDeployment, None when it is gone."""
        return self.get(metadata.API_VERSION, metadata.KIND, key.namespace, key.name)

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Json | None:
        """Read one object, None when there is none (or no such kind)."""
        try:
            return self._connection.request("GET", _path(api_version, kind, namespace, name))
        except errors.NotFoundError:
            return None

    def list_objects(self) -> Iterator[Json]:
        """Yield every SpecDecodeDeployment of the served namespaces, page by page.

        Raises NotFoundError when the resource definition is not installed.
        """
        for namespace in self._namespaces or ("",):
            yield from self._pages(metadata.KIND, namespace, {})

    def list_owned(self, namespace: str, kind: str, selector: Mapping[str, str]) -> list[Json]:
        """List the objects of a kind that carry all these labels."""
        return list(self._pages(kind, namespace, selector))

    def apply(self, manifest: Mapping[str, Any]) -> Json:
        """Server-side apply a manifest, taking over fields that others had set."""
        self._fence()
        return self._connection.request(
            "PATCH",
            _path_of(manifest),
            query={"fieldManager": metadata.FIELD_MANAGER, "force": "true"},
            body=manifest,
            content_type=transport.APPLY_PATCH,
        )

    def apply_status(
        self, key: ObjectKey, uid: str, status: Mapping[str, Any], *, resource_version: str
    ) -> str:
        """Write the whole status and return the new resourceVersion.

        An unchanged status leaves the resourceVersion as it is. Raises ConflictError if the
        object changed since `resource_version`, or is another one of the same name.
        """
        self._fence()
        answer = self._connection.request(
            "PATCH",
            _path(metadata.API_VERSION, metadata.KIND, key.namespace, key.name) + "/status",
            query={"fieldManager": metadata.FIELD_MANAGER, "force": "true"},
            body={
                "apiVersion": metadata.API_VERSION,
                "kind": metadata.KIND,
                "metadata": {
                    "namespace": key.namespace,
                    "name": key.name,
                    "uid": uid,
                    "resourceVersion": resource_version,
                },
                "status": status,
            },
            content_type=transport.APPLY_PATCH,
        )
        return str(answer["metadata"]["resourceVersion"])

    def annotate_pod(self, namespace: str, pod: str, annotations: Mapping[str, str | None]) -> bool:
        """Set annotations of a pod (None removes one); False when the pod is gone."""
        self._fence()
        try:
            self._connection.request(
                "PATCH",
                _path("v1", "Pod", namespace, pod),
                query={"fieldManager": metadata.FIELD_MANAGER},
                body={"metadata": {"annotations": dict(annotations)}},
                content_type=transport.MERGE_PATCH,
            )
        except errors.NotFoundError:
            return False
        return True

    def delete(self, api_version: str, kind: str, namespace: str, name: str) -> bool:
        """Delete an object and, in the background, what it owns; False when it was gone."""
        self._fence()
        try:
            self._connection.request(
                "DELETE",
                _path(api_version, kind, namespace, name),
                query={"propagationPolicy": "Background"},
            )
        except errors.NotFoundError:
            return False
        return True

    def create(self, manifest: Mapping[str, Any]) -> Json:
        """Create an object; ConflictError when it exists."""
        self._fence()
        return self._connection.request("POST", _path_of(manifest, collection=True), body=manifest)

    def replace(self, manifest: Mapping[str, Any]) -> Json:
        """Replace an object; ConflictError when its resourceVersion is not the present one."""
        self._fence()
        return self._connection.request("PUT", _path_of(manifest), body=manifest)

    def pod_log(
        self,
        namespace: str,
        pod: str,
        *,
        container: str,
        previous: bool,
        limit_bytes: int,
        timeout_seconds: float,
    ) -> str | None:
        """Read the end of a container's log, bad bytes replaced; None when there is no such log.

        Raises TransientError when it cannot be read within the time.
        """
        query = {
            "container": container,
            "previous": "true" if previous else "false",
            # limitBytes would keep the beginning and lose the end, which is what is wanted.
            "tailLines": str(limit_bytes // _SHORT_LINE_BYTES),
        }
        try:
            data = self._connection.tail(
                _path("v1", "Pod", namespace, pod) + "/log",
                query=query,
                limit_bytes=limit_bytes,
                timeout_seconds=timeout_seconds,
            )
        except (errors.NotFoundError, errors.InvalidObjectError):
            return None  # the API server answers 400 for a previous container that never was
        return data.decode(errors="replace")

    def create_event(self, about: Mapping[str, Any], event: Event, *, at: datetime) -> None:
        """Tell the user of a decision about an object, where `kubectl describe` shows it.

        The same reason and message about the same object raise the count of one Event.
        """
        self._fence()
        manifest = build_event(about, event, at=at)
        try:
            self.create(manifest)
        except errors.ConflictError:
            self._count_event(manifest)

    def _count_event(self, manifest: Json) -> None:
        meta = manifest["metadata"]
        known = self.get("v1", "Event", meta["namespace"], meta["name"]) or manifest
        self._connection.request(
            "PATCH",
            _path_of(manifest),
            body={
                "count": int(known.get("count") or 1) + 1,
                "lastTimestamp": manifest["lastTimestamp"],
            },
            content_type=transport.MERGE_PATCH,
        )

    def _pages(self, kind: str, namespace: str, selector: Mapping[str, str]) -> Iterator[Json]:
        api_version = _API_VERSIONS[kind]
        query = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = ",".join(f"{k}={v}" for k, v in sorted(selector.items()))
        while True:
            page = self._connection.request("GET", _path(api_version, kind, namespace), query=query)
            for item in page.get("items") or ():
                # The items of a list do not say what they are.
                yield {"apiVersion": api_version, "kind": kind, **item}
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token

    def _fence(self) -> None:
        if not self._may_write():
            raise errors.NotLeaderError("the lease is not held: nothing was written")


def build_event(about: Mapping[str, Any], event: Event, *, at: datetime) -> Json:
    """Make the Event object; its name is the same for the same reason and message."""
    meta = about["metadata"]
    message = _cut(event.message, MAX_EVENT_MESSAGE_BYTES)
    identity = "\n".join((meta["uid"], event.type, event.reason, message))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    stamp = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": meta["namespace"], "name": f"{meta['name'][:230]}.{digest}"},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
        },
        "type": str(event.type),
        "reason": event.reason,
        "message": message,
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": metadata.FIELD_MANAGER},
        "reportingComponent": metadata.FIELD_MANAGER,
    }


def _cut(text: str, limit_bytes: int) -> str:
    """Shorten a text to so many bytes, at a character, with a sign that it was cut."""
    encoded = text.encode()
    if len(encoded) <= limit_bytes:
        return text
    mark = " …"
    return encoded[: limit_bytes - len(mark.encode())].decode(errors="ignore") + mark


def _path(api_version: str, kind: str, namespace: str, name: str = "") -> str:
    """Compose an address; an empty namespace means all, or that the kind has none."""
    plural = _PLURALS.get((api_version, kind))
    if plural is None:
        raise errors.InvalidObjectError(f"{api_version} {kind} is no kind that this client knows")
    group = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    scope = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{group}{scope}/{plural}" + (f"/{quote(name, safe='')}" if name else "")


def _path_of(manifest: Mapping[str, Any], *, collection: bool = False) -> str:
    meta = manifest["metadata"]
    return _path(
        manifest["apiVersion"],
        manifest["kind"],
        meta.get("namespace", ""),
        "" if collection else meta["name"],
    )
