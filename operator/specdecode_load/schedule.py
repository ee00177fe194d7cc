"""The concurrency schedule: stages of so many streams for so long, written `1:60s,8:60s,32:2m`."""

import re
from dataclasses import dataclass

from specdecode_load.loop import MOST_STREAMS

MOST_STAGES = 100
LONGEST_SECONDS = 24 * 3600.0

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")


@dataclass(frozen=True)
class Stage:
    """A number of streams held for a number of seconds."""

    streams: int
    seconds: float


def parse_schedule(text: str) -> tuple[Stage, ...]:
    """Read `STREAMS:DURATION,…`; raises ValueError with what to write instead."""
    stages = tuple(_parse_stage(part.strip()) for part in text.split(","))
    if len(stages) > MOST_STAGES:
        raise ValueError(f"{len(stages)} stages are too many: at most {MOST_STAGES}")
    return stages


def parse_duration(text: str) -> float:
    """Read `90`, `90s`, `1.5m`, `500ms` or `1h` as seconds; raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no duration: write 90s, 1.5m, 500ms or 1h")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > LONGEST_SECONDS:
        raise ValueError(f"{text!r} is longer than {LONGEST_SECONDS / 3600:.0f} hours")
    return seconds


def _parse_stage(text: str) -> Stage:
    streams, colon, duration = text.partition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,6}", streams):
        raise ValueError(f"{text!r} is no stage: write STREAMS:DURATION, like 8:60s")
    if not 1 <= int(streams) <= MOST_STREAMS:
        raise ValueError(f"{text!r}: from 1 to {MOST_STREAMS} streams are possible")
    seconds = parse_duration(duration)
    if seconds <= 0:
        raise ValueError(f"{text!r}: a stage lasts longer than nothing")
    return Stage(int(streams), seconds)
