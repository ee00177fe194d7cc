"""Gather everything that one decision may look at: the object first, then what is slower.

Prometheus and the engines are read before the object's lock is taken, so that they never stand
in the way of an urgent pass; the cluster is read again under the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

import pydantic

from specdecode_operator import config, errors
from specdecode_operator.api import metadata, parse
from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.clients import engines, kube, prometheus, queries
from specdecode_operator.decide import experiment, fall, faults
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.evidence import Evidence, FaultClass
from specdecode_operator.domain.observation import (
    Acknowledgement,
    InvalidSpec,
    MetricsAbsent,
    MetricsSamples,
    ObjectKey,
    Observation,
    ObservedObject,
    ObservedPod,
    Series,
)
from specdecode_operator.durations import parse_duration
from specdecode_operator.manifests import deployment, tables

from . import pods

LOG_BYTES: Final = 256 * 1024
URGENT_LOG_SECONDS: Final = 0.5
LOG_SECONDS: Final = 5.0
LONGEST_WINDOW: Final = timedelta(hours=1)
NOT_ASKED: Final = MetricsAbsent(reason="", message="")


@dataclass(frozen=True)
class SlowReadings:
    """What is read outside the lock; the default is that of an urgent pass: nothing."""

    acknowledgements: Mapping[str, Acknowledgement] = field(default_factory=dict)
    metrics: MetricsSamples | MetricsAbsent = NOT_ASKED


@dataclass(frozen=True)
class Observer:
    """Reads the world; judges nothing."""

    kube: kube.KubeClient
    prometheus: prometheus.PrometheusClient | None
    engines: engines.EngineClient
    settings: config.OperatorConfig
    clock: Callable[[], datetime]

    def read_slowly(self, key: ObjectKey) -> SlowReadings:
        """Ask the engines for their tables and Prometheus for the object's samples."""
        raw = self.kube.get_object(key)
        if raw is None:
            return SlowReadings()
        alive = [pod for pod in self._observe_pods(key) if not pod.deleting]
        addresses = {
            pod.name: pod.metrics_address
            for pod in alive
            if pod.container_running and pod.metrics_address
        }
        acknowledgements = self.engines.read_acknowledgements(addresses) if addresses else {}
        names = frozenset(pod.name for pod in alive)
        return SlowReadings(acknowledgements, self._read_metrics(to_object(raw), names))

    def observe(self, key: ObjectKey, slow: SlowReadings, *, urgent: bool) -> Observation | None:
        """Read the object and all that it owns; None when it is gone."""
        raw = self.kube.get_object(key)
        if raw is None:
            return None
        target = to_object(raw)
        selector = {metadata.LABEL_OBJECT: key.name}
        revisions = [
            revision
            for item in self.kube.list_owned(key.namespace, "Deployment", selector)
            if (revision := deployment.read_deployment(item)) is not None
        ]
        config_map = self.kube.get("v1", "ConfigMap", key.namespace, metadata.tables_name(key.name))
        seen_pods = [
            self._with_log(key, pod, target.status, urgent=urgent)
            for pod in self._observe_pods(key)
        ]
        return Observation(
            now=self.clock(),
            target=target,
            unrenderable=_find_unrenderable(target, self.settings.plugin_image),
            revisions=tuple(revisions),
            pods=tuple(seen_pods),
            tables=tables.read_tables(config_map) if config_map else None,
            acknowledgements=slow.acknowledgements,
            metrics=slow.metrics,
        )

    def _observe_pods(self, key: ObjectKey) -> list[ObservedPod]:
        selector = {metadata.LABEL_OBJECT: key.name}
        found = self.kube.list_owned(key.namespace, "Pod", selector)
        return sorted((pods.observe_pod(raw) for raw in found), key=lambda pod: pod.name)

    def _with_log(
        self, key: ObjectKey, pod: ObservedPod, status: Status, *, urgent: bool
    ) -> ObservedPod:
        """Read the log of a container that ended, where its message does not say enough."""
        ended = pod.termination
        if ended is None or fall.is_handled(status.faults, pod):
            return pod
        verdict = faults.classify(ended.evidence)
        if verdict.fault_class is FaultClass.ILLEGAL_MEMORY_ACCESS:
            return pod
        evidence = self._read_log(key, pod, ended.evidence, urgent=urgent)
        return replace(pod, termination=replace(ended, evidence=evidence))

    def _read_log(
        self, key: ObjectKey, pod: ObservedPod, evidence: Evidence, *, urgent: bool
    ) -> Evidence:
        try:
            log = self.kube.pod_log(
                key.namespace,
                pod.name,
                container=metadata.ENGINE_CONTAINER,
                previous=pod.container_running,
                limit_bytes=LOG_BYTES,
                timeout_seconds=URGENT_LOG_SECONDS if urgent else LOG_SECONDS,
            )
        except errors.OperatorError:
            return evidence  # classified from what is left
        return replace(evidence, log=log)

    def _read_metrics(
        self, target: ObservedObject, names: frozenset[str]
    ) -> MetricsSamples | MetricsAbsent:
        if self.prometheus is None:
            return MetricsAbsent(
                Reason.NOT_CONFIGURED, "the operator was given no Prometheus address"
            )
        now = self.clock()
        if not names:
            return MetricsAbsent(Reason.NO_READY_PODS, "no engine is there yet")
        seconds = int(self._choose_window(target, now).total_seconds())
        labels = queries.Labels(
            self.settings.namespace_label,
            self.settings.pod_label,
            self.settings.prometheus_matchers,
        )
        query = queries.engine_samples(
            target.key.namespace, queries.pods_regex(names), seconds, labels=labels
        )
        try:
            found = self.prometheus.query_range_vector(query, now)
        except errors.OperatorError as error:
            return MetricsAbsent(Reason.PROMETHEUS_UNAVAILABLE, str(error))
        end = now.timestamp()
        return MetricsSamples(end - seconds, end, tuple(self._name_pod(s) for s in found))

    def _name_pod(self, series: Series) -> Series:
        """Estimators know the pod's label as `pod`, whatever this Prometheus calls it."""
        if self.settings.pod_label == "pod":
            return series
        return replace(
            series, labels={**series.labels, "pod": series.labels[self.settings.pod_label]}
        )

    def _choose_window(self, target: ObservedObject, now: datetime) -> timedelta:
        """Reach back over an open block, and else as far as a measurement needs."""
        back = self.settings.cycle
        if isinstance(target.spec, Spec):
            block = parse_duration(target.spec.rollout.live_soak.min_duration)
            back = max(back, experiment.reach(block))
        if target.status.experiment is not None:
            open_one = target.status.experiment
            back = max(back, now - (open_one.judged_from or open_one.started_at))
        return min(LONGEST_WINDOW, back + 2 * self.settings.scrape_interval)


def to_object(raw: Mapping[str, Any]) -> ObservedObject:
    """Read the custom resource; a spec that the models refuse becomes an InvalidSpec."""
    meta = raw["metadata"]
    return ObservedObject(
        key=ObjectKey(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        resource_version=meta["resourceVersion"],
        deleting="deletionTimestamp" in meta,
        annotations=meta.get("annotations") or {},
        spec=_to_spec(raw),
        status=to_status(raw),
    )


def to_status(raw: Mapping[str, Any]) -> Status:
    """Read the stored status; one that cannot be read counts as absent, and is made anew."""
    try:
        return Status.model_validate(raw.get("status") or {})
    except pydantic.ValidationError:
        return Status()


def _to_spec(raw: Mapping[str, Any]) -> Spec | InvalidSpec:
    try:
        return parse.parse_spec(raw)
    except pydantic.ValidationError as error:
        return InvalidSpec(parse.problems_of(error))


def _find_unrenderable(target: ObservedObject, plugin_image: str | None) -> str | None:
    """Try whether the spec can become a pod; only the rendering knows about overlays and names."""
    if isinstance(target.spec, InvalidSpec):
        return None
    inputs = levers.inputs_of(target.spec)
    try:
        deployment.render_template(
            target.key.name,
            inputs,
            revision="try",
            rendered_by="",
            plugin_image=plugin_image,
        )
    except errors.InvalidSpecError as error:
        return str(error)
    return None
