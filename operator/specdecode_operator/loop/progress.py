"""Whether the loop still moves: everything that must come round says so, and is missed if not.

A liveness probe that only asks whether the process answers keeps a stuck operator alive.
"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """The latest sign of life of each part; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limits: dict[str, float] = {}
        self._beats: dict[str, float] = {}

    def expect(self, part: str, *, every_seconds: float) -> None:
        """Miss this part if it does not beat at least so often from now on."""
        self._beats[part] = self._clock()
        self._limits[part] = every_seconds

    def beat(self, part: str) -> None:
        """Say that this part has come round."""
        self._beats[part] = self._clock()

    def stalled(self) -> tuple[str, ...]:
        """Say which parts stand still, and for how long; empty when all move."""
        now = self._clock()
        return tuple(
            f"{part} has not moved for {now - self._beats[part]:.0f} s"
            for part, limit in sorted(self._limits.items())
            if now - self._beats[part] > limit
        )

    def oldest_beat_seconds(self) -> float:
        """Age of the oldest latest sign of life."""
        now = self._clock()
        return max((now - beat for beat in list(self._beats.values())), default=0.0)
