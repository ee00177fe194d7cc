"""Service and disruption budget: over the pods of all revisions, not of one."""

from __future__ import annotations

from specdecode_operator.manifests import disruption, service
from tests.unit.manifests.builders import KEY, UID, inputs_of, template_of


def test_the_service_selects_the_pods_of_every_revision_by_their_named_port() -> None:
    spec = service.build_service(KEY, UID)["spec"]
    for inputs in (inputs_of(), inputs_of(model={"name": "org/other"})):
        pod = template_of(inputs)
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        names = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
        assert spec["ports"][0]["targetPort"] in names
    assert "specdecode.io/revision" not in spec["selector"]


def test_drains_take_one_pod_at_a_time_but_never_wait_for_a_broken_one() -> None:
    spec = disruption.build_disruption_budget(KEY, UID)["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"]["matchLabels"] == {"specdecode.io/deployment": "chat"}
