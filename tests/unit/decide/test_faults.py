"""The crash cases from public reports, and the table of actions."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_operator.cli import case_file
from specdecode_operator.decide import faults
from specdecode_operator.domain.evidence import (
    Classification,
    FaultAction,
    FaultClass,
    FaultContext,
)

CASES = sorted((Path(__file__).parents[2] / "data" / "cases").glob("*.yaml"))
REVERT, REPORT = FaultAction.REVERT_CHANGE, FaultAction.REPORT


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_case(path: Path) -> None:
    case = case_file.load(path)
    found = faults.classify(case.evidence, log=case.log_blocks())
    assert found.fault_class in (case.expect["class"], *case.expect.get("alsoAccept", ()))
    assert faults.choose_action(found, case.context) == case.expect["action"]


ANY = (True, False)
ACTIONS = [
    # classes, speculation, ever Ready, change in flight, expected
    ({"gpu-hardware"}, ANY, ANY, ANY, FaultAction.HAND_OVER),
    ({"graceful-shutdown"}, ANY, ANY, ANY, FaultAction.NONE),
    ({"illegal-memory-access"}, ANY, {False}, {True}, REVERT),
    ({"illegal-memory-access"}, {True}, {True}, ANY, FaultAction.SPEC_OFF),
    ({"illegal-memory-access"}, {True}, {False}, {False}, FaultAction.SPEC_OFF),
    ({"illegal-memory-access"}, {False}, {True}, ANY, REPORT),
    ({"illegal-memory-access"}, {False}, {False}, {False}, REPORT),
    ({"oom-killed", "probe-killed", "evicted"}, ANY, {False}, {True}, REVERT),
    ({"oom-killed", "probe-killed", "evicted"}, ANY, {True}, ANY, REPORT),
    ({"oom-killed", "probe-killed", "evicted"}, ANY, ANY, {False}, REPORT),
    ({"device-assert", "cuda-out-of-memory", "collective-timeout", "engine-crash", "engine-hang",
      "config-refused"}, ANY, ANY, {True}, REVERT),
    ({"device-assert", "cuda-out-of-memory", "collective-timeout", "engine-crash", "engine-hang",
      "config-refused"}, ANY, ANY, {False}, REPORT),
]  # fmt: skip


@pytest.mark.parametrize("fault_class", FaultClass)
@pytest.mark.parametrize("speculation", ANY)
@pytest.mark.parametrize("ever_ready", ANY)
@pytest.mark.parametrize("change_in_flight", ANY)
def test_action(
    fault_class: FaultClass, speculation: bool, ever_ready: bool, change_in_flight: bool
) -> None:
    expected = {
        action
        for classes, speculations, readies, changes, action in ACTIONS
        if fault_class in classes
        and speculation in speculations
        and ever_ready in readies
        and change_in_flight in changes
    }
    chosen = faults.choose_action(
        Classification(fault_class, None),
        FaultContext(
            speculation=speculation, ever_ready=ever_ready, change_in_flight=change_in_flight
        ),
    )
    assert {chosen} == expected
