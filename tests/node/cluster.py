"""A cluster whose one node is real: kubelet, containerd and runc beside the local control plane.

It lives in the namespaces of `namespaces`, which also end what it leaves: containers go on when
their containerd ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specdecode_operator.manifests.pod import GPU_RESOURCE
from tests.node import image, packages
from tests.node.namespaces import BRIDGE, NODE_ADDRESS, POD_NETWORK
from tests.support.cluster import MODULE, ClusterError, LocalCluster, wait_for

NODE = "node-1"
SOCKET = "/run/containerd/containerd.sock"
NETWORK = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": POD_NETWORK, "gateway": NODE_ADDRESS}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
    ],
}
# restrict_oom_score_adj: our namespaces may lack the right to lower it.
CONTAINERD = """version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{runtime}/usr/lib/cni"
conf_dir = "{network}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def build_kubelet() -> Path:
    """Return the kubelet, compiled first where needed (minutes; progress on stderr)."""
    command = [sys.executable, str(MODULE / "build"), "kubelet"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode != 0:
        raise ClusterError("the kubelet could not be built, see above")
    return Path(answer.stdout.splitlines()[-1])


class NodeCluster(LocalCluster):
    """The control plane with a node of `gpus` GPUs that are only counted."""

    def __init__(self, directory: Path, *, images: Sequence[image.Image], gpus: int = 8) -> None:
        super().__init__(directory, nodes=0, node_address=NODE_ADDRESS)
        self.external = False
        self._images = images
        self._gpus = gpus
        self._node = directory / "node"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._runtime = packages.fetch_runtime()
        self._environment = {
            "PATH": f"{self._runtime}/usr/bin:{self._runtime}/usr/sbin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(str(p) for p in self._runtime.glob("usr/lib/*-linux-gnu")),
            "HOME": str(self._node),
        }

    def start(self, *, owned: bool = True) -> None:
        """Return when the node is Ready and offers its GPUs."""
        self._node.mkdir(parents=True)
        self._start_containerd()
        with ThreadPoolExecutor() as threads:
            # Half a gigabyte is unpacked while the control plane starts.
            archive = str(image.make_archive(self._images))
            imported = threads.submit(self._ctr, "images", "import", archive)
            super().start(owned=owned)
            imported.result()
        self.start_kubelet()
        self._offer_gpus()

    def stop(self) -> None:
        """Stop everything; containers end with the namespaces."""
        for name in list(self._processes):
            self._stop_process(name)
        super().stop()

    def start_kubelet(self, *, server: str | None = None) -> None:
        """Start the kubelet and wait for its node, talking to another address than the real one.

        One that runs is stopped first; its containers stay.
        """
        self._stop_process("kubelet")
        before = self._heartbeat()
        configuration = self._node / "kubelet.json"
        configuration.write_text(json.dumps(self._configure_kubelet(), indent=2))
        self._start_process(
            "kubelet",
            *(str(build_kubelet()), f"--config={configuration}"),
            *(f"--kubeconfig={self._write_kubeconfig(server)}", f"--hostname-override={NODE}"),
            *(f"--node-ip={NODE_ADDRESS}", f"--root-dir={self._node / 'kubelet'}"),
        )
        wait_for(
            lambda: self._heartbeat() not in ("", before),
            what=f"a Ready node, see {self._log('kubelet')}",
            timeout_seconds=60,
        )

    def _heartbeat(self) -> str:
        path = 'jsonpath={.status.conditions[?(@.status=="True")].lastHeartbeatTime}'
        return self.kubectl("get", "node", NODE, "--ignore-not-found", "-o", path)

    def _configure_kubelet(self) -> dict[str, object]:
        pki = self.directory / "pki"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": NODE_ADDRESS,
            "tlsCertFile": str(pki / "agent.crt"),
            "tlsPrivateKeyFile": str(pki / "agent.key"),
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "failSwapOn": False,
            "resolvConf": "",
            "volumePluginDir": str(self._node / "plugins"),
            "podLogsDir": str(self._node / "pod-logs"),
            "nodeStatusUpdateFrequency": "2s",
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
            # The machine is shared: its being full is no reason to evict pods from a test.
            "evictionHard": dict.fromkeys(("memory.available", "nodefs.available"), "1Mi"),
            "imageGCHighThresholdPercent": 100,
        }

    def _write_kubeconfig(self, server: str | None) -> Path:
        own = self.directory / "pki" / "agent.kubeconfig"
        if server is None:
            return own
        changed = self._node / "kubelet.kubeconfig"
        changed.write_text(own.read_text())
        arguments = ("config", "set-cluster", "local", f"--server={server}")
        subprocess.run(
            [str(self.binary), "kubectl", "--kubeconfig", str(changed), *arguments],
            check=True,
            capture_output=True,
        )
        return changed

    def _start_containerd(self) -> None:
        network = self._node / "network"
        network.mkdir()
        (network / "pods.conflist").write_text(json.dumps(NETWORK))
        configuration = self._node / "containerd.toml"
        configuration.write_text(
            CONTAINERD.format(
                root=self._node / "containerd",
                socket=SOCKET,
                pause=image.PAUSE.reference,
                runtime=self._runtime,
                network=network,
            )
        )
        self._start_process("containerd", "containerd", f"--config={configuration}")
        wait_for(
            lambda: self._try_ctr("version").returncode == 0,
            what=f"containerd, see {self._log('containerd')}",
        )

    def _ctr(self, *arguments: str) -> None:
        answer = self._try_ctr(*arguments)
        if answer.returncode != 0:
            raise ClusterError(f"ctr {' '.join(arguments)}: {answer.stderr.strip()}")

    def _try_ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ctr", "--address", SOCKET, "--namespace", "k8s.io", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def _offer_gpus(self) -> None:
        """Count GPUs on the node as its device plugin would."""
        capacity = {"status": {"capacity": {GPU_RESOURCE: str(self._gpus)}}}
        self.kubectl("patch", "node", NODE, "--subresource=status", "-p", json.dumps(capacity))
        path = f"jsonpath={{.status.allocatable.{GPU_RESOURCE.replace('.', chr(92) + '.')}}}"
        wait_for(
            lambda: self.kubectl("get", "node", NODE, "-o", path) == str(self._gpus),
            what="GPUs on the node",
        )

    def _start_process(self, name: str, *command: str) -> None:
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _stop_process(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _log(self, name: str) -> Path:
        return self._node / f"{name}.log"
