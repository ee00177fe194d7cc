"""The operator as a process of its own, as a user runs it outside a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.support.waiting import wait_until

COMMAND = Path(sys.executable).parent / "specdecode-operator"


class OperatorProcess:
    """Starts and stops the operator; its log is a file. It can be killed and started again."""

    def __init__(
        self,
        directory: Path,
        kubeconfig: Path,
        settings: Mapping[str, str] | None = None,
        *,
        command: Sequence[str] = (str(COMMAND),),
    ) -> None:
        self._command = list(command)
        self.log_path = directory / "operator.log"
        self._environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(directory),
            "KUBECONFIG": str(kubeconfig),
            "SPECDECODE_LEASE": "off",
            "SPECDECODE_LISTEN": "127.0.0.1:0",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; it is watching when its log says so, which nobody has to wait for."""
        self._log = self.log_path.open("ab")
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=self._log
        )

    def kill(self) -> None:
        """End it as a node failure would: at once, nothing tidied."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it as a kubelet would, and kill it after ten seconds."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()

    def check_alive(self) -> None:
        """Raise with the end of its log when it ended by itself."""
        if self._process is None or self._process.poll() is None:
            return
        tail = self.log_path.read_text(errors="replace")[-4000:]
        raise AssertionError(f"the operator ended with {self._process.returncode}:\n{tail}")

    def wait_for_log(self, text: str, *, seconds: float = 30) -> None:
        """Wait until its log holds a text."""
        wait_until(
            lambda: text in self.log_path.read_text(errors="replace"),
            what=f"{text!r} in the operator's log",
            seconds=seconds,
        )
