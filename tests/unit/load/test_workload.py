"""The same seed makes the same requests; no two share a prefix."""

import json
from typing import Any

import pytest

from specdecode_load.conversation import Message, Script, Turn
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


def test_further_turns_leave_the_first_request_as_it_was() -> None:
    assert request(Workload(seed=7, turns=4), 3) == request(Workload(seed=7), 3)


def test_the_turns_of_a_conversation_are_drawn_each_on_its_own() -> None:
    workload = Workload(prompt=Lengths.parse("uniform:100:900"), seed=7, turns=3)
    talk = workload.conversation(0, model="m", tokens_per_character=1.0)
    lengths, said = [], 0
    while not talk.is_over:
        prompt = json.loads(talk.ask().body)["prompt"]
        lengths.append(len(prompt) - said)
        said = len(prompt)
        talk.hear("")
    assert len(set(lengths)) == 3
    assert all(100 <= length <= 900 for length in lengths)


def test_a_share_of_the_prompts_is_long_and_the_others_stay_as_they_were() -> None:
    plain = Workload(seed=7)
    mixed = Workload(seed=7, long_share=0.1, long_prompt=Lengths.parse("900"))
    pairs = [(request(plain, number), request(mixed, number)) for number in range(1000)]
    long = [mine for theirs, mine in pairs if mine != theirs]
    assert {len(body["prompt"]) for body in long} == {900}
    assert len(long) == pytest.approx(100, abs=40)


def test_all_prompts_may_be_long() -> None:
    workload = Workload(long_share=1.0, long_prompt=Lengths.parse("900"))
    assert {len(request(workload, number)["prompt"]) for number in range(20)} == {900}


def script(text: str, output_tokens: int | None = None) -> Script:
    return Script((Turn((Message(text),), output_tokens),))


def test_prompts_of_a_file_come_in_its_order_and_again_from_its_start() -> None:
    workload = Workload(scripts=(script("a"), script("b"), script("c")))
    prompts = [request(workload, number)["prompt"] for number in range(5)]
    assert prompts == ["a", "b", "c", "a", "b"]


def test_a_line_may_limit_its_answer_and_the_workload_does_otherwise() -> None:
    scripts = (script("a", 5), script("b"))
    workload = Workload(output=Lengths.parse("uniform:50:60"), scripts=scripts)
    assert request(workload, 0)["max_tokens"] == 5
    assert 50 <= request(workload, 1)["max_tokens"] <= 60


def test_long_prompts_mix_into_those_of_a_file() -> None:
    workload = Workload(scripts=(script("a"),), long_share=0.5, long_prompt=Lengths.parse("900"))
    lengths = [len(request(workload, number)["prompt"]) for number in range(200)]
    assert set(lengths) == {1, 900}


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "no turn": ({"turns": 0}, "from 1 to"),
    "too many turns": ({"turns": 1001}, "from 1 to"),
    "a share above one": ({"long_share": 1.5, "long_prompt": Lengths.parse("9")}, "give 0 to 1"),
    "a share that is no number": ({"long_share": float("nan")}, "give 0 to 1"),
    "a share without a length": ({"long_share": 0.5}, "give both"),
    "a length without a share": ({"long_prompt": Lengths.parse("9")}, "give both"),
}


@pytest.mark.parametrize(("options", "sentence"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_workload_that_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Workload(**options)
