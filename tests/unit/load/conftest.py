"""The paced server and a wait for a condition, shared by the load generator's tests."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

Until = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """Wait until a condition holds; the test fails if it does not within 20 s."""

    async def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the condition never held"
            await asyncio.sleep(0.01)

    return wait
