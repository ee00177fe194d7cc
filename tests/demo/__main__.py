"""`make demo`: from nothing to a tuned engine, and to a safe fall, on one screen.

KEEP=1 leaves everything up until Enter or Ctrl-C. The report is also written to .build/demo.json.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from tests.demo.course import NAME, Course, Plan
from tests.demo.view import Screen, draw_fault, draw_summary
from tests.support.engine import ROOT
from tests.support.stack import Stack

BUILD = ROOT / ".build"
PLAN = Plan(loads=(1, 8, 32, 64, 8), fixed=(0, 1, 2, 3, 5, 7))


def main() -> int:
    """Run the demo; 0 when it came to its end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A pipe has no width of its own: leave the summary's columns room.
    console = Console(width=None if sys.stdout.isatty() else 140)
    screen = Screen(console)
    screen.tell("starting Kubernetes, Prometheus and the operator")
    keep = os.environ.get("KEEP") == "1"
    with Stack(BUILD / "demo") as stack:
        course = Course(stack, PLAN, tell=screen.tell)
        screen.tell("settings of the demo: Prometheus scrapes every 2 s, cycle 8 s, blocks of 18 s")
        try:
            with screen.follow(lambda: stack.objects.status(NAME), lambda: _load_of(course)):
                report = course.run()
        finally:
            course.report.write(BUILD / "demo.json")
        console.print(draw_summary(report), draw_fault(report))
        console.print(f"written to {_shown(BUILD / 'demo.json')}")
        if keep:
            _keep(console, stack)
    return 0


def _load_of(course: Course) -> str:
    loop = getattr(course, "loop", None)
    return f"{loop.streams} streams" if loop is not None else "none"


def _keep(console: Console, stack: Stack) -> None:
    console.print("KEEP=1: everything stays up. Look around with")
    console.print(f"  export KUBECONFIG={stack.cluster.kubeconfig}", highlight=False)
    console.print(f"  alias kubectl='{stack.cluster.binary} kubectl'", highlight=False)
    console.print(f"  kubectl get sdd; kubectl describe sdd {NAME}", highlight=False)
    console.print(f"  Prometheus: {stack.prometheus.url}", highlight=False)
    console.print("Enter or Ctrl-C stops it.")
    try:
        if sys.stdin is not None and sys.stdin.isatty():
            input()
        else:
            signal.pause()
    except (EOFError, KeyboardInterrupt):
        pass


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
