"""GPU profiles: the parameters of one model on one GPU, each with the table it was fitted to.

A profile is a YAML file in `profiles/`; times are in milliseconds, sizes in tokens. CUDA graph
kinds differ in the launch time only: FULL replays a whole step, PIECEWISE launches attention by
hand. No published table has one engine under both kinds, so that difference is assumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from specdecode_sim import arguments, cost
from specdecode_sim.acceptance import Survival, build_survival
from specdecode_sim.model import Conditions

FOLDER = Path(__file__).parent / "profiles"
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
GraphKind = Literal["FULL", "PIECEWISE", "NONE"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTimes(_Part):
    """Parameters of `cost.Cost`, in milliseconds, at the profile's own graph kind."""

    launch: dict[GraphKind, NonNegative]
    weights: NonNegative
    experts: NonNegative = 0.0
    experts_tokens: Annotated[float, Field(gt=0)] = 1.0
    token: NonNegative = 0.0
    knee: NonNegative = 0.0
    knee_tokens: NonNegative = 0.0
    context: NonNegative = 0.0
    prefill: NonNegative = 0.0
    captured_tokens: int = 1024
    uncaptured: NonNegative = 0.0


class Drafting(_Part):
    """Milliseconds of the drafter: per step, further pass, request, and request and pass."""

    step: NonNegative = 0.0
    draft_pass: NonNegative = 0.0
    request: NonNegative = 0.0
    request_pass: NonNegative = 0.0


class Acceptance(_Part):
    """Which drafts survive: the curve of class `ease` 1 at `context_reference` tokens, at start."""

    curve: tuple[Share, ...]
    spread: NonNegative = 0.0
    context_per_doubling: float = 0.0  # ease lost with each doubling of the context
    context_reference: float = 1024.0
    drift_per_hour: float = 0.0  # ease lost with each hour of uptime


class RequestClass(_Part):
    """A kind of requests: its share, and how easily its drafts are accepted (1 = as the curve)."""

    share: Share
    ease: NonNegative = 1.0


class Noise(_Part):
    """Relative noise of step times: `step` from step to step, `slow` over about `slow_seconds`."""

    step: NonNegative = 0.02
    slow: NonNegative = 0.01
    slow_seconds: Annotated[float, Field(gt=0)] = 60.0


class Profile(_Part):
    """One model on one GPU."""

    name: str
    gpu: str
    model: str
    source: str
    error_percent: NonNegative  # within which the source's table is reproduced
    times: StepTimes
    drafting: Drafting = Drafting()
    acceptance: Acceptance
    classes: dict[str, RequestClass] = {"all": RequestClass(share=1.0)}
    noise: Noise = Noise()
    kv_tokens: int = 1_000_000
    start_seconds: NonNegative = 2.0

    def build_cost(self, *, graphs: str, captured_tokens: int | None = None) -> cost.Cost:
        """Return the step cost under vLLM's `cudagraph_mode`."""
        kind = "FULL" if graphs in arguments.FULL_KINDS else graphs
        times = self.times.model_dump()
        launch = times.pop("launch")
        captured = captured_tokens or times.pop("captured_tokens")
        times.pop("captured_tokens", None)
        return cost.Cost(
            launch=launch.get(kind, max(launch.values())),
            captured_tokens=float("inf") if kind == "NONE" else float(captured),
            draft=self.drafting.step,
            draft_pass=self.drafting.draft_pass,
            draft_request=self.drafting.request,
            draft_request_pass=self.drafting.request_pass,
            **times,
        )

    def build_survival(self, *, positions: int) -> Survival:
        """Return survival by group and position; beyond the curve nothing survives."""
        curve = [*self.acceptance.curve, *[0.0] * positions][: max(1, positions)]
        survival = build_survival(curve, spread=self.acceptance.spread)
        return np.ascontiguousarray(survival)

    def build_conditions(self, *, noise: bool = True) -> Conditions:
        """Return what makes steps and drafts differ from the plain profile."""
        return Conditions(
            context_per_doubling=self.acceptance.context_per_doubling,
            context_reference=self.acceptance.context_reference,
            step_noise=self.noise.step if noise else 0.0,
            slow_noise=self.noise.slow if noise else 0.0,
            slow_seconds=self.noise.slow_seconds,
        )

    def ease_of(self, seed: int) -> float:
        """Return the ease of a request's class, drawn by the seed of its prompt."""
        point = (seed % 9973) / 9973 * sum(kind.share for kind in self.classes.values())
        for kind in self.classes.values():
            point -= kind.share
            if point < 0:
                return kind.ease
        return 1.0

    def scaled(self, factor: float) -> Profile:
        """Return the same profile on a GPU whose steps take `factor` times as long."""
        times = self.times.model_dump()
        fixed = ("captured_tokens", "experts_tokens", "knee_tokens", "launch")
        for name, value in times.items():
            if name not in fixed:
                times[name] = value * factor
        times["launch"] = {kind: value * factor for kind, value in times["launch"].items()}
        drafting = {name: value * factor for name, value in self.drafting.model_dump().items()}
        return self.model_copy(
            update={"times": StepTimes(**times), "drafting": Drafting(**drafting)}
        )


class UnknownProfileError(LookupError):
    """There is no profile of that name."""


def list_profiles() -> list[str]:
    """Return the names of the profiles that come with the simulator."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Read a profile by its name, or from a file by its path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise UnknownProfileError(f"no profile {name!r}: there are {', '.join(list_profiles())}")
    fields = yaml.safe_load(path.read_text("utf-8"))
    return Profile.model_validate({"name": path.stem, **fields})
