"""What users may not write, and what to do instead: flags and variables of the engine.

Data only. The CRD's rules (rules.py) refuse the plain spellings with it, the Python check
(domain/refusal.py) every other spelling that vLLM's parser takes. Names are those of vllm 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from specdecode_operator.api.v1alpha1 import Method

RUST_FRONTEND: Final = (
    "leave it out, without the Python front end the engine's metrics are not whole"
)
DATA_PARALLELISM: Final = (
    "leave it out, an engine runs without data parallelism in v1alpha1: scale by spec.replicas"
)

# Methods that draft with a model of their own.
METHODS_WITH_DRAFT_MODEL: Final = frozenset(
    {Method.EAGLE, Method.EAGLE3, Method.DRAFT_MODEL, Method.DFLASH, Method.DSPARK}
)

# Flag of `vllm serve` -> the field that sets it.
FLAG_FIELDS: Final[Mapping[str, str]] = {
    "--model": "spec.model.name",
    "--revision": "spec.model.revision",
    "--served-model-name": "spec.model.servedName",
    "--max-model-len": "spec.model.maxModelLen",
    "--hf-token": "spec.model.tokenSecretRef",
    "--max-num-seqs": "spec.engine.maxNumSeqs",
    "--tensor-parallel-size": "spec.engine.tensorParallelSize",
    "--api-key": "spec.engine.apiKeySecretRef",
    "--shutdown-timeout": "spec.engine.drainTimeout",
    "--speculative-config": "spec.speculation",
    "--spec-method": "spec.speculation.method",
    "--spec-model": "spec.speculation.draftModel",
    "--spec-tokens": "spec.speculation.numSpeculativeTokens",
    "--compilation-config": "spec.speculation.cudagraphMode",
    "--optimization-level": "spec.speculation.cudagraphMode",
}

# Flags that no field sets -> why they are left out.
FLAG_REASONS: Final[Mapping[tuple[str, ...], str]] = {
    ("--config",): "leave it out, a file can set any flag: write its flags here one by one",
    ("--host", "--port", "--uds", "--grpc", "--ssl-keyfile", "--ssl-certfile"): "leave it out, "
    "the engine serves plain HTTP on the port that the operator gives it",
    ("--scheduler-cls",): "leave it out, the live table and its metrics need the plugin's "
    "scheduler",
    ("--disable-log-stats",): "leave it out, the operator measures by the engine's metrics",
    ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size"): "leave it out, what is "
    "captured follows spec.engine.maxNumSeqs and spec.speculation.envelope",
    ("--omni",): "leave it out, the operator knows `vllm serve` only",
    ("--grpc-port",): RUST_FRONTEND,
    ("--headless", "--nnodes", "--node-rank", "--master-addr", "--master-port"): "leave it out, "
    "an engine runs on one node in v1alpha1",
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
    ): DATA_PARALLELISM,
    ("--kv-transfer-config", "--ec-transfer-config", "--tokens-only"): "leave it out, prefill "
    "and decode are not split in v1alpha1",
}

# Flag -> what to do instead, whole.
REFUSED_FLAGS: Final[Mapping[str, str]] = {
    **{flag: f"set {field} instead" for flag, field in FLAG_FIELDS.items()},
    **{flag: reason for flags, reason in FLAG_REASONS.items() for flag in flags},
}

# Flags that vLLM refuses together with adaptive verification, which trims batches on the GPU.
FLAGS_AGAINST_ADAPTIVE_VERIFICATION: Final = frozenset(
    {
        "--enable-lora",
        "--enable-return-routed-experts",
        "--pipeline-parallel-size",
        "--return-sampling-mask",
    }
)

# With it vLLM records no CUDA graphs, whatever it was told of their mode.
EAGER: Final = "--enforce-eager"

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

# Variables of the engine -> what to do instead.
VARIABLE_REASONS: Final[Mapping[tuple[str, ...], str]] = {
    ("PROMETHEUS_MULTIPROC_DIR", "VLLM_PLUGINS"): _PLUGIN,
    ("VLLM_SERVER_DEV_MODE",): "leave it out, its endpoints let anyone stop or reset the engine",
    ("VLLM_USE_V2_MODEL_RUNNER",): "leave it out, the operator goes by the runner that vLLM "
    "chooses",
    ("VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH"): RUST_FRONTEND,
}
REFUSED_VARIABLES: Final[Mapping[str, str]] = {
    name: reason for names, reason in VARIABLE_REASONS.items() for name in names
}
REFUSED_VARIABLE_PREFIXES: Final[Mapping[str, str]] = {
    "SPECDECODE_": _PLUGIN,
    "VLLM_DP_": DATA_PARALLELISM,
}
