"""One pass over one object: observe, decide, act.

A full pass reads Prometheus and the engines before it takes the object's lock, so an urgent pass
(an engine ended) never waits for them; it may run between a full pass's reading and its deciding,
which then reads the cluster again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta

from specdecode_operator import config
from specdecode_operator.clients import engines, kube, prometheus
from specdecode_operator.decide import cycle
from specdecode_operator.domain.decision import Decision
from specdecode_operator.domain.observation import ObjectKey, Observation
from specdecode_operator.telemetry import Telemetry

from .act import Actor
from .observe import Observer, SlowReadings

log = logging.getLogger(__name__)


class Reconciler:
    """Runs passes; safe to call from many threads."""

    def __init__(
        self,
        *,
        kube: kube.KubeClient,
        prometheus: prometheus.PrometheusClient | None,
        engines: engines.EngineClient,
        config: config.OperatorConfig,
        clock: Callable[[], datetime],
        telemetry: Telemetry,
    ) -> None:
        self._observer = Observer(kube, prometheus, engines, config, clock)
        self._actor = Actor(kube, config.plugin_image)
        self._cycle = config.cycle
        self._telemetry = telemetry
        self._locks: dict[ObjectKey, threading.Lock] = {}
        self._locks_guard = threading.Lock()

    def run(self, key: ObjectKey, *, urgent: bool) -> timedelta | None:
        """Run one pass; return when the next is due, None when the object is gone.

        Raises TransientError (try again) or PermanentError (somebody must act).
        """
        slow = SlowReadings() if urgent else self._observer.read_slowly(key)
        with self._lock_of(key):
            seen = self._observer.observe(key, slow, urgent=urgent)
            if seen is None or seen.target.deleting:
                self._forget(key)
                return None
            decision = cycle.decide(seen, cycle=self._cycle)
            self._actor.act(seen, decision)
        self._tell(seen, decision)
        # An urgent pass asked nobody: a full one follows at once.
        return timedelta(0) if urgent else decision.requeue_after

    def _lock_of(self, key: ObjectKey) -> threading.Lock:
        with self._locks_guard:
            return self._locks.setdefault(key, threading.Lock())

    def _forget(self, key: ObjectKey) -> None:
        with self._locks_guard:
            self._locks.pop(key, None)

    def _tell(self, seen: Observation, decision: Decision) -> None:
        for event in decision.events:
            log.info("%s: %s: %s", seen.target.key, event.reason, event.message)
        for fault_class in decision.faults:
            self._telemetry.record_fault(fault_class)
