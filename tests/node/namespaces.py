"""Namespaces of our own for a kubelet, so that nothing of the machine changes.

A kubelet and its containers write sysctls, cgroups, mounts, addresses and folders under /var. All
of it happens in private namespaces that end with their first process; what is left on the machine
is removed then: one cgroup a hierarchy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NODE_ADDRESS = "10.89.0.1"
POD_NETWORK = "10.89.0.0/24"
BRIDGE = "cni0"
# Fixed: a bridge would otherwise take the lowest address of its ports, a new one with each pod.
BRIDGE_MAC = "02:00:0a:59:00:01"

PROGRAMS = ("unshare", "setpriv", "mount", "ip", "apt-get", "dpkg-deb")
CGROUPS = Path("/sys/fs/cgroup")
GROUP_PREFIX = "specdecode-node-"
# A kubelet sets these for the whole machine where they have other values: it is shown these files.
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
MOUNT_OPTIONS = ("rw", "ro", "xattr", "clone_children")
OVERLAID = ("/var/lib", "/var/log", "/opt")


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup v1 hierarchy; `root` is the group that the mount shows as its top."""

    mount: Path
    options: str
    root: str

    def find_here(self) -> Path:
        """Return the folder of the group that this process is in."""
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, options, path = line.split(":", 2)
            if options == self.options:
                return self.mount / Path(path).relative_to(self.root)
        raise RuntimeError(f"/proc/self/cgroup does not tell of {self.mount}")


def find_obstacle() -> str | None:
    """Say why there can be no node here, None where it can be tried."""
    if os.geteuid() != 0:
        return "a kubelet needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"these programs are missing: {', '.join(missing)}"
    if not any(h.options == "memory" for h in find_hierarchies()):
        return "cgroup v2 alone is mounted; this was made for cgroup v1"
    return None


def find_hierarchies() -> list[Hierarchy]:
    """List the mounted cgroup v1 hierarchies."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup":
            names = [o for o in options.split(",") if o not in MOUNT_OPTIONS]
            found.append(Hierarchy(Path(mount), ",".join(names), root))
    return found


def run_inside(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command as the first process of namespaces of its own; return its exit code.

    The command calls `furnish` first. All its processes end with it, and with this process.
    """
    hierarchies = find_hierarchies()
    remove_groups(hierarchies)
    groups = [h.find_here() / f"{GROUP_PREFIX}{os.getpid()}" for h in hierarchies]
    for group in groups:
        _make_group(group)
    unshare = "unshare --cgroup --mount --uts --ipc --net --pid --fork --kill-child --mount-proc"
    try:
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *unshare.split(), "--", *command],
            env=dict(environment),
            preexec_fn=_joining(groups),  # noqa: PLW1509 - no thread of ours runs by then
        )
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the command has it too, and ends in its own way
    finally:
        remove_groups(hierarchies, mine=True)


def _make_group(group: Path) -> None:
    group.mkdir()
    # A new group of this controller is empty, and nothing can enter it.
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():
            (group / name).write_text((group.parent / name).read_text())


def _joining(groups: Sequence[Path]) -> Callable[[], None]:
    def join() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return join


def remove_groups(hierarchies: Sequence[Hierarchy], *, mine: bool = False) -> None:
    """Remove groups left by a run that was killed, and our own where it is over."""
    for hierarchy in hierarchies:
        for group in hierarchy.find_here().glob(f"{GROUP_PREFIX}*"):
            owner = int(group.name.removeprefix(GROUP_PREFIX))
            if (owner == os.getpid() and mine) or not Path(f"/proc/{owner}").exists():
                _remove_tree(group)


def _remove_tree(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        os.rmdir(folder)


def furnish(scratch: Path) -> None:
    """Make the namespaces a machine for a kubelet: cgroups, sysctls, folders, network.

    `scratch` is an empty folder. Call it once, as the first process inside.
    """
    hierarchies = find_hierarchies()
    _run("mount", "--make-rprivate", "/")
    # Those mounted before show the machine's network and cgroups.
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("mount", "-t", "tmpfs", "tmpfs", str(CGROUPS))
    for hierarchy in hierarchies:
        hierarchy.mount.mkdir()
        named = "none," if hierarchy.options.startswith("name=") else ""
        options = f"{named}{hierarchy.options}"
        _run("mount", "-t", "cgroup", "-o", options, "cgroup", str(hierarchy.mount))
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _run("mount", "-t", "tmpfs", "tmpfs", str(scratch))
    _hide_sysctls(scratch / "sysctls")
    for folder in OVERLAID:
        _overlay(Path(folder), scratch / "overlays" / folder.replace("/", "-"))
    _make_network()


def _hide_sysctls(folder: Path) -> None:
    folder.mkdir()
    for name, value in SYSCTLS.items():
        shown = folder / name.replace("/", ".")
        shown.write_text(f"{value}\n")
        _run("mount", "--bind", str(shown), f"/proc/sys/{name}")


def _overlay(folder: Path, place: Path) -> None:
    upper, work = place / "upper", place / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    options = f"lowerdir={folder},upperdir={upper},workdir={work}"
    _run("mount", "-t", "overlay", "-o", options, "overlay", str(folder))


def _make_network() -> None:
    width = POD_NETWORK.partition("/")[2]
    for command in (
        "link set lo up",
        f"link add {BRIDGE} address {BRIDGE_MAC} type bridge",
        f"addr add {NODE_ADDRESS}/{width} dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"route add default dev {BRIDGE}",
    ):
        _run("ip", *command.split())


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {answer.stderr.strip()}")
