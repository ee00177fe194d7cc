"""One real vLLM engine as a test drives it: its files, its load, its metrics, its end."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specdecode_load import BackgroundLoop, Lengths, Target, Workload
from tests.support.engine import PLANT_VARIABLE, Engine
from tests.support.waiting import wait_until

Rows = list[list[int]]

START_SECONDS = 600.0  # 48 s when idle; a busy machine has taken ten times that
MAX_BATCH = 64
K_MAX = 7
START_TABLE = [[1, 58, 7], [59, 59, 5], [60, 60, 3], [61, 61, 2], [62, 63, 1], [64, 64, 0]]


class Scrape:
    """The samples of one look at /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: object) -> float:
        """Sum the samples of a name that carry these labels."""
        return sum(value for _, value in self._matching(name, labels))

    def by_label(self, name: str, label: str, **labels: object) -> dict[str, float]:
        """Sum the samples of a name by the values of one label."""
        sums: dict[str, float] = {}
        for sample_labels, value in self._matching(name, labels):
            sums[sample_labels[label]] = sums.get(sample_labels[label], 0.0) + value
        return sums

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of a name's only sample."""
        ((labels, _),) = self._matching(name, {})
        return labels

    def _matching(
        self, name: str, labels: dict[str, object]
    ) -> Iterator[tuple[dict[str, str], float]]:
        wanted = {key: str(value) for key, value in labels.items()}
        for sample in self._samples:
            if sample.name == name and wanted.items() <= sample.labels.items():
                yield sample.labels, sample.value


class RunningServer:
    """A server started as in its image, with its mounts in a folder of the test."""

    def __init__(
        self, folder: Path, command: Sequence[str], environment: Mapping[str, str], *, port: int
    ) -> None:
        self.folder = folder
        (folder / "tables").mkdir(parents=True)
        self.termination_log.touch()
        self.plant = folder / "plant"
        self._generation = 0
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **self._mounts(), **environment},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _mounts(self) -> dict[str, str]:
        return {
            "SPECDECODE_TABLES": str(self.folder / "tables"),
            "SPECDECODE_ARM": str(self.folder / "arm"),
            "SPECDECODE_TERMINATION_LOG": str(self.termination_log),
            "SPECDECODE_METRICS_DIR": str(self.folder / "metrics"),
        }

    @property
    def termination_log(self) -> Path:
        """Return the file that stands for /dev/termination-log."""
        return self.folder / "termination-log"

    def wait_until_ready(self) -> None:
        """Wait for /health; fail at once, with the log's end, when the engine ends instead."""
        wait_until(self._is_ready, what="a healthy engine", seconds=START_SECONDS)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            code = self.process.returncode
            raise AssertionError(f"the engine ended with {code}:\n{self.log[-4000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End the engine and what it started; each start is a session of its own."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        # A killed main process leaves the others behind; in a container they would go with it.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._log.close()

    def scrape(self) -> Scrape:
        """Look at /metrics."""
        return Scrape(self.read_metrics())

    def read_metrics(self) -> str:
        """Return what /metrics says, as it stands."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            return str(reply.read().decode())

    def write_table(self, rows: Rows, *, enabled: bool = True, arm: str = "stable") -> int:
        """Write a table file; return its generation."""
        self._generation += 1
        table = {"schema": 1, "generation": self._generation, "enabled": enabled, "rows": rows}
        self.write_text(json.dumps(table), arm=arm)
        return self._generation

    def write_text(self, text: str | bytes, *, arm: str = "stable") -> None:
        """Put anything where a table file belongs, whole."""
        self._write("tables/" + arm + ".json", text)

    def set_arm(self, arm: str) -> None:
        """Write the arm as the downward API does."""
        self._write("arm", arm)

    def _write(self, name: str, text: str | bytes) -> None:
        draft = self.folder / "draft"
        draft.write_bytes(text.encode() if isinstance(text, str) else text)
        draft.replace(self.folder / name)

    def apply(self, rows: Rows, *, enabled: bool = True, arm: str = "stable") -> float:
        """Write a table and wait until the engine says it is in force; return the seconds."""
        started = time.monotonic()
        generation = self.write_table(rows, enabled=enabled, arm=arm)
        self.wait_for(specdecode_table_generation=generation, specdecode_table_stale=0)
        return time.monotonic() - started

    def wait_for(self, **values: float) -> None:
        """Wait until these gauges have these values."""

        def is_so() -> bool:
            scrape = self.scrape()
            return all(scrape.total(name) == value for name, value in values.items())

        wait_until(is_so, what=str(values), seconds=30, pause_seconds=0.05)

    @contextmanager
    def load(self, streams: int, *, output_tokens: int = 64) -> Iterator[BackgroundLoop]:
        """Hold a closed loop of so many streams."""
        workload = Workload(output=Lengths("fixed", output_tokens))
        with BackgroundLoop(Target(self.url, "chat"), workload, streams=streams) as loop:
            # At the end of a short request a stream is between two: never all run at once.
            wait_until(
                lambda: self.scrape().total("vllm:num_requests_running") > streams / 2,
                what=f"{streams} running requests",
                seconds=60,
            )
            yield loop

    @property
    def log(self) -> str:
        """Return what the server has written so far, stdout and stderr together."""
        return (self.folder / "log").read_text(errors="replace")

    def find_process(self, title: str) -> int:
        """Return the pid of the server's only process whose title contains this."""
        (pid,) = self.find_processes(title)
        return pid

    def find_processes(self, title: str) -> list[int]:
        """List the pids of the server's processes whose titles contain this."""
        return sorted(
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
            if _is_of_session(pid, self.process.pid) and title in _read_title(pid)
        )

    def complete(self, prompt: str, *, tokens: int) -> str:
        """Return the greedy completion of a prompt."""
        return str(self.ask(prompt, tokens=tokens)["choices"][0]["text"])

    def ask(self, prompt: str, *, tokens: int) -> dict[str, Any]:
        """Return the whole answer to a greedy completion."""
        body = {
            "model": "chat",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def observe(self, steps: int, **labels: object) -> "Difference":
        """Watch until so many more decode-only steps were counted under these labels."""
        before = self.scrape()
        start = before.total("specdecode_steps_total", **labels)
        after = wait_until(
            lambda: (
                (now := self.scrape()).total("specdecode_steps_total", **labels) >= start + steps
                and now
            ),
            what=f"{steps} decode-only steps with {labels}",
            seconds=60,
        )
        assert isinstance(after, Scrape)
        return Difference(before, after)


class RunningEngine(RunningServer):
    """The real engine, started as the image starts it."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *arguments: str,
        model: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        command = [str(engine.entrypoint), str(model), *build_flags(port), *arguments]
        settings = {**self._settings(folder), **(environment or {})}
        super().__init__(folder, command, settings, port=port)

    @staticmethod
    def _settings(folder: Path) -> dict[str, str]:
        return {
            PLANT_VARIABLE: str(folder / "plant"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }


def _is_of_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session
    except OSError:
        return False


def _read_title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def build_flags(port: int) -> list[str]:
    """List the flags of every engine under test."""
    return [
        "--served-model-name=chat",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--max-num-seqs={MAX_BATCH}",
        "--max-model-len=1024",
        "--dtype=float32",
        "--enforce-eager",
        "--scheduler-cls=specdecode_vllm.scheduler.make_scheduler",
        "--shutdown-timeout=1",
    ]


class Difference:
    """What was counted between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before = before
        self._after = after

    def total(self, name: str, **labels: object) -> float:
        """Return the increase of a counter."""
        return self._after.total(name, **labels) - self._before.total(name, **labels)

    def by_label(self, name: str, label: str, **labels: object) -> dict[str, float]:
        """Return the increases of a counter by one label, those above 0."""
        before = self._before.by_label(name, label, **labels)
        after = self._after.by_label(name, label, **labels)
        changes = {key: value - before.get(key, 0.0) for key, value in after.items()}
        return {key: change for key, change in changes.items() if change > 0}
