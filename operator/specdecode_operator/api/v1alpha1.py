"""The custom resource `SpecDecodeDeployment`, v1alpha1: what users write and what they read.

A field is here only when it acts. Bounds, enums and defaults become the structural schema
(`crd.py`), so the API server refuses what these models refuse.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)
from pydantic.alias_generators import to_camel

MAX_BATCH: Final = 65_536
MAX_SPECULATIVE_TOKENS: Final = 64

Duration = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9]{1,6}(ms|s|m|h|d))+$", max_length=32),
]
ShortString = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
]
FolderPath = Annotated[str, StringConstraints(pattern=r"^/", max_length=1024)]
QuantityNumber = Annotated[int, Field(ge=0)]
QuantityText = Annotated[
    str,
    StringConstraints(
        pattern=r"^[0-9]+([.][0-9]+)?(m|[kMGTPE]|[KMGTPE]i|[eE][0-9]+)?$", max_length=64
    ),
]
Quantities = dict[str, QuantityNumber | QuantityText]


class ApiModel(BaseModel):
    """A frozen piece of the resource, camelCase outside."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid"
    )

    def to_json(self) -> dict[str, Any]:
        """Render as the API server takes it: camelCase, nothing absent."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


# --------------------------------------------------------------------------- spec


class SecretKeyReference(ApiModel):
    """One key of a Secret in the object's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: ShortString = Field(description="Key in the Secret.")


class ModelCache(ApiModel):
    """Where model weights are kept: one of the three; an emptyDir where none is given."""

    claim_name: ObjectName | None = Field(
        None, description="A PersistentVolumeClaim, shared by all revisions."
    )
    host_path: FolderPath | None = Field(
        None, description="A folder on every node, as an absolute path."
    )
    empty_dir: bool | None = Field(
        None, description="Download to the pod's own disk at each start (the default)."
    )


class Model(ApiModel):
    """The target model."""

    name: ShortString = Field(description="Repository name or absolute path of the model.")
    revision: ShortString | None = Field(None, description="Branch, tag or commit.")
    served_name: ShortString | None = Field(
        None, description="Name under which it is served; the model's own name where absent."
    )
    max_model_len: int | None = Field(
        None, ge=1, le=100_000_000, description="Longest context in tokens."
    )
    cache: ModelCache | None = Field(None, description="Where the weights are kept.")
    token_secret_ref: SecretKeyReference | None = Field(
        None, description="Secret key with the hub's token, given to the engine as HF_TOKEN."
    )


class LiveTable(StrEnum):
    """Whether K can be changed while the engine runs."""

    PREFERRED = "Preferred"
    OFF = "Off"


class Plugin(StrEnum):
    """How the engine comes by the plugin, which follows live tables and measures the steps."""

    IMAGE = "Image"
    INJECT = "Inject"
    NONE = "None"


class EnvVar(ApiModel):
    """An environment variable of the engine; a value or a reference as in a Pod."""

    name: Annotated[
        str, StringConstraints(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256)
    ] = Field(description="Name of the variable.")
    value: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        None, description="Its value."
    )
    value_from: dict[str, Any] | None = Field(
        None, description="Where its value comes from, as in a Pod; instead of value."
    )


class Resources(ApiModel):
    """Compute resources of the engine container, as in a Pod."""

    requests: Quantities = Field(
        default_factory=dict, description="What the scheduler sets aside for the container."
    )
    limits: Quantities = Field(
        default_factory=dict, description="What the container may use at most."
    )


class Engine(ApiModel):
    """The vLLM engine: image, arguments, pod."""

    image: ShortString | None = Field(
        None, description="Engine image; build it from vllm-image/. Without one nothing starts."
    )
    version: (
        Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+.*$", max_length=64)]
        | None
    ) = Field(None, description="vLLM's version, where the image's tag does not tell it.")
    # Absent, not a default: what it then means depends on the image and on the operator.
    plugin: Plugin | None = Field(
        None,
        description="Image: the image carries the plugin. Inject: an init container brings it, "
        "for any vLLM image. None: without the plugin; K follows kTable inside vLLM where its "
        "version can, an edit of kTable restarts the pods, and there is no live control, no kill "
        "switch, no measurement, no tuning and no termination message. Absent: Image where the "
        "image's name begins with specdecode- or the operator has nothing to inject, else Inject.",
    )
    live_table: LiveTable = Field(
        LiveTable.PREFERRED,
        description="Preferred: K follows a live table. Off: static K, no live control and no "
        "kill switch.",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs that share one engine.")
    max_num_seqs: int = Field(256, ge=1, le=MAX_BATCH, description="Largest batch, in requests.")
    extra_args: list[Annotated[str, StringConstraints(max_length=4096)]] = Field(
        default_factory=list,
        max_length=128,
        description="More arguments of `vllm serve`. Arguments that the operator manages are "
        "refused in every spelling.",
    )
    env: list[EnvVar] = Field(
        default_factory=list, max_length=128, description="More environment variables."
    )
    api_key_secret_ref: SecretKeyReference | None = Field(
        None, description="Secret key with the API key, given to the engine as VLLM_API_KEY."
    )
    startup_timeout: Duration = Field("30m", description="How long an engine may take to start.")
    drain_timeout: Duration = Field(
        "120s", description="How long a stopping engine may finish its requests."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the engine container. GPUs default to tensorParallelSize.",
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict,
        description="Strategic-merge overlay over the engine's pod template: nodeSelector, "
        "tolerations, runtimeClassName, volumes, imagePullSecrets and the like. The engine's "
        "container is called `engine`.",
    )


class Method(StrEnum):
    """How tokens are drafted, as vLLM names it."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DRAFT_MODEL = "draft_model"
    NGRAM = "ngram"
    DFLASH = "dflash"
    DSPARK = "dspark"
    SUFFIX = "suffix"


class Switch(StrEnum):
    """On or off, as the user writes it."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class CudagraphMode(StrEnum):
    """What CUDA graphs record, as vLLM names it."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class TableRow(ApiModel):
    """From this batch size on, draft k tokens."""

    min_batch: int = Field(
        ge=1, le=MAX_BATCH, description="First batch size of the row: 1 or 2^n + 1."
    )
    k: int = Field(ge=0, le=MAX_SPECULATIVE_TOKENS, description="Draft tokens per request.")


class Speculation(ApiModel):
    """Where speculation starts, and its limits."""

    method: Method = Field(description="How tokens are drafted.")
    draft_model: ShortString | None = Field(
        None, description="The drafter; needed by eagle, eagle3, draft_model, dflash and dspark."
    )
    num_speculative_tokens: int = Field(
        ge=1, le=MAX_SPECULATIVE_TOKENS, description="The largest K (K_max)."
    )
    envelope: list[Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)]] = Field(
        default_factory=list,
        max_length=16,
        description="K values prepared at start-up; only these can be reached live. Empty: 0, 1, "
        "about half of K_max, and K_max. 0 and K_max always belong to it.",
    )
    k_table: list[TableRow] = Field(
        default_factory=list,
        max_length=32,
        description="K by batch size. In mode Auto it is where tuning starts. Empty: K_max.",
    )
    adaptive_verification: Switch = Field(
        Switch.DISABLED, description="Verify only the drafts likely to survive."
    )
    cudagraph_mode: CudagraphMode = Field(
        CudagraphMode.FULL_AND_PIECEWISE, description="What CUDA graphs record."
    )


class TuningMode(StrEnum):
    """How far the operator may go by itself."""

    OFF = "Off"
    ADVISE = "Advise"
    AUTO = "Auto"


class Tuning(ApiModel):
    """What the tuner may do."""

    mode: TuningMode = Field(
        TuningMode.ADVISE,
        description="Off: run kTable. Advise: run kTable and recommend. Auto: tune it live.",
    )
    min_gain_percent: float = Field(
        2, ge=0, le=100, description="A change is kept only when goodput rises by this much."
    )
    min_k: int = Field(
        1,
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
        description="Smallest K that the tuner may choose; 0 must be asked for.",
    )


class Strategy(StrEnum):
    """How a restart finds its GPUs."""

    REPLACE = "Replace"
    SURGE = "Surge"


class LiveSoak(ApiModel):
    """How long a live change is watched before it is kept."""

    min_duration: Duration = Field("2m", description="Shortest time under the change.")
    min_steps: int = Field(
        200, ge=1, le=100_000_000, description="Fewest engine steps under the change."
    )


class Rollout(ApiModel):
    """How changes reach the pods."""

    canary_replicas: int = Field(
        1,
        ge=1,
        le=1000,
        description="Pods that take a change first; cut to replicas - 1 at run time.",
    )
    strategy: Strategy = Field(
        Strategy.REPLACE,
        description="Replace: a pod goes for each that comes, GPUs are scarce. Surge: the new "
        "pod comes first.",
    )
    allow_downtime: bool = Field(
        False, description="Lets a change replace the only pod of an object with one replica."
    )
    cooldown: Duration = Field("10m", description="Rest after each live change of the table.")
    live_soak: LiveSoak = Field(
        default_factory=LiveSoak,
        description="How long a live change of the table is watched before it is kept.",
    )
    paused: bool = Field(False, description="Hold every change but the answer to a fault.")


class OnIllegalMemoryAccess(StrEnum):
    """The answer to a CUDA illegal memory access."""

    SPEC_OFF = "SpecOff"
    REPORT = "Report"


class Faults(ApiModel):
    """How faults are answered."""

    on_illegal_memory_access: OnIllegalMemoryAccess = Field(
        OnIllegalMemoryAccess.SPEC_OFF,
        description="SpecOff: stop speculation at once and roll to speculation off. Report: say so "
        "and leave it running.",
    )


class Spec(ApiModel):
    """The wanted state."""

    model: Model = Field(description="The target model.")
    replicas: int = Field(1, ge=0, le=10_000, description="Engine pods.")
    engine: Engine = Field(
        default_factory=Engine, description="The vLLM engine: image, arguments, pod."
    )
    speculation: Speculation | None = Field(
        None, description="Speculative decoding; served without it where absent."
    )
    tuning: Tuning = Field(default_factory=Tuning, description="What the tuner may do.")
    rollout: Rollout = Field(default_factory=Rollout, description="How changes reach the pods.")
    faults: Faults = Field(default_factory=Faults, description="How faults are answered.")


class RevisionInputs(ApiModel):
    """What a revision of the engine is made from: user inputs and restart levers, whole.

    kTable is among them only where the engine is started with it for good: without the plugin.
    """

    model: Model
    engine: Engine
    speculation: Speculation | None = None

    @field_validator("speculation")
    @classmethod
    def _without_live_table(
        cls, value: Speculation | None, info: ValidationInfo
    ) -> Speculation | None:
        engine = info.data.get("engine")
        if value is None or (engine is not None and engine.plugin is Plugin.NONE):
            return value
        return value.model_copy(update={"k_table": []})


# ------------------------------------------------------------------------- status


class Phase(StrEnum):
    """Where an object stands; edges in decide/rollout.py."""

    PENDING = "Pending"
    IDLE = "Idle"
    EXPERIMENT = "Experiment"
    PROMOTE = "Promote"
    FAULT = "Fault"
    SPEC_OFF = "SpecOff"
    QUARANTINED = "Quarantined"


class Condition(ApiModel):
    """A condition as in every Kubernetes resource."""

    type: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="What the condition is about."
    )
    status: Annotated[str, StringConstraints(pattern=r"^(True|False|Unknown)$", max_length=8)] = (
        Field(description="True, False or Unknown.")
    )
    reason: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="Why, as one word for machines."
    )
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(
        "", description="Why, as a sentence for people."
    )
    observed_generation: int = Field(0, description="Generation of the object that this speaks of.")
    last_transition_time: datetime = Field(description="When status last flipped.")


Rows = list[list[int]]


class ActiveStatus(ApiModel):
    """What the operator wants now."""

    revision: str = Field("", description="Revision that serves, or is being rolled out.")
    table: str = Field("", description="The K-table in short: `7x16,3x64,1`.")
    k_table: Rows = Field(default_factory=list, description="[first batch, last batch, K].")
    table_generation: int | None = Field(
        None, description="Generation of the table file written last; it never falls."
    )
    num_speculative_tokens: int | None = Field(
        None, description="The largest K; absent with speculation off."
    )
    adaptive_verification: str = Field(
        "", description="Enabled or Disabled; empty with speculation off."
    )
    cudagraph_mode: str = Field(
        "", description="What CUDA graphs record; empty with speculation off."
    )
    speculation: str = Field("", description="On or Off.")


class EffectiveStatus(ApiModel):
    """What the engines say they run."""

    table_generation: int | None = Field(
        None, description="Smallest generation of the table that an engine reports."
    )
    pods_at_table: int = Field(0, description="Engines that report the wanted table.")
    pods_live: int = Field(0, description="Engines whose K follows a live table.")
    cudagraph_mode: str = Field("", description="What CUDA graphs record, as the engines say.")
    engine_version: str = Field("", description="vLLM's version, as the engines say.")
    method: str = Field(
        "", description="How tokens are drafted, as the engines say; `none` with speculation off."
    )


class EstimateStatus(ApiModel):
    """What was measured last."""

    batch: int | None = Field(None, description="Batch bucket with most of the time now.")
    mean_acceptance_length: float | None = Field(
        None, description="Tokens per draft and request: 1 + accepted / drafts."
    )
    acceptance: list[float] = Field(
        default_factory=list, description="Share of drafts accepted up to each position."
    )
    goodput_tokens_per_second: float | None = Field(
        None, description="Tokens emitted per second of busy time, per engine."
    )
    tokens_per_second_per_user: float | None = Field(
        None, description="Tokens per second that one request gets."
    )
    versus_spec_off_percent: str = Field(
        "unknown", description="Gain over speculation off; `unknown` where it was not measured."
    )
    measured_at: datetime | None = Field(None, description="When this was measured.")


class CellStatus(ApiModel):
    """Goodput of one K at one batch bucket, as the tuner measured it."""

    batch: int = Field(description="Upper bound of the batch bucket.")
    k: int = Field(description="Draft tokens per request.")
    tokens_per_second: float = Field(description="Goodput of the cell.")
    mean_batch: float = Field(description="Mean batch size within the bucket.")
    steps: int = Field(description="Engine steps that were counted.")
    step_seconds: float | None = Field(None, description="Mean wall time of a step.")
    acceptance: float | None = Field(
        None, description="Acceptance at the first position when it was measured."
    )
    context_tokens: float | None = Field(
        None, description="Mean context of a request, in tokens, when it was measured."
    )
    measured_at: datetime = Field(description="When the cell was measured.")


class ExperimentStatus(ApiModel):
    """The live change that is being tried."""

    id: str = Field(description="Name of the experiment.")
    lever: str = Field(description="What is being changed.")
    batch: int = Field(description="Upper bound of the batch bucket whose K is changed.")
    from_k: int = Field(description="K before the change.")
    to_k: int = Field(description="K that is tried.")
    from_rows: Rows = Field(description="Table before the change: [first batch, last batch, K].")
    to_rows: Rows = Field(description="Table that is tried.")
    baseline_tokens_per_second: float = Field(description="Goodput before the change.")
    baseline_mean_batch: float = Field(description="Mean batch size at which that was measured.")
    started_at: datetime = Field(description="When the table was written.")
    judged_from: datetime | None = Field(
        None, description="When every engine reported the table; the block is counted from here."
    )


class RecommendationStatus(ApiModel):
    """What the tuner would do in mode Auto."""

    table: str = Field(description="The recommended table in short.")
    k_table: Rows = Field(description="The recommended table: [first batch, last batch, K].")
    expected_gain_percent: float = Field(description="Expected gain in goodput.")
    why: str = Field(description="The numbers behind it.")
    at: datetime = Field(description="When it was made.")


class TuningStatus(ApiModel):
    """The tuner's memory: with it a restarted operator goes on."""

    spec_table: str = Field("", description="The kTable from which tuning started, in short.")
    rows: Rows = Field(
        default_factory=list, description="The tuned table: [first batch, last batch, K]."
    )
    cells: list[CellStatus] = Field(default_factory=list, description="Measured cells.")
    last_change_at: datetime | None = Field(None, description="When the table was last changed.")
    recommendation: RecommendationStatus | None = Field(
        None, description="What the tuner would do in mode Auto."
    )


class RolloutStatus(ApiModel):
    """The restart change that is under way."""

    change: str = Field(description="What is being changed.")
    from_revision: str = Field(description="Revision that is leaving.")
    to_revision: str = Field(description="Revision that is coming.")
    started_at: datetime = Field(description="When the change began.")


class FaultRecord(ApiModel):
    """One terminated engine and what was made of it."""

    pod: str = Field(description="Name of the pod.")
    pod_uid: str = Field(description="Uid of the pod.")
    container: str = Field(description="Name of the container.")
    restart_count: int = Field(description="Restarts of the container before this end.")
    revision: str = Field(description="Revision of the pod.")
    node: str = Field("", description="Node of the pod.")
    fault_class: str = Field(alias="class", default="", description="Class of the fault.")
    action: str = Field(description="What was done about it.")
    line: str = Field("", description="First fatal line, redacted.")
    exit_code: int | None = Field(None, description="Exit code of the container.")
    uptime_seconds: float | None = Field(None, description="How long the container ran.")
    at: datetime = Field(description="When the container ended.")


class HandledTermination(ApiModel):
    """A termination that was answered already; kept while its pod is there."""

    pod_uid: str = Field(description="Uid of the pod.")
    container: str = Field(description="Name of the container.")
    restart_count: int = Field(description="Restarts of the container before this end.")


class FaultsStatus(ApiModel):
    """Faults of this object."""

    counts: dict[str, int] = Field(
        default_factory=dict, description="How often each class of fault was seen."
    )
    last: FaultRecord | None = Field(None, description="The latest fault.")
    handled: list[HandledTermination] = Field(
        default_factory=list, description="Terminations that were answered already."
    )


class Fingerprint(ApiModel):
    """A configuration as quarantine knows it."""

    image: str = Field(description="Engine image.")
    engine_version: str = Field("", description="vLLM's version.")
    method: str = Field(description="How tokens are drafted.")
    draft_model: str = Field("", description="The drafter.")
    cudagraph_mode: str = Field(description="What CUDA graphs record.")
    adaptive_verification: str = Field(description="Enabled or Disabled.")
    num_speculative_tokens: int = Field(description="The largest K.")


class QuarantineEntry(ApiModel):
    """A configuration that crashed and is not started again by itself."""

    fingerprint: Fingerprint = Field(description="The configuration.")
    revision: str = Field(description="Revision that crashed.")
    at: datetime = Field(description="When it crashed.")
    evidence: FaultRecord = Field(description="The crash.")


class FallStatus(ApiModel):
    """The fall to speculation off: its times."""

    detected_at: datetime = Field(description="When the pod's status showed the fault.")
    kill_switch_at: datetime | None = Field(
        None, description="When the kill switch was written for every pod."
    )
    spec_off_at: datetime | None = Field(
        None, description="When the first pod with speculation off was created."
    )
    recovered_at: datetime | None = Field(
        None, description="When every wanted pod was ready with speculation off."
    )
    from_revision: str = Field(description="Revision that crashed.")
    user_levers: str = Field(
        "", description="Digest of the user's levers at the fall; an edit of them ends it."
    )


class Status(ApiModel):
    """The observed state."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: int = Field(
        0, description="Generation of the object that this status speaks of."
    )
    phase: Phase = Field(Phase.PENDING, description="Where the object stands.")
    conditions: list[Condition] = Field(
        default_factory=list, description="Conditions, each with its reason."
    )
    replicas: int = Field(0, description="Engine pods of all revisions.")
    ready_replicas: int = Field(0, description="Engine pods that are ready.")
    ready: str = Field("", description="Ready and wanted pods: `3/4`.")
    selector: str = Field(
        "", description="Label selector of the engine pods, for the scale subresource."
    )
    mode: str = Field("", description="Tuning mode in force.")
    active: ActiveStatus = Field(
        default_factory=ActiveStatus, description="What the operator wants now."
    )
    effective: EffectiveStatus = Field(
        default_factory=EffectiveStatus, description="What the engines say they run."
    )
    estimate: EstimateStatus = Field(
        default_factory=EstimateStatus, description="What was measured last."
    )
    experiment: ExperimentStatus | None = Field(
        None, description="The live change that is being tried."
    )
    rollout: RolloutStatus | None = Field(None, description="The restart change that is under way.")
    tuning: TuningStatus = Field(default_factory=TuningStatus, description="The tuner's memory.")
    quarantine: list[QuarantineEntry] = Field(
        default_factory=list,
        description="Configurations that crashed and are not started again by themselves.",
    )
    fall: FallStatus | None = Field(None, description="The fall to speculation off: its times.")
    faults: FaultsStatus = Field(default_factory=FaultsStatus, description="Faults of this object.")

    def to_json(self) -> dict[str, Any]:
        """Render as the API server takes it, without empty texts, lists and maps."""
        pruned: dict[str, Any] = _without_empty(super().to_json())
        return pruned


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    pruned = {name: _without_empty(inner) for name, inner in value.items()}
    return {name: inner for name, inner in pruned.items() if inner not in ("", [], {}, None)}
