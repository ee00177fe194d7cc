"""Ties the live table to the metrics: what comes into force is exported, what is refused counted.

Apart from the scheduler's hooks, so that whatever runs the table shows the same acknowledgement.
"""

import logging
from collections.abc import Callable

from specdecode_vllm import live, metrics, reload

logger = logging.getLogger("vllm.specdecode")


def start_following(
    table: live.LiveTable,
    sink: metrics.EngineMetrics,
    *,
    max_batch: int,
    static_k: int,
    positions: int,
    on_error: Callable[[str, Exception], None],
) -> reload.Reloader:
    """Export what is in force now, read the files once, then keep up with them in a thread.

    `static_k` is K where no table sets it, `positions` how many draft positions are counted.
    """

    def show(in_force: live.InForce) -> None:
        sink.create_cells(in_force, max_batch=max_batch, static_k=static_k)
        sink.show_table(in_force)

    def on_change(before: live.InForce, after: live.InForce) -> None:
        show(after)
        if after.arm != before.arm:
            sink.count_reload("arm")
        elif after.table != before.table:
            sink.count_reload("table")
        logger.info("specdecode plugin: in force now %s", describe(after))

    def on_refusal(refusal: live.Refused) -> None:
        sink.count_reject(refusal.reason)
        logger.warning("specdecode plugin: refused, table in force stays: %s", refusal)

    sink.create_positions(positions)
    show(table.in_force)
    reloader = reload.Reloader(table, on_change=on_change, on_refusal=on_refusal, on_error=on_error)
    reloader.poll()
    reloader.start()
    return reloader


def describe(in_force: live.InForce) -> str:
    """Say in a line what is in force."""
    if in_force.arm is live.Arm.OFF:
        return "the kill switch: K=0"
    if in_force.table is None:
        return f"arm {in_force.arm.name.lower()}, no table"
    table = in_force.table
    rows = ",".join(f"{row.first}-{row.last}:{row.k}" for row in table.rows)
    state = "" if table.enabled else ", disabled: K=0"
    return f"arm {in_force.arm.name.lower()}, generation {table.generation}, {rows}{state}"
