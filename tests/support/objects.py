"""SpecDecodeDeployments in a cluster, as a test or the demo handles them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import urllib3
from kubernetes import client, config, watch

from specdecode_operator.api import metadata
from tests.support.cluster import LocalCluster
from tests.support.waiting import wait_until

Json = dict[str, Any]


def reason_of(status: Json, kind: str) -> str:
    """Return the reason of a status's condition; empty where there is none."""
    found = (c for c in status.get("conditions") or [] if c["type"] == kind)
    return str(next(found, {}).get("reason", ""))


class Objects:
    """Apply, edit and read the objects of one namespace."""

    def __init__(self, cluster: LocalCluster, namespace: str = "default") -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.api = config.new_client_from_config(str(cluster.kubeconfig))
        self._custom = client.CustomObjectsApi(self.api)
        self.core = client.CoreV1Api(self.api)
        self.apps = client.AppsV1Api(self.api)

    def apply(self, name: str, spec: Json) -> None:
        """Apply an object as `kubectl apply` does."""
        manifest = {
            "apiVersion": metadata.API_VERSION,
            "kind": metadata.KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def edit(self, name: str, spec: Json) -> None:
        """Merge a piece of spec into an object, as `kubectl patch --type merge` does."""
        self._custom.patch_namespaced_custom_object(
            metadata.GROUP,
            metadata.VERSION,
            self.namespace,
            metadata.PLURAL,
            name,
            {"spec": spec},
            _content_type="application/merge-patch+json",
        )

    def read(self, name: str) -> Json:
        """Read an object."""
        found: Json = self._custom.get_namespaced_custom_object(
            metadata.GROUP, metadata.VERSION, self.namespace, metadata.PLURAL, name
        )
        return found

    def status(self, name: str) -> Json:
        """Read an object's status, empty where there is none yet."""
        return self.read(name).get("status") or {}

    def condition(self, name: str, kind: str) -> Json:
        """Read one condition, empty where there is none yet."""
        conditions = self.status(name).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_condition(
        self,
        name: str,
        kind: str,
        *,
        status: str = "True",
        reason: str | None = None,
        seconds: float = 60,
    ) -> Json:
        """Wait until a condition has this status, and this reason where one is given."""

        def look() -> Json | None:
            found = self.condition(name, kind)
            right = found.get("status") == status and reason in (None, found.get("reason"))
            return found if right else None

        return wait_until(look, what=f"{name} {kind}={status} {reason or ''}", seconds=seconds)

    def wait_status(
        self, name: str, look: Callable[[Json], Any], *, what: str, seconds: float = 60
    ) -> Json:
        """Wait until a status satisfies a condition; return it."""

        def check() -> Json | None:
            status = self.status(name)
            return status if status and look(status) else None

        return wait_until(check, what=f"{name}: {what}", seconds=seconds, pause_seconds=0.2)

    def pods(self, name: str) -> list[Json]:
        """List an object's pods, as plain JSON."""
        selector = f"{metadata.LABEL_OBJECT}={name}"
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector)
        plain: list[Json] = self.api.sanitize_for_serialization(found)["items"]
        return plain


@dataclass
class PodWatch:
    """Notes when each thing of an object's pods was first seen, on one clock.

    Keys: (pod, "created"), (pod, "ready"), (pod, "terminated", boot), (pod, "arm", value).
    """

    objects: Objects
    name: str
    seen: dict[tuple[Any, ...], float] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> PodWatch:
        self._watch = watch.Watch()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()
        self._stopped = True

    _stopped = False

    def _run(self) -> None:
        while not self._stopped:
            # A watch may be cut at any time; what it showed before is seen again, and kept.
            with contextlib.suppress(urllib3.exceptions.HTTPError, client.ApiException):
                self._follow()

    def _follow(self) -> None:
        for event in self._watch.stream(
            self.objects.core.list_namespaced_pod,
            self.objects.namespace,
            label_selector=f"{metadata.LABEL_OBJECT}={self.name}",
            timeout_seconds=3600,
        ):
            self._note(event["raw_object"])
            if self._stopped:
                return

    def _note(self, pod: Json) -> None:
        now = time.time()
        meta, status = pod["metadata"], pod.get("status") or {}
        name = meta["name"]
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        self.revisions[name] = labels.get(metadata.LABEL_REVISION, "")
        self.seen.setdefault((name, "created"), now)
        arm = annotations.get(metadata.ANNOTATION_ARM, "")
        self.seen.setdefault((name, "arm", arm), now)
        for condition in status.get("conditions") or []:
            if condition["type"] == "Ready" and condition["status"] == "True":
                self.seen.setdefault((name, "ready"), now)
        for container in status.get("containerStatuses") or []:
            self.restarts[name] = container.get("restartCount", 0)
            state, last = container.get("state") or {}, container.get("lastState") or {}
            ended = "terminated" in state or "terminated" in last
            # A pod that is being deleted ends because it was asked to.
            if ended and "deletionTimestamp" not in meta:
                boot = self.restarts[name] - (1 if "running" in state else 0)
                self.seen.setdefault((name, "terminated", boot), now)
