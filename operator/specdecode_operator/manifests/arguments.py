"""The arguments of `vllm serve` for one revision, as vLLM 0.33.0 parses them.

Every flag is one `--flag=value` token: a user's value that begins with a dash, or that holds a
dot behind one, would otherwise be read as another flag (vLLM's parser turns `--a.b` into JSON).
The user's extra arguments come last; those that the operator manages were refused before.
"""

from __future__ import annotations

import json
import math
from typing import Final

from specdecode_operator import durations
from specdecode_operator.api import metadata, v1alpha1
from specdecode_operator.domain import engine, lever, table
from specdecode_operator.errors import InvalidSpecError, InvalidTableError

SCHEDULER_FACTORY: Final = "specdecode_vllm.scheduler.make_scheduler"


def build_arguments(inputs: v1alpha1.RevisionInputs) -> list[str]:
    """List the arguments that follow `vllm serve`, the model first.

    The scheduler factory is there without speculation too: it exports the steps. Without the
    plugin it is not, and the table is the user's own. Raises InvalidSpecError for a model name
    that would be read as a flag, or a table that cannot be given.
    """
    model, plugin = inputs.model, inputs.engine.plugin
    if model.name.startswith("-"):
        raise InvalidSpecError(
            f"spec.model.name is {model.name!r}, which vLLM reads as a flag: give a repository "
            "name or an absolute path"
        )
    flags = {
        "served-model-name": model.served_name,
        "revision": model.revision,
        "max-model-len": model.max_model_len,
        "host": "0.0.0.0",
        "port": metadata.ENGINE_PORT,
        "tensor-parallel-size": inputs.engine.tensor_parallel_size,
        "max-num-seqs": inputs.engine.max_num_seqs,
        "speculative-config": _speculative_config(inputs),
        "compilation-config": _compilation_config(inputs),
        "scheduler-cls": None if plugin is v1alpha1.Plugin.NONE else SCHEDULER_FACTORY,
        "shutdown-timeout": drain_seconds(inputs),
    }
    managed = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
    return [model.name, *managed, *inputs.engine.extra_args]


def drain_seconds(inputs: v1alpha1.RevisionInputs) -> int:
    """Return the drain time in whole seconds, rounded up: 0 would abort every request."""
    return math.ceil(durations.parse_duration(inputs.engine.drain_timeout).total_seconds())


def _speculative_config(inputs: v1alpha1.RevisionInputs) -> str | None:
    speculation = inputs.speculation
    if speculation is None:
        return None
    config: dict[str, object] = {
        "method": speculation.method.value,
        "num_speculative_tokens": speculation.num_speculative_tokens,
    }
    if speculation.draft_model is not None:
        config["model"] = speculation.draft_model
    rows = _table_rows(inputs, speculation)
    if rows is not None:
        config["num_speculative_tokens_per_batch_size"] = rows
    # Absent where off: engines that do not know the field refuse it.
    if speculation.adaptive_verification is v1alpha1.Switch.ENABLED:
        config["enable_adaptive_verification"] = True
    return _compact(config)


def _table_rows(
    inputs: v1alpha1.RevisionInputs, speculation: v1alpha1.Speculation
) -> list[list[int]] | None:
    """Return vLLM's own table: the envelope's, the user's without the plugin, or none.

    A constant table would cost the V1 runner its full graphs and say nothing.
    """
    batches = inputs.engine.max_num_seqs
    if engine.has_live_table(inputs):
        return table.build_start_table(lever.envelope_of(speculation), batches)
    if not (engine.has_fixed_table(inputs) and speculation.k_table):
        return None
    try:
        return lever.spec_table(speculation, batches).to_rows()
    except InvalidTableError as error:
        raise InvalidSpecError(f"spec.speculation.kTable: {error}.") from error


def _compilation_config(inputs: v1alpha1.RevisionInputs) -> str | None:
    if inputs.speculation is None:
        return None
    return _compact({"cudagraph_mode": inputs.speculation.cudagraph_mode.value})


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
