"""What the engine image stands on: Debian's Python and the simulator's libraries, in a folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.node import cache, packages
from tests.support.engine import ROOT

PYTHON_PACKAGES = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1",
    "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libuuid1", "libcrypt1", "dash", "coreutils", "libselinux1", "libacl1", "libattr1",
    "libgmp10", "libpcre2-8-0",
)  # fmt: skip
DIST_PACKAGES = "usr/lib/python3/dist-packages"
SIMULATOR = ROOT / "vllm-image" / "simulator"
LOCK = ROOT / "requirements.lock"


class ImageError(Exception):
    """The image could not be made; the message says which step failed, in its words."""


def make_base() -> Path:
    """Return the folder with Python and all libraries, made first where needed."""
    wanted = find_requirements()
    sources = ["\n".join([*PYTHON_PACKAGES, *wanted]).encode(), *read_files(Path(__file__), LOCK)]
    return cache.make_once("python", sources, lambda at: _build_base(wanted, at))


def find_requirements() -> list[str]:
    """List the simulator's requirements from other projects."""
    project = tomllib.loads((SIMULATOR / "pyproject.toml").read_text())["project"]
    return [r for r in project["dependencies"] if not r.startswith("specdecode-")]


def _build_base(requirements: Sequence[str], root: Path) -> None:
    packages.unpack(PYTHON_PACKAGES, root)
    (root / "usr" / "bin" / "python3").symlink_to("python3.11")
    if not (root / "bin" / "sh").exists():
        (root / "bin" / "sh").symlink_to("dash")
    target = root / DIST_PACKAGES
    target.mkdir(parents=True, exist_ok=True)
    say("fetching the simulator's libraries")
    _install(requirements, root, target)
    for tests in [*target.glob("*/tests"), *target.glob("*/*/tests")]:
        shutil.rmtree(tests)


def _install(requirements: Sequence[str], root: Path, target: Path) -> None:
    """Let the image's Python run our pip, so that it takes that Python's wheels."""
    found = importlib.util.find_spec("pip")
    assert found is not None
    assert found.submodule_search_locations is not None
    libraries = [str(path) for path in (root / "usr" / "lib").glob("*-linux-gnu")]
    run(
        str(root / "usr" / "bin" / "python3.11"),
        *(found.submodule_search_locations[0], "install", "--quiet", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--constraint", str(LOCK)),
        *("--target", str(target), *requirements),
        environment={
            **os.environ,
            "PYTHONHOME": str(root / "usr"),
            "LD_LIBRARY_PATH": ":".join(libraries),
        },
    )


def read_files(*paths: Path) -> Iterator[bytes]:
    """Yield names and contents of files and of those in folders, in a steady order."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file.name.encode()
                yield file.read_bytes()


def run(*command: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command; raises ImageError with its words."""
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ImageError(f"{' '.join(command[:3])}: {answer.stderr.strip()[-1000:]}")


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)
