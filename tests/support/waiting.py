"""Wait for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(
    look: Callable[[], Value | None], *, what: str, seconds: float, pause_seconds: float = 0.1
) -> Value:
    """Return the first truthy answer of `look`; raise AssertionError when time is over."""
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause_seconds)
    return found
