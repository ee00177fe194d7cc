"""Carry out a decision: urgent writes, then the status, then the rest, then the Events.

Every write may be repeated: a pass that was killed in between is simply done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

from specdecode_operator import __version__
from specdecode_operator.api import metadata
from specdecode_operator.clients import kube
from specdecode_operator.domain.decision import (
    Action,
    AnnotatePod,
    Decision,
    DeleteRevision,
    EnsureService,
    SetRevision,
    WriteTables,
)
from specdecode_operator.domain.observation import Observation, ObservedObject
from specdecode_operator.manifests import deployment, disruption, service, tables


@dataclass(frozen=True)
class Actor:
    """Writes what was decided; decides nothing."""

    kube: kube.KubeClient
    plugin_image: str | None = None

    def act(self, seen: Observation, decision: Decision) -> None:
        """Write everything, in an order that survives a kill between any two writes.

        Raises ConflictError where the object changed meanwhile: nothing after the status was
        written then, and the urgent writes do no harm when they are repeated.
        """
        target = seen.target
        for action in decision.urgent:
            self._carry_out(target, action)
        if decision.status != target.status or not target.status.conditions:
            self.kube.apply_status(
                target.key,
                target.uid,
                decision.status.to_json(),
                resource_version=target.resource_version,
            )
        for action in decision.actions:
            self._carry_out(target, action)
        for event in decision.events:
            self.kube.create_event(_reference(target), event, at=seen.now)

    def _carry_out(self, target: ObservedObject, action: Action) -> None:
        match action:
            case AnnotatePod():
                self.kube.annotate_pod(target.key.namespace, action.pod, dict(action.annotations))
            case WriteTables():
                self.kube.apply(
                    tables.build_tables(
                        target.key,
                        target.uid,
                        stable=action.stable,
                        canary=action.canary,
                        written_at=action.written_at,
                    )
                )
            case SetRevision():
                self._set_revision(target, action)
            case DeleteRevision():
                self.kube.delete(
                    "apps/v1",
                    "Deployment",
                    target.key.namespace,
                    metadata.revision_name(target.key.name, action.revision),
                )
            case EnsureService():
                self.kube.apply(service.build_service(target.key, target.uid))
                self.kube.apply(disruption.build_disruption_budget(target.key, target.uid))
            case _:
                assert_never(action)

    def _set_revision(self, target: ObservedObject, action: SetRevision) -> None:
        template = action.template or deployment.render_template(
            target.key.name,
            action.inputs,
            revision=action.revision,
            rendered_by=__version__,
            plugin_image=self.plugin_image,
        )
        self.kube.apply(
            deployment.build_deployment(
                target.key,
                target.uid,
                revision=action.revision,
                inputs=action.inputs,
                template=template,
                replicas=action.replicas,
            )
        )


def _reference(target: ObservedObject) -> dict[str, Any]:
    return {
        "apiVersion": metadata.API_VERSION,
        "kind": metadata.KIND,
        "metadata": {
            "namespace": target.key.namespace,
            "name": target.key.name,
            "uid": target.uid,
        },
    }
