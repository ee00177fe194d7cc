"""A stored spec becomes models, or sentences with paths and without values."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api import parse, v1alpha1

SECRET = "sk-very-secret"


def problems(spec: Any) -> tuple[str, ...]:
    with pytest.raises(ValidationError) as refusal:
        parse.parse_spec({"spec": spec})
    return parse.problems_of(refusal.value)


def test_a_sound_spec_becomes_models() -> None:
    raw = {"kind": "SpecDecodeDeployment", "spec": {"model": {"name": "org/model"}}, "status": {}}
    spec = parse.parse_spec(raw)
    assert spec.model.name == "org/model"
    assert spec.tuning.mode is v1alpha1.TuningMode.ADVISE


def with_speculation(**changes: Any) -> dict[str, Any]:
    speculation = {"method": "ngram", "numSpeculativeTokens": 3, **changes}
    return {"model": {"name": "m"}, "speculation": speculation}


def with_engine(**changes: Any) -> dict[str, Any]:
    return {"model": {"name": "m"}, "engine": changes}


PROBLEMS = {
    "no spec": (None, "spec.model: must be set."),
    "a spec that is no map": (5, "spec: input should be a valid dictionary or instance of Spec."),
    "a field that is missing": ({"model": {}}, "spec.model.name: must be set."),
    "a field of a newer operator": (
        {"model": {"name": "m", "shards": SECRET}},
        "spec.model.shards: this operator knows no such field: take it out, or update the "
        "operator.",
    ),
    "a row of a table": (
        with_speculation(kTable=[{"minBatch": 1, "k": 1}, {"minBatch": 0, "k": 1}]),
        "spec.speculation.kTable[1].minBatch: input should be greater than or equal to 1.",
    ),
    "a word that is none of the choices": (
        {"model": {"name": "m"}, "tuning": {"mode": SECRET}},
        "spec.tuning.mode: input should be 'Off', 'Advise' or 'Auto'.",
    ),
    "a quantity": (
        with_engine(resources={"limits": {"cpu": SECRET}}),
        "spec.engine.resources.limits.cpu: should be a quantity such as 2, 500m or 16Gi.",
    ),
    "a resource with the name of a type": (
        with_engine(resources={"limits": {"int": -1}}),
        "spec.engine.resources.limits.int: should be a quantity such as 2, 500m or 16Gi.",
    ),
    "a duration": (
        with_engine(startupTimeout=SECRET),
        "spec.engine.startupTimeout: string should match pattern '^([0-9]{1,6}(ms|s|m|h|d))+$'.",
    ),
    "a variable's value": (
        with_engine(env=[{"name": "TOKEN", "value": [SECRET]}]),
        "spec.engine.env[0].value: input should be a valid string.",
    ),
}


@pytest.mark.parametrize("situation", PROBLEMS)
def test_a_problem_is_told_with_its_path_and_without_its_value(situation: str) -> None:
    spec, sentence = PROBLEMS[situation]
    assert problems(spec) == (sentence,)


def test_every_problem_is_told() -> None:
    spec = {"model": {"name": ""}, "replicas": -1, "tuning": {"minK": 1.5}}
    assert [p.partition(":")[0] for p in problems(spec)] == [
        "spec.model.name",
        "spec.replicas",
        "spec.tuning.minK",
    ]


@pytest.mark.parametrize("amount", ["500m", "2", 2, 0, "16Gi", "1.5", "1e3", "0.5"])
def test_quantities_are_those_of_kubernetes(amount: str | int) -> None:
    spec = parse.parse_spec({"spec": with_engine(resources={"limits": {"cpu": amount}})})
    assert spec.engine.resources.limits == {"cpu": amount}
