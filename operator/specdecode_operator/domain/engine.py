"""What each engine can do, and what may not be given to it: tables by vLLM version and method.

What the engine refuses or silently drops, the operator refuses loudly first. Facts are from the
sources of vllm 0.33.0 and from runs of 0.32.0 on a CPU; see docs/design.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.v1alpha1 import Engine, LiveTable, Method, RevisionInputs

_VERSION_IN_TAG = re.compile(r"(\d+\.\d+\.\d+)")
_MINOR = re.compile(r"(\d+)\.(\d+)\.")

# Methods that draft with a model of their own.
METHODS_WITH_DRAFT_MODEL: Final = frozenset(
    {Method.EAGLE, Method.EAGLE3, Method.DRAFT_MODEL, Method.DFLASH, Method.DSPARK}
)

KNOWN_MINORS: Final = frozenset({(0, 32), (0, 33)})

# The V2 runner has no proposer for it, and V1's wants a fixed K: 0.33 drops the table, 0.32 keeps
# it and dies of an assert.
METHODS_ON_V1_ONLY: Final = frozenset({Method.SUFFIX})
# Adaptive verification weighs the drafter's logits, which these do not have; and it needs V2.
METHODS_WITHOUT_ADAPTIVE_VERIFICATION: Final = METHODS_ON_V1_ONLY | {Method.NGRAM}

_NOTES: Final[Mapping[Method, str]] = {
    Method.DRAFT_MODEL: "on the V2 runner drafts always run to numSpeculativeTokens: a smaller K "
    "saves verification only",
    Method.MTP: "numSpeculativeTokens must be a multiple of the model's n_predict",
    Method.DFLASH: "drafting costs the same at every K above 0",
    Method.DSPARK: "numSpeculativeTokens below the checkpoint's block size gives invalid output",
    Method.SUFFIX: "runs on the V1 runner, which follows no table",
}


@dataclass(frozen=True)
class Capabilities:
    """What one vLLM version can do with one method; nothing where the version is not known."""

    known: bool
    live_table: bool
    adaptive_verification: bool
    runner_v2_default: bool
    notes: tuple[str, ...] = ()


def capabilities(version: str | None, method: Method) -> Capabilities:
    """Look up what an engine can do; `version` as `engine_version_of` gives it.

    The runner is the one that vLLM chooses on CUDA; on a CPU it is always V1.
    """
    match = _MINOR.match(version or "")
    if match is None or (int(match[1]), int(match[2])) not in KNOWN_MINORS:
        return Capabilities(
            known=False, live_table=False, adaptive_verification=False, runner_v2_default=False
        )
    return Capabilities(
        known=True,
        live_table=method not in METHODS_ON_V1_ONLY,
        adaptive_verification=method not in METHODS_WITHOUT_ADAPTIVE_VERIFICATION,
        runner_v2_default=method not in METHODS_ON_V1_ONLY,
        notes=(_NOTES[method],) if method in _NOTES else (),
    )


def has_live_table(inputs: RevisionInputs) -> bool:
    """Tell whether the engine is started with a table, so that K can change while it runs."""
    speculation = inputs.speculation
    return (
        speculation is not None
        and inputs.engine.live_table is LiveTable.PREFERRED
        and capabilities(engine_version_of(inputs.engine), speculation.method).live_table
    )


def engine_version_of(engine: Engine) -> str | None:
    """Return vLLM's version: the field, else the one in the image's tag, else None."""
    if engine.version:
        return engine.version
    tag = (engine.image or "").rpartition(":")[2]
    match = _VERSION_IN_TAG.search(tag)
    return match.group(1) if match else None


# ------------------------------------------------------- what extraArgs and env may not hold

_HTTP: Final = "leave it out, the engine serves plain HTTP on the port that the operator gives it"
_ONE_NODE: Final = "leave it out, an engine runs on one node in v1alpha1"
_NO_DATA_PARALLELISM: Final = (
    "leave it out, an engine runs without data parallelism in v1alpha1: scale by spec.replicas"
)
_NOT_SPLIT: Final = "leave it out, prefill and decode are not split in v1alpha1"
_GRAPHS: Final = "set spec.speculation.cudagraphMode instead"
_CAPTURE_SIZES: Final = (
    "leave it out, what is captured follows spec.engine.maxNumSeqs and spec.speculation.envelope"
)
_RUST: Final = "leave it out, without the Python front end the engine's metrics are not whole"

# Flag of `vllm serve` -> what to do instead.
REFUSED_FLAGS: Final[Mapping[str, str]] = {
    "--model": "set spec.model.name instead",
    "--revision": "set spec.model.revision instead",
    "--served-model-name": "set spec.model.servedName instead",
    "--max-model-len": "set spec.model.maxModelLen instead",
    "--hf-token": "set spec.model.tokenSecretRef instead",
    "--max-num-seqs": "set spec.engine.maxNumSeqs instead",
    "--tensor-parallel-size": "set spec.engine.tensorParallelSize instead",
    "--api-key": "set spec.engine.apiKeySecretRef instead",
    "--shutdown-timeout": "set spec.engine.drainTimeout instead",
    "--speculative-config": "set spec.speculation instead",
    "--spec-method": "set spec.speculation.method instead",
    "--spec-model": "set spec.speculation.draftModel instead",
    "--spec-tokens": "set spec.speculation.numSpeculativeTokens instead",
    "--compilation-config": _GRAPHS,
    "--optimization-level": _GRAPHS,
    "--cudagraph-capture-sizes": _CAPTURE_SIZES,
    "--max-cudagraph-capture-size": _CAPTURE_SIZES,
    "--config": "leave it out, a file can set any flag: write its flags here one by one",
    "--scheduler-cls": "leave it out, the live table and its metrics need the plugin's scheduler",
    "--disable-log-stats": "leave it out, the operator measures by the engine's metrics",
    **dict.fromkeys(
        ("--host", "--port", "--uds", "--grpc", "--ssl-keyfile", "--ssl-certfile"), _HTTP
    ),
    "--omni": "leave it out, the operator knows `vllm serve` only",
    "--grpc-port": _RUST,
    **dict.fromkeys(
        ("--headless", "--nnodes", "--node-rank", "--master-addr", "--master-port"), _ONE_NODE
    ),
    **dict.fromkeys(
        (
            "--data-parallel-size",
            "--data-parallel-size-local",
            "--data-parallel-rank",
            "--data-parallel-start-rank",
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-backend",
            "--data-parallel-hybrid-lb",
            "--data-parallel-external-lb",
            "--data-parallel-multi-port-external-lb",
            "--data-parallel-supervisor-port",
        ),
        _NO_DATA_PARALLELISM,
    ),
    **dict.fromkeys(("--kv-transfer-config", "--ec-transfer-config", "--tokens-only"), _NOT_SPLIT),
}

# Flags that vLLM refuses together with adaptive verification, which trims batches on the GPU.
FLAGS_AGAINST_ADAPTIVE_VERIFICATION: Final = frozenset(
    {
        "--enable-lora",
        "--enforce-eager",
        "--enable-return-routed-experts",
        "--pipeline-parallel-size",
        "--return-sampling-mask",
    }
)

# One-dash form -> the flag that it stands for, of the flags above.
SHORT_FLAGS: Final[Mapping[str, str]] = {
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}

_PLUGIN: Final = "leave it out, the operator's plugin stands on it"

# Variable of the engine -> what to do instead.
REFUSED_VARIABLES: Final[Mapping[str, str]] = {
    "PROMETHEUS_MULTIPROC_DIR": _PLUGIN,
    "VLLM_PLUGINS": _PLUGIN,
    "VLLM_SERVER_DEV_MODE": "leave it out, its endpoints let anyone stop or reset the engine",
    "VLLM_USE_V2_MODEL_RUNNER": "leave it out, the operator goes by the runner that vLLM chooses",
    "VLLM_USE_RUST_FRONTEND": _RUST,
    "VLLM_RUST_FRONTEND_PATH": _RUST,
}
REFUSED_VARIABLE_PREFIXES: Final[Mapping[str, str]] = {
    "SPECDECODE_": _PLUGIN,
    "VLLM_DP_": _NO_DATA_PARALLELISM,
}
