"""A way to an address that a test can cut, or let go silent as a lost node does."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class TcpProxy:
    """Forwards connections from a port of its own on the loopback address."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._refusing = True
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Keep all connections of now open, and forward nothing of them ever again."""
        self._flowing.clear()
        self._flowing = threading.Event()
        self._flowing.set()

    def mend(self) -> None:
        """Accept connections again."""
        self._refusing = False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._pairs.append((near, far))
            for source, target in ((near, far), (far, near)):
                flowing = self._flowing
                threading.Thread(
                    target=self._forward, args=(source, target, flowing), daemon=True
                ).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket, flowing: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                flowing.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
