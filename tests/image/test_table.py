"""The table file as the engine reads it; the shared cases also run against the operator."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_vllm import table as tables

CONTRACT = Path(__file__).parents[1] / "data" / "tables_contract.json"
CASES = json.loads(CONTRACT.read_text(encoding="utf-8"))["cases"]
ACCEPTED = [case for case in CASES if "rows" in case["expect"]]
REFUSED = [case for case in CASES if "reason" in case["expect"]]
VALID = '{"schema": 1, "generation": 12, "enabled": true, "rows": [[1, 64, 7]], "reason": "%s"}'


def by_name(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


@by_name(ACCEPTED)
def test_accepts(case: dict[str, Any]) -> None:
    table = tables.parse_table(case["text"].encode(), envelope=case["envelope"])
    rows, clamped = tables.clamp_rows(
        table.rows, envelope=case["envelope"], captured_tokens=case["captured_tokens"]
    )
    assert {
        "rows": [[row.first, row.last, row.k] for row in rows],
        "clamped_rows": clamped,
        "fingerprint": table.fingerprint,
    } == case["expect"]


@by_name(REFUSED)
def test_refuses(case: dict[str, Any]) -> None:
    with pytest.raises(tables.TableRefusedError) as refusal:
        tables.parse_table(case["text"].encode(), envelope=case["envelope"])
    assert refusal.value.reason == case["expect"]["reason"]


def test_the_shared_cases_name_every_reason_of_the_content() -> None:
    named = {case["expect"]["reason"] for case in REFUSED}
    assert named == set(tables.PARSE_REASONS) - {tables.TOO_LARGE}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param((VALID % ("x" * 70_000)).encode(), tables.TOO_LARGE, id="too large"),
        pytest.param(b"[" * 60_000, tables.NOT_JSON, id="nested too deep"),
        pytest.param(VALID.encode("utf-16"), tables.NOT_JSON, id="not UTF-8"),
        pytest.param(
            (VALID % "\udcff").encode("utf-8", "surrogateescape"), tables.NOT_JSON, id="bad byte"
        ),
    ],
)
def test_refuses_bytes_that_are_no_table(content: bytes, reason: str) -> None:
    with pytest.raises(tables.TableRefusedError) as refusal:
        tables.parse_table(content, envelope=[7])
    assert refusal.value.reason == reason


def test_a_file_of_exactly_64_kib_is_taken() -> None:
    padding = tables.MAX_FILE_BYTES - len(VALID % "")
    table = tables.parse_table((VALID % ("x" * padding)).encode(), envelope=[7])
    assert table.generation == 12


@pytest.mark.parametrize(
    ("batch", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (17, 32), (64, 64), (65, 128)]
)
def test_a_batch_falls_into_its_power_of_two_bucket(batch: int, bucket: int) -> None:
    assert tables.batch_bucket(batch) == bucket


def test_rows_may_start_where_a_bucket_starts() -> None:
    starts = [batch for batch in range(1, 70) if tables.is_row_start(batch)]
    assert starts == [1, 2, 3, 5, 9, 17, 33, 65]


def test_the_look_up_follows_the_rows_and_the_last_one_holds_beyond_its_end() -> None:
    rows = [tables.Row(1, 2, 7), tables.Row(3, 4, 1)]
    assert tables.build_lookup(rows, max_batch=6) == [0, 7, 7, 1, 1, 1, 1]


def test_the_look_up_ends_at_the_largest_batch() -> None:
    rows = [tables.Row(1, 2, 7), tables.Row(3, 99, 1), tables.Row(100, 200, 3)]
    assert tables.build_lookup(rows, max_batch=3) == [0, 7, 7, 1]


def test_an_extended_table_ends_at_the_engines_largest_batch() -> None:
    rows = (tables.Row(1, 2, 7), tables.Row(3, 4, 1))
    assert tables.extend_rows(rows, max_batch=8) == (tables.Row(1, 2, 7), tables.Row(3, 8, 1))
    assert tables.extend_rows(rows, max_batch=3) == rows
