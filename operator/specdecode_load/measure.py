"""What was measured: events of the streams collected into a window, a window into a result.

Tokens count where they arrive, so a window needs no alignment with requests. A time to first token
belongs to the window in which that token came; a time per output token to the one in which its
request ended.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from specdecode_load.acceptance import Acceptance, AcceptanceTally, Report
from specdecode_load.spread import Spread
from specdecode_load.target import ErrorKind


@dataclass(frozen=True)
class Measurement:
    """One window's result.

    `requests` ended well; a failed one is in `errors` by its kind, one still running in neither.
    `reconnects` are requests that were sent again because a kept-alive connection had gone.
    `streams` is None when it changed inside the window. `generator_cpu` is the share of one core
    that the generator itself used: near 1, it was the generator that was measured. `acceptance` is
    None where the engine reported none.
    """

    streams: int | None
    seconds: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    tokens_per_second: float
    ttft_seconds: Spread | None
    tpot_seconds: Spread | None
    errors: dict[ErrorKind, int]
    reconnects: int
    generator_cpu: float
    acceptance: Acceptance | None = None

    @property
    def error_count(self) -> int:
        """Count the errors of all kinds."""
        return sum(self.errors.values())


@dataclass
class Window:
    """A measurement that is running or has ended; made by `ClosedLoop.start_window`."""

    streams: int | None
    on_stop: Callable[["Window"], None]
    requests: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    errors: Counter[ErrorKind] = field(default_factory=Counter)
    reconnects: int = 0
    _ttft_seconds: "array[float]" = field(default_factory=lambda: array("d"))
    _tpot_seconds: "array[float]" = field(default_factory=lambda: array("d"))
    _acceptance: AcceptanceTally = field(default_factory=AcceptanceTally)
    _result: Measurement | None = None

    def __post_init__(self) -> None:
        self._started_at = time.perf_counter()
        self._cpu_started_at = time.thread_time()

    @property
    def result(self) -> Measurement:
        """Return the result of an ended window, or of one that runs as it stands now."""
        return self._result or self._summarise()

    def stop(self) -> Measurement:
        """End the window and return its result; ending it again changes nothing."""
        if self._result is None:
            self._result = self._summarise()
            self.on_stop(self)
        return self._result

    def note_first_token(self, ttft_seconds: float) -> None:
        """Take the time from sending a request to its first token."""
        self._ttft_seconds.append(ttft_seconds)

    def note_request(
        self, *, prompt_tokens: int, tpot_seconds: float | None, drafting: Report = None
    ) -> None:
        """Take a request that ended well; no time per token if all came in one chunk."""
        self.requests += 1
        self._acceptance.add(drafting)
        self.prompt_tokens += prompt_tokens
        if tpot_seconds is not None:
            self._tpot_seconds.append(tpot_seconds)

    def _summarise(self) -> Measurement:
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        return Measurement(
            streams=self.streams,
            seconds=seconds,
            requests=self.requests,
            output_tokens=self.output_tokens,
            prompt_tokens=self.prompt_tokens,
            tokens_per_second=self.output_tokens / seconds,
            ttft_seconds=Spread.of(self._ttft_seconds),
            tpot_seconds=Spread.of(self._tpot_seconds),
            errors=dict(self.errors),
            reconnects=self.reconnects,
            generator_cpu=(time.thread_time() - self._cpu_started_at) / seconds,
            acceptance=self._acceptance.summarise(),
        )
