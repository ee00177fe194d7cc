"""Which of two operators acts: a Lease, judged by each with its own clock only.

A holder counts its time from before the request that renewed it, a waiter from when it first saw
the record as it is; so the holder stops before the waiter begins, whatever their clocks say.
Nothing can call back a write that is on its way: the margin covers the time limits of one call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from specdecode_operator import errors

logger = logging.getLogger(__name__)

API_VERSION = "coordination.k8s.io/v1"
KIND = "Lease"
RENEW_SECONDS = 2.0
EXPIRE_SECONDS = 10.0
MARGIN_SECONDS = 3.0


class Store(Protocol):
    """Where leases are kept; see clients.kube.KubeClient."""

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Read an object, None when there is none."""

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object; raises ConflictError when it exists."""

    def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object; raises ConflictError when it is newer than that."""


class Leadership(Protocol):
    """Who may act."""

    def is_leader(self) -> bool:
        """Whether this operator may write now."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it may, at most so long; say whether it may."""

    def leading_since(self) -> float:
        """Since when it may, in seconds of the monotonic clock."""


class Alone:
    """Leadership without a lease, for an operator that nobody else accompanies."""

    def is_leader(self) -> bool:
        """Say yes."""
        return True

    def wait(self, timeout_seconds: float) -> bool:
        """Say yes at once."""
        return True

    def leading_since(self) -> float:
        """Say for ever."""
        return float("-inf")


class Lease:
    """One contender for a Lease. `monotonic` gives seconds, `wall` the time that people read."""

    def __init__(
        self,
        store: Store,
        *,
        namespace: str,
        name: str,
        identity: str,
        monotonic: Callable[[], float],
        wall: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._namespace, self._name, self._identity = namespace, name, identity
        self._monotonic, self._wall = monotonic, wall
        self._deadline = float("-inf")
        self._record: dict[str, Any] | None = None
        self._is_known = False  # whether _record is what the server has, as far as we can know
        self._seen_at = 0.0
        self._held = False
        self._led_from = float("-inf")
        self._told = ""
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._stepping = threading.Lock()

    def is_leader(self) -> bool:
        """Whether this operator may write now; cheap, asked before each write."""
        return self._monotonic() < self._deadline

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until this operator may act, at most so long."""
        with self._changed:
            return self._changed.wait_for(self.is_leader, timeout_seconds)

    def leading_since(self) -> float:
        """Since when this operator holds the lease, in monotonic seconds."""
        return self._led_from

    def step(self) -> None:
        """Renew the lease, or take it if nobody holds it; call it every RENEW_SECONDS.

        A failure is logged when leadership changes by it, not each time.
        """
        started = self._monotonic()
        try:
            if not (self._is_known and self.is_leader()):
                self._read()
            if self._may_take():
                self._write(self._identity)
                self._lead(started + EXPIRE_SECONDS - MARGIN_SECONDS)
        except errors.OperatorError as error:
            self._is_known = False
            self._tell(error)
        if self._held and not self.is_leader():
            self._held = False
            logger.warning("%s lost the lease and stops writing", self._identity)

    def start(self, on_step: Callable[[], None]) -> None:
        """Contend in a thread of its own from now on; `on_step` is called after each step."""
        threading.Thread(target=self._contend, args=(on_step,), name="lease", daemon=True).start()

    def stop(self) -> None:
        """Stop contending and give the lease up; call it when nothing writes any more."""
        self._stopping.set()
        with self._stepping:
            self._release()

    def _contend(self, on_step: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            with self._stepping:
                if not self._stopping.is_set():
                    self.step()
            on_step()
            self._stopping.wait(RENEW_SECONDS)

    def _release(self) -> None:
        """Give the lease up, so that the next operator need not wait."""
        if not self.is_leader():
            return
        self._deadline = float("-inf")
        try:
            self._write("")
        except errors.OperatorError as error:
            logger.info("the lease was not given up and expires by itself: %s", error)

    def _read(self) -> None:
        record = self._store.get(API_VERSION, KIND, self._namespace, self._name)
        if _version(record) != _version(self._record):
            # Now, not when the request began: the holder may have renewed in between.
            self._seen_at = self._monotonic()
        self._record = record
        self._is_known = True

    def _may_take(self) -> bool:
        spec = (self._record or {}).get("spec") or {}
        holder = spec.get("holderIdentity")
        expires = max(EXPIRE_SECONDS, float(spec.get("leaseDurationSeconds") or 0))
        waited = self._monotonic() - self._seen_at
        return not holder or holder == self._identity or waited > expires

    def _write(self, holder: str) -> None:
        known = self._record or {}
        spec = known.get("spec") or {}
        stamp = self._wall().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        taken = spec.get("holderIdentity") != holder
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": known.get("metadata") or {"namespace": self._namespace, "name": self._name},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": int(EXPIRE_SECONDS) if holder else 1,
                "acquireTime": stamp if taken else spec.get("acquireTime"),
                "renewTime": stamp,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + int(taken),
            },
        }
        write = self._store.replace if self._record else self._store.create
        self._record = write(manifest)

    def _lead(self, deadline: float) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify_all()
        if not self._held:
            self._held = True
            self._led_from = self._monotonic()
            logger.info("%s holds the lease %s/%s", self._identity, self._namespace, self._name)

    def _tell(self, error: errors.OperatorError) -> None:
        """Log what a person must mend, once; the rest passes by itself."""
        permanent = isinstance(error, errors.PermanentError) and str(error) != self._told
        self._told = str(error)
        logger.log(logging.ERROR if permanent else logging.DEBUG, "lease: %s", error)


def _version(record: Mapping[str, Any] | None) -> str | None:
    return None if record is None else str((record.get("metadata") or {}).get("resourceVersion"))
