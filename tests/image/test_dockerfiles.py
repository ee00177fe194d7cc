"""Both Dockerfiles: read, and carried out as far as that goes without their base images.

Each stage that stands on Python's image runs whole on the machine's Python, in a root of its own
that is thrown away; of the engine's last stage everything but what needs vLLM's image. What was not
run is listed in the output.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from specdecode_operator import __version__
from specdecode_operator.manifests import inject, pod
from tests.support import dockerfile
from tests.support.dockerfile import Stage

ROOT = Path(__file__).parents[2]
FILES = {"engine": ROOT / "vllm-image" / "Dockerfile", "operator": ROOT / "operator" / "Dockerfile"}
DIGEST = "sha256:" + "0" * 64


def stages_of(image: str, **arguments: str) -> list[Stage]:
    return dockerfile.read_stages(FILES[image].read_text(), arguments)


def instruction(stage: Stage, word: str) -> str:
    (step,) = stage.find(word)
    return step.text


# ------------------------------------------------------------------------------------ read


def test_the_engine_stands_on_the_official_image_of_the_version_that_is_given() -> None:
    assert stages_of("engine")[-1].base == "vllm/vllm-openai:v0.33.0"
    assert stages_of("engine", VLLM_VERSION="0.34.0")[-1].base == "vllm/vllm-openai:v0.34.0"


def test_a_digest_pins_the_base_images() -> None:
    pinned = stages_of("engine", VLLM_DIGEST=DIGEST)[-1].base
    assert pinned == f"vllm/vllm-openai:v0.33.0@{DIGEST}"
    for stage in stages_of("operator", PYTHON_DIGEST=DIGEST):
        assert stage.base == f"python:3.12-slim@{DIGEST}"


@pytest.mark.parametrize("image", FILES)
def test_an_image_runs_as_a_number_that_is_not_root(image: str) -> None:
    user, _, _ = instruction(stages_of(image)[-1], "USER").partition(":")
    assert int(user) > 0


def test_the_engines_user_and_folders_are_those_of_the_operators_pods() -> None:
    last = stages_of("engine")[-1]
    assert instruction(last, "USER") == f"{pod.ENGINE_USER}:{pod.ENGINE_GROUP}"
    variables = instruction(last, "ENV")
    assert f"HOME={pod.CACHE_FOLDER} " in variables
    assert f"HF_HOME={pod.MODELS_FOLDER} " in variables
    assert instruction(last, "ENTRYPOINT") == f'["{inject.FOLDER}/entrypoint"]'


@pytest.mark.parametrize("image", FILES)
def test_an_image_says_what_it_is(image: str) -> None:
    labels = instruction(stages_of(image)[-1], "LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


def test_the_operators_image_is_of_the_operators_version() -> None:
    arguments = [step.text for step in stages_of("operator")[-1].find("ARG")]
    assert f"VERSION={__version__}" in arguments


@pytest.mark.parametrize("image", FILES)
def test_what_is_copied_is_there_and_is_sent_to_the_builder(image: str) -> None:
    ignored = FILES[image].with_name("Dockerfile.dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    copied = [
        source
        for stage in stages_of(image)
        for step in stage.find("COPY")
        if "from" not in step.flags
        for source in step.text.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), f"{source} is ignored"


def test_the_reader_joins_lines_and_tells_flags_from_words() -> None:
    (first, second) = dockerfile.read_stages(
        "# syntax=x\nARG V=1\nFROM a:${V}${D:+@$D} AS one\nRUN x \\\n  # why\n  && y\n"
        "FROM b\nCOPY --from=one --chmod=755 /p /q/\n"
    )
    assert (first.base, first.name) == ("a:1", "one")
    assert first.steps[0].text == "x && y"
    assert second.steps[0].flags == {"from": "one", "chmod": "755"}


# ----------------------------------------------------------------------------- carried out

NOT_RUN = [
    (image, FILES[image].relative_to(ROOT), step)
    for image in FILES
    for step in dockerfile.plan(stages_of(image), ROOT).left_out
]


@pytest.mark.parametrize(("image", "file", "step"), NOT_RUN)
def test_what_is_not_run_is_listed_with_the_reason(image: str, file: Path, step: str) -> None:
    pytest.skip(f"{file} {step} ... is not run: it needs {stages_of(image)[-1].base}")


def carry_out(image: str, folder: Path, *then: str) -> tuple[dockerfile.Plan, str]:
    """Run what can be run, then a command in the last stage's root; return its output."""
    planned = dockerfile.plan(stages_of(image), ROOT)
    print(f"{image}: run:", *planned.run, f"{image}: not run:", *planned.left_out, sep="\n  ")
    alone = ["unshare", "--mount", "--propagation", "private"]
    answer = subprocess.run(
        [*alone, "/bin/sh", "-c", planned.script, "sh", str(folder), *then],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        # Nothing of it lasts: what would make it start quicker is not worth its time.
        env={**os.environ, "PIP_NO_COMPILE": "1", "PIP_ROOT_USER_ACTION": "ignore"},
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return planned, answer.stdout


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="carrying a Dockerfile out needs root (mounts in a namespace of its own) and unshare",
)


def words_of(steps: Sequence[str]) -> list[str]:
    return [step.split(": ", 1)[1].split()[0] for step in steps]


@needs_root
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_the_operators_image_comes_out_whole_and_works(tmp_path: Path) -> None:
    check = f"""
    set -eu
    export PATH=/opt/operator/bin:$PATH
    specdecode-operator --help > /dev/null
    python -c 'import specdecode_operator, specdecode_load, sys; print(sys.prefix)'
    mkdir /tmp/injected && specdecode-inject /tmp/injected
    test -x /tmp/injected/entrypoint
    PYTHONPATH=/tmp/injected/site python -c '
    import importlib.metadata as m
    (entry,) = m.entry_points(group="vllm.general_plugins")
    print(entry.value)'
    test ! -e {ROOT}/vllm-image/plugin/build
    """
    planned, output = carry_out("operator", tmp_path, "/bin/sh", "-c", dedent(check))
    assert planned.left_out == ()
    assert "/opt/operator" in output
    assert "specdecode_vllm.plugin:register" in output


@needs_root
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_of_the_engines_image_all_but_what_needs_vllm_comes_out(tmp_path: Path) -> None:
    check = """
    set -eu
    test -x /opt/specdecode/entrypoint
    test -f /opt/specdecode/features.yaml
    id -u specdecode
    stat -c '%a %u %g' /var/cache/specdecode /var/lib/specdecode/models
    """
    planned, output = carry_out("engine", tmp_path, "/bin/sh", "-c", dedent(check))
    assert words_of(planned.left_out) == ["RUN"]
    assert "verify" in planned.left_out[0] or "pip install" in planned.left_out[0]
    assert output.split()[-7:] == ["10001", "775", "10001", "0", "775", "10001", "0"]
