"""The closed loop: a number of streams, each sending its next request when the last has ended.

A stream holds one conversation at a time and begins another when it is over. The number of streams
can change while it runs, and windows of measurement can be taken from it at any time; neither
restarts a stream. An engine that dies and comes back is waited for: each stream tries again
after a short pause that grows to a second, and the failures are counted by kind.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from types import TracebackType

from specdecode_load.completion import Completion, complete
from specdecode_load.connection import Connection, build_tls
from specdecode_load.conversation import Conversation
from specdecode_load.measure import Measurement, Window
from specdecode_load.target import RequestError, Target
from specdecode_load.workload import Workload

MOST_STREAMS = 4096

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0


class ClosedLoop:
    """Holds `streams` requests running against a target; use it as an async context."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        *,
        streams: int = 1,
        most_requests: int | None = None,
    ) -> None:
        self._target = target
        self._tls = build_tls(target)
        self._workload = workload
        self._streams = _checked(streams)
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._windows: list[Window] = []
        self._most_requests = most_requests
        self._sent_requests = 0
        self._begun_conversations = 0
        self._pauses = random.Random(workload.seed)
        self.last_error: RequestError | None = None

    async def __aenter__(self) -> "ClosedLoop":
        self._start_missing()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def streams(self) -> int:
        """Return the number of streams that is held."""
        return self._streams

    @property
    def is_exhausted(self) -> bool:
        """Tell whether `most_requests` have been sent and all of them have ended."""
        return self._has_sent_all() and all(worker.done() for worker in self._workers.values())

    def set_concurrency(self, streams: int) -> None:
        """Change the number of streams; those too many end with the request they are in."""
        if _checked(streams) == self._streams:
            return
        self._streams = streams
        for window in self._windows:
            window.streams = None
        self._start_missing()

    def start_window(self) -> Window:
        """Start to measure from now on; ended by its `stop`."""
        window = Window(streams=self._streams, on_stop=self._windows.remove)
        self._windows.append(window)
        return window

    @contextlib.asynccontextmanager
    async def window(self) -> AsyncIterator[Window]:
        """Measure for as long as the context lasts; then read `result` of the window."""
        window = self.start_window()
        try:
            yield window
        finally:
            window.stop()

    async def stop(self) -> None:
        """End open windows, give up all running requests and close the connections."""
        for window in list(self._windows):
            window.stop()
        self._streams = 0
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        ends = await asyncio.gather(*workers, return_exceptions=True)
        self._workers.clear()
        for end in ends:
            if isinstance(end, Exception):  # a stream that broke was not held: say so
                raise end

    def _note_tokens(self, tokens: int, ttft_seconds: float | None) -> None:
        for window in self._windows:
            window.output_tokens += tokens
            if ttft_seconds is not None:
                window.note_first_token(ttft_seconds)

    def _start_missing(self) -> None:
        for number in range(self._streams):
            worker = self._workers.get(number)
            if worker is None or worker.done():
                self._workers[number] = asyncio.create_task(self._work(number))

    async def _work(self, number: int) -> None:
        failures = 0
        talk: Conversation | None = None
        link = Connection(self._target, tls=self._tls, on_reconnect=self._note_reconnect)
        with contextlib.closing(link) as connection:
            while number < self._streams and not self._has_sent_all():
                talk = talk or self._begin_conversation()
                try:
                    completion = await self._ask(connection, talk)
                except RequestError as error:
                    failures += 1
                    talk = None  # an answer is missing: what would follow is another conversation
                    self._note_error(error)
                    await asyncio.sleep(self._pause_seconds(failures))
                else:
                    failures = 0
                    self._note_request(completion)
                    talk.hear(completion.text)
                    talk = None if talk.is_over else talk

    async def _ask(self, connection: Connection, talk: Conversation) -> Completion:
        self._sent_requests += 1
        return await complete(connection, talk.ask(), self._note_tokens)

    def _has_sent_all(self) -> bool:
        return self._most_requests is not None and self._sent_requests >= self._most_requests

    def _begin_conversation(self) -> Conversation:
        number = self._begun_conversations
        self._begun_conversations += 1
        return self._workload.conversation(
            number,
            model=self._target.model,
            tokens_per_character=self._target.tokens_per_character,
        )

    def _note_request(self, completion: Completion) -> None:
        for window in self._windows:
            window.note_request(
                prompt_tokens=completion.prompt_tokens,
                tpot_seconds=completion.tpot_seconds,
                drafting=completion.drafting,
            )

    def _note_error(self, error: RequestError) -> None:
        self.last_error = error
        for window in self._windows:
            window.errors[error.kind] += 1

    def _note_reconnect(self) -> None:
        for window in self._windows:
            window.reconnects += 1

    def _pause_seconds(self, failures: int) -> float:
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10))
        return longest * self._pauses.uniform(0.5, 1.0)


async def run_stage(
    target: Target,
    workload: Workload,
    *,
    streams: int,
    seconds: float,
    warmup_seconds: float = 0.0,
) -> Measurement:
    """Load a target with a number of streams and return what the seconds after the warm-up gave."""
    async with ClosedLoop(target, workload, streams=streams) as loop:
        await asyncio.sleep(warmup_seconds)
        async with loop.window() as window:
            await asyncio.sleep(seconds)
    return window.result


def _checked(streams: int) -> int:
    if not 1 <= streams <= MOST_STREAMS:
        raise ValueError(f"{streams} streams: from 1 to {MOST_STREAMS} are possible")
    return streams
