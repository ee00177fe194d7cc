"""Durations as users write them, in the resource and in the operator's own configuration."""

from __future__ import annotations

import re
from datetime import timedelta

_PART = re.compile(r"(\d+)(ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> timedelta:
    """Turn `1h30m` into a timedelta; the units are ms, s, m, h and d.

    Raises ValueError for anything else.
    """
    parts = _PART.findall(text)
    if not parts or "".join(n + u for n, u in parts) != text:
        raise ValueError(f"{text!r} is no duration: write it like 90s, 10m or 1h30m")
    return timedelta(seconds=sum(int(n) * _UNIT_SECONDS[u] for n, u in parts))
