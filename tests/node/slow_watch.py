"""A way to the API server on which changes of ConfigMaps arrive late.

A kubelet that syncs a pod before its watch has shown the new ConfigMap writes the old files again,
and looks next after a minute. How late the watch is decides who wins; here a test decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import yarl
from aiohttp import web

_OF_ONE_HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding"})


class SlowWatch:
    """A plain HTTP proxy on loopback that speaks to the API server as the kubelet."""

    def __init__(self, server: str, pki: Path) -> None:
        self._server = server
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "agent.crt", pki / "agent.key")
        self._events = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.delay_seconds = 0.0
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._events.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._events) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        forever = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=forever, auto_decompress=False
        ) as self._session:
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._started.set()
            await self._stopping.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        late = "/configmaps" in request.path and "watch" in request.query
        async with self._session.request(
            request.method,
            yarl.URL(self._server + request.raw_path, encoded=True),
            headers=_pass_on(request.headers),
            data=await request.read(),
            allow_redirects=False,
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_pass_on(answer.headers))
            await response.prepare(request)
            with contextlib.suppress(ConnectionResetError):  # the kubelet was stopped
                async for part in answer.content.iter_any():
                    if late:
                        await asyncio.sleep(self.delay_seconds)
                    await response.write(part)
                await response.write_eof()
            return response


def _pass_on(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_HOP]
