"""K at the edges of rows: held within the margin, never beyond what was captured."""

import pytest

from specdecode_vllm import edges

#         batch  1  2  3  4  5  6  7  8
PLAIN = (0, *(7, 7, 7, 7, 3, 3, 3, 3))


def follow(batches: list[int], *, margin: int, captured_tokens: int | None = None) -> list[int]:
    held = edges.Edges(margin=margin, captured_tokens=captured_tokens)
    ks = []
    for batch in batches:
        ks.append(held.choose(PLAIN)[batch])
        held.note(batch)
    return ks


@pytest.mark.parametrize(
    ("situation", "margin", "batches", "ks"),
    [
        ("no margin", 0, [4, 5, 4, 5], [7, 3, 7, 3]),
        ("one request joins and another ends", 1, [4, 5, 4, 5], [7, 7, 7, 7]),
        ("two join", 1, [4, 6, 5, 4], [7, 3, 3, 3]),
        ("two end", 1, [6, 4, 3], [3, 3, 7]),
        ("nothing is held at the first step", 1, [5], [3]),
        ("far away", 1, [1, 8, 1], [7, 3, 7]),
        ("an empty step changes nothing", 1, [4, 0, 5], [7, 0, 7]),
        ("a wide margin", 3, [4, 7, 8], [7, 7, 3]),
    ],
)
def test_k_follows_the_batch(
    situation: str, margin: int, batches: list[int], ks: list[int]
) -> None:
    assert follow(batches, margin=margin) == ks, situation


def test_k_is_not_held_beyond_the_captured_tokens() -> None:
    assert follow([4, 5], margin=1, captured_tokens=40) == [7, 7]
    assert follow([4, 5], margin=1, captured_tokens=39) == [7, 3]


def test_a_new_table_begins_without_anything_held() -> None:
    held = edges.Edges(margin=1, captured_tokens=None)
    held.choose(PLAIN)
    held.note(4)
    assert held.choose(PLAIN)[5] == 7
    assert held.choose((0,) * 9)[5] == 0
    held.note(5)
    again = (*PLAIN,)
    assert held.choose(again)[5] == 3


def test_rows_of_the_same_k_apart_from_each_other_keep_their_own_edges() -> None:
    plain = (0, 7, 7, 3, 3, 7, 7)
    held = edges.Edges(margin=1, captured_tokens=None)
    ks = []
    for batch in (1, 6, 4, 3):
        ks.append(held.choose(plain)[batch])
        held.note(batch)
    assert ks == [7, 7, 7, 3]


@pytest.mark.parametrize(("text", "margin"), [("", 0), ("0", 0), ("2", 2)])
def test_the_margin_comes_from_the_environment(text: str, margin: int) -> None:
    assert edges.read_margin({edges.VARIABLE: text}) == margin
    assert edges.read_margin({}) == 0


@pytest.mark.parametrize("text", ["-1", "one", "1.5"])
def test_a_senseless_margin_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of requests from 0"):
        edges.read_margin({edges.VARIABLE: text})
