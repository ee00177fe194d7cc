"""Runs `specdecode acceptance`: from positions to what each draft token brings."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.cli.csv_file import CsvRow, read_rows
from specdecode_operator.errors import PermanentError
from specdecode_operator.estimate.acceptance import Survival, estimate_survival
from specdecode_operator.estimate.counters import NoEstimate

_POSITION: Final = "a whole number from 1 on"
_SHARE: Final = "a share from 0 to 1"
_COUNT: Final = "a count of at least 0"
_MAX_POSITION: Final = 1024
_GROUP_COLUMNS: Final = ("source", "model", "k_max")


class AcceptanceError(PermanentError):
    """The command cannot do what it was asked; the message says what to change."""


@dataclass(frozen=True)
class Depth:
    """What drafting k tokens brings; the interval of the gain where counts were given."""

    k: int
    mean_acceptance_length: float
    tokens_per_computed_position: float
    marginal_gain: float
    interval: tuple[float, float] | None


def run(options: argparse.Namespace) -> int:
    """Print the table of every model in the file; return the exit status."""
    groups = load(options.file)
    if options.json:
        print(json.dumps([_as_json(name, depths) for name, depths in groups.items()]))
        return 0
    for number, (name, depths) in enumerate(groups.items()):
        print(("\n" if number else "") + _as_text(name, depths))
    return 0


def load(path: Path) -> dict[str, list[Depth]]:
    """Read what each depth brings, by model; raise with file, line and column what is wrong."""
    rows = read_rows(path, required=("position",))
    counted = {"at_risk", "accepted"} <= set(rows[0].columns)
    if not counted and "cumulative_acceptance" not in rows[0].columns:
        raise AcceptanceError(
            f"{path}:1: column {len(rows[0].columns)}: expected cumulative_acceptance, or at_risk "
            "and accepted, in the header"
        )
    groups: dict[str, list[CsvRow]] = defaultdict(list)
    for row in rows:
        groups[_group_name(row)].append(row)
    read = _from_counts if counted else _from_shares
    return {name: read(_in_order(group)) for name, group in groups.items()}


def _group_name(row: CsvRow) -> str:
    texts = (row.text(column) for column in _GROUP_COLUMNS[:2])
    k_max = row.text("k_max")
    return ", ".join([t for t in texts if t] + ([f"K={k_max}"] if k_max else []))


def _in_order(rows: Sequence[CsvRow]) -> list[CsvRow]:
    """Sort by position; every position from 1 must be there once."""
    ordered = sorted(
        rows, key=lambda row: row.whole("position", _POSITION, least=1, most=_MAX_POSITION)
    )
    for wanted, row in enumerate(ordered, start=1):
        if int(float(row.text("position"))) != wanted:
            raise row.error("position", f"each position once and none left out: {wanted} next")
    return ordered


def _from_shares(rows: Sequence[CsvRow]) -> list[Depth]:
    shares: list[float] = []
    for row in rows:
        most = shares[-1] if shares else 1.0
        share = row.number("cumulative_acceptance", _SHARE, least=0, most=1)
        if share > most:
            raise row.error(
                "cumulative_acceptance", f"at most {most:g}, the share of the position before"
            )
        shares.append(share)
    return _depths(shares, {})


def _from_counts(rows: Sequence[CsvRow]) -> list[Depth]:
    at_risk, accepted = {}, {}
    for position, row in enumerate(rows):
        at_risk[position] = row.number("at_risk", _COUNT, least=0, most=1e15)
        accepted[position] = row.number("accepted", _COUNT, least=0, most=1e15)
        if accepted[position] > at_risk[position]:
            raise row.error("accepted", f"at most the {at_risk[position]:g} at risk")
    found = estimate_survival(at_risk, accepted)
    if isinstance(found, NoEstimate):
        raise rows[0].error("at_risk", f"more drafts: {found.message}")
    return _depths([p.survival for p in found.positions], _intervals(found))


def _intervals(survival: Survival) -> dict[int, tuple[float, float]]:
    return {k: (p.lower, p.upper) for k, p in enumerate(survival.positions, start=1)}


def _depths(shares: Sequence[float], intervals: Mapping[int, tuple[float, float]]) -> list[Depth]:
    depths, length = [], 1.0
    for k, share in enumerate(shares, start=1):
        length += share
        depths.append(Depth(k, length, length / (k + 1), share, intervals.get(k)))
    return depths


def _as_json(name: str, depths: Sequence[Depth]) -> dict[str, object]:
    return {
        "name": name,
        "rows": [
            {
                "k": d.k,
                "mean_acceptance_length": round(d.mean_acceptance_length, 4),
                "tokens_per_computed_position": round(d.tokens_per_computed_position, 4),
                "marginal_gain": round(d.marginal_gain, 4),
                **({"interval": [round(x, 4) for x in d.interval]} if d.interval else {}),
            }
            for d in depths
        ],
    }


def _as_text(name: str, depths: Sequence[Depth]) -> str:
    lines = [name] if name else []
    lines.append("  k  mean acceptance length  tokens per computed position  marginal gain")
    for d in depths:
        interval = f"  [{d.interval[0]:.3f}, {d.interval[1]:.3f}]" if d.interval else ""
        lines.append(
            f"{d.k:>3}  {d.mean_acceptance_length:>22.2f}  {d.tokens_per_computed_position:>28.2f}"
            f"  {d.marginal_gain:>13.3f}{interval}"
        )
    return "\n".join(lines)
