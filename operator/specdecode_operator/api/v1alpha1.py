"""The custom resource `SpecDecodeDeployment`, v1alpha1: what users write and what they read.

A field is here only when it acts. Bounds, enums and defaults become the structural schema
(`crd.py`), so the API server refuses what these models refuse.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic.alias_generators import to_camel

MAX_BATCH: Final = 65_536
MAX_SPECULATIVE_TOKENS: Final = 64

_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

Duration = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9]{1,6}(ms|s|m|h|d))+$", max_length=32),
]
ShortString = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
]


def parse_duration(text: str) -> timedelta:
    """Turn `1h30m` into a timedelta; the units are ms, s, m, h and d.

    Raises ValueError for anything else.
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(n + u for n, u in parts) != text:
        raise ValueError(f"{text!r} is no duration: write it like 90s, 10m or 1h30m")
    return timedelta(seconds=sum(int(n) * _UNIT_SECONDS[u] for n, u in parts))


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
    host_path: ShortString | None = Field(None, description="A folder on every node.")
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


class EnvVar(ApiModel):
    """An environment variable of the engine; a value or a reference as in a Pod."""

    name: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256)]
    value: Annotated[str, StringConstraints(max_length=4096)] | None = None
    value_from: dict[str, Any] | None = None


class Resources(ApiModel):
    """Compute resources of the engine container, as in a Pod."""

    requests: dict[str, str | int] = Field(default_factory=dict)
    limits: dict[str, str | int] = Field(default_factory=dict)


class Engine(ApiModel):
    """The vLLM engine: image, arguments, pod."""

    image: ShortString | None = Field(
        None, description="Engine image; build it from vllm-image/. Without one nothing starts."
    )
    version: (
        Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+.*$", max_length=64)]
        | None
    ) = Field(None, description="vLLM's version, where the image's tag does not tell it.")
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

    min_duration: Duration = "2m"
    min_steps: int = Field(200, ge=1, le=100_000_000)


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
    live_soak: LiveSoak = Field(default_factory=LiveSoak)
    paused: bool = Field(False, description="Hold every change but the answer to a fault.")


class OnIllegalMemoryAccess(StrEnum):
    """The answer to a CUDA illegal memory access."""

    SPEC_OFF = "SpecOff"
    REPORT = "Report"


class Faults(ApiModel):
    """How faults are answered."""

    on_illegal_memory_access: OnIllegalMemoryAccess = Field(
        OnIllegalMemoryAccess.SPEC_OFF,
        description="SpecOff: stop speculation at once and roll to speculation off.",
    )


class Spec(ApiModel):
    """The wanted state."""

    model: Model
    replicas: int = Field(1, ge=0, le=10_000, description="Engine pods.")
    engine: Engine = Field(default_factory=Engine)
    speculation: Speculation | None = Field(
        None, description="Speculative decoding; served without it where absent."
    )
    tuning: Tuning = Field(default_factory=Tuning)
    rollout: Rollout = Field(default_factory=Rollout)
    faults: Faults = Field(default_factory=Faults)


class RevisionInputs(ApiModel):
    """What a revision of the engine is made from: user inputs and restart levers, whole.

    kTable is not among them: it changes without a restart.
    """

    model: Model
    engine: Engine
    speculation: Speculation | None

    @field_validator("speculation")
    @classmethod
    def _without_table(cls, value: Speculation | None) -> Speculation | None:
        return value.model_copy(update={"k_table": []}) if value else None


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

    type: Annotated[str, StringConstraints(max_length=64)]
    status: Annotated[str, StringConstraints(pattern=r"^(True|False|Unknown)$", max_length=8)]
    reason: Annotated[str, StringConstraints(max_length=64)]
    message: Annotated[str, StringConstraints(max_length=1024)] = ""
    observed_generation: int = 0
    last_transition_time: datetime


Rows = list[list[int]]


class ActiveStatus(ApiModel):
    """What the operator wants now."""

    revision: str = ""
    table: str = Field("", description="The K-table in short: `7x16,3x64,1`.")
    k_table: Rows = Field(default_factory=list, description="[first batch, last batch, K].")
    num_speculative_tokens: int | None = None
    adaptive_verification: str = ""
    cudagraph_mode: str = ""
    speculation: str = Field("", description="On or Off.")


class EffectiveStatus(ApiModel):
    """What the engines say they run."""

    table_generation: int | None = None
    pods_at_table: int = 0
    pods_live: int = 0
    cudagraph_mode: str = ""
    engine_version: str = ""
    method: str = ""


class EstimateStatus(ApiModel):
    """What was measured last."""

    batch: int | None = Field(None, description="Batch bucket with most of the time now.")
    mean_acceptance_length: float | None = None
    acceptance: list[float] = Field(
        default_factory=list, description="Share of drafts accepted up to each position."
    )
    goodput_tokens_per_second: float | None = None
    tokens_per_second_per_user: float | None = None
    versus_spec_off_percent: str = Field(
        "unknown", description="Gain over speculation off; `unknown` where it was not measured."
    )
    measured_at: datetime | None = None


class CellStatus(ApiModel):
    """Goodput of one K at one batch bucket, as the tuner measured it."""

    batch: int
    k: int
    tokens_per_second: float
    mean_batch: float
    steps: int
    step_seconds: float | None = Field(None, description="Mean wall time of a step.")
    acceptance: float | None = Field(
        None, description="Acceptance at the first position when it was measured."
    )
    measured_at: datetime


class ExperimentStatus(ApiModel):
    """The live change that is being tried."""

    id: str
    lever: str
    batch: int
    from_k: int
    to_k: int
    from_rows: Rows
    to_rows: Rows
    baseline_tokens_per_second: float
    baseline_mean_batch: float
    started_at: datetime
    judged_from: datetime | None = Field(
        None, description="When every engine reported the table; the block is counted from here."
    )


class RecommendationStatus(ApiModel):
    """What the tuner would do in mode Auto."""

    table: str
    k_table: Rows
    expected_gain_percent: float
    why: str
    at: datetime


class TuningStatus(ApiModel):
    """The tuner's memory: with it a restarted operator goes on."""

    spec_table: str = Field("", description="The kTable from which tuning started, in short.")
    rows: Rows = Field(default_factory=list)
    cells: list[CellStatus] = Field(default_factory=list)
    last_change_at: datetime | None = None
    recommendation: RecommendationStatus | None = None


class RolloutStatus(ApiModel):
    """The restart change that is under way."""

    change: str
    from_revision: str
    to_revision: str
    started_at: datetime


class FaultRecord(ApiModel):
    """One terminated engine and what was made of it."""

    pod: str
    pod_uid: str
    container: str
    restart_count: int
    revision: str
    node: str = ""
    fault_class: str = Field(alias="class", default="")
    action: str
    line: str = Field("", description="First fatal line, redacted.")
    exit_code: int | None = None
    uptime_seconds: float | None = None
    at: datetime


class HandledTermination(ApiModel):
    """A termination that was answered already; kept while its pod is there."""

    pod_uid: str
    container: str
    restart_count: int


class FaultsStatus(ApiModel):
    """Faults of this object."""

    counts: dict[str, int] = Field(default_factory=dict)
    last: FaultRecord | None = None
    handled: list[HandledTermination] = Field(default_factory=list)


class Fingerprint(ApiModel):
    """A configuration as quarantine knows it."""

    image: str
    engine_version: str = ""
    method: str
    draft_model: str = ""
    cudagraph_mode: str
    adaptive_verification: str
    num_speculative_tokens: int


class QuarantineEntry(ApiModel):
    """A configuration that crashed and is not started again by itself."""

    fingerprint: Fingerprint
    revision: str
    at: datetime
    evidence: FaultRecord


class FallStatus(ApiModel):
    """The fall to speculation off: its times."""

    detected_at: datetime
    kill_switch_at: datetime | None = None
    spec_off_at: datetime | None = None
    recovered_at: datetime | None = None
    from_revision: str
    user_levers: str = Field(
        "", description="Digest of the user's levers at the fall; an edit of them ends it."
    )


class Status(ApiModel):
    """The observed state."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: int = 0
    phase: Phase = Phase.PENDING
    conditions: list[Condition] = Field(default_factory=list)
    replicas: int = 0
    ready_replicas: int = 0
    ready: str = Field("", description="Ready and wanted pods: `3/4`.")
    selector: str = ""
    mode: str = ""
    active: ActiveStatus = Field(default_factory=ActiveStatus)
    effective: EffectiveStatus = Field(default_factory=EffectiveStatus)
    estimate: EstimateStatus = Field(default_factory=EstimateStatus)
    experiment: ExperimentStatus | None = None
    rollout: RolloutStatus | None = None
    tuning: TuningStatus = Field(default_factory=TuningStatus)
    quarantine: list[QuarantineEntry] = Field(default_factory=list)
    fall: FallStatus | None = None
    faults: FaultsStatus = Field(default_factory=FaultsStatus)
