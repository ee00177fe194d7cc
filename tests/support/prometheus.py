"""A real Prometheus for tests and the demo: fetched once into the cache, run on loopback.

Debian's package is unpacked and not installed, because installing it starts a service. It knows no
Kubernetes (2.42: "field kubernetes_sd_configs not found"), so for the pods of a cluster, or where
apt is missing, Go builds one. `python -m tests.support.prometheus --dir D --kubeconfig K` runs it
in the foreground. Its targets are the pods with the usual annotations, and any that are named:

    with LocalPrometheus(tmp_path, kubeconfig=path) as prometheus:
        prometheus.query("up")
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

GO_VERSION = "v0.316.0"  # of Prometheus 3, as Go modules number it

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_TELL_EVERY_SECONDS = 15.0
_LOG_TAIL_LINES = 15
_GO_TAGS = "remove_all_sd,enable_kubernetes_sd"  # all clouds' libraries would double the build


@dataclass(frozen=True)
class Binaries:
    """The two programs, of one version."""

    prometheus: Path
    promtool: Path


class PrometheusError(Exception):
    """Prometheus could not be fetched, started or asked."""


class LocalPrometheus:
    """Prometheus with its configuration, data and log in one folder; restarts keep the port.

    `static_targets` are HOST:PORT. Start it from a thread that lives as long as it shall: Linux
    ends the process with the thread that started it, and so none is left behind.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kubeconfig: Path | None = None,
        scrape_interval: str = "2s",
        static_targets: Sequence[str] = (),
        rule_files: Sequence[Path] = (),
        port: int | None = None,
    ) -> None:
        self.directory = directory
        self.port = port or _free_port()
        self._configuration = build_configuration(
            kubeconfig=kubeconfig,
            scrape_interval=scrape_interval,
            static_targets=static_targets,
            rule_files=rule_files,
        )
        self._discovers_pods = kubeconfig is not None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def promtool(self) -> Path:
        return fetch_binaries(kubernetes=self._discovers_pods).promtool

    @property
    def configuration_path(self) -> Path:
        return self.directory / "prometheus.yml"

    @property
    def log_path(self) -> Path:
        return self.directory / "prometheus.log"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def __enter__(self) -> "LocalPrometheus":
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
        """Start it and wait until it answers; raises PrometheusError with the end of its log."""
        program = fetch_binaries(kubernetes=self._discovers_pods).prometheus
        self.write_configuration()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *_ending_with_parent(),
                    str(program),
                    f"--config.file={self.configuration_path}",
                    f"--storage.tsdb.path={self.directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def write_configuration(self) -> None:
        """Write the configuration into the folder; starting does it too."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # JSON is YAML: nothing has to be quoted by hand.
        self.configuration_path.write_text(json.dumps(self._configuration, indent=2))

    def stop(self) -> None:
        """Stop it, by its own process id; a second stop does nothing."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an expression now; return the vector's samples with `metric` and `value`."""
        parameters = urllib.parse.urlencode({"query": expression})
        try:
            with _get(f"{self.url}/api/v1/query?{parameters}") as reply:
                samples: list[dict[str, Any]] = json.load(reply)["data"]["result"]
                return samples
        except urllib.error.HTTPError as error:
            raise PrometheusError(error.read().decode("utf-8", "replace")) from error

    def wait_for(self, expression: str, *, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Evaluate an expression until it has a result, and return it; raises PrometheusError."""
        deadline = time.monotonic() + seconds
        while not (samples := self.query(expression)):
            if time.monotonic() > deadline:
                raise PrometheusError(f"no result in {seconds:g} s: {expression}")
            time.sleep(0.1)
        return samples

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), _get(f"{self.url}/-/ready"):
                return
            time.sleep(0.05)
        status = self._process.poll()
        what = "is not ready" if status is None else f"ended with status {status}"
        tail = "\n".join(self.log_path.read_text().splitlines()[-_LOG_TAIL_LINES:])
        raise PrometheusError(f"Prometheus {what}; the end of {self.log_path}:\n{tail}")


def build_configuration(
    *,
    kubeconfig: Path | None,
    scrape_interval: str,
    static_targets: Sequence[str],
    rule_files: Sequence[Path] = (),
) -> dict[str, Any]:
    """Build the configuration: a job for the annotated pods, a job for the named targets."""
    jobs: list[dict[str, Any]] = []
    if static_targets:
        jobs.append({"job_name": "static", "static_configs": [{"targets": [*static_targets]}]})
    if kubeconfig is not None:
        discovery = {"role": "pod", "kubeconfig_file": str(kubeconfig.absolute())}
        jobs.append(
            {
                "job_name": "kubernetes-pods",
                "kubernetes_sd_configs": [discovery],
                "relabel_configs": _pod_relabeling(),
            }
        )
    return {
        "global": {"scrape_interval": scrape_interval, "evaluation_interval": scrape_interval},
        "rule_files": [str(path.absolute()) for path in rule_files],
        "scrape_configs": jobs,
    }


def fetch_binaries(*, kubernetes: bool = False) -> Binaries:
    """Return programs from the cache or the machine, or fetch them into the cache first.

    With `kubernetes` they can discover pods. Raises PrometheusError.
    """
    cache = _cache_folder()
    if (found := _find(cache, kubernetes=kubernetes)) is not None:
        return found
    with _only_one(cache):
        if (found := _find(cache, kubernetes=kubernetes)) is not None:
            return found
        if not kubernetes and shutil.which("apt-get") and shutil.which("dpkg-deb"):
            _fetch_package(cache)
        elif shutil.which("go"):
            _build_with_go(cache)
        else:
            raise PrometheusError("to get Prometheus, install Go (or Prometheus itself)")
        found = _find(cache, kubernetes=kubernetes)
    if found is None:
        raise PrometheusError(f"what was fetched into {cache} is not the Prometheus that is needed")
    return found


def _pod_relabeling() -> list[dict[str, Any]]:
    pod = "__meta_kubernetes_pod_"
    annotation = f"{pod}annotation_prometheus_io_"
    return [
        {"source_labels": [f"{annotation}scrape"], "action": "keep", "regex": "true"},
        # A pod that has ended keeps its address, which by then may be another pod's.
        {"source_labels": [f"{pod}phase"], "action": "drop", "regex": "Succeeded|Failed"},
        {
            "source_labels": [f"{annotation}path"],
            "regex": "(.+)",
            "target_label": "__metrics_path__",
        },
        {
            "source_labels": ["__address__", f"{annotation}port"],
            "regex": r"(.+?)(?::\d+)?;(\d+)",
            "replacement": "$1:$2",
            "target_label": "__address__",
        },
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{pod}name"], "target_label": "pod"},
        {"source_labels": [f"{pod}node_name"], "target_label": "node"},
    ]


def _cache_folder() -> Path:
    root = os.environ.get("SPECDECODE_CACHE") or Path.home() / ".cache" / "specdecode"
    return Path(root) / "prometheus"


def _find(cache: Path, *, kubernetes: bool) -> Binaries | None:
    for folder in [*sorted(cache.glob("[!.]*/"), reverse=True), None]:
        where = None if folder is None else str(folder)
        prometheus = shutil.which("prometheus", path=where)
        promtool = shutil.which("promtool", path=where)
        if prometheus and promtool and (not kubernetes or _discovers_pods(Path(promtool))):
            return Binaries(Path(prometheus), Path(promtool))
    return None


def _discovers_pods(promtool: Path) -> bool:
    configuration = build_configuration(kubeconfig=None, scrape_interval="1s", static_targets=())
    discovery = [{"role": "pod"}]
    job = {"job_name": "pods", "kubernetes_sd_configs": discovery}
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump({**configuration, "scrape_configs": [job]}, file)
        file.flush()
        command = [str(promtool), "check", "config", "--syntax-only", file.name]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _only_one(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_package(cache: Path) -> None:
    _say("getting Debian's prometheus package (19 MB)")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        work = Path(folder)
        try:
            _run(["apt-get", "download", "prometheus"], cwd=work)
        except PrometheusError:
            # Lists of our own: the machine's stay as they are, and no root is needed.
            lists = [f"-oDir::State::Lists={work}/lists", f"-oDir::Cache={work}/cache"]
            for name in ("lists/partial", "cache/archives/partial"):
                (work / name).mkdir(parents=True)
            _run(["apt-get", *lists, "update"], cwd=work)
            _run(["apt-get", *lists, "download", "prometheus"], cwd=work)
        package = next(work.glob("prometheus_*.deb"))
        _run(["dpkg-deb", "-x", str(package), "unpacked"], cwd=work)
        _keep(work / "unpacked/usr/bin", cache / package.name.split("_")[1].replace("%3a", ":"))


def _build_with_go(cache: Path) -> None:
    _say("building Prometheus with Go: some minutes, the first time only")
    module = "github.com/prometheus/prometheus/cmd"
    flags = [f"-tags={_GO_TAGS}", "-ldflags=-s -w"]
    with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as folder:
        for program in ("prometheus", "promtool"):
            _run(
                ["go", "install", *flags, f"{module}/{program}@{GO_VERSION}"],
                cwd=Path(folder),
                environment={"GOBIN": folder, "CGO_ENABLED": "0", "GOFLAGS": ""},
            )
        _keep(Path(folder), cache / GO_VERSION)


def _keep(folder: Path, target: Path) -> None:
    """Move both programs into the cache; the folder appears there complete or not at all."""
    ready = Path(tempfile.mkdtemp(dir=target.parent, prefix=".ready-"))
    for program in ("prometheus", "promtool"):
        shutil.move(folder / program, ready / program)
    ready.chmod(0o755)
    ready.rename(target)


def _run(command: list[str], *, cwd: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command, telling now and then that it goes on; raises PrometheusError."""
    started_at = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        while True:
            try:
                output, _ = process.communicate(timeout=_TELL_EVERY_SECONDS)
                break
            except subprocess.TimeoutExpired:
                what = f"{command[0]} {command[-1].rpartition('/')[2]}"
                _say(f"  {what}: {time.monotonic() - started_at:.0f} s")
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0:
        raise PrometheusError(f"{' '.join(command)} failed:\n{output.strip()[-1000:]}")


def _ending_with_parent() -> list[str]:
    """Make the command's beginning that ends it with its parent, where the system can do that."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _get(url: str) -> Any:
    # Without this opener a proxy of the environment would be asked for loopback addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(url, timeout=10)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run a Prometheus in the foreground until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.prometheus")
    parser.add_argument("--fetch", action="store_true", help="only fill the cache, for pods too")
    parser.add_argument("--dir", type=Path, help="configuration, data and log")
    parser.add_argument("--kubeconfig", type=Path, help="scrape the annotated pods of this cluster")
    parser.add_argument("--target", action="append", default=[], metavar="HOST:PORT")
    parser.add_argument("--scrape-interval", default="2s")
    parser.add_argument("--port", type=int, help="default: a free one")
    options = parser.parse_args()
    if options.fetch:
        print(fetch_binaries(kubernetes=True).prometheus)
        return
    if options.dir is None:
        parser.error("--dir is needed")
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    prometheus = LocalPrometheus(
        options.dir,
        kubeconfig=options.kubeconfig,
        scrape_interval=options.scrape_interval,
        static_targets=options.target,
        port=options.port,
    )
    with prometheus:
        print(prometheus.url, flush=True)
        stopping.wait()


if __name__ == "__main__":
    try:
        main()
    except PrometheusError as error:
        sys.exit(str(error))
