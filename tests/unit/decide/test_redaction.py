"""Nothing secret and nothing a user wrote leaves through a status or an Event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.decide.redaction import MAX_CHARACTERS, redact

SECRET = "s3cr3tV4lue99"
PLANTED = {
    "an authorization header": f"headers: Authorization: Bearer {SECRET}",
    "a header in a dictionary": f"{{'authorization': 'Bearer {SECRET}', 'x': 1}}",
    "basic authorization": f"Proxy-Authorization: Basic {SECRET}==",
    "a bearer alone": f"got bearer {SECRET} from client",
    "an API key header": f"X-Api-Key: {SECRET}",
    "an option": f"vllm serve m --api-key {SECRET} --port 8000",
    "an option with =": f"--hf-token={SECRET}",
    "an argument list": f"non-default args: {{'api_key': ['{SECRET}', 'k2'], 'model': 'm'}}",
    "the second of several keys": f"args: {{'api_key': ['k1', '{SECRET}'], 'model': 'm'}}",
    "a variable": f"HF_TOKEN={SECRET} started",
    "a variable in quotes": f'AWS_SECRET_ACCESS_KEY="{SECRET} with blanks"',
    "JSON": f'{{"access_token": "{SECRET}", "a": 1}}',
    "a password in words": f"password: {SECRET}",
    "a Hugging Face token": f"401 for hf_{SECRET}abcdef",
    "an OpenAI key": f"invalid key sk-proj-{SECRET}abcdef",
    "a GitHub token": f"clone with ghp_{SECRET}abcdef",
    "a JSON web token": f"token eyJhbGciOi.{SECRET}.sig",
    "a URL with credentials": f"fetching https://user:{SECRET}@host/path",
    "a URL with a token as user": f"fetching https://{SECRET}@host/path",
    "a signed URL": f"GET https://bucket/x?X-Amz-Signature={SECRET}&X=1 403",
    "a query": f"GET /v1/models?api_key={SECRET} HTTP/1.1",
    "a database URL": f"postgresql://app:{SECRET}@db:5432/x refused",
    "a cookie": f"Cookie: session={SECRET}",
    "a private key": f"-----BEGIN RSA PRIVATE KEY----- {SECRET}",
    "a prompt": f"Received request c-1: prompt: 'My name is {SECRET}', params: SamplingParams(n=1)",
    "an answer": f"Generated response c-1: output: '{SECRET} it is'",
    "a request body": f'body: {{"messages": [{{"role": "user", "content": "{SECRET}"}}]}}',
    "token ids": f"prompt_token_ids=[1, 2, '{SECRET}']",
    "an image": f"data:image/png;base64,{SECRET}AAAA==",
    "a body in an error": f'ValueError: bad request {{"prompt": "tell {SECRET}"}}',
    "a secret across the cut": "x" * (MAX_CHARACTERS - 12) + f" api_key={SECRET}",
}


@pytest.mark.parametrize("line", PLANTED.values(), ids=PLANTED)
def test_a_planted_secret_is_gone(line: str) -> None:
    assert SECRET not in redact(line)
    assert SECRET[:6] not in redact(line)


@pytest.mark.parametrize(
    "line",
    [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "NVRM: Xid (PCI:0000:81:00): 48, pid=72921, name=VLLM::Worker_TP, Double Bit ECC error",
        "ValueError: max_num_batched_tokens (512) is smaller than max_model_len (4096)",
        "GPU KV cache size: 342,150 tokens, num_speculative_tokens=5, max_tokens: 16",
        "RuntimeError: The size of tensor a (7) must match the size of tensor b (5)",
        "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/TYPES.html for more",
        "Decode batch, #token: 100765, token usage: 0.24, accept len: 2.27",
        "AttributeError: 'NoneType' object has no attribute 'tokenizer'",
    ],
)
def test_what_tells_of_the_fault_stays(line: str) -> None:
    assert redact(line) == line


def test_a_long_line_is_cut() -> None:
    assert len(redact("error " * 1000)) == MAX_CHARACTERS


@given(st.text(max_size=2000))
def test_any_text_becomes_one_short_line(text: str) -> None:
    line = redact(text)
    assert len(line) <= MAX_CHARACTERS
    assert "\n" not in line
