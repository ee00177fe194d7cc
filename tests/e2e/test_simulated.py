"""The operator with simulated engines: what takes several GPUs, and what a GPU's landscape is.

One stack for all tests, which run in their order; each uses objects of its own name. Goodput of a
choice is judged by the engines' own model in virtual time, where nothing else takes the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from specdecode_load import BackgroundLoop, Lengths, Workload, probe
from specdecode_sim import profile, virtual
from specdecode_sim.engine import LAG_LIMIT
from tests.support.engine import ROOT
from tests.support.lag import worst_lag
from tests.support.objects import PodWatch, reason_of
from tests.support.simulator import Simulator
from tests.support.stack import SimulatedImage, Stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Json = dict[str, Any]
TABLE = [{"minBatch": 1, "k": 3}]
PROMPT, OUTPUT = 128, 128
ENVELOPE = (1, 2, 3, 5, 7)
NODE_NAME = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    image = SimulatedImage(Simulator(), replicas=1)
    with Stack(ROOT / ".build" / "e2e-simulated", image) as running:
        yield running
        running.operator.check_alive()


@contextlib.contextmanager
def serving(stack: Stack, name: str, **changes: Any) -> Iterator[PodWatch]:
    """Run an object until the block ends; its pods are watched."""
    spec = stack.build_spec(k_table=TABLE)
    for part, value in changes.items():
        spec[part] = {**spec[part], **value} if isinstance(value, dict) else value
    try:
        with PodWatch(stack.objects, name) as watch:
            stack.objects.apply(name, spec)
            wait_ready(stack, name, spec["replicas"])
            stack.objects.wait_condition(name, "TableApplied", seconds=60)
            yield watch
    finally:  # its GPUs are the next test's
        stack.cluster.kubectl("delete", "sdd", name)
        wait_until(lambda: not stack.objects.pods(name), what=f"{name} gone", seconds=60)


def wait_ready(stack: Stack, name: str, replicas: int) -> None:
    stack.objects.wait_status(
        name,
        lambda s: s.get("readyReplicas") == replicas and s.get("replicas") == replicas,
        what=f"{replicas} of {name} Ready",
        seconds=180,
    )


@contextlib.contextmanager
def loaded(stack: Stack, name: str, streams: int) -> Iterator[BackgroundLoop]:
    """Hold a load on kept-alive connections."""
    target = asyncio.run(probe(stack.cluster.service_url("default", name)))
    workload = Workload(Lengths("fixed", PROMPT), Lengths("fixed", OUTPUT), seed=7)
    with BackgroundLoop(target, workload, streams=streams) as loop:
        yield loop


def wait_converged(stack: Stack, name: str, batch: int, *, seconds: float = 300) -> Json:
    return stack.objects.wait_status(
        name,
        lambda s: (
            (s.get("estimate") or {}).get("batch") == batch
            and reason_of(s, "Tuned") in ("Converged", "SpeculationDoesNotPay")
        ),
        what=f"converged at batch {batch}",
        seconds=seconds,
    )


def k_at(status: Json, batch: int) -> int:
    return next(k for first, last, k in reversed(status["active"]["kTable"]) if first <= batch)


def goodput(profile_name: str, *, streams: int, k: int) -> float:
    """Goodput of a fixed K in virtual time, step by step, in tokens per second."""
    engine = virtual.VirtualEngine(
        profile.load_profile(profile_name),
        k_max=7,
        lengths=virtual.Lengths(PROMPT, PROMPT, OUTPUT, OUTPUT),
        seed=1,
    )
    engine.run([(1, 256, k)], streams=streams, seconds=10)
    return engine.run([(1, 256, k)], streams=streams, seconds=60).goodput


def skip_if_lagging(stack: Stack, name: str) -> None:
    """Skip where the machine could not keep up: what was tuned then is the machine."""
    lag = worst_lag(stack.read_step_seconds(name))
    if lag is not None and lag > LAG_LIMIT:
        pytest.skip(f"invalid: an engine lagged by {lag:.1%}")


@pytest.mark.parametrize("name", ["llama8b-a100"])
def test_k_is_tuned_to_what_the_cost_model_says(stack: Stack, name: str) -> None:
    image = SimulatedImage(Simulator(profile=name))
    image.image = f"{name}:0.33.0"
    image.register(stack.cluster, stack.paths)
    with (
        serving(stack, "tuned", engine={"image": image.image, "maxNumSeqs": 256}) as watch,
        loaded(stack, "tuned", 4) as load,
    ):
        for streams in (4, 64):
            load.set_concurrency(streams)
            chosen = k_at(wait_converged(stack, "tuned", streams), streams)
            skip_if_lagging(stack, "tuned")
            by_k = {k: goodput(name, streams=streams, k=k) for k in ENVELOPE}
            assert by_k[chosen] >= 0.97 * max(by_k.values()), (streams, chosen, by_k)
        assert not any(watch.restarts.values())


def test_a_prometheus_outage_changes_nothing_and_passes(stack: Stack) -> None:
    with serving(stack, "outage") as watch, loaded(stack, "outage", 8):
        before = wait_converged(stack, "outage", 8)
        stack.prometheus.stop()
        absent = stack.objects.wait_status(
            "outage",
            lambda s: reason_of(s, "MetricsAvailable") in ("PrometheusUnavailable", "Stale"),
            what="metrics are absent",
            seconds=120,
        )
        assert absent["active"]["table"] == before["active"]["table"]
        stack.prometheus.start()
        after = wait_converged(stack, "outage", 8)
        assert reason_of(after, "MetricsAvailable") == "Scraped"
        assert not any(watch.restarts.values())


def test_an_operator_killed_while_it_explores_goes_on(stack: Stack) -> None:
    with serving(stack, "killed") as watch, loaded(stack, "killed", 16):
        stack.objects.wait_status(
            "killed", lambda s: s.get("experiment"), what="an exploration", seconds=120
        )
        stack.operator.kill()
        stack.operator.start()
        wait_converged(stack, "killed", 16)
        assert not any(watch.restarts.values())


def test_pods_of_unequal_speed_are_tuned_as_one(stack: Stack) -> None:
    scenario = {"speedByNode": {"node-1": 0.6}}
    image = SimulatedImage(Simulator(scenario=scenario))
    image.image = "unequal:0.33.0"
    image.register(stack.cluster, stack.paths)
    template = {"spec": {"containers": [{"name": "engine", "env": [NODE_NAME]}]}}
    engine = {"image": image.image, "maxNumSeqs": 256, "podTemplate": template}
    with serving(stack, "unequal", engine=engine, replicas=3), loaded(stack, "unequal", 24):
        status = wait_converged(stack, "unequal", 8)
        assert k_at(status, 8) > 0
        assert status["ready"] == "3/3"


def test_scaling_down_and_up_keeps_what_was_learned(stack: Stack) -> None:
    with serving(stack, "scaled", replicas=3) as watch:
        with loaded(stack, "scaled", 12) as load:
            learned = k_at(wait_converged(stack, "scaled", 4), 4)
            window = load.start_window()
            for replicas in (1, 3):
                stack.cluster.kubectl("scale", "sdd", "scaled", f"--replicas={replicas}")
                wait_ready(stack, "scaled", replicas)
            assert window.stop().errors == {}
        # Kept-alive connections stay where they are: only new ones reach the new pods. On the one
        # pod alone the batch was another one, which may have been explored.
        with loaded(stack, "scaled", 12):
            assert k_at(wait_converged(stack, "scaled", 4), 4) == learned
        assert not any(watch.restarts.values())


def test_an_image_change_rolls_pod_by_pod_without_an_outage(stack: Stack) -> None:
    image = SimulatedImage(stack.engine.simulator)  # type: ignore[attr-defined]
    image.image = "next:0.33.0"
    image.register(stack.cluster, stack.paths)
    with serving(stack, "rolled", replicas=3) as watch, loaded(stack, "rolled", 6) as load:
        window = load.start_window()
        stack.objects.edit("rolled", {"engine": {"image": image.image}})
        wait_until(
            lambda: (
                {p["spec"]["containers"][0]["image"] for p in stack.objects.pods("rolled")}
                == {image.image}
            ),
            what="all pods of the next image",
            seconds=300,
        )
        wait_ready(stack, "rolled", 3)
        assert window.stop().errors == {}
        assert not any(watch.restarts.values())
