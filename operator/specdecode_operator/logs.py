"""How the operator's own log reads: one line a fact, in text or JSON, no line many times over."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

_REPEAT_SECONDS = 60.0


def configure(*, log_format: str, level: str) -> None:
    """Send the log of the whole process to stderr; libraries speak from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else _text_formatter())
    handler.addFilter(Rarely(time.monotonic))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # our clients say it themselves
    logging.getLogger("specdecode_operator").setLevel(level)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the trace of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class Rarely(logging.Filter):
    """Lets a line of a library pass once a minute.

    Kopf tries a watch twice a second while the API server is away, and says so each time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Judge a record; our own lines always pass."""
        if record.name.startswith("specdecode_operator"):
            return True
        place = (record.pathname, record.lineno)
        now = self._clock()
        if now - self._passed.get(place, float("-inf")) < _REPEAT_SECONDS:
            return False
        self._passed[place] = now
        return True


def _text_formatter() -> logging.Formatter:
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    return formatter
