"""Debian's packages, unpacked into folders and never installed: installing starts services."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.node import cache

# libseccomp: runc is linked to it, and the machine may not have it.
RUNTIME = ("containerd", "runc", "containernetworking-plugins", "libseccomp2")


class PackagesError(Exception):
    """apt cannot give a package; the message holds its words."""


def fetch_runtime() -> Path:
    """Return the folder with containerd, runc and the network plugins, fetched at first."""
    return cache.make_once("runtime", [" ".join(RUNTIME).encode()], lambda at: unpack(RUNTIME, at))


def unpack(names: Sequence[str], target: Path) -> None:
    """Unpack packages as they would lie below `/`; raises PackagesError."""
    with tempfile.TemporaryDirectory(prefix="specdecode-apt-") as folder:
        files = _download(names, Path(folder))
        for file in files:
            subprocess.run(["dpkg-deb", "--extract", str(file), str(target)], check=True)


def _download(names: Sequence[str], folder: Path) -> list[Path]:
    print(f"fetching {len(names)} Debian packages", file=sys.stderr, flush=True)
    answer = _apt("download", *names, cwd=folder)
    if answer.returncode != 0:
        # Lists of our own: the machine's may be absent or old, and stay as they are.
        lists, archives = folder / "lists", folder / "cache"
        for each in (lists / "partial", archives / "archives" / "partial"):
            each.mkdir(parents=True)
        own = ("-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={archives}")
        _apt(*own, "update", cwd=folder)
        answer = _apt(*own, "download", *names, cwd=folder)
    if answer.returncode != 0:
        raise PackagesError(answer.stderr.strip().splitlines()[-1])
    return sorted(folder.glob("*.deb"))


def _apt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Its own user could not write into our folder.
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def find_architecture() -> str:
    """Name this machine's architecture as Debian and OCI do."""
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
