"""The PromQL: names cannot break out of it, and it says what is configured."""

import re

import pytest

from specdecode_operator.clients import queries


def test_the_samples_of_some_pods() -> None:
    promql = queries.engine_samples("team-a", queries.pods_regex(["chat-2", "chat-1.x"]), 300)
    assert promql == (
        '{__name__=~"specdecode_.*",namespace="team-a",pod=~"chat\\\\-1\\\\.x|chat\\\\-2"}[300s]'
    )


def test_labels_and_matchers_of_this_prometheus_are_used() -> None:
    labels = queries.Labels("exported_namespace", "exported_pod", ' cluster="eu", replica="0", ')
    promql = queries.range_vector(
        queries.SCRAPES_UP, labels=labels, namespace="ns", pods_regex="a", seconds=60
    )
    assert promql == (
        '{__name__="up",exported_namespace="ns",exported_pod=~"a",cluster="eu", replica="0"}[60s]'
    )


@pytest.mark.parametrize("name", ['a"} or vector(1) #', "a\\", "a\nb", "a.b", "a|b", "(a)*"])
def test_a_name_stays_a_name(name: str) -> None:
    promql = queries.engine_samples(name, queries.pods_regex([name]), 60)
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', promql)
    namespace, pod = (s.encode().decode("unicode_escape") for s in strings[1:3])
    assert namespace == name
    assert re.fullmatch(pod, name)
    assert not re.fullmatch(pod, "other")
    assert promql.endswith("}[60s]")


def test_every_query_says_its_unit_and_purpose() -> None:
    known = [value for value in vars(queries).values() if isinstance(value, queries.Query)]
    assert len(known) >= 4
    assert all(query.unit and query.description.endswith(".") for query in known)
