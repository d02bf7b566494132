"""Keys of torchtitan's TOML before summer 2025 as those that replaced them.

torchtitan/config_manager.py, releases of 2024 and commits up to March 2025: degrees were in [training] and
[experimental], and a pipeline had a number of micro-batches. Up to June 2025 a rank's batch was `training.batch_size`.
Recomputation had no switch of its own then (`apply_ac`, models/llama3/infra/parallelize.py), so it ended early, as
torch's does by default.
"""

from __future__ import annotations

from typing import Any

from sim.convert.torchtitan.tokens import DEGREE

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel")
RENAMED = {
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{
        f"{table}.{name}_degree": f"parallelism.{name}_degree"
        for table in ("training", "experimental")
        for name in DEGREES
    },
    **{
        f"experimental.{name}": f"parallelism.{name}"
        for name in (
            *("pipeline_parallel_schedule", "pipeline_parallel_split_points", "enable_async_tensor_parallel"),
            *("context_parallel_rotate_method", "module_fqns_per_model_part"),
        )
    },
}
FLOAT8 = (  # the switch of 8-bit matmuls, by age
    *("training.fp8_linear", "training.enable_fp8_linear", "training.enable_float8_linear"),
    "float8.enable_float8_linear",
)
MICRO_BATCHES = "experimental.pipeline_parallel_microbatches"
SIZE = "parallelism.pipeline_parallel_microbatch_size"
POINTS = "parallelism.pipeline_parallel_split_points"
BATCH = "training.batch_size"
FUSED = "optimizer.fused"  # until pull request 881 of February 2025
EARLY_STOP = "activation_checkpoint.early_stop"
# Without effect on a step, or how it is simulated anyhow.
IGNORED = (
    "training.warmup_steps",
    "training.enable_loss_parallel",
    "experimental.custom_model_path",
)


def as_of_2025(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of 2025 that the values have or stand for; those that both have are of 2025."""
    if FUSED in values:
        fused = "fused" if values[FUSED] else "foreach"
        values = {key: value for key, value in values.items() if key != FUSED} | {"optimizer.implementation": fused}
    if not any(key in values for key in (*RENAMED, *FLOAT8)):
        return {EARLY_STOP: True, **values} if BATCH in values else values
    found = {EARLY_STOP: True} | {key: value for key, value in values.items() if key not in IGNORED}
    for old, new in RENAMED.items():
        if old in found:
            value = found.pop(old)
            found.setdefault(new, value)
    if values.get("model.norm_type") == "rmsnorm":
        del found["model.norm_type"]
    in_8_bits = [found.pop(key) for key in FLOAT8 if key in found]
    if any(in_8_bits):
        found.setdefault("model.converters", ["float8"])
    if isinstance(points := found.get(POINTS), str):
        found[POINTS] = [point for point in points.split(",") if point]
    degree, batch = found.get(DEGREE, 1), found.get(BATCH, 8)
    number = found.pop(MICRO_BATCHES, None) or degree  # as many as stages
    if type(degree) is type(batch) is type(number) is int and degree > 1:
        found.setdefault(SIZE, max(1, batch // number))
    return found
