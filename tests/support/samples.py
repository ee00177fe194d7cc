"""Builders of raw samples, as Prometheus hands them to the operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdecode_operator.domain.observation import MetricsSamples, Series

STEP_FIELDS = ("steps", "step_seconds", "step_tokens", "step_requests", "step_context_tokens")


def series(name: str, samples: Iterable[tuple[float, float]], **labels: object) -> Series:
    """Build one series of pod `a`, engine 0, unless labels say otherwise."""
    texts = {"pod": "a", "engine": "0", "model_name": "chat", **labels}
    return Series(name, {key: str(value) for key, value in texts.items()}, tuple(samples))


def samples_of(*found: Series) -> MetricsSamples:
    """Bundle series; start and end are those of the samples."""
    moments = [moment for one in found for moment, _ in one.samples]
    return MetricsSamples(min(moments, default=0.0), max(moments, default=0.0), found)


def heartbeat(moments: Sequence[float], **labels: object) -> Series:
    """Build the iterations counter of a pod scraped at these moments."""
    values = [(moment, 10.0 * index) for index, moment in enumerate(moments)]
    return series("specdecode_engine_iterations_total", values, **labels)


def cell(
    moments: Sequence[float],
    *,
    batch: int,
    k: int,
    arm: int = 0,
    steps: float = 10.0,
    step_seconds: float = 0.02,
    step_tokens: float = 16.0,
    requests: float | None = None,
    **labels: object,
) -> tuple[Series, ...]:
    """Build the counters of one decode-only cell that grows evenly from scrape to scrape."""
    per_step = (1.0, step_seconds, step_tokens, requests or batch, 100.0 * batch)
    return tuple(
        series(
            f"specdecode_{name}_total",
            [(moment, index * steps * amount) for index, moment in enumerate(moments)],
            batch=batch,
            k=k,
            arm=arm,
            **labels,
        )
        for name, amount in zip(STEP_FIELDS, per_step, strict=True)
    )


def mixed_cell(
    moments: Sequence[float],
    *,
    batch: int,
    arm: int = 0,
    steps: float = 10.0,
    step_seconds: float = 0.02,
    step_tokens: float = 16.0,
) -> tuple[Series, ...]:
    """Build the counters of steps with prefill tokens, growing evenly."""
    per_step = {
        "steps": 1.0,
        "step_seconds": step_seconds,
        "step_tokens": step_tokens,
        "step_requests": float(batch),
        "step_prefill_tokens": 32.0,
    }
    return tuple(
        series(
            f"specdecode_mixed_{name}_total",
            [(moment, index * steps * amount) for index, moment in enumerate(moments)],
            batch=batch,
            arm=arm,
        )
        for name, amount in per_step.items()
    )
