"""The real API server takes the CRD, and refuses what it should with what to change.

Specs are created as a server-side dry run: schema, defaults and rules are the real thing, and
nothing is left behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

from specdecode_operator.api import crd, metadata, parse, rules, v1alpha1
from specdecode_operator.domain import refusal
from tests.support.cluster import LocalCluster, wait_for

pytestmark = pytest.mark.integration

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
CRDS = ROOT / "crds"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


# --------------------------------------------------------------------------- the API server


class Resource:
    """The objects of one kind in one namespace."""

    def __init__(self, api: kubernetes.client.ApiClient, group: str, namespace: str) -> None:
        self._custom = kubernetes.client.CustomObjectsApi(api)
        self._place = (group, metadata.VERSION, namespace, metadata.PLURAL)
        self._kind = {"apiVersion": f"{group}/{metadata.VERSION}", "kind": metadata.KIND}

    def create(self, spec: Json, *, name: str = "chat", dry_run: bool = True) -> Json:
        body = {**self._kind, "metadata": {"name": name}, "spec": spec}
        options = {"dry_run": "All"} if dry_run else {}
        made: Json = self._custom.create_namespaced_custom_object(*self._place, body, **options)
        return made

    def patch(self, part: Json, *, name: str = "chat") -> Json:
        made: Json = self._custom.patch_namespaced_custom_object(*self._place, name, part)
        return made

    def patch_status(self, status: Json, *, name: str = "chat") -> Json:
        made: Json = self._custom.patch_namespaced_custom_object_status(
            *self._place, name, {"status": status}
        )
        return made

    def scale(self, replicas: int, *, name: str = "chat") -> Json:
        """Return the Scale; 0 replicas are absent from it."""
        made: Json = self._custom.patch_namespaced_custom_object_scale(
            *self._place, name, {"spec": {"replicas": replicas}}
        )
        return made

    def refusal(self, attempt: Callable[[], object]) -> str:
        """Return the sentences with which the API server refuses an attempt."""
        with pytest.raises(kubernetes.client.ApiException) as refused:
            attempt()
        assert refused.value.status == 422, refused.value.body
        message: str = json.loads(refused.value.body)["message"]
        return message


@pytest.fixture(scope="module")
def api(cluster: LocalCluster) -> kubernetes.client.ApiClient:
    return kubernetes.config.new_client_from_config(str(cluster.kubeconfig))


def install(cluster: LocalCluster, manifest: str) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)
    name = yaml.safe_load(manifest)["metadata"]["name"]
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")


@pytest.fixture(scope="module")
def objects(cluster: LocalCluster, api: kubernetes.client.ApiClient) -> Resource:
    install(cluster, (CRDS / crd.FILE).read_text("utf-8"))
    resource = Resource(api, metadata.GROUP, "default")

    def is_served() -> bool:
        try:
            resource.create(MINIMAL)
        except kubernetes.client.ApiException as error:
            return error.status != 404
        return True

    wait_for(is_served, what="the new resource to be served")
    return resource


# --------------------------------------------------------------------------- what users write

MINIMAL: Json = {"model": {"name": "org/model"}}
SPECULATION: Json = {"method": "eagle3", "draftModel": "org/draft", "numSpeculativeTokens": 7}
AV = {"adaptiveVerification": "Enabled"}


def merged(base: Json, change: Json) -> Json:
    """Merge maps; a value of None takes a field away."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and value else value
    return {key: value for key, value in result.items() if value is not None}


def speculating(**changes: Any) -> Json:
    return {**MINIMAL, "speculation": merged(SPECULATION, changes)}


def with_rows(*rows: tuple[int, int], **changes: Any) -> Json:
    return speculating(kTable=[{"minBatch": first, "k": k} for first, k in rows], **changes)


def with_engine(**changes: Any) -> Json:
    return {**MINIMAL, "engine": changes}


def with_arguments(*arguments: str) -> Json:
    return with_engine(extraArgs=list(arguments))


def with_variable(name: str, **more: Any) -> Json:
    return with_engine(env=[{"name": name, **more}])


ARGUMENT = "spec.engine.extraArgs[0]"
VARIABLE = "spec.engine.env[0].name"
TABLE = "spec.speculation.kTable"

# situation -> spec, place, sentence
REFUSED: dict[str, tuple[Json, str, str]] = {
    # the model
    "no model": ({}, "spec.model", "Required value"),
    "a model that reads as a flag": (
        {"model": {"name": "--port"}},
        "spec.model.name",
        "must not start with '-': vLLM would read it as a flag",
    ),
    "a revision that reads as a flag": (
        {"model": {"name": "m", "revision": "-v"}},
        "spec.model.revision",
        "must not start with '-'",
    ),
    "a served name that reads as a flag": (
        {"model": {"name": "m", "servedName": "-m"}},
        "spec.model.servedName",
        "must not start with '-'",
    ),
    "two kinds of cache": (
        {"model": {"name": "m", "cache": {"claimName": "weights", "hostPath": "/models"}}},
        "spec.model.cache",
        "set exactly one of claimName, hostPath and emptyDir: true",
    ),
    "a cache of no kind": (
        {"model": {"name": "m", "cache": {}}},
        "spec.model.cache",
        "set exactly one of claimName",
    ),
    "an emptyDir that is switched off": (
        {"model": {"name": "m", "cache": {"emptyDir": False}}},
        "spec.model.cache",
        "set exactly one of claimName",
    ),
    "a folder that is not absolute": (
        {"model": {"name": "m", "cache": {"hostPath": "models"}}},
        "spec.model.cache.hostPath",
        "should match '^/'",
    ),
    # the engine
    "a managed flag": (
        with_arguments("--max-num-seqs", "64"),
        ARGUMENT,
        "--max-num-seqs is refused here: set spec.engine.maxNumSeqs instead",
    ),
    "a managed flag with its value": (
        with_arguments("--speculative-config={}"),
        ARGUMENT,
        "--speculative-config is refused here: set spec.speculation instead",
    ),
    "a managed flag in its short form": (
        with_arguments("-tp", "2"),
        ARGUMENT,
        "-tp is refused here: set spec.engine.tensorParallelSize instead",
    ),
    "a managed flag further on": (
        with_arguments("--seed", "1", "--host=::"),
        "spec.engine.extraArgs[2]",
        "--host is refused here: leave it out, the engine serves plain HTTP on the port that",
    ),
    "a file that sets anything": (
        with_arguments("--config=/etc/vllm.yaml"),
        ARGUMENT,
        "--config is refused here: leave it out, a file can set any flag: write its flags here",
    ),
    "another scheduler": (
        with_arguments("--scheduler-cls=mine"),
        ARGUMENT,
        "leave it out, the live table and its metrics need the plugin's scheduler",
    ),
    "no metrics": (
        with_arguments("--disable-log-stats"),
        ARGUMENT,
        "leave it out, the operator measures by the engine's metrics",
    ),
    "other capture sizes": (
        with_arguments("--cudagraph-capture-sizes", "1", "2"),
        ARGUMENT,
        "leave it out, what is captured follows spec.engine.maxNumSeqs and",
    ),
    "another program": (
        with_arguments("--omni"),
        ARGUMENT,
        "leave it out, the operator knows `vllm serve` only",
    ),
    "the Rust front end's port": (
        with_arguments("--grpc-port=9000"),
        ARGUMENT,
        "leave it out, without the Python front end the engine's metrics are not whole",
    ),
    "an engine on many nodes": (
        with_arguments("--nnodes", "2"),
        ARGUMENT,
        "leave it out, an engine runs on one node in v1alpha1",
    ),
    "data parallelism": (
        with_arguments("-dp", "2"),
        ARGUMENT,
        "-dp is refused here: leave it out, an engine runs without data parallelism in v1alpha1: "
        "scale by spec.replicas",
    ),
    "prefill apart from decode": (
        with_arguments("--kv-transfer-config={}"),
        ARGUMENT,
        "leave it out, prefill and decode are not split in v1alpha1",
    ),
    "a bare word at the beginning": (
        with_arguments("serve", "--seed=1"),
        "spec.engine.extraArgs",
        "begin with a flag: the model and the command are the operator's",
    ),
    "a variable of the plugin's": (
        with_variable("VLLM_PLUGINS", value=""),
        VARIABLE,
        "VLLM_PLUGINS is refused here: leave it out, the operator's plugin stands on it",
    ),
    "a variable of the operator's": (
        with_variable("SPECDECODE_ARM", value="/tmp/arm"),
        VARIABLE,
        "SPECDECODE_ARM is refused here: leave it out, the operator's plugin stands on it",
    ),
    "dev mode": (
        with_variable("VLLM_SERVER_DEV_MODE", value="1"),
        VARIABLE,
        "leave it out, its endpoints let anyone stop or reset the engine",
    ),
    "another runner": (
        with_variable("VLLM_USE_V2_MODEL_RUNNER", value="0"),
        VARIABLE,
        "leave it out, the operator goes by the runner that vLLM chooses",
    ),
    "the Rust front end": (
        with_variable("VLLM_USE_RUST_FRONTEND", value="1"),
        VARIABLE,
        "leave it out, without the Python front end the engine's metrics are not whole",
    ),
    "data parallelism by a variable": (
        with_variable("VLLM_DP_SIZE", value="2"),
        VARIABLE,
        "leave it out, an engine runs without data parallelism",
    ),
    "a variable with two sources": (
        with_variable("A", value="1", valueFrom={"fieldRef": {"fieldPath": "metadata.name"}}),
        "spec.engine.env[0]",
        "has both value and valueFrom: keep one of them",
    ),
    "a variable twice": (
        with_engine(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "spec.engine.env[1]",
        "Duplicate value",
    ),
    "no time to start": (
        with_engine(startupTimeout="0m"),
        "spec.engine.startupTimeout",
        "must be longer than 0, for example 30m",
    ),
    "a time without a unit": (
        with_engine(drainTimeout="120"),
        "spec.engine.drainTimeout",
        "should match '^([0-9]{1,6}(ms|s|m|h|d))+$'",
    ),
    "a quantity that is none": (
        with_engine(resources={"limits": {"memory": "lots"}}),
        "spec.engine.resources.limits.memory",
        "should match",
    ),
    "a quantity below zero": (
        with_engine(resources={"limits": {"nvidia.com/gpu": -1}}),
        "spec.engine.resources.limits.nvidia.com/gpu",
        "should be greater than or equal to 0",
    ),
    # speculation
    "an unknown method": (
        speculating(method="medusa"),
        "spec.speculation.method",
        "Unsupported value",
    ),
    "no K": (
        speculating(numSpeculativeTokens=None),
        "spec.speculation.numSpeculativeTokens",
        "Required value",
    ),
    "adaptive verification with piecewise graphs": (
        speculating(**AV, cudagraphMode="PIECEWISE"),
        "spec.speculation.cudagraphMode",
        "adaptive verification needs full CUDA graphs: set cudagraphMode to FULL_AND_PIECEWISE, "
        "FULL_DECODE_ONLY or FULL, or adaptiveVerification to Disabled",
    ),
    "adaptive verification without graphs": (
        speculating(**AV, cudagraphMode="NONE"),
        "spec.speculation.cudagraphMode",
        "adaptive verification needs full CUDA graphs",
    ),
    "adaptive verification with LoRA": (
        {**speculating(**AV), **with_arguments("--enable-lora")},
        "spec.engine.extraArgs",
        "vLLM refuses adaptive verification together with --enable-lora, ",
    ),
    "adaptive verification with pipeline parallelism": (
        {**speculating(**AV), **with_arguments("-pp=2")},
        "spec.engine.extraArgs",
        "leave the flag out of engine.extraArgs, or set speculation.adaptiveVerification to",
    ),
    "graphs in eager mode": (
        {**speculating(), **with_arguments("--enforce-eager")},
        "spec.engine.extraArgs",
        "--enforce-eager records no CUDA graphs: leave it out of engine.extraArgs, or set "
        "speculation.cudagraphMode to NONE",
    ),
    "a table that starts at 2": (
        with_rows((2, 7)),
        TABLE,
        "let the first row have minBatch 1",
    ),
    "rows that fall": (
        with_rows((1, 7), (17, 1), (9, 1)),
        TABLE,
        "minBatch must rise from row to row: sort the rows, and give each start once",
    ),
    "a row twice": (
        with_rows((1, 7), (9, 1), (9, 0)),
        TABLE,
        "minBatch must rise from row to row",
    ),
    "a row off the bucket bounds": (
        with_rows((1, 7), (16, 1)),
        f"{TABLE}[1].minBatch",
        "a row starts at 1 or 2^n + 1, as the engine's metrics are bucketed: 1, 2, 3, 5, 9, 17",
    ),
    "a row above K_max": (
        with_rows((1, 8)),
        TABLE,
        "a row's k is above numSpeculativeTokens: lower k, or raise numSpeculativeTokens",
    ),
    "a row outside the envelope": (
        with_rows((1, 7), (9, 2), envelope=[1, 3]),
        TABLE,
        "a row's k is not in the envelope, which the engine prepares at start-up: add it to "
        "envelope, or choose one of its values, 0 or numSpeculativeTokens",
    ),
    "a row outside the default envelope": (
        with_rows((1, 7), (9, 3)),
        TABLE,
        "without an envelope the engine prepares K = 0, 1, about half of numSpeculativeTokens, "
        "and numSpeculativeTokens: list every k of the table in envelope",
    ),
    "an envelope above K_max": (
        speculating(envelope=[1, 9]),
        "spec.speculation.envelope",
        "a K is above numSpeculativeTokens: take it out, or raise numSpeculativeTokens",
    ),
    "a smallest K above K_max": (
        {**speculating(), "tuning": {"minK": 8}},
        "spec.tuning.minK",
        "tuning.minK is above speculation.numSpeculativeTokens: lower minK",
    ),
    **{
        f"{method} without a draft model": (
            speculating(method=method, draftModel=None),
            "spec.speculation.draftModel",
            f"the method {method} drafts with a model of its own: set draftModel",
        )
        for method in ("eagle", "eagle3", "draft_model", "dflash", "dspark")
    },
}


@pytest.mark.parametrize("situation", REFUSED)
def test_the_api_server_refuses(objects: Resource, situation: str) -> None:
    spec, place, sentence = REFUSED[situation]
    message = objects.refusal(lambda: objects.create(spec))
    assert f"{place}: " in message
    assert sentence in message


NAMES = {
    "too long for labels": "a" * 53,
    "a digit first": "7b-chat",
    "dots": "chat.v2",
}


@pytest.mark.parametrize("situation", NAMES)
def test_the_api_server_refuses_a_name_that_cannot_name_a_service(
    objects: Resource, situation: str
) -> None:
    message = objects.refusal(lambda: objects.create(MINIMAL, name=NAMES[situation]))
    assert "metadata.name names a Service and labels: at most 52 lower case letters" in message


def test_every_rule_has_a_situation_that_it_refuses() -> None:
    said = " ".join(sentence for _, _, sentence in REFUSED.values())
    spoken = {
        "a field of the spec sets this flag: leave it out": "is refused here: set spec.",
        "this method drafts with a model of its own: set draftModel": "a model of its own",
    }
    for path, listed in rules.RULES.items():
        for rule in listed if path else ():
            beginning = spoken.get(rule.message, rule.message[:40])
            assert beginning in said, (path, rule.message)


ACCEPTED: dict[str, Json] = {
    "a model and nothing else": MINIMAL,
    "no replicas": {**MINIMAL, "replicas": 0},
    "more canaries than replicas": {**MINIMAL, "replicas": 1, "rollout": {"canaryReplicas": 5}},
    "each kind of cache": {"model": {"name": "m", "cache": {"hostPath": "/models"}}},
    "an emptyDir": {"model": {"name": "m", "cache": {"emptyDir": True}}},
    "flags of the user's own": with_arguments("--seed", "1", "--model-impl=auto", "--enable-lora"),
    "a value that names a managed flag": with_arguments("--generation-config", "--port 1"),
    "a variable from a Secret": with_variable(
        "AWS_KEY", valueFrom={"secretKeyRef": {"name": "s3", "key": "id"}}
    ),
    "quantities as text and as numbers": with_engine(
        resources={"limits": {"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": "2"}}
    ),
    "any pod template": with_engine(
        podTemplate={"spec": {"nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu"}]}}
    ),
    "the methods that need no draft model": speculating(method="mtp", draftModel=None),
    "ngram": speculating(method="ngram", draftModel=None),
    "adaptive verification with full graphs": speculating(**AV, cudagraphMode="FULL_DECODE_ONLY"),
    "adaptive verification with the default graphs": speculating(**AV),
    "no graphs in eager mode": {
        **speculating(cudagraphMode="NONE"),
        **with_arguments("--enforce-eager"),
    },
    "eager mode without speculation": with_arguments("--enforce-eager"),
    "piecewise graphs alone": speculating(cudagraphMode="PIECEWISE"),
    "a table of the envelope": with_rows((1, 7), (17, 3), (65, 0), envelope=[0, 1, 3, 7]),
    "0 and K_max, which no envelope needs to name": with_rows((1, 7), (5, 0), envelope=[3]),
    "a table of the default envelope": with_rows((1, 7), (2, 4), (3, 1), (5, 0)),
    "a table that rises": with_rows((1, 0), (32769, 7)),
    "the largest table": with_rows(*((start, 1) for start in rules.ROW_STARTS)),
    "an empty table and an empty envelope": speculating(kTable=[], envelope=[]),
    "the largest lists": with_arguments(*["--seed=" + "1" * 4089] * 128),
}


@pytest.mark.parametrize("situation", ACCEPTED)
def test_the_api_server_takes(objects: Resource, situation: str) -> None:
    made = objects.create(ACCEPTED[situation])
    # What the server makes of it is what the models make of it: defaults are the same.
    assert parse.parse_spec(made) == parse.parse_spec({"spec": ACCEPTED[situation]})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_api_server_takes_the_example(objects: Resource, path: Path) -> None:
    for manifest in yaml.safe_load_all(path.read_text("utf-8")):
        if manifest["kind"] == metadata.KIND:
            made = objects.create(manifest["spec"], name=manifest["metadata"]["name"])
            assert not refusal.find_refusals(parse.parse_spec(made))


def test_defaults_are_filled_in_where_people_look(objects: Resource) -> None:
    spec = objects.create(speculating())["spec"]
    assert spec["tuning"]["mode"] == "Advise"
    assert spec["rollout"]["liveSoak"] == {"minDuration": "2m", "minSteps": 200}
    assert spec["speculation"]["cudagraphMode"] == "FULL_AND_PIECEWISE"
    assert spec["replicas"] == 1


# --------------------------------------------------------------------------- stored objects


def a_sample(schema: Json, name: str = "") -> Any:
    """Make the value of a schema with every field set."""
    if "properties" in schema:
        return {key: a_sample(child, key) for key, child in schema["properties"].items()}
    if schema.get("type") == "array":
        return [a_sample(schema["items"])] * 2
    if "additionalProperties" in schema:
        return {"a": a_sample(schema["additionalProperties"])}
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("format") == "date-time":
        return "2026-01-02T03:04:05Z"
    samples = {"integer": 3, "number": 1.5, "boolean": True}
    return samples.get(schema["type"], "True" if name == "status" else "text")


@pytest.fixture
def stored(api: kubernetes.client.ApiClient, objects: Resource, namespace: str) -> Resource:
    resource = Resource(api, metadata.GROUP, namespace)
    resource.create(speculating(kTable=[{"minBatch": 1, "k": 7}]), dry_run=False)
    return resource


def test_a_whole_status_is_stored_as_the_operator_writes_it(stored: Resource) -> None:
    schema = crd.build_schema()["properties"]["status"]
    sample = a_sample(schema)
    sample["conditions"] = sample["conditions"][:1]
    written = v1alpha1.Status.model_validate(sample).to_json()
    assert written.keys() == schema["properties"].keys()
    assert stored.patch_status(written)["status"] == written


def test_the_columns_show_what_people_look_for(
    stored: Resource, cluster: LocalCluster, namespace: str
) -> None:
    stored.patch_status(
        {
            "phase": "Idle",
            "active": {
                "table": "7x16,3x64,1",
                "adaptiveVerification": "Disabled",
                "cudagraphMode": "FULL_AND_PIECEWISE",
            },
            "estimate": {"goodputTokensPerSecond": 551.2, "versusSpecOffPercent": "unknown"},
            "ready": "3/4",
        }
    )
    head, row = cluster.kubectl("get", "sdd", "-n", namespace).splitlines()
    assert head.split() == [
        "NAME", "PHASE", "MODE", "TABLE", "AV", "GRAPHS", "TOK/S", "VS-OFF", "READY", "AGE",
    ]  # fmt: skip
    assert row.split()[:9] == [
        "chat", "Idle", "Advise", "7x16,3x64,1", "Disabled", "FULL_AND_PIECEWISE", "551.2",
        "unknown", "3/4",
    ]  # fmt: skip
    wide = cluster.kubectl("get", "sdd", "-n", namespace, "-o", "wide").splitlines()[0]
    assert {"METHOD", "BATCH", "ACCEPTED", "REVISION", "MESSAGE"} <= set(wide.split())


def test_scaling_down_is_never_refused(stored: Resource) -> None:
    stored.patch({"spec": {"replicas": 5, "rollout": {"canaryReplicas": 4}}})
    for replicas in (3, 1, 0, 2):
        assert stored.scale(replicas)["spec"].get("replicas", 0) == replicas


def test_scale_says_what_is_running(stored: Resource) -> None:
    stored.patch_status({"replicas": 3, "selector": "specdecode.io/deployment=chat"})
    status = stored.scale(4)["status"]
    assert status == {"replicas": 3, "selector": "specdecode.io/deployment=chat"}


def test_rows_added_to_a_stored_table_are_checked(stored: Resource) -> None:
    rows = [{"minBatch": 1, "k": 7}, {"minBatch": 6, "k": 1}]
    message = stored.refusal(lambda: stored.patch({"spec": {"speculation": {"kTable": rows}}}))
    assert "a row starts at 1 or 2^n + 1" in message


# ------------------------------------------------------------- objects older than the rules

OLD_GROUP = "old.specdecode.io"
OLD = {
    "managed flags and variables": {
        **with_engine(extraArgs=["--port=1", "-tp"], env=[{"name": "VLLM_PLUGINS", "value": ""}])
    },
    "graphs that adaptive verification cannot have": speculating(**AV, cudagraphMode="NONE"),
    "adaptive verification with LoRA": {**speculating(**AV), **with_arguments("--enable-lora")},
    "graphs in eager mode": {**speculating(), **with_arguments("--enforce-eager")},
    "a smallest K above K_max": {**speculating(), "tuning": {"minK": 60}},
    "an unsound table": with_rows((4, 60), (2, 9), envelope=[40]),
    "no draft model": speculating(draftModel=None),
    "two kinds of cache": {"model": {"name": "-m", "cache": {}}},
}


@pytest.fixture(scope="module")
def older(
    cluster: LocalCluster, api: kubernetes.client.ApiClient, objects: Resource
) -> Iterator[Resource]:
    """Objects that were stored before there were rules, under a group of their own."""
    manifest = crd.build_crd()
    manifest["metadata"]["name"] = f"{metadata.PLURAL}.{OLD_GROUP}"
    manifest["spec"]["group"] = OLD_GROUP
    manifest["spec"]["names"]["shortNames"] = ["old"]
    bare = json.loads(json.dumps(manifest), object_hook=without_rules)
    install(cluster, json.dumps(bare))
    resource = Resource(api, OLD_GROUP, "default")

    def is_served() -> bool:
        try:
            resource.create(MINIMAL)
        except kubernetes.client.ApiException:
            return False
        return True

    wait_for(is_served, what="the older resource to be served")
    for number, spec in enumerate(OLD.values()):
        resource.create(spec, name=f"{number}-old.chat", dry_run=False)
    install(cluster, json.dumps(manifest))

    def has_rules() -> bool:
        try:
            resource.create(with_arguments("--port=1"))
        except kubernetes.client.ApiException:
            return True
        return False

    wait_for(has_rules, what="the rules to be in force")
    yield resource
    cluster.kubectl("delete", "crd", f"{metadata.PLURAL}.{OLD_GROUP}")


def without_rules(node: Json) -> Json:
    node.pop("x-kubernetes-validations", None)
    return node


@pytest.mark.parametrize("situation", OLD)
def test_an_object_older_than_the_rules_can_still_be_served(
    older: Resource, situation: str
) -> None:
    name = f"{list(OLD).index(situation)}-old.chat"
    assert older.scale(3, name=name)["spec"]["replicas"] == 3
    assert "replicas" not in older.scale(0, name=name)["spec"]
    older.patch_status({"phase": "Idle"}, name=name)
    older.patch({"spec": {"rollout": {"paused": True}}}, name=name)
    older.patch({"metadata": {"labels": {"team": "search"}}}, name=name)


def test_an_object_older_than_the_rules_cannot_become_worse(older: Resource) -> None:
    name = f"{list(OLD).index('a smallest K above K_max')}-old.chat"
    message = older.refusal(
        lambda: older.patch(
            {"spec": {"engine": {"extraArgs": ["--enable-lora"]}, "speculation": AV}}, name=name
        )
    )
    assert re.search("vLLM refuses adaptive verification together with", message)
