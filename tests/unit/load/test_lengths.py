"""Lengths of prompts and answers: what is drawn is what was asked for."""

import random
import statistics

import pytest

from specdecode_load.lengths import LONGEST_TOKENS, Lengths


def draws(text: str, count: int = 5000) -> list[int]:
    chance = random.Random(1)
    return [Lengths.parse(text).draw(chance) for _ in range(count)]


def test_a_number_is_always_that_length() -> None:
    assert set(draws("32")) == {32}


def test_uniform_reaches_both_ends_and_nothing_beyond() -> None:
    assert set(draws("uniform:3:6")) == {3, 4, 5, 6}


def test_lognormal_has_the_mean_that_was_asked_for_and_a_long_tail() -> None:
    lengths = draws("lognormal:200:0.8")
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.05)
    assert statistics.median(lengths) < 160
    assert max(lengths) > 1000


def test_no_draw_is_below_one_or_beyond_the_longest() -> None:
    assert min(draws("lognormal:1:2")) == 1
    assert max(draws(f"lognormal:{LONGEST_TOKENS}:3")) == LONGEST_TOKENS


@pytest.mark.parametrize("text", ["32", "uniform:16:64", "lognormal:200:0.8"])
def test_the_written_form_survives_reading_and_writing(text: str) -> None:
    assert str(Lengths.parse(text)) == text


REFUSED = {
    "empty": ("", "give a number"),
    "unknown distribution": ("normal:3:4", "give a number"),
    "a number missing": ("uniform:3", "give a number"),
    "a number too many": ("uniform:3:4:5", "give a number"),
    "a lone number after a colon": ("fixed:3:4", "give a number"),
    "not a number": ("many", "give a number"),
    "nothing": ("0", "from 1"),
    "negative": ("-5", "from 1"),
    "not a finite number": ("nan", "from 1"),
    "infinite": ("lognormal:inf:1", "from 1"),
    "half a token": ("1.5", "whole"),
    "ends swapped": ("uniform:9:3", "low end"),
    "sigma out of range": ("lognormal:200:9", "sigma"),
    "sigma not a number": ("lognormal:200:nan", "sigma"),
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_length_is_refused_with_what_to_write(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Lengths.parse(text)
