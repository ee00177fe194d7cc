"""A small cluster in memory that carries out decisions, so that whole courses run in milliseconds.

It holds what decisions look at and nothing else: one object, its Deployments' replicas, pods that
become Ready after some steps, the ConfigMap, and engines that take a table some steps later.
ReplicaSets give up not-ready pods first; a pod that goes keeps its GPU while it drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count

from specdecode_operator.api import metadata
from specdecode_operator.api.v1alpha1 import RevisionInputs, Spec, Status
from specdecode_operator.decide import cycle, tables
from specdecode_operator.domain.decision import (
    Action,
    AnnotatePod,
    Decision,
    DeleteRevision,
    EnsureService,
    Event,
    SetRevision,
    WriteTables,
)
from specdecode_operator.domain.evidence import Evidence, Termination
from specdecode_operator.domain.observation import (
    Acknowledgement,
    InvalidSpec,
    MetricsAbsent,
    ObjectKey,
    Observation,
    ObservedObject,
    ObservedPod,
    ObservedRevision,
    ObservedTables,
    ObservedTermination,
)
from specdecode_operator.domain.table import TableFile
from tests.support.builders import NOT_ASKED, NOW

CYCLE = timedelta(seconds=60)
IMA = "CUDA error: an illegal memory access was encountered"
LONGEST_BUMP_SECONDS = 12
NO_PROMETHEUS = MetricsAbsent("PrometheusNotConfigured", "the operator was given no address")


@dataclass
class Revision:
    """A Deployment with its ReplicaSet."""

    inputs: RevisionInputs
    replicas: int
    created_at: datetime


@dataclass
class Pod:
    """One engine pod; `boots` counts its container's starts from 0."""

    name: str
    revision: str
    placed: bool = False
    ready: bool = False
    age: int = 0
    boots: int = 0
    draining: int | None = None
    annotations: dict[str, str] = field(default_factory=dict)
    ended: ObservedTermination | None = None
    taken: tuple[str, TableFile | None] | None = None
    taking: int = 0

    @property
    def deleting(self) -> bool:
        """Tell whether its ReplicaSet gave it up."""
        return self.draining is not None


@dataclass
class World:
    """One object's cluster; `step` lets time go on, `reconcile` runs a pass of the operator."""

    spec: Spec | InvalidSpec
    gpus: int = 100
    ready_after: int = 2
    takes_after: int = 1
    drains: int = 1
    crashes_at_start: Callable[[RevisionInputs], bool] = lambda inputs: False
    status: Status = field(default_factory=Status)
    now: datetime = NOW
    generation: int = 1
    revisions: dict[str, Revision] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    tables: ObservedTables | None = None
    events: list[Event] = field(default_factory=list)
    status_writes: int = 0
    numbers: Iterator[int] = field(default_factory=count)

    # ------------------------------------------------------------------ the user's doings

    def edit(self, spec: Spec | InvalidSpec) -> None:
        """Apply another spec."""
        self.spec = spec
        self.generation += 1

    # ------------------------------------------------------------------------ the cluster

    def step(self) -> None:
        """Let one second pass: ReplicaSets, the scheduler, kubelets, engines."""
        self.now += timedelta(seconds=1)
        for pod in self.pods:
            pod.draining = pod.draining - 1 if pod.draining is not None else None
        self.pods = [pod for pod in self.pods if pod.draining is None or pod.draining > 0]
        for name, revision in self.revisions.items():
            self._replicate(name, revision.replicas)
        for pod in self.pods:
            if pod.placed or sum(p.placed for p in self.pods) < self.gpus:
                pod.placed = True
                self._run(pod)

    def alive(self, revision: str | None = None) -> list[Pod]:
        """List the pods that are not on their way out."""
        return [p for p in self.pods if not p.deleting and revision in (None, p.revision)]

    def ready(self, revision: str | None = None) -> list[Pod]:
        """List the pods that serve."""
        return [pod for pod in self.alive(revision) if pod.ready]

    def speculating(self) -> list[Pod]:
        """List the pods whose engine was started with speculation."""
        return [p for p in self.alive() if self.revisions[p.revision].inputs.speculation]

    def crash(self, pod: Pod, message: str = IMA) -> None:
        """End a pod's engine; its kubelet starts another boot at once."""
        pod.ended = ObservedTermination(
            container=metadata.ENGINE_CONTAINER,
            restart_count=pod.boots,
            evidence=Evidence(
                termination=Termination(
                    1, None, "Error", message, self.now - timedelta(seconds=pod.age), self.now
                ),
                deletion_requested=pod.deleting,
                ever_ready=pod.ready,
            ),
        )
        pod.ready, pod.age, pod.taken = False, 0, None
        pod.boots += 1

    def _replicate(self, name: str, wanted: int) -> None:
        there = sorted(self.alive(name), key=lambda pod: (not pod.ready, -pod.age))
        for pod in there[wanted:]:
            pod.draining, pod.ready = self.drains, False
        for _ in range(wanted - len(there)):
            self.pods.append(Pod(f"{name[:4]}-{next(self.numbers)}", name))

    def _run(self, pod: Pod) -> None:
        if pod.deleting:
            return
        pod.age = min(pod.age + 1, self.ready_after)
        inputs = self.revisions[pod.revision].inputs
        if pod.age == self.ready_after and self.crashes_at_start(inputs):
            self.crash(pod)
            return
        pod.ready = pod.age >= self.ready_after
        arm = pod.annotations.get(metadata.ANNOTATION_ARM, "")
        there = self.tables or ObservedTables(None, None, 0, None)
        offered = (arm, there.canary if arm == metadata.ARM_CANARY else there.stable)
        pod.taking = 0 if pod.taken == offered else pod.taking + 1
        if pod.taking > self.takes_after:
            pod.taken = offered

    # ----------------------------------------------------------------------- the operator

    def reconcile(self, *, urgent: bool = False, writes: int | None = None) -> Decision:
        """Run one pass; with `writes` the operator is killed after so many of its writes."""
        seen = self.observe(urgent=urgent)
        decision = cycle.decide(seen, cycle=CYCLE)
        steps: list[Callable[[], None]] = [
            *(self._writer(action) for action in decision.urgent),
            lambda: self._write_status(decision.status),
            *(self._writer(action) for action in decision.actions),
            lambda: self.events.extend(decision.events),
        ]
        for write in steps[:writes]:
            write()
        return decision

    def run(self, steps: int = 60, *, check: Callable[[], None] = lambda: None) -> None:
        """Let operator and cluster go on; an ended engine brings an urgent pass first.

        Returns early when nothing has moved for so long that nothing will.
        """
        quiet = 0
        for _ in range(steps):
            before = repr((self.pods, self.revisions, self.tables, self.status_writes))
            ends = {(pod.name, pod.boots) for pod in self.pods if pod.ended}
            self.step()
            check()
            if {(pod.name, pod.boots) for pod in self.pods if pod.ended} - ends:
                self.reconcile(urgent=True)
            self.reconcile()
            after = repr((self.pods, self.revisions, self.tables, self.status_writes))
            quiet = quiet + 1 if before == after else 0
            if quiet > LONGEST_BUMP_SECONDS:
                return

    def observe(self, *, urgent: bool = False) -> Observation:
        """Give what one pass sees."""
        return Observation(
            now=self.now,
            target=ObservedObject(
                key=ObjectKey("default", "chat"),
                uid="uid-chat",
                generation=self.generation,
                resource_version="1",
                deleting=False,
                annotations={},
                spec=self.spec,
                status=self.status,
            ),
            unrenderable=None,
            revisions=tuple(
                ObservedRevision(name, r.inputs, {"stored": name}, r.replicas, r.created_at)
                for name, r in self.revisions.items()
            ),
            pods=tuple(self._observe_pod(pod) for pod in self.pods),
            tables=self.tables,
            acknowledgements={} if urgent else self._acknowledgements(),
            metrics=NOT_ASKED if urgent else NO_PROMETHEUS,
        )

    def _observe_pod(self, pod: Pod) -> ObservedPod:
        return ObservedPod(
            name=pod.name,
            uid=f"uid-{pod.name}",
            revision=pod.revision,
            node="node-1",
            created_at=NOW,
            ready=pod.ready,
            ever_ready=pod.ready,
            deleting=pod.deleting,
            arm=pod.annotations.get(metadata.ANNOTATION_ARM, ""),
            table_generation=pod.annotations.get(metadata.ANNOTATION_TABLE_GENERATION, ""),
            table_bump=pod.annotations.get(metadata.ANNOTATION_TABLE_BUMP, ""),
            metrics_address="10.0.0.1:8000" if pod.placed else None,
            container_running=pod.placed,
            container_started_at=self.now - timedelta(seconds=pod.age) if pod.placed else None,
            waiting=None,
            unschedulable=None if pod.placed else "0/1 nodes are available: no nvidia.com/gpu",
            termination=pod.ended,
        )

    def _acknowledgements(self) -> Mapping[str, Acknowledgement]:
        return {
            pod.name: _acknowledge(*pod.taken)
            for pod in self.speculating()
            if pod.taken is not None
        }

    def _write_status(self, status: Status) -> None:
        if status != self.status or not self.status.conditions:
            self.status_writes += 1
            self.status = Status.model_validate(status.to_json())

    def _writer(self, action: Action) -> Callable[[], None]:
        return lambda: self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case AnnotatePod(pod=name, annotations=annotations):
                for pod in self.pods:
                    if pod.name == name:
                        pod.annotations.update(annotations)
            case WriteTables(stable=stable, canary=canary, written_at=written_at):
                generation = max(file.generation for file in (stable, canary) if file)
                self.tables = ObservedTables(stable, canary, generation, written_at)
            case SetRevision(revision=name, inputs=inputs, replicas=replicas):
                there = self.revisions.setdefault(name, Revision(inputs, 0, self.now))
                assert there.inputs == inputs, "a revision's inputs never change"
                there.replicas = replicas
            case DeleteRevision(revision=name):
                assert not self.alive(name)
                del self.revisions[name]
            case EnsureService():
                pass


def without_speculation(spec: Spec) -> Spec:
    """Give the same spec without speculation."""
    return spec.model_copy(update={"speculation": None})


def changes(decision: Decision, world: World) -> list[Action]:
    """List the actions of a decision that would change something."""
    return [
        action
        for action in (*decision.urgent, *decision.actions)
        if not isinstance(action, EnsureService)
        and not (
            isinstance(action, SetRevision)
            and action.revision in world.revisions
            and world.revisions[action.revision].replicas == action.replicas
        )
    ]


def _acknowledge(arm: str, file: TableFile | None) -> Acknowledgement:
    return Acknowledgement(
        generation=file.generation if file else 0,
        fingerprint=file.fingerprint if file else 0,
        stale=False,
        arm=tables.ARM_NUMBERS[arm or metadata.ARM_STABLE],
        enabled=file.enabled if file else False,
        live=True,
        engine_version="0.33.0",
        method="eagle3",
        cudagraph_mode="FULL_AND_PIECEWISE",
    )


def with_arm(pod: Pod, arm: str) -> bool:
    """Tell whether a pod is annotated with this arm."""
    return pod.annotations.get(metadata.ANNOTATION_ARM) == arm
