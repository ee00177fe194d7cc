"""What each vLLM version has, and where it comes from: upstream, ours or absent.

Made by `make features` from vllm-image/features.yaml; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VERSIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "0.32.0": {
        "dynamicK": "upstream",
        "adaptiveVerification": "upstream",
        "uniformBatchGraphs": "absent",
        "truncatedDrafts": "upstream",
    },
    "0.33.0": {
        "dynamicK": "upstream",
        "adaptiveVerification": "upstream",
        "uniformBatchGraphs": "absent",
        "truncatedDrafts": "upstream",
    },
}
