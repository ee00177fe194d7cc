"""What the engine is to draft now: the table of the pod's arm, or why it was not taken.

The arm (which file to follow, or the kill switch) and the tables are two mounts that change
apart from each other, so each poll reads both and decides anew. What is refused never disturbs
what is in force. Values only change hands as one frozen InForce, which the engine's thread picks
up between two steps: look-up and arm label can never disagree.
"""

import enum
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specdecode_vllm import table as tables

DEFAULT_TABLES_FOLDER = "/etc/specdecode/tables"
DEFAULT_ARM_FILE = "/etc/specdecode/pod/arm"
MAX_ARM_BYTES = 64

# Reasons of specdecode_table_rejects_total beside table.PARSE_REASONS.
MISSING = "missing"
UNREADABLE = "unreadable"
ARM = "arm"
REJECT_REASONS = (*tables.PARSE_REASONS, MISSING, UNREADABLE, ARM)


class Arm(enum.IntEnum):
    """Which table the pod follows; the numbers are the metric label `arm`."""

    STABLE = 0
    CANARY = 1
    OFF = 2


ARM_BY_TEXT = {"": Arm.STABLE, "stable": Arm.STABLE, "canary": Arm.CANARY, "off": Arm.OFF}


@dataclass(frozen=True)
class Limits:
    """What the engine captured at start-up and a live table must keep to."""

    envelope: frozenset[int]
    max_batch: int
    captured_tokens: int | None


@dataclass(frozen=True)
class InForce:
    """The arm and table in force. `lookup` is K by batch, None where K is not ours to set."""

    arm: Arm = Arm.STABLE
    table: tables.Table | None = None
    lookup: tuple[int, ...] | None = None
    clamped_rows: int = 0
    stale: bool = False

    @property
    def enabled(self) -> bool:
        """Tell whether the engine may draft at all by what is in force."""
        return self.arm is not Arm.OFF and self.table is not None and self.table.enabled


@dataclass(frozen=True)
class Sources:
    """Where arm and tables are mounted."""

    tables_folder: Path
    arm_file: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Sources":
        """Read SPECDECODE_TABLES and SPECDECODE_ARM, or take their defaults."""
        return cls(
            tables_folder=Path(environment.get("SPECDECODE_TABLES") or DEFAULT_TABLES_FOLDER),
            arm_file=Path(environment.get("SPECDECODE_ARM") or DEFAULT_ARM_FILE),
        )


class Refused(Exception):
    """Arm or table as found cannot be followed; `reason` is one of REJECT_REASONS."""

    def __init__(self, reason: str, detail: str, content: bytes = b"") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.identity = (reason, hashlib.sha256(content).digest())


class LiveTable:
    """Follows the mounted files; `limits` None means an engine whose K cannot be set."""

    def __init__(self, sources: Sources, limits: Limits | None) -> None:
        self._sources = sources
        self._limits = limits
        self._last_refusal: tuple[str, bytes] | None = None
        lookup = (0,) * (limits.max_batch + 1) if limits else None
        self.in_force = InForce(lookup=lookup)

    @property
    def is_live(self) -> bool:
        """Tell whether tables set this engine's K."""
        return self._limits is not None

    def poll(self) -> Refused | None:
        """Bring `in_force` up to the files; return a refusal the first time it is seen."""
        try:
            self.in_force = self._read()
        except Refused as refusal:
            self.in_force = replace(self.in_force, stale=True)
            is_new = refusal.identity != self._last_refusal
            self._last_refusal = refusal.identity
            return refusal if is_new else None
        self._last_refusal = None
        return None

    def _read(self) -> InForce:
        arm = self._read_arm()
        if self._limits is None:
            return InForce(arm=Arm.CANARY if arm is Arm.CANARY else Arm.STABLE)
        limits = self._limits
        off = (0,) * (limits.max_batch + 1)
        if arm is Arm.OFF:
            return replace(self.in_force, arm=arm, lookup=off, clamped_rows=0, stale=False)
        name = f"{arm.name.lower()}.json"
        content = _read_file(self._sources.tables_folder / name, limit=tables.MAX_FILE_BYTES)
        if content is None:
            if self.in_force.table is None:
                return InForce(arm=arm, lookup=off)
            raise Refused(MISSING, f"{name} is gone")
        return _take(arm, content, limits)

    def _read_arm(self) -> Arm:
        content = _read_file(self._sources.arm_file, limit=MAX_ARM_BYTES)
        if content is None:
            return self.in_force.arm
        text = content.decode("utf-8", errors="replace").strip()
        if text not in ARM_BY_TEXT:
            raise Refused(ARM, f"arm {text[:32]!r} is not known", content)
        return ARM_BY_TEXT[text]


def _read_file(path: Path, *, limit: int) -> bytes | None:
    """Read at most one byte over `limit`; None when there is no such file."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(UNREADABLE, f"{path.name}: {error.strerror}") from error


def _take(arm: Arm, content: bytes, limits: Limits) -> InForce:
    try:
        table = tables.parse_table(content, envelope=limits.envelope)
    except tables.TableRefusedError as error:
        raise Refused(error.reason, error.detail, content) from error
    rows, clamped = tables.clamp_rows(
        tables.extend_rows(table.rows, max_batch=limits.max_batch),
        envelope=limits.envelope,
        captured_tokens=limits.captured_tokens,
    )
    lookup = tables.build_lookup(rows if table.enabled else (), max_batch=limits.max_batch)
    return InForce(arm=arm, table=table, lookup=tuple(lookup), clamped_rows=clamped)
