"""Which revision, and how many pods of each: single situations, then whole changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.conditions import Reason
from specdecode_operator.api.v1alpha1 import FaultRecord, QuarantineEntry, Spec, Status
from specdecode_operator.decide import rollout
from specdecode_operator.decide.rollout import Hold, Pods, Target
from specdecode_operator.domain import lever as levers
from specdecode_operator.domain.lever import Lever
from tests.support.builders import NOW, build_pod, build_revision, build_spec

PODS_STEPS = {
    # situation: (replicas, rollout, falling, {revision: (wanted, ready)}, expected)
    "the first revision takes all pods": (3, {}, False, {}, {"new": 3}),
    "a canary comes first": (4, {}, False, {"old": (4, 4)}, {"old": 3, "new": 1}),
    "nothing moves before the canary is Ready": (
        4, {}, False, {"old": (3, 3), "new": (1, 0)}, {"old": 3, "new": 1}),
    "after it, one at a time": (
        4, {}, False, {"old": (3, 3), "new": (1, 1)}, {"old": 2, "new": 2}),
    "the last ones": (2, {}, False, {"old": (1, 1), "new": (1, 1)}, {"old": 0, "new": 2}),
    "the canaries are cut to replicas - 1": (
        3, {"canaryReplicas": 9}, False, {"old": (3, 3)}, {"old": 1, "new": 2}),
    "a broken old revision gives way at once": (
        3, {}, False, {"old": (3, 0)}, {"old": 0, "new": 3}),
    "not-ready old pods wait for an unproven canary": (
        3, {}, False, {"old": (2, 1), "new": (1, 0)}, {"old": 2, "new": 1}),
    "surge adds before it takes": (
        2, {"strategy": "Surge"}, False, {"old": (2, 2)}, {"old": 2, "new": 1}),
    "surge takes when the new one is Ready": (
        2, {"strategy": "Surge"}, False, {"old": (2, 2), "new": (1, 1)}, {"old": 1, "new": 2}),
    "surge ends": (
        2, {"strategy": "Surge"}, False, {"old": (1, 1), "new": (2, 2)}, {"old": 0, "new": 2}),
    "falling: the crashed pod's GPU goes to speculation off at once": (
        3, {}, True, {"old": (3, 2)}, {"old": 2, "new": 1}),
    "falling: all crashed": (3, {}, True, {"old": (3, 0)}, {"old": 0, "new": 3}),
    "falling: the others follow one at a time": (
        3, {}, True, {"old": (2, 2), "new": (1, 1)}, {"old": 1, "new": 2}),
    "falling: another crash does not wait": (
        3, {}, True, {"old": (2, 1), "new": (1, 0)}, {"old": 1, "new": 2}),
    "falling with one pod that is back already": (
        1, {}, True, {"old": (1, 1)}, {"old": 0, "new": 1}),
    "falling ignores surge: GPUs may be scarce": (
        2, {"strategy": "Surge"}, True, {"old": (2, 1)}, {"old": 1, "new": 1}),
    "scaled up in mid-change: what serves grows": (
        5, {}, False, {"old": (2, 2), "new": (1, 0)}, {"old": 4, "new": 1}),
    "scaled down in mid-change: what goes away shrinks": (
        2, {}, False, {"old": (3, 3), "new": (1, 0)}, {"old": 1, "new": 1}),
    "scaled down in mid-change: the last Ready pod stays": (
        2, {"canaryReplicas": 2}, False, {"old": (1, 1), "new": (2, 0)}, {"old": 1, "new": 1}),
    "falling and scaled up: what crashed does not grow": (
        5, {}, True, {"old": (2, 2), "new": (1, 0)}, {"old": 2, "new": 3}),
    "falling, and killed between the two writes of a move": (
        2, {}, True, {"old": (2, 1), "new": (1, 0)}, {"old": 1, "new": 1}),
    "paused in mid-change: nothing moves": (
        3, {"paused": True}, False, {"old": (2, 2), "new": (1, 1)}, {"old": 2, "new": 1}),
    "paused in mid-change: scaled all the same": (
        4, {"paused": True}, False, {"old": (2, 2), "new": (1, 1)}, {"old": 2, "new": 2}),
    "falling is not paused": (
        3, {"paused": True}, True, {"old": (3, 2)}, {"old": 2, "new": 1}),
    "scaled to zero": (0, {}, False, {"old": (3, 3), "new": (1, 0)}, {"old": 0, "new": 0}),
}  # fmt: skip


@pytest.mark.parametrize("situation", PODS_STEPS)
def test_one_step_towards_the_target(situation: str) -> None:
    replicas, settings, falling, there, expected = PODS_STEPS[situation]
    planned = rollout.plan_replicas(
        target="new",
        counts={name: Pods(*pods) for name, pods in there.items()},
        spec=build_spec(replicas=replicas, rollout=settings),
        current="old" if "old" in there else None,
        falling=falling,
    )
    assert planned == expected


def test_an_abandoned_canary_gives_way_before_what_serves() -> None:
    planned = rollout.plan_replicas(
        target="newer",
        counts={"old": Pods(2, 2), "new": Pods(1, 1)},
        spec=build_spec(replicas=3),
        current="old",
    )
    assert planned == {"old": 2, "new": 0, "newer": 1}


@given(
    replicas=st.integers(1, 8),
    canaries=st.integers(1, 9),
    surge=st.booleans(),
    falling=st.booleans(),
    crashed=st.integers(0, 8),
)
def test_a_whole_change_arrives_and_never_takes_the_last_ready_pod(
    replicas: int, canaries: int, surge: bool, falling: bool, crashed: int
) -> None:
    spec = build_spec(
        replicas=replicas,
        rollout={"canaryReplicas": canaries, "strategy": "Surge" if surge else "Replace"},
    )
    wanted = {"old": replicas}
    ready = {"old": max(0, replicas - crashed)}
    for _ in range(3 * replicas + 3):
        counts = {name: Pods(wanted[name], ready.get(name, 0)) for name in wanted}
        wanted = rollout.plan_replicas(
            target="new", counts=counts, spec=spec, current="old", falling=falling
        )
        surplus = sum(wanted.values()) - replicas
        assert 0 <= surplus <= (min(canaries, max(1, replicas - 1)) if surge else 0)
        before = sum(ready.values())
        # A ReplicaSet gives up not-ready pods first; new pods become Ready after the check.
        ready = {name: min(ready.get(name, 0), number) for name, number in wanted.items()}
        if replicas > 1 and before > 1:
            assert sum(ready.values()) >= 1
        ready["new"] = wanted["new"]
    assert wanted == {"old": 0, "new": replicas}


# --------------------------------------------------------------------------- the target


def choose(spec: Spec, running: Spec | None, **changes: object) -> Target | None:
    inputs = levers.inputs_of(running) if running else None
    revisions = [build_revision(inputs, 2, name="running")] if inputs else []
    pods = [build_pod(f"p{n}", "running") for n in range(2)] if inputs else []
    counts = rollout.count_pods(revisions, pods)
    facts: dict[str, object] = {
        "quarantine": [],
        "falling": False,
        "refused": None,
        "current": rollout.find_current(Status(), revisions, counts),
        "revisions": revisions,
        "counts": counts,
    }
    return rollout.choose_target(spec=spec, **{**facts, **changes})  # type: ignore[arg-type]


def quarantine(spec: Spec) -> QuarantineEntry:
    fingerprint = levers.fingerprint_of(levers.inputs_of(spec))
    assert fingerprint is not None
    evidence = FaultRecord(
        pod="p", pod_uid="u", container="engine", restart_count=0, revision="r",
        fault_class="illegal-memory-access", action="SpecOff", at=NOW,
    )  # fmt: skip
    return QuarantineEntry(fingerprint=fingerprint, revision="r", at=NOW, evidence=evidence)


TWO = {"replicas": 2}


def test_nothing_runs_yet_so_the_wish_is_the_target() -> None:
    target = choose(build_spec(), None)
    assert target is not None
    assert target.inputs == levers.inputs_of(build_spec())


def test_a_refused_spec_starts_nothing() -> None:
    assert choose(build_spec(), None, refused=Hold(Reason.INVALID_SPEC, "")) is None


def test_a_refused_spec_leaves_what_runs() -> None:
    wish = build_spec(**TWO, engine={"maxNumSeqs": 32})
    target = choose(wish, build_spec(**TWO), refused=Hold(Reason.INVALID_SPEC, ""))
    assert target is not None
    assert (target.revision, target.change) == ("running", None)


def test_no_difference_is_no_change() -> None:
    target = choose(build_spec(**TWO), build_spec(**TWO))
    assert target is not None
    assert (target.revision, target.change) == ("running", None)


def test_a_k_table_edit_is_no_restart() -> None:
    wish = build_spec(**TWO, speculation={"kTable": [{"minBatch": 1, "k": 1}]})
    target = choose(wish, build_spec(**TWO))
    assert target is not None
    assert target.revision == "running"


def test_two_edits_are_two_changes_safest_first() -> None:
    wish = build_spec(
        **TWO,
        engine={"image": "registry/specdecode-vllm:0.33.1"},
        speculation={"cudagraphMode": "FULL_DECODE_ONLY"},
    )
    first = choose(wish, build_spec(**TWO))
    assert first is not None
    assert first.change is Lever.CUDAGRAPH_MODE
    assert first.inputs.engine.image == "registry/specdecode-vllm:0.33.0"


def test_levers_that_only_fit_together_move_together() -> None:
    wish = build_spec(**TWO, speculation={"numSpeculativeTokens": 3, "envelope": [0, 3]})
    first = choose(wish, build_spec(**TWO))
    assert first is not None
    assert levers.is_consistent(first.inputs)


def test_a_pause_holds_a_change() -> None:
    wish = build_spec(**TWO, rollout={"paused": True}, engine={"maxNumSeqs": 32})
    target = choose(wish, build_spec(**TWO))
    assert target is not None
    assert target.revision == "running"
    assert target.hold is not None
    assert target.hold.reason is Reason.PAUSED


@pytest.mark.parametrize(
    ("settings", "held"),
    [({}, True), ({"strategy": "Surge"}, False), ({"allowDowntime": True}, False)],
)
def test_the_only_pod_is_not_stopped_unasked(settings: dict[str, object], held: bool) -> None:
    wish = build_spec(replicas=1, rollout=settings, engine={"maxNumSeqs": 32})
    target = choose(wish, build_spec(replicas=1))
    assert target is not None
    assert (target.hold is not None) == held


def test_falling_goes_to_the_same_without_speculation() -> None:
    target = choose(build_spec(**TWO), build_spec(**TWO), falling=True)
    assert target is not None
    assert target.inputs.speculation is None
    assert target.inputs.engine == build_spec(**TWO).engine


def test_falling_is_held_by_nothing() -> None:
    paused = build_spec(replicas=1, rollout={"paused": True})
    target = choose(paused, build_spec(replicas=1), falling=True, refused=Hold(Reason.PAUSED, ""))
    assert target is not None
    assert target.inputs.speculation is None


def test_a_quarantined_wish_keeps_the_speculation_that_serves() -> None:
    wish = build_spec(**TWO, speculation={"cudagraphMode": "FULL_DECODE_ONLY"})
    target = choose(wish, build_spec(**TWO), quarantine=[quarantine(wish)])
    assert target is not None
    assert target.revision == "running"


def test_a_quarantined_image_is_not_tried_again() -> None:
    wish = build_spec(**TWO, engine={"image": "registry/specdecode-vllm:0.33.1"})
    target = choose(wish, build_spec(**TWO), quarantine=[quarantine(wish)])
    assert target is not None
    assert target.revision == "running"


def test_a_quarantined_wish_at_first_start_runs_without_speculation() -> None:
    target = choose(build_spec(), None, quarantine=[quarantine(build_spec())])
    assert target is not None
    assert target.inputs.speculation is None
