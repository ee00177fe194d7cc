"""`make demo`: from nothing to tuned engines, and to a safe fall, on one screen.

The engines are simulated: three GPU-like pods, minutes. ENGINE=vllm is the proof on the real
engine, on the CPU. KEEP=1 leaves everything up until Enter or Ctrl-C. The report is also written to
.build/demo.json.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from tests.demo.course import NAME, Course, Plan
from tests.demo.view import Screen, draw_drain, draw_fault, draw_summary, judge_lag
from tests.support.engine import ROOT
from tests.support.simulator import Simulator
from tests.support.stack import (
    CYCLE,
    SCRAPE_INTERVAL,
    STREAM_INTERVAL,
    EngineImage,
    RealImage,
    SimulatedImage,
    Stack,
)

BUILD = ROOT / ".build"
FIXED = (0, 1, 2, 3, 5, 7)
REAL_PLAN = Plan(loads=(1, 8, 32, 64, 8), fixed=FIXED, rounds=4)
SIMULATED_PLAN = Plan(
    loads=(4, 16, 64, 256, 64, 16, 4),
    fixed=FIXED,
    rounds=2,
    measure_seconds=1.5,
    pods=3,
    prompt_tokens=128,
    output_tokens="uniform:64:192",
    off_settle_seconds=4.0,
    drain_requests=256,
    fault="graphs",
    fault_streams=256,
)
# Like the public report, where one lever brought engines down within a minute under load; that one
# (adaptive verification beside FULL_AND_PIECEWISE graphs) the operator refuses by now.
SCENARIO = {
    "faults": [
        {
            "kind": "illegal-memory-access",
            "when": {"graphs": ["FULL"], "minRunning": 16},
            "meanSeconds": 20,
        }
    ]
}
ENGINES = ("sim", "vllm")


def main() -> int:
    """Run the demo; 0 when it came to its end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A pipe has no width of its own: leave the summary's columns room.
    console = Console(width=None if sys.stdout.isatty() else 140)
    screen = Screen(console)
    screen.tell("starting Kubernetes, Prometheus and the operator")
    keep = os.environ.get("KEEP") == "1"
    engine, plan = _choose_engine(os.environ.get("ENGINE", "sim"))
    with Stack(BUILD / "demo", engine) as stack:
        course = Course(stack, plan, tell=screen.tell)
        screen.tell(f"settings of the demo: {_settings(stack)}")
        try:
            with screen.follow(lambda: stack.objects.status(NAME), lambda: _load_of(course)):
                report = course.run()
        finally:
            course.report.write(BUILD / "demo.json")
        console.print(draw_summary(report), draw_fault(report))
        if report.drain:
            console.print(draw_drain(report))
        if report.lag:
            console.print(judge_lag(report))
        console.print(f"written to {_shown(BUILD / 'demo.json')}")
        if keep:
            _keep(console, stack)
    return 0


def _choose_engine(name: str) -> tuple[EngineImage, Plan]:
    if name not in ENGINES:
        sys.exit(f"ENGINE={name} is not known: give one of {', '.join(ENGINES)}")
    if name == "vllm":
        return RealImage(), REAL_PLAN
    simulator = Simulator(scenario=SCENARIO)
    return SimulatedImage(simulator), SIMULATED_PLAN


def _settings(stack: Stack) -> str:
    soak = stack.build_spec(k_table=[])["rollout"]["liveSoak"]["minDuration"]
    text = f"Prometheus scrapes every {SCRAPE_INTERVAL}, cycle {CYCLE}, blocks of {soak}"
    if isinstance(stack.engine, SimulatedImage):
        simulator = stack.engine.simulator
        text += f", GPU profile {simulator.profile}, time scale {simulator.time_scale:g}"
        text += f", one event for {STREAM_INTERVAL} tokens"
    return text


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
