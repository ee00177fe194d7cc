"""Whatever happens to a log on its way: an answer, and no memory fault that nobody reported."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.cli import case_file
from specdecode_operator.decide import faults
from specdecode_operator.domain.evidence import Evidence, FaultClass, Termination

CASES = {
    path.stem: case_file.load(path)
    for path in sorted((Path(__file__).parents[2] / "data" / "cases").glob("*.yaml"))
}
# The spellings of the contract, much looser than the classifier's own.
SIGNATURE = re.compile(
    r"illegal\s*mem|illegal_?address|\b700\b|memory access fault|hsa_status",
    re.IGNORECASE,
)
MUTATIONS_PER_CASE = 60


def mutate(text: str, chance: random.Random, other: str) -> str:
    """Do to a log what transport, buffers, shippers and people do to it."""
    lines = text.split("\n")
    kind = chance.randrange(9)
    if kind == 0:  # the beginning is lost, in the middle of a line
        return text[chance.randrange(len(text) + 1) :]
    if kind == 1:  # the end is lost
        return text[: chance.randrange(len(text) + 1)]
    if kind == 2:  # noise
        letters = list(text)
        for _ in range(max(1, len(letters) // 50)):
            letters[chance.randrange(len(letters) or 1) :][:1] = [chr(chance.randrange(0x3000))]
        return "".join(letters)
    if kind == 3:  # two logs in one
        mixed = lines + other.split("\n")
        chance.shuffle(mixed)
        return "\n".join(mixed)
    if kind == 4:  # lines are lost
        return "\n".join(line for line in lines if chance.random() < 0.7)
    if kind == 5:  # newest first
        return "\n".join(reversed(lines))
    if kind == 6:  # another encoding
        return text.encode(chance.choice(["utf-16", "utf-8", "utf-32", "cp500"]), "replace").decode(
            "utf-8", "replace"
        )
    if kind == 7:  # prefixes of the runtime, some lines in two parts
        return "\n".join(split_for_runtime(line, chance) for line in lines)
    return "\n".join(line[: chance.randrange(1, 120)] for line in lines)  # cut lines


def split_for_runtime(line: str, chance: random.Random) -> str:
    prefix = "2026-08-14T03:12:31.118242922Z stderr "
    at = chance.randrange(len(line) + 1)
    if chance.random() < 0.5:
        return f"{prefix}F {line}"
    return f"{prefix}P {line[:at]}\n{prefix}F {line[at:]}"


@pytest.mark.parametrize("name", CASES)
def test_a_mutated_log_is_answered_and_names_no_unreported_memory_fault(name: str) -> None:
    case = CASES[name]
    chance = random.Random(name)
    message = case.evidence.termination.message if case.evidence.termination else ""
    for _ in range(MUTATIONS_PER_CASE):
        other = CASES[chance.choice(list(CASES))].log
        log = mutate(mutate(case.log, chance, other), chance, other)
        found = faults.classify(replace(case.evidence, log=log))
        if found.fault_class is FaultClass.ILLEGAL_MEMORY_ACCESS:
            seen = re.sub("[\x00\ufffd]|\n\\S* stderr F ", "", log)
            assert SIGNATURE.search(seen + message), log


@pytest.mark.parametrize("name", CASES)
def test_splitting_lines_as_the_runtime_does_changes_nothing(name: str) -> None:
    case = CASES[name]
    if name.startswith("C01") or name == "11":  # has such prefixes already; newest line first
        return
    chance = random.Random(name)
    log = "\n".join(split_for_runtime(line, chance) for line in case.log.split("\n"))
    whole = faults.classify(replace(case.evidence, log=case.log))
    assert faults.classify(replace(case.evidence, log=log)) == whole


@pytest.mark.parametrize("name", CASES)
def test_where_a_log_is_cut_into_blocks_changes_nothing(name: str) -> None:
    case = CASES[name]
    whole = faults.classify(case.evidence, log=[case.log])
    for size in (1, 7, 300):
        pieces = [case.log[at : at + size] for at in range(0, len(case.log), size)]
        assert faults.classify(case.evidence, log=pieces) == whole


STAMP = "2026-08-14T03:12:31.118242922Z "
WAYS_TO_KEEP_A_LOG: dict[str, Callable[[list[str]], list[str]]] = {
    "in colours": lambda lines: [f"\x1b[31m{line}\x1b[0m" for line in lines],
    "as Docker does": lambda lines: [json.dumps({"log": f"{x}\n", "time": STAMP}) for x in lines],
    "structured": lambda lines: [json.dumps({"level": "info", "message": x}) for x in lines],
    "quoted": lambda lines: [json.dumps(line) for line in lines],
    "with times": lambda lines: [STAMP + line for line in lines],
    "by the container runtime": lambda lines: [f"{STAMP}stderr F {line}" for line in lines],
    "by syslog": lambda lines: [f"Aug 14 03:12:31 node-1 vllm[123]: {line}" for line in lines],
    "with pod names": lambda lines: [f"[pod/chat-abc/vllm] {line}" for line in lines],
    "by Compose": lambda lines: [f"vllm-0  | {line}" for line in lines],
    "with carriage returns": lambda lines: [f"{line}\r" for line in lines],
    "with blank lines": lambda lines: [each for line in lines for each in (line, "")],
    "in a wide encoding": lambda lines: ["\x00".join(line) for line in lines],
    "with broken bytes": lambda lines: [f"\ufffd{line}\ufffd" for line in lines],
    "behind much chatter": lambda lines: ["INFO: 10.0.0.1 - 200 OK"] * 9000 + lines,
    "newest first": lambda lines: lines[::-1],
}
# A log kept twice; and kernel lines alone do not tell the direction.
NOT_KEPT = {"C01": set(WAYS_TO_KEEP_A_LOG) - {"newest first"}, "61": {"newest first"}}


@pytest.mark.parametrize("way", WAYS_TO_KEEP_A_LOG)
def test_how_a_log_was_kept_changes_nothing(way: str) -> None:
    for name, case in CASES.items():
        if way in NOT_KEPT.get(name, ()):
            continue
        lines = "".join(case.log_blocks()).rstrip("\n").split("\n")
        kept = replace(case.evidence, log="\n".join(WAYS_TO_KEEP_A_LOG[way](lines)))
        found = faults.classify(kept)
        assert found.fault_class in (case.expect["class"], *case.expect.get("alsoAccept", ())), name


@given(
    log=st.text(max_size=400) | st.none(),
    message=st.text(max_size=200),
    exit_code=st.none() | st.integers(-300, 300),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_garbage_is_answered(
    log: str | None, message: str, exit_code: int | None, flags: tuple[bool, bool, bool]
) -> None:
    evidence = Evidence(
        termination=Termination(exit_code, None, "", message, None, None),
        log=log,
        deletion_requested=flags[0],
        ever_ready=flags[1],
        hang=flags[2],
    )
    assert faults.classify(evidence).fault_class is not FaultClass.ILLEGAL_MEMORY_ACCESS


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["schema", "cause", "line", "process"]), inner)
    ),
)


@given(fields=JSON)
def test_any_json_as_termination_message_is_answered(fields: object) -> None:
    end = Termination(0, None, "Completed", json.dumps(fields), None, None)
    assert faults.classify(Evidence(end)).fault_class is FaultClass.ENGINE_CRASH
