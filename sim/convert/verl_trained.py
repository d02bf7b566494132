"""How verl's FSDP engine trains, of reinforcement learning and of fine-tuning, and where both have their settings.

Names and defaults: verl 0.9.1, trainer/config/engine/fsdp.yaml and optim/fsdp.yaml. FSDP keeps its parameters in fp32,
computes in bf16 and reduces in fp32 (workers/engine/fsdp/transformer_impl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sim.convert.settings import FSDP_ON_HOST, Settings, without_none
from sim.core.errors import InputError
from sim.inputs.input_source import show

ACTOR = "actor_rollout_ref.actor"
NAMED_MEGATRON = "megatron"  # a trainer, and in the names of configs
TRAINERS = ("dp", "fsdp", "fsdp2", NAMED_MEGATRON)
BF16 = ("bf16", "bfloat16")
# By `optimizer_impl` and `optimizer`, where these are not torch's AdamW: the dtype of its states.
STATES = {("bitsandbytes.optim", "AdamW8bit"): "int8"}
PACKS = (
    "micro-batches: verl packs {tokens:,} tokens ({named} · ulysses_sequence_parallel_size); here {packed:,}, so that "
    "whole sequences of training.seq_len divide the batch"
)


# Log-probabilities by FlashAttention's loss (utils/torch_functional.py).
OF_FLASH = {"cross_entropy": "fused"}


class Places(NamedTuple):
    """Where a config has its settings: `engine` the keys that name who trains, the others sections or keys."""

    engine: tuple[str, ...]
    fsdp: str
    megatron: str
    ulysses: str
    optimizer: str
    model: str

    @property
    def strategy(self) -> str:
        """The key that tells FSDP from FSDP2."""
        return self.engine[-1]


OF_PPO = Places(
    engine=("model_engine", f"{ACTOR}.strategy"),  # the first chooses the actor's config, since 0.7
    fsdp=f"{ACTOR}.fsdp_config",
    megatron=f"{ACTOR}.megatron",
    ulysses=f"{ACTOR}.ulysses_sequence_parallel_size",
    optimizer=f"{ACTOR}.optim",
    model="actor_rollout_ref.model",
)


def trained_by_megatron(file: Path, values: Mapping[str, Any], at: Places, inherited: list[str]) -> bool:
    """Whether Megatron trains, by what is set and by the configs that are inherited.

    Raises:
        InputError: for another trainer than FSDP and Megatron.
    """
    named = [NAMED_MEGATRON for word in inherited if NAMED_MEGATRON in word]
    for key in at.engine:
        if (trainer := values.get(key)) is not None:
            if trainer not in TRAINERS:
                known = ", ".join(TRAINERS)
                raise InputError(f"{file}: {key}: found {show(trainer)}; can be converted: {known}")
            named.append(str(trainer))
    return NAMED_MEGATRON in named


def layout_of_fsdp(s: Settings, at: Places, gpus: int, usual: str = "fsdp") -> dict[str, Any]:
    """FSDP over all GPUs, or over groups of `fsdp_size`; Ulysses splits sequences within it. `usual`: the strategy."""
    ulysses = s.size(at.ulysses, 1)
    group, old = s.integer(f"{at.fsdp}.fsdp_size", -1), s.take(at.strategy, usual) == "fsdp"
    if gpus % ulysses:
        raise InputError(f"{s.place(at.ulysses)}: found {ulysses}; must divide {gpus} GPUs")
    kept = not s.flag(f"{at.fsdp}.reshard_after_forward", True)
    once = s.flag(f"{at.fsdp}.use_no_sync_for_gradient_accumulation")
    found = {
        "dp": gpus // ulysses,
        "cp": ulysses if ulysses > 1 else None,
        "cp_method": "all_to_all" if ulysses > 1 else None,
        "zero": 3,
        "fsdp_version": 1 if old else 2,
        "shard_size": group if 0 < group < gpus else None,
        "reshard_after_forward": False if kept else None,
        "accumulate_unsharded": True if once else None,
    }
    return without_none(found)


def training_of_fsdp(s: Settings, at: Places) -> dict[str, Any]:
    """The section `training` without sizes and loss; what is offloaded between steps is no part of one."""
    dtype = str(s.take(f"{at.fsdp}.model_dtype", "fp32"))
    rank = s.integer(f"{at.model}.lora_rank", 0)
    s.take(f"{at.optimizer}.clip_grad")  # a norm is computed for any
    # FSDP2's `CPUOffloadPolicy` (workers/fsdp_workers.py), which the first FSDP does not read
    on_host = s.flag(f"{at.fsdp}.offload_policy") and s.values.get(at.strategy) == "fsdp2"
    return {
        "precision": "bf16",
        "attention": "fused",
        "optimizer": "adamw",
        **_states(s, at),
        "framework": "transformers",
        "recompute": "full" if s.flag(f"{at.model}.enable_gradient_checkpointing", True) else "none",
        **({"activation_offload": True} if s.flag(f"{at.model}.enable_activation_offload") else {}),
        **({} if dtype in BF16 else {"param_dtype": "fp32", "grad_reduce_dtype": "fp32"}),
        **({"lora": {"rank": rank}} if rank else {}),
        **(FSDP_ON_HOST if on_host else {}),
    }


def _states(s: Settings, at: Places) -> dict[str, str]:
    """The dtype of the optimizer's states, where it is not AdamW's of torch (workers/config/optimizer.py)."""
    names = [f"{at.optimizer}.{key}" for key in ("optimizer_impl", "optimizer")]
    dtype = STATES.get((str(s.values.get(names[0])), str(s.values.get(names[1]))))
    s.taken |= {*names} if dtype else set()
    return {"optimizer_dtype": dtype} if dtype else {}


def fused_loss(s: Settings, at: Places, parallelism: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities from tiles of the logits, which the backward computes again (utils/experimental/
    torch_functional.py: `FusedLinearForPPO`; utils/kernel/linear_cross_entropy.py)."""
    fused = f"{at.model}.use_fused_kernels"
    if not s.values.get(fused) or parallelism.get("tp", 1) > 1:  # in which case a note names it
        s.taken |= set() if s.values.get(fused) else {fused}
        return {}
    s.take(f"{at.model}.fused_kernel_options.impl_backend")
    return {"cross_entropy": "tiled"} if s.flag(fused) else {}


def packed(s: Settings, tokens: int, length: int, batch: int, replicas: int, named: str) -> int:
    """Sequences of full length that a micro-batch by tokens has room for, so many that they divide the batch."""
    most = max(tokens // length, 1)
    found = next((n for n in range(most, 1, -1) if batch % (n * replicas) == 0), 1)
    s.notes.append(PACKS.format(tokens=tokens, packed=found * length, named=named))
    return found
