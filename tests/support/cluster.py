"""A real Kubernetes cluster for tests and the demo.

`LocalCluster` starts the control plane and the process node of `tests/cluster`. When
KUBECONFIG and SPECDECODE_TEST_IMAGE are both set it uses that cluster and that image
instead, so that the same tests run anywhere. From a shell:
`python -m tests.support.cluster up --dir DIR` and `... down --dir DIR`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

MODULE = Path(__file__).resolve().parents[1] / "cluster"
URL_ANNOTATION = "cluster.specdecode.io/url"

Answer = TypeVar("Answer")


class ClusterError(Exception):
    """The cluster could not do what was asked; the message says what to look at."""


def build_binary() -> Path:
    """Return the cluster binary, compiled first where needed (minutes; progress on stderr)."""
    # Its progress goes to stderr, its result to stdout.
    answer = subprocess.run(
        [sys.executable, str(MODULE / "build")], stdout=subprocess.PIPE, text=True, check=False
    )
    if answer.returncode != 0:
        raise ClusterError("the local cluster could not be built, see above")
    return Path(answer.stdout.splitlines()[-1])


def is_external() -> bool:
    """Say whether the user has named a cluster and an image of his own."""
    return bool(os.environ.get("KUBECONFIG") and os.environ.get("SPECDECODE_TEST_IMAGE"))


class LocalCluster:
    """A cluster for the time of a `with` block, or from start() to stop()."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        nodes: int = 3,
        gpus: int = 1,
        restart_backoff_seconds: float = 1.0,
        node_address: str | None = None,
    ) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="specdecode-cluster-"))
        self.external = is_external()
        self._options = [
            "--nodes", str(nodes),
            "--gpus", str(gpus),
            "--restart-backoff", f"{restart_backoff_seconds}s",
            *(["--node-address", node_address] if node_address else []),
        ]  # fmt: skip
        self._binary: Path | None = None
        self._forwards: list[subprocess.Popen[str]] = []

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

    @property
    def binary(self) -> Path:
        """The built binary, which is kubectl too."""
        if self._binary is None:
            self._binary = build_binary()
        return self._binary

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        if self.external:
            return Path(os.environ["KUBECONFIG"].split(os.pathsep)[0])
        return self.directory / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """The API server's audit log: a JSON object a line, level Metadata."""
        return self.directory / "audit.log"

    def start(self, *, owned: bool = True) -> None:
        """Return when nodes and the default ServiceAccount are ready.

        An owned cluster ends with this process, however this process ends.
        """
        if self.external:
            return
        owner = ["--owner", str(os.getpid())] if owned else []
        self._run("up", "--dir", str(self.directory), *self._options, *owner)

    def stop(self) -> None:
        """Stop the cluster and every process of its pods."""
        for forward in self._forwards:
            forward.terminate()
            forward.wait()
        self._forwards.clear()
        if not self.external and (self.directory / "lock").exists():
            self._run("down", "--dir", str(self.directory))
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def set_image(
        self, name: str, entrypoint: Sequence[str], env: Mapping[str, str] | None = None
    ) -> str:
        """Let `name` be an image that runs this command; return the name for pods to use."""
        if self.external:
            return os.environ["SPECDECODE_TEST_IMAGE"]
        path = self.directory / "images.json"
        images = json.loads(path.read_text()) if path.exists() else {}
        images[name] = {"entrypoint": list(entrypoint), "env": dict(env or {})}
        self._write_images(path, images)
        return name

    def remove_image(self, name: str) -> None:
        """Forget an image, so that pods with it cannot be started any more."""
        path = self.directory / "images.json"
        images = json.loads(path.read_text())
        images.pop(name, None)
        self._write_images(path, images)

    @staticmethod
    def _write_images(path: Path, images: Mapping[str, object]) -> None:
        # The agent may read at any moment: it must never see half a file.
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(images, indent=2))
        fresh.replace(path)

    def service_url(self, namespace: str, name: str, *, timeout_seconds: float = 30.0) -> str:
        """Return a URL of a Service that works from this machine; wait for it."""
        if self.external:
            return self._forward_service(namespace, name, timeout_seconds)
        path = f"jsonpath={{.metadata.annotations.{URL_ANNOTATION.replace('.', chr(92) + '.')}}}"

        def read_url() -> str:
            try:
                return self.kubectl("get", "service", name, "-n", namespace, "-o", path)
            except ClusterError:
                return ""

        return wait_for(
            read_url, what=f"the URL of service {namespace}/{name}", timeout_seconds=timeout_seconds
        )

    def _forward_service(self, namespace: str, name: str, timeout_seconds: float) -> str:
        # Unlike the local balancer this reaches one pod only, and ends with it.
        port = self.kubectl(
            "get", "service", name, "-n", namespace, "-o", "jsonpath={.spec.ports[0].port}"
        )
        log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        command = [*self._kubectl_command(), "port-forward", "-n", namespace, f"service/{name}"]
        forward = subprocess.Popen([*command, f":{port}"], stdout=log, stderr=log, text=True)
        self._forwards.append(forward)

        def read_port() -> str:
            found = re.search(r"127\.0\.0\.1:(\d+) ->", Path(log.name).read_text())
            return found[1] if found else ""

        local = wait_for(
            read_port, what=f"port-forward to {namespace}/{name}", timeout_seconds=timeout_seconds
        )
        return f"http://127.0.0.1:{local}"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl prints; raise ClusterError with its words when it fails."""
        answer = subprocess.run(
            [*self._kubectl_command(), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {answer.stderr.strip()}")
        return answer.stdout

    def _kubectl_command(self) -> list[str]:
        # With somebody's own cluster his own kubectl will do; no need to build ours.
        own = shutil.which("kubectl") if self.external else None
        command = [own] if own else [str(self.binary), "kubectl"]
        return [*command, "--kubeconfig", str(self.kubeconfig)]

    def _run(self, *arguments: str) -> None:
        answer = subprocess.run(
            [str(self.binary), *arguments], capture_output=True, text=True, check=False
        )
        if answer.returncode != 0:
            raise ClusterError(
                f"cluster {arguments[0]}: {answer.stderr.strip().removeprefix('error: ')}"
            )


def wait_for(
    look: Callable[[], Answer | None],
    *,
    what: str,
    timeout_seconds: float = 30.0,
    pause_seconds: float = 0.05,
) -> Answer:
    """Return the first true answer of `look`; raise ClusterError when time is over."""
    end = time.monotonic() + timeout_seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise ClusterError(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(pause_seconds)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Start or stop a cluster that outlives this command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "binary"])
    parser.add_argument("--dir", type=Path, help="folder of the cluster")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each node")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "binary":
            print(build_binary())
            return 0
        if chosen.dir is None:
            parser.error("--dir is needed")
        cluster = LocalCluster(chosen.dir, nodes=chosen.nodes, gpus=chosen.gpus)
        cluster.external = False
        if chosen.command == "up":
            cluster.start(owned=False)
            print(f"export KUBECONFIG={cluster.kubeconfig.resolve()}")
        else:
            cluster.stop()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
