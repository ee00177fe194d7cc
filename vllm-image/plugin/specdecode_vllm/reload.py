"""The daemon thread that keeps the live table up to its files.

It reads the content each time: a mounted ConfigMap is a symlink swap, which file times and
watchers miss. A poll of two small files costs the engine's process next to nothing.
"""

import os
import threading
from collections.abc import Callable, Mapping

from specdecode_vllm import live

POLL_SECONDS = 0.2
LEAST_POLL_SECONDS = 0.01
VARIABLE = "SPECDECODE_POLL_SECONDS"

OnChange = Callable[[live.InForce, live.InForce], None]
OnRefusal = Callable[[live.Refused], None]
OnError = Callable[[str, Exception], None]


def read_poll_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds between two polls; what is senseless is as if nothing were asked for."""
    try:
        asked = float(environment.get(VARIABLE) or POLL_SECONDS)
    except ValueError:
        return POLL_SECONDS
    return max(LEAST_POLL_SECONDS, asked) if asked < float("inf") else POLL_SECONDS


class Reloader(threading.Thread):
    """Polls for ever; what the callbacks raise is reported and never ends the thread."""

    def __init__(
        self,
        table: live.LiveTable,
        *,
        on_change: OnChange,
        on_refusal: OnRefusal,
        on_error: OnError,
        poll_seconds: float | None = None,
    ) -> None:
        super().__init__(name="specdecode-reload", daemon=True)
        self._table = table
        self._on_change = on_change
        self._on_refusal = on_refusal
        self._on_error = on_error
        self._poll_seconds = read_poll_seconds() if poll_seconds is None else poll_seconds
        self._stopped = threading.Event()

    def run(self) -> None:
        """Poll until stopped."""
        while not self._stopped.wait(self._poll_seconds):
            self.poll()

    def stop(self) -> None:
        """Let the thread end at its next poll."""
        self._stopped.set()

    def poll(self) -> None:
        """Read once and tell what changed; also called before the thread starts."""
        try:
            before = self._table.in_force
            refusal = self._table.poll()
            if self._table.in_force != before:
                self._on_change(before, self._table.in_force)
            if refusal is not None:
                self._on_refusal(refusal)
        except Exception as error:
            self._on_error("reload", error)
