"""The simulated engine as an OCI archive: Debian's Python, wheels, the project's code, one layer.

The archive holds several images over the same layer, which differ by their scenario only. No
container tool is needed to make it, and no registry to get it: containerd imports it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.node import base, cache, packages
from tests.support.engine import ROOT

REGISTRY = "specdecode.local"
USER = 1000
PLUGIN = ROOT / "vllm-image" / "plugin"
ENTRYPOINT = ROOT / "vllm-image" / "entrypoint"
CODE = (base.SIMULATOR / "specdecode_sim", PLUGIN / "specdecode_vllm")
VLLM = "#!/usr/bin/python3\nfrom specdecode_sim.main import main\n\nmain()\n"
SCENARIOS = "etc/scenarios"
COMPILED = "opt/numba"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "NUMBA_CACHE_DIR": f"/{COMPILED}",
    "OPENBLAS_NUM_THREADS": "1",
}
CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"
# Compiles what the first engine would compile while its probes wait.
WARM_UP = """
from prometheus_client import CollectorRegistry
from specdecode_sim import arguments, engine, faults, main, profile
engine.Engine(
    arguments.parse(["sim/model"], {}),
    profile.load_profile(main.DEFAULT_PROFILE),
    registry=CollectorRegistry(),
    vllm_version=main.DEFAULT_VLLM_VERSION,
    faults=faults.Faults(faults.Scenario()),
)
"""


@dataclass(frozen=True)
class Image:
    """One image of the archive; `scenario` is what its engines meet."""

    name: str
    command: tuple[str, ...] = ("/usr/local/bin/entrypoint",)
    environment: Mapping[str, str] = field(default_factory=dict)
    scenario: Mapping[str, Any] | None = None

    @property
    def reference(self) -> str:
        """The name by which pods ask for it."""
        return f"{REGISTRY}/{self.name}:0.33.0"


# What holds a pod's namespaces; `sleep` as first process ends by SIGKILL, which is all it needs.
PAUSE = Image("pause", ("/bin/sleep", "infinity"))


def make_archive(images: Sequence[Image]) -> Path:
    """Return the archive of these images and PAUSE, made first where needed (minutes, 500 MB)."""
    root = base.make_base()
    sources = [
        str(root).encode(),
        repr(images).encode(),
        *base.read_files(Path(__file__), ENTRYPOINT, *CODE),
    ]
    folder = cache.make_once("image", sources, lambda at: _build(root, [PAUSE, *images], at))
    return folder / "images.tar"


def _build(python: Path, images: Sequence[Image], target: Path) -> None:
    base.say("building the image of the simulated engine")
    root = target / "root"
    # Links: nothing that is there already is written to.
    base.run("cp", "--archive", "--link", str(python), str(root))
    _add_project(root, images)
    _warm_up(root)
    layer = target / "layer.tar"
    base.run("tar", "--numeric-owner", "--sort=name", "-C", str(root), "-cf", str(layer), ".")
    shutil.rmtree(root)
    write_archive(images, layer, target / "images.tar")
    layer.unlink()


def _add_project(root: Path, images: Sequence[Image]) -> None:
    for package in CODE:
        copy = root / base.DIST_PACKAGES / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for path in copy.rglob("*"):
            # numba knows a source by its time, of which a tar file keeps whole seconds.
            os.utime(path, (0, int(path.stat().st_mtime)))
    programs = root / "usr" / "local" / "bin"
    programs.mkdir(parents=True)
    shutil.copy(ENTRYPOINT, programs / "entrypoint")
    (programs / "vllm").write_text(VLLM)
    for program in programs.iterdir():
        program.chmod(0o755)
    (root / SCENARIOS).mkdir(parents=True)
    for image in images:
        scenario = root / SCENARIOS / f"{image.name}.yaml"
        scenario.write_text(yaml.safe_dump(dict(image.scenario or {})))
    for folder in ("tmp", COMPILED):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).chmod(0o1777)


def _warm_up(root: Path) -> None:
    base.run(CHROOT, str(root), "/usr/bin/python3", "-c", WARM_UP, environment=ENVIRONMENT)
    # numba goes elsewhere where it could not write.
    for path in (root / COMPILED).rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)


def write_archive(images: Sequence[Image], layer: Path, target: Path) -> None:
    """Write an OCI archive of images that share one uncompressed layer."""
    digest = _hash_file(layer)
    parts: dict[str, bytes] = {}
    manifests = []
    for image in images:
        config = _to_json(_configure(image, digest))
        manifest = _to_json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _describe("config.v1+json", config),
                "layers": [_describe("layer.v1.tar", digest=digest, size=layer.stat().st_size)],
            }
        )
        described = _describe("manifest.v1+json", manifest)
        named = {"io.containerd.image.name": image.reference}
        manifests.append({**described, "annotations": named})
        parts.update({_blob(_hash(config)): config, _blob(_hash(manifest)): manifest})
    index = {"schemaVersion": 2, "manifests": manifests}
    parts["oci-layout"] = _to_json({"imageLayoutVersion": "1.0.0"})
    parts["index.json"] = _to_json(index)
    _write_tar(parts, layer, _blob(digest), target)


def _configure(image: Image, digest: str) -> dict[str, Any]:
    scenario = {"SPECDECODE_SIM_SCENARIO": f"/{SCENARIOS}/{image.name}.yaml"}
    environment = {**ENVIRONMENT, **scenario, **image.environment}
    return {
        "architecture": packages.find_architecture(),
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "Entrypoint": list(image.command),
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "WorkingDir": "/tmp",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }


def _describe(
    kind: str, content: bytes = b"", *, digest: str | None = None, size: int | None = None
) -> dict[str, Any]:
    return {
        "mediaType": f"application/vnd.oci.image.{kind}",
        "digest": f"sha256:{digest or _hash(content)}",
        "size": len(content) if size is None else size,
    }


def _write_tar(parts: Mapping[str, bytes], layer: Path, layer_name: str, target: Path) -> None:
    with tarfile.open(target, "w") as archive:
        for name, content in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        archive.add(layer, layer_name)


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
