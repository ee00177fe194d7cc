"""Which pods run the change in which block of a live experiment.

Blocks come in pairs on the same pods: two halves run opposite arms in the first and swap in the
second, so pods, load and time of day fall out of a pair's difference. Which half starts is drawn
for each pair from the seed that the status holds: a fixed order falls in step with a load that has
a rhythm (ABAB with one of two blocks gave false verdicts only).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def choose_canaries(pods: Sequence[str], *, seed: int, block: int) -> frozenset[str]:
    """Choose the pods that run the change in a block, counted from 0; one pod: all or none."""
    ordered = sorted(pods)
    half = (len(ordered) + 1) // 2
    starts = _draw(seed, block // 2) ^ (block % 2 == 1)
    return frozenset(ordered[:half] if starts else ordered[half:])


def _draw(seed: int, pair: int) -> bool:
    return hashlib.sha256(f"{seed}/{pair}".encode()).digest()[0] % 2 == 1
