"""Dockerfiles read and, as far as that goes without their base images, carried out.

Each stage gets a root of its own: the machine's, with everything written kept apart in memory and
thrown away. Python's official images are stood in for by the machine's Python; a step that needs
what another base image brings is not run, and listed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_DIRECTIVE = re.compile(r"^#\s*\w+=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\+([^}]*))?\}|(\w+))")
# Base images that the machine's own Python stands in for.
PYTHON_IMAGE = re.compile(r"^python:")


@dataclass(frozen=True)
class Step:
    """One instruction of a stage; `text` is what follows its word, flags apart."""

    word: str
    text: str
    flags: dict[str, str] = field(default_factory=dict)
    line: int = 0

    def __str__(self) -> str:
        return f"line {self.line}: {self.word} {self.text[:70]}"


@dataclass(frozen=True)
class Stage:
    """A base image and the steps upon it."""

    base: str
    name: str
    steps: tuple[Step, ...]

    @property
    def has_stand_in(self) -> bool:
        """Tell whether the machine's Python is as good as the base image here."""
        return PYTHON_IMAGE.match(self.base) is not None

    def find(self, word: str) -> list[Step]:
        """Return the steps of one kind."""
        return [step for step in self.steps if step.word == word]


def read_stages(text: str, arguments: dict[str, str] | None = None) -> list[Stage]:
    """Read the stages; `arguments` take the place of the defaults of ARG before the first FROM."""
    given, values = arguments or {}, {}
    stages: list[Stage] = []
    steps: list[Step] = []
    for step in _read_steps(text):
        if step.word == "FROM":
            steps = []
            words = expand(step.text, values).split()
            name = words[2] if len(words) == 3 else ""
            stages.append(Stage(words[0], name, ()))
        elif not stages:
            name, _, default = step.text.partition("=")
            values[name] = given.get(name, default)
        else:
            steps.append(step)
            stages[-1] = Stage(stages[-1].base, stages[-1].name, tuple(steps))
    return stages


def expand(text: str, values: dict[str, str]) -> str:
    """Put values in the place of $NAME, ${NAME} and ${NAME:+text}."""

    def value_of(match: re.Match[str]) -> str:
        name, instead, plain = match.groups()
        if instead is not None:
            return expand(instead, values) if values.get(name) else ""
        return values.get(name or plain, "")

    return _VARIABLE.sub(value_of, text)


def _read_steps(text: str) -> list[Step]:
    steps: list[Step] = []
    logical, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start if logical else number
        logical += line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        steps.append(_read_step(logical, start))
        logical = ""
    return steps


def _read_step(logical: str, line: int) -> Step:
    word, _, rest = logical.partition(" ")
    flags: dict[str, str] = {}
    rest = rest.strip()
    while rest.startswith("--") and word in ("RUN", "COPY"):
        flag, _, rest = rest.partition(" ")
        name, _, value = flag.removeprefix("--").partition("=")
        flags[name] = value
        rest = rest.strip()
    return Step(word, rest, flags, line)


@dataclass(frozen=True)
class Plan:
    """A shell script that carries out what can be, and the steps that it leaves out."""

    script: str
    run: tuple[str, ...]
    left_out: tuple[str, ...]


def plan(stages: Sequence[Stage], context: Path) -> Plan:
    """Plan the run of all stages, COPY from `context`; to be run where mounts may be made.

    The script takes the folder to work in, empty. Every stage ends in FOLDER/STAGE/root, which
    lasts as long as the script: its last line runs the rest of its arguments there.
    """
    lines, run, left_out = [_PROLOGUE], [], []
    for number, stage in enumerate(stages):
        name = stage.name or f"stage{number}"
        lines.append(f"stage {name}")
        folder, environment = "/", ""
        for step in stage.steps:
            if step.word == "WORKDIR":
                folder = step.text
                lines.append(f'mkdir -p "$W/{name}/root{folder}"')
            elif step.word == "ENV":
                environment += f"export {step.text}; "
            elif step.word in ("RUN", "COPY"):
                command = _to_command(stage, step, name, folder, environment, context)
                (run if command else left_out).append(str(step))
                lines.append(command or f": left out, {stage.base} is needed")
    return Plan("\n".join([*lines, _EPILOGUE]), tuple(run), tuple(left_out))


def _to_command(
    stage: Stage, step: Step, name: str, folder: str, environment: str, context: Path
) -> str | None:
    if step.word == "COPY":
        *sources, target = step.text.split()
        source = f'"$W/{step.flags["from"]}/root"' if "from" in step.flags else str(context)
        words = " ".join(shlex.quote(one.lstrip("/")) for one in sources)
        where = target if target.startswith("/") else f"{folder}/{target}"
        mode = step.flags.get("chmod", "")
        return f'copy {source} "$W/{name}/root" {shlex.quote(where)} "{mode}" {words}'
    needs_base = re.search(r"\bpython3\b", step.text) is not None
    if needs_base and not stage.has_stand_in:
        return None
    shell = f"cd {folder}; {environment}{step.text}"
    return f'chroot "$W/{name}/root" /bin/sh -ec {shlex.quote(shell)}'


_PROLOGUE = """set -eu
W=$1; shift
mount -t tmpfs tmpfs "$W"
stage() {
  mkdir -p "$W/$1/upper" "$W/$1/work" "$W/$1/root"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$W/$1/upper,workdir=$W/$1/work" "$W/$1/root"
  for folder in dev proc; do mount --rbind "/$folder" "$W/$1/root/$folder"; done
  LAST=$W/$1/root
}
# copy FROM ROOT TARGET MODE SOURCE...: as a builder does, the content of a folder, a file by name.
copy() {
  from=$1; root=$2; target=$root$3; mode=$4; shift 4
  case $target in */.|*/./|*/) mkdir -p "$target";; *) mkdir -p "$(dirname "$target")";; esac
  for source; do
    if [ -d "$from/$source" ]; then
      mkdir -p "$target"
      tar -C "$from/$source" --exclude=__pycache__ -cf - . | tar -C "$target" -xf -
    else
      cp "$from/$source" "$target"
      if [ -n "$mode" ]; then
        if [ -d "$target" ]; then chmod "$mode" "$target/$(basename "$source")"
        else chmod "$mode" "$target"; fi
      fi
    fi
  done
}"""
_EPILOGUE = 'if [ $# -gt 0 ]; then exec chroot "$LAST" "$@"; fi'
