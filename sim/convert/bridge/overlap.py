"""Megatron-Bridge's `comm_overlap`: what a run sets by it in `model` and `ddp` before it starts.

Source: `CommOverlapConfig` (src/megatron/bridge/training/comm_overlap.py of 0.3 to 0.6), which `runtime_config_update`
calls (training/config.py). A run saves its config after this, with the number of replicas in
`comm_overlap.data_parallel_size`. The config that a recipe's function returns has none there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Elements of a bucket, and what is overlapped over several replicas (`_get_optimizer_overlap_cfgs`).
OF_DDP: dict[str, Any] = {"bucket_size": 128 * 2**20, "overlap_grad_reduce": True, "overlap_param_gather": True}
P2P, TENSORS, WITHOUT_RUN = "overlap_p2p_comm", "tp_comm_overlap", "data_parallel_size"


def of_comm_overlap(data: Mapping[str, Any], merged: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """The keys that a run sets. `merged`: the keys of all sections; `whole`: the file has every key of a config."""
    own = data.get("comm_overlap")
    if not isinstance(own, dict):
        return {}
    found: dict[str, Any] = {} if _tensors_overlap(merged) else {TENSORS: False}
    if whole and own.get(WITHOUT_RUN) is not None:
        return found
    if whole and own.get(P2P) is None:
        found[P2P] = _is_split(merged, "virtual_pipeline_model_parallel_size")
    if merged.get("use_distributed_optimizer") and not merged.get("use_megatron_fsdp"):
        found |= {key: value for key, value in OF_DDP.items() if own.get(key) is None}
    return found


def _tensors_overlap(merged: Mapping[str, Any]) -> bool:
    """Whether tensor parallelism's messages can overlap: with sequence parallelism (`_get_model_comm_overlap_cfgs`)."""
    return _is_split(merged, "tensor_model_parallel_size") and bool(merged.get("sequence_parallel"))


def _is_split(merged: Mapping[str, Any], degree: str) -> bool:
    """Whether a degree is above 1; what is no number is told where the degree is read."""
    value = merged.get(degree)
    return isinstance(value, int | float) and value > 1
