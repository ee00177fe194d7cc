"""The metric table as a scrape sees it: names, labels, types, early children."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from specdecode_vllm import live, metrics
from specdecode_vllm import table as tables

LABELS = metrics.EngineLabels(model_name="chat", engine="0")
INFO = {
    "version": "0.1.0",
    "vllm_version": "0.33.0",
    "runner": "V2",
    "method": "eagle3",
    "k_max": "7",
    "live_table": "true",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "adaptive_verification": "false",
}
TABLE = tables.Table(
    generation=12,
    enabled=True,
    rows=(tables.Row(1, 16, 7), tables.Row(17, 64, 3), tables.Row(65, 256, 1)),
)
DECODE = metrics.Step(
    batch=9, k=7, arm=0, seconds=0.25, tokens=31, context_tokens=4000, prefill_tokens=0
)
MIXED = metrics.Step(
    batch=9, k=7, arm=0, seconds=0.5, tokens=9, context_tokens=4000, prefill_tokens=100
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def sink(registry: CollectorRegistry) -> metrics.EngineMetrics:
    sink = metrics.EngineMetrics(LABELS, registry)
    sink.announce(INFO)
    return sink


def value(registry: CollectorRegistry, name: str, **labels: object) -> float | None:
    texts = {key: str(label) for key, label in labels.items()}
    return registry.get_sample_value(name, {**LABELS._asdict(), **texts})


def test_a_decode_step_counts_in_its_cell(
    registry: CollectorRegistry, sink: metrics.EngineMetrics
) -> None:
    sink.count_step(DECODE)
    sink.count_step(DECODE)
    cell = {"batch": 16, "k": 7, "arm": 0}
    assert value(registry, "specdecode_steps_total", **cell) == 2
    assert value(registry, "specdecode_step_seconds_total", **cell) == 0.5
    assert value(registry, "specdecode_step_tokens_total", **cell) == 62
    assert value(registry, "specdecode_step_requests_total", **cell) == 18
    assert value(registry, "specdecode_step_context_tokens_total", **cell) == 8000


def test_a_mixed_step_counts_apart_and_without_k(
    registry: CollectorRegistry, sink: metrics.EngineMetrics
) -> None:
    sink.count_step(MIXED)
    cell = {"batch": 16, "arm": 0}
    assert value(registry, "specdecode_mixed_steps_total", **cell) == 1
    assert value(registry, "specdecode_mixed_step_seconds_total", **cell) == 0.5
    assert value(registry, "specdecode_mixed_step_tokens_total", **cell) == 9
    assert value(registry, "specdecode_mixed_step_requests_total", **cell) == 9
    assert value(registry, "specdecode_mixed_step_prefill_tokens_total", **cell) == 100
    assert value(registry, "specdecode_steps_total", batch=16, k=7, arm=0) is None


def test_positions_count_from_0(registry: CollectorRegistry, sink: metrics.EngineMetrics) -> None:
    sink.create_positions(3)
    sink.count_positions([5, 3], [3, 1])
    at_risk = [
        value(registry, "specdecode_at_risk_per_position_total", position=p) for p in range(4)
    ]
    accepted = [
        value(registry, "specdecode_accepted_per_position_total", position=p) for p in range(4)
    ]
    assert (at_risk, accepted) == ([5, 3, 0, None], [3, 1, 0, None])


@pytest.mark.parametrize(
    ("situation", "in_force", "expected"),
    [
        ("no table yet", live.InForce(), (0, 0, 0, 0, 0, 0)),
        (
            "a clamped canary table",
            live.InForce(arm=live.Arm.CANARY, table=TABLE, clamped_rows=2),
            (12, 245483788344770, 1, 0, 1, 2),
        ),
        (
            "the kill switch, over a refused file",
            live.InForce(arm=live.Arm.OFF, table=TABLE, stale=True),
            (12, 245483788344770, 2, 1, 0, 0),
        ),
    ],
)
def test_the_table_in_force_is_shown(
    registry: CollectorRegistry,
    sink: metrics.EngineMetrics,
    situation: str,
    in_force: live.InForce,
    expected: tuple[int, ...],
) -> None:
    sink.show_table(in_force)
    shown = tuple(
        value(registry, f"specdecode_table_{name}")
        for name in ("generation", "fingerprint", "arm", "stale", "enabled", "clamped_rows")
    )
    assert shown == expected, situation


def test_a_fingerprint_is_exposed_to_its_last_digit(
    registry: CollectorRegistry, sink: metrics.EngineMetrics
) -> None:
    sink.show_table(live.InForce(table=TABLE))
    (line,) = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("specdecode_table_fingerprint{")
    ]
    assert int(float(line.rsplit(" ", 1)[1])) == TABLE.fingerprint


def test_children_are_there_before_their_first_increment(
    registry: CollectorRegistry, sink: metrics.EngineMetrics
) -> None:
    lookup = tuple(tables.build_lookup(TABLE.rows, max_batch=64))
    sink.create_cells(live.InForce(table=TABLE, lookup=lookup), max_batch=64, static_k=7)
    assert value(registry, "specdecode_steps_total", batch=1, k=7, arm=0) == 0
    assert value(registry, "specdecode_steps_total", batch=64, k=3, arm=0) == 0
    assert value(registry, "specdecode_mixed_steps_total", batch=64, arm=0) == 0
    assert value(registry, "specdecode_engine_iterations_total") == 0
    assert value(registry, "specdecode_plugin_errors_total", where="schedule") == 0
    assert value(registry, "specdecode_table_rejects_total", reason="missing") == 0
    assert value(registry, "specdecode_plugin_info", **INFO) == 1


def test_a_step_may_carry_the_k_of_the_neighbouring_bucket() -> None:
    lookup = tuple(tables.build_lookup([tables.Row(1, 4, 7), tables.Row(5, 64, 1)], max_batch=64))
    assert metrics.reachable_cells(lookup) == [
        (1, {7}),
        (2, {7}),
        (4, {7, 1}),
        (8, {7, 1}),
        (16, {1}),
        (32, {1}),
        (64, {1}),
    ]


def test_without_a_table_the_static_k_is_what_can_be_reached(
    registry: CollectorRegistry, sink: metrics.EngineMetrics
) -> None:
    sink.create_cells(live.InForce(), max_batch=3, static_k=5)
    assert value(registry, "specdecode_steps_total", batch=4, k=5, arm=0) == 0
    assert value(registry, "specdecode_steps_total", batch=8, k=5, arm=0) is None


def test_the_contracts_names_and_types(
    registry: CollectorRegistry, sink: metrics.EngineMetrics
) -> None:
    counters = {
        "steps",
        "step_seconds",
        "step_tokens",
        "step_requests",
        "step_context_tokens",
        "mixed_steps",
        "mixed_step_seconds",
        "mixed_step_tokens",
        "mixed_step_requests",
        "mixed_step_prefill_tokens",
        "at_risk_per_position",
        "accepted_per_position",
        "table_reloads",
        "table_rejects",
        "engine_iterations",
        "plugin_errors",
    }
    gauges = {
        "table_generation",
        "table_fingerprint",
        "table_arm",
        "table_stale",
        "table_enabled",
        "table_clamped_rows",
        "plugin_info",
    }
    families = {family.name.removeprefix("specdecode_"): family for family in registry.collect()}
    assert {name for name, family in families.items() if family.type == "counter"} == counters
    assert {name for name, family in families.items() if family.type == "gauge"} == gauges
