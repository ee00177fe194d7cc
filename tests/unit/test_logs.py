"""The log: valid JSON, and no line of a library many times over."""

import json
import logging

from specdecode_operator.logs import JsonFormatter, Rarely


def make_record(name: str, message: str = "said", line: int = 1) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "file.py", line, message, (), None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_is_one_json_object() -> None:
    fields = json.loads(JsonFormatter().format(make_record("specdecode_operator.x", 'a "b"\nc')))
    assert fields["level"] == "WARNING"
    assert fields["message"] == 'a "b"\nc'
    assert fields["time"].endswith("+00:00")


def test_a_library_says_the_same_once_a_minute() -> None:
    clock = Clock()
    rarely = Rarely(clock)
    assert rarely.filter(make_record("kopf.watching"))
    assert not rarely.filter(make_record("kopf.watching"))
    assert rarely.filter(make_record("kopf.watching", line=2))
    clock.now = 61
    assert rarely.filter(make_record("kopf.watching"))


def test_our_own_lines_always_pass() -> None:
    rarely = Rarely(Clock())
    assert rarely.filter(make_record("specdecode_operator.loop"))
    assert rarely.filter(make_record("specdecode_operator.loop"))
