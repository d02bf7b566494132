"""TRL's defaults beside those of `TrainingArguments` (trl/trainer), known by `max_length`, which its files have."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Settings

NLL = "nll, the default"
TILED = (
    "loss_type: {}: TRL 1.16 computes the loss in tiles of 4,096 tokens and 32,768 entries of the vocabulary, whatever "
    "is named; in earlier releases nll had all logits at once (training.cross_entropy=unfused), and chunked_nll, the "
    "default from 1.7 on, chunks of 256 tokens"
)

OF_TRL = "accelerate_config"  # the flag of TRL's command: a file, or one of those that it ships (trl/cli)
_DEEPSPEED = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8}
_FSDP = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8}
# What they say of a step (trl/accelerate_configs of release 1.16).
ACCELERATE_CONFIGS: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "mixed_precision": "bf16", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 8},
    **{f"zero{stage}": {**_DEEPSPEED, "deepspeed_config": {"zero_stage": stage}} for stage in (1, 2, 3)},
    "fsdp1": {
        **_FSDP,
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": True,
            "fsdp_reshard_after_forward": "FULL_SHARD",
        },
    },
    "fsdp2": {**_FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
}


def is_trl(s: Settings) -> bool:
    """Tell whether settings are those of TRL."""
    return s.values.get("max_length") is not None


def take_precision(s: Settings, given: set[str]) -> None:
    """TRL computes in bf16 unless told otherwise (trl/trainer/base_config.py)."""
    if is_trl(s) and not {"bf16", "fp16"} & given:
        s.values = {**s.values, "bf16": True}
        s.notes.append("bf16: on, as TRL has it by default since mid-2025; before it was off")


def loss_in_tiles(s: Settings, training: dict[str, Any], tp: int) -> dict[str, Any]:
    """TRL's loss in tiles of tokens and of the vocabulary, without Liger's (trl/trainer/sft_trainer.py:
    `add_fused_lm_head`; sft_config.py: chunked_nll is another name of nll)."""
    if not is_trl(s):
        return {}
    named = s.take("loss_type") or NLL
    if "cross_entropy" in training or tp > 1:
        return {}
    s.notes.append(TILED.format(named))
    return {"cross_entropy": "tiled"}


def forces_reentrant(s: Settings) -> bool:
    """Tell whether TRL takes torch's reentrant checkpoint for adapters, whatever the file says: with DeepSpeed's ZeRO-3
    (trl/trainer/sft_trainer.py of release 1.16)."""
    zero = s.values.get("zero_optimization")
    return is_trl(s) and isinstance(zero, dict) and str(zero.get("stage")) == "3"
