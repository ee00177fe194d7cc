"""The same seed makes the same requests; no two share a prefix."""

import json
from typing import Any

from specdecode_load.lengths import Lengths
from specdecode_load.workload import Workload


def request(workload: Workload, number: int, tokens_per_character: float = 1.0) -> dict[str, Any]:
    body = workload.request(number, model="m", tokens_per_character=tokens_per_character)
    value: dict[str, Any] = json.loads(body)
    return value


def test_the_same_seed_and_number_make_the_same_request() -> None:
    workload = Workload(prompt=Lengths.parse("uniform:8:64"), seed=7)
    assert request(workload, 3) == request(workload, 3)


def test_no_two_prompts_share_a_prefix_that_an_engine_could_have_cached() -> None:
    prompts = [request(Workload(seed=7), number)["prompt"] for number in range(200)]
    prompts += [request(Workload(seed=8), number)["prompt"] for number in range(200)]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_prompts_are_words_of_letters() -> None:
    prompt = request(Workload(prompt=Lengths.parse("2000")), 0)["prompt"]
    assert len(prompt) == 2000
    assert set(prompt) == set("abcdefghijklmnopqrstuvwxyz ")


def test_a_prompt_is_as_long_as_the_tokenizer_needs_it_to_be() -> None:
    workload = Workload(prompt=Lengths.parse("100"))
    assert len(request(workload, 0, tokens_per_character=0.5)["prompt"]) == 200
    assert len(request(workload, 0, tokens_per_character=1000.0)["prompt"]) == 1


def test_lengths_are_drawn_for_each_request_on_its_own() -> None:
    workload = Workload(output=Lengths.parse("uniform:10:20"))
    lengths = {request(workload, number)["max_tokens"] for number in range(300)}
    assert lengths == set(range(10, 21))


def test_the_engine_is_asked_to_count_tokens_in_every_chunk() -> None:
    body = request(Workload(), 0)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0.0
    assert request(Workload(ignore_eos=False), 0)["ignore_eos"] is False
