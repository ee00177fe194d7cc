"""The closed loop for callers without an event loop: it runs in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from specdecode_load.loop import ClosedLoop
from specdecode_load.measure import Measurement, Window
from specdecode_load.target import Target
from specdecode_load.workload import Workload

_Value = TypeVar("_Value")


class BackgroundLoop:
    """A `ClosedLoop` in a daemon thread; every method may be called from any other thread."""

    def __init__(self, target: Target, workload: Workload, *, streams: int = 1) -> None:
        self._loop = ClosedLoop(target, workload, streams=streams)
        self._events = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="specdecode-load", daemon=True)

    def __enter__(self) -> "BackgroundLoop":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def streams(self) -> int:
        """Return the number of streams that is held."""
        return self._loop.streams

    def set_concurrency(self, streams: int) -> None:
        """Change the number of streams; those too many end with the request they are in."""
        self._call(lambda: self._loop.set_concurrency(streams))

    def start_window(self) -> "BackgroundWindow":
        """Start to measure from now on; ended by its `stop`."""
        return BackgroundWindow(self._call(self._loop.start_window), self._call)

    def measure(self, seconds: float) -> Measurement:
        """Measure for a number of seconds and return the result."""
        window = self.start_window()
        time.sleep(seconds)
        return window.stop()

    def stop(self) -> None:
        """End open windows, give up all running requests and end the thread."""
        if self._thread.is_alive():
            self._events.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._events) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        async with self._loop:
            await self._stopping.wait()

    def _call(self, function: Callable[[], _Value]) -> _Value:
        if not self._thread.is_alive():
            return function()

        async def call() -> _Value:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._events).result()


class BackgroundWindow:
    """A window of a `BackgroundLoop`."""

    def __init__(
        self, window: Window, call: Callable[[Callable[[], Measurement]], Measurement]
    ) -> None:
        self._window = window
        self._call = call

    @property
    def result(self) -> Measurement:
        """Return the result of an ended window, or of one that runs as it stands now."""
        return self._call(lambda: self._window.result)

    def stop(self) -> Measurement:
        """End the window and return its result."""
        return self._call(self._window.stop)
