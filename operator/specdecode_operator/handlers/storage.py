"""Kopf's storages that store nothing, so that no annotation of its own is written.

Right only without change handlers, which need what was stored. They also spare the deep copy
that Kopf makes of each body to compare it.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoProgress(kopf.ProgressStorage):
    """Remembers no handler's progress: there are no handlers that make any."""

    def fetch(self, **_: Any) -> None:
        """Know nothing."""

    def store(self, **_: Any) -> None:
        """Keep nothing."""

    def purge(self, **_: Any) -> None:
        """Remove nothing."""

    def touch(self, **_: Any) -> None:
        """Change nothing."""

    def clear(self, *, essence: Any) -> Any:
        """Leave the essence as it is."""
        return essence


class NoDiffBase(kopf.DiffBaseStorage):
    """Finds every body the same: changes are judged by our own records."""

    def build(self, **_: Any) -> Any:
        """See nothing in a body."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Know nothing."""

    def store(self, **_: Any) -> None:
        """Keep nothing."""
