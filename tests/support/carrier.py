"""What the operator's image carries for engines, laid out where a process node finds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.engine import ROOT


def lay_carrier(folder: Path) -> dict[str, str]:
    """Lay plugin, entrypoint and program into a new folder; return the variables to find them."""
    folder.mkdir(parents=True)
    image = ROOT / "vllm-image"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(image / "plugin")], check=True)
    for name in ("entrypoint", "inject"):
        shutil.copy2(image / name, folder / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "specdecode-inject").symlink_to(folder / "inject")
    return {"PATH": f"{folder}/bin:/usr/bin:/bin"}
