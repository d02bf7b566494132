"""Keys of `parallelism` that a framework decides by the ZeRO stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.inputs.parallelism import Parallelism
from sim.inputs.training_config import Training
from sim.variants.frameworks.records import framework_of, zero_engine
from sim.variants.frameworks.zero import ZeroEngine


def zero_keys(training: Training, p: Parallelism, zero: int, dp: int, given: Collection[str]) -> dict[str, Any]:
    """Return what the framework sets for a ZeRO stage where the scenario leaves a key out; see `ZeroEngine`.

    `zero` and `dp` take the place of those of `p`. `given`: keys of `parallelism` that the scenario sets.
    """
    own = framework_of(training).zero
    if own == ZeroEngine():
        return {}
    sync = p.dp_sync if "dp_sync" in given else "after_backward" if zero in own.alone_at else "bucketed"
    found = {
        "dp_sync": sync,
        "bucket_bytes": own.bucket_bytes_of(dp, dtype_bytes(training.grad_reduce_dtype)),
        "gather_bucket_bytes": _gather_bucket_bytes(own, training) if zero == 3 else None,
        "param_gather_overlap": own.gathers_ahead and sync != "after_backward",
        **(
            {"all_reduce_once": True}
            if own.replicas_once and zero >= 2 and not p.fsdp_version and not _in_rows(p)
            else {}
        ),
    }
    return {key: value for key, value in found.items() if key not in given}


def sums_apart(t: Training, p: Parallelism) -> bool:
    """Tell whether gradients are sharded by an FSDP that cannot add them up in their matmuls (Megatron-LM,
    megatron/training/arguments.py: "--use-torch-fsdp2 is not supported with gradient accumulation fusion")."""
    sharded = p.zero >= 2 and p.sharded_over[0] > 1
    return sharded and not (framework_of(t).accumulates_sharded and zero_engine(t, p).fills_buckets)


def can_gather_integers(t: Training, p: Parallelism) -> bool:
    """Tell whether parameters can be gathered as 8-bit integers (`ZeroEngine.scaled_elements`)."""
    whole = t.lora is None or t.lora.weights != "nf4"
    return p.zero == 3 and zero_engine(t, p).scaled_elements > 0 and t.precision in ("bf16", "fp16") and whole


def _in_rows(p: Parallelism) -> bool:
    """Tell whether gradients are not reduced micro-batch by micro-batch anyhow."""
    return p.accumulate_unsharded or bool(p.accumulate_in_a_row)


def as_reduced(training: Training, p: Parallelism) -> Training:
    """Return the section with the dtype in which the framework reduces gradients where the scenario leaves it out; see
    `ZeroEngine.sends_in_precision`."""
    own, dtype = framework_of(training).zero, sixteen_bit(training.precision)
    alone = p.zero < 2 or p.dp * p.cp == 1 or training.precision == "fp32" or "grad_dtype" in training.model_fields_set
    if alone or not own.sends_in_precision or "grad_reduce_dtype" in training.model_fields_set:
        return training
    return training.model_copy(update={"grad_reduce_dtype": dtype})


def _gather_bucket_bytes(own: ZeroEngine, training: Training) -> int | None:
    """Return the least bytes of a gather, of parameters in the precision of the computation."""
    if own.gather_bucket_elements is None:
        return None
    return round(own.gather_bucket_elements * dtype_bytes(sixteen_bit(training.precision)))
