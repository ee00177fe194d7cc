"""What the init container does: a folder from which any image with vLLM starts with the plugin."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

IMAGE = Path(__file__).parents[2] / "vllm-image"
ENGINE = '#!/bin/sh\necho "$PYTHONPATH"\n'


@pytest.fixture
def carrier(tmp_path: Path) -> Path:
    """What the operator's image carries, the program on a PATH of its own."""
    folder = tmp_path / "carrier"
    (folder / "site" / "specdecode_vllm").mkdir(parents=True)
    (folder / "site" / "specdecode_vllm" / "__init__.py").write_text("")
    for name in ("entrypoint", "inject"):
        shutil.copy2(IMAGE / name, folder / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "specdecode-inject").symlink_to(folder / "inject")
    return folder


def inject(carrier: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(carrier / "bin" / "specdecode-inject"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.umask(0o077)
    )


def start(folder: Path, tmp_path: Path, **variables: str) -> str:
    """Start the injected entrypoint with an engine that tells its PYTHONPATH."""
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir(exist_ok=True)
    vllm.write_text(ENGINE)
    vllm.chmod(0o755)
    environment = {"PATH": f"{vllm.parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path), **variables}
    answer = subprocess.run(
        ["./entrypoint"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def test_the_folder_holds_the_plugin_and_the_entrypoint_for_every_user(
    carrier: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for _ in "12":  # a node that starts again runs it again
        answer = inject(carrier, str(shared))
        assert answer.returncode == 0, answer.stderr
    module = shared / "site" / "specdecode_vllm" / "__init__.py"
    assert stat.S_IMODE(module.stat().st_mode) & 0o044 == 0o044
    assert stat.S_IMODE((shared / "entrypoint").stat().st_mode) & 0o055 == 0o055


def test_the_injected_entrypoint_puts_the_plugin_before_what_is_on_the_path(
    carrier: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    inject(carrier, str(shared))
    assert start(shared, tmp_path) == f"{shared}/site"
    assert start(shared, tmp_path, PYTHONPATH="/srv/x") == f"{shared}/site:/srv/x"


def test_in_our_image_nothing_is_put_onto_the_path(carrier: Path, tmp_path: Path) -> None:
    shutil.rmtree(carrier / "site")
    assert start(carrier, tmp_path) == ""


@pytest.mark.parametrize("arguments", [(), ("/no/such/folder",), ("/tmp", "/tmp")])
def test_a_folder_that_is_not_there_is_refused(carrier: Path, arguments: tuple[str, ...]) -> None:
    answer = inject(carrier, *arguments)
    assert answer.returncode == 64
    assert "usage: specdecode-inject FOLDER" in answer.stderr
