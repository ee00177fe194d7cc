"""Events: what a user sees, and which of them count as the same."""

from datetime import UTC, datetime, timedelta, timezone

from specdecode_operator.clients.kube import MAX_EVENT_MESSAGE_BYTES, build_event
from specdecode_operator.domain.decision import Event, EventType

AT = datetime(2030, 1, 1, 12, 0, 0, 999, tzinfo=UTC)
ABOUT = {
    "apiVersion": "specdecode.io/v1alpha1",
    "kind": "SpecDecodeDeployment",
    "metadata": {"namespace": "ns", "name": "chat", "uid": "u-1"},
}
EVENT = Event("Promoted", "table 7x16,1 is 4.1 % faster", EventType.NORMAL)


def test_an_event_is_about_the_object() -> None:
    made = build_event(ABOUT, EVENT, at=AT)
    assert made["involvedObject"]["uid"] == "u-1"
    assert made["metadata"]["namespace"] == "ns"
    assert made["metadata"]["name"].startswith("chat.")
    assert made["lastTimestamp"] == "2030-01-01T12:00:00Z"
    assert made["type"] == "Normal"


def test_the_same_decision_has_the_same_name_and_another_one_has_not() -> None:
    def name(event: Event, uid: str = "u-1") -> str:
        about = {**ABOUT, "metadata": {**ABOUT["metadata"], "uid": uid}}
        made = build_event(about, event, at=AT + timedelta(minutes=9))
        return str(made["metadata"]["name"])

    assert name(EVENT) == build_event(ABOUT, EVENT, at=AT)["metadata"]["name"]
    others = {
        name(Event("Reverted", EVENT.message)),
        name(Event(EVENT.reason, "table 3 is 2.0 % faster")),
        name(Event(EVENT.reason, EVENT.message, EventType.WARNING)),
        name(EVENT, uid="u-2"),
    }
    assert len(others | {name(EVENT)}) == 5


def test_a_long_message_is_cut_at_a_character() -> None:
    made = build_event(ABOUT, Event("Long", "é" * 2000), at=AT)
    assert len(made["message"].encode()) <= MAX_EVENT_MESSAGE_BYTES
    assert made["message"].endswith("é …")


def test_the_longest_name_of_an_object_still_makes_a_valid_name() -> None:
    about = {**ABOUT, "metadata": {**ABOUT["metadata"], "name": "a" * 253}}
    assert len(build_event(about, EVENT, at=AT)["metadata"]["name"]) <= 253


def test_times_are_written_in_utc() -> None:
    there = AT.astimezone(timezone(timedelta(hours=9)))
    assert build_event(ABOUT, EVENT, at=there)["firstTimestamp"] == "2030-01-01T12:00:00Z"
