"""`specdecode classify`: the operator's own classifier for a case file or a log in hand."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from specdecode_operator.cli import case_file
from specdecode_operator.decide import faults
from specdecode_operator.domain.evidence import Classification, Evidence, FaultContext, Termination
from specdecode_operator.errors import PermanentError

_BLOCK_BYTES = 1 << 18


class ClassifyError(PermanentError):
    """The command cannot do what it was asked; the message says what to change."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "classify",
        help="say why an engine ended and what the operator would do",
        description="Say why an engine ended, from a case file or from a log, and what the "
        "operator would do about it. Nothing is changed and no cluster is asked.",
    )
    parser.add_argument("case", nargs="?", type=Path, metavar="CASE.yaml", help="a case file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    log = parser.add_argument_group("without a case file")
    log.add_argument("--log", type=Path, metavar="FILE", help="the container's log; - for stdin")
    log.add_argument("--exit-code", type=int, metavar="N", help="from lastState.terminated")
    log.add_argument("--signal", type=int, metavar="N")
    log.add_argument("--reason", default="", metavar="TEXT", help="e.g. Error, OOMKilled")
    log.add_argument("--message", default="", metavar="TEXT", help="the termination message")
    log.add_argument("--pod-reason", default="", metavar="TEXT", help="e.g. Evicted")
    log.add_argument("--event", action="append", default=[], metavar="TEXT", help="Reason: text")
    log.add_argument("--hang", action="store_true", help="the container never ended")
    log.add_argument("--ever-ready", action="store_true", help="it had been Ready before")
    log.add_argument("--deletion-requested", action="store_true", help="the pod was being deleted")
    log.add_argument("--speculation-off", action="store_true", help="it ran without speculation")
    log.add_argument("--change-in-flight", action="store_true", help="it carried a new change")


def run(options: argparse.Namespace) -> int:
    """Print class, action and first fatal line; return the exit status."""
    if (options.case is None) == (options.log is None):
        raise ClassifyError("give either a case file or --log FILE (--log - reads stdin)")
    if options.case is not None:
        case = case_file.load(options.case)
        found = faults.classify(case.evidence, log=case.log_blocks())
        context = case.context
    else:
        found = faults.classify(_evidence(options), log=_read_blocks(options.log))
        context = FaultContext(
            speculation=not options.speculation_off,
            ever_ready=options.ever_ready,
            change_in_flight=options.change_in_flight,
        )
    action = faults.choose_action(found, context)
    print(_as_json(found, action) if options.json else _as_text(found, action))
    return 0


def _evidence(options: argparse.Namespace) -> Evidence:
    return Evidence(
        termination=Termination(
            exit_code=options.exit_code,
            signal=options.signal,
            reason=options.reason,
            message=options.message,
            started_at=None,
            finished_at=None,
        ),
        pod_reason=options.pod_reason,
        deletion_requested=options.deletion_requested,
        ever_ready=options.ever_ready,
        hang=options.hang,
        events=tuple(options.event),
    )


def _read_blocks(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces; bytes that are no UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield decoder.decode(block)
    except OSError as error:
        raise ClassifyError(f"{path}: {error.strerror or error}") from error
    yield decoder.decode(b"", final=True)


def _as_json(found: Classification, action: str) -> str:
    return json.dumps({"class": str(found.fault_class), "action": action, "line": found.line})


def _as_text(found: Classification, action: str) -> str:
    line = found.line if found.line is not None else "(no line tells; from the container's status)"
    rows = [("class", found.fault_class), ("action", action), ("line", line)]
    if found.reported_by:
        rows.append(("reported by", found.reported_by))
    return "\n".join(f"{name + ':':<13}{value}" for name, value in rows)
