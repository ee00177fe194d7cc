"""Stages as they are written on the command line, and what is said of wrong ones."""

import pytest

from specdecode_load.schedule import Stage, parse_duration, parse_schedule


def test_stages_are_read_in_their_order() -> None:
    assert parse_schedule("1:60s, 8:1.5m,32:500ms") == (
        Stage(1, 60.0),
        Stage(8, 90.0),
        Stage(32, 0.5),
    )


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("2h", 7200), ("0s", 0), ("0.5", 0.5)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


REFUSED = {
    "empty": ("", "no stage"),
    "no duration": ("8", "no stage"),
    "an empty stage": ("8:60s,", "no stage"),
    "streams not a number": ("x:60s", "no stage"),
    "digits that are not ASCII": ("८:60s", "no stage"),
    "no stream": ("0:60s", "streams"),
    "too many streams": ("100000:60s", "streams"),
    "a duration in words": ("8:long", "no duration"),
    "a negative duration": ("8:-5s", "no duration"),
    "no time at all": ("8:0s", "longer than nothing"),
    "more than a day": ("8:25h", "longer than 24 hours"),
    "too many stages": (",".join(["1:1s"] * 101), "at most 100"),
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_schedule_is_refused_with_what_to_write(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_schedule(text)
