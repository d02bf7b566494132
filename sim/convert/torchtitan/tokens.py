"""torchtitan's batches in tokens, as its configurations have them since summer 2026, as those in sequences before.

torchtitan/config/configs.py: `TrainingConfig`, and `num_pp_microbatches` of `ParallelismConfig`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.core.errors import InputError

MICRO, WHOLE = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
LENGTH, NUMBER = "training.max_context_length", "parallelism.num_pp_microbatches"
DEFAULTS = {MICRO: 16384, WHOLE: -1, LENGTH: 2048, NUMBER: 1}
DEGREE = "parallelism.pipeline_parallel_degree"


def in_sequences(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values with sequences of the context's length in place of tokens, where any of these keys is given.

    Raises:
        InputError: for tokens that are no whole number of such sequences.
    """
    if not any(key in values for key in DEFAULTS):
        return values
    found = {key: value for key, value in values.items() if key not in DEFAULTS}
    micro, whole, length, number = (_number(file, values, key) for key in DEFAULTS)
    for key, tokens in ((MICRO, micro), (WHOLE, whole)):
        if tokens > 0 and tokens % length:
            raise InputError(f"{file}: {key}: found {tokens}; must be a multiple of {LENGTH}, {length}")
    rows = micro // length
    found["training.seq_len"] = length
    found["training.local_batch_size"] = rows * (number if values.get(DEGREE, 1) != 1 else 1)
    found["parallelism.pipeline_parallel_microbatch_size"] = rows
    return found | ({"training.global_batch_size": whole // length} if whole > 0 else {})


def _number(file: Path, values: dict[str, Any], key: str) -> int:
    value = values.get(key, DEFAULTS[key])
    if type(value) is not int or value == 0:
        raise InputError(f"{file}: {key}: found {value!r}; must be a whole number above 0")
    return value
