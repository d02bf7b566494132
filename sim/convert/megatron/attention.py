"""Megatron-LM's `--attention-backend` as a scenario's `training.attention` and `attention_kernel`."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Machine, Settings
from sim.inputs.calibration_input import profile_of
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile

UNFUSED = ("unfused", "local")  # Transformer Engine's matmuls and softmax, Megatron-LM's own
# The kernel that a backend leaves Transformer Engine (`get_attention_backend`); auto leaves the choice that is also
# framework megatron's. Of FlashAttention it takes 3 on Hopper only where that is installed, which packages do not do.
KERNELS = {"flash": "flash2", "fused": "cudnn", "auto": None}
MASKLESS = "no-create-attention-mask-in-dataloader"
LARGE_MASK_BYTES = 2**28  # a few milliseconds of PCIe


def attention_of(s: Settings, machine: Machine) -> dict[str, Any]:
    """The two keys; `attention_kernel` only where the GPU's profile has the kernel's speed, else a note."""
    backend = f"{s.written_as('attention-backend')} {s.values.get('attention-backend')}"
    if s.choice("attention-backend", dict.fromkeys(UNFUSED, True), "auto"):
        return {"attention": "unfused"}
    kernel = s.choice("attention-backend", KERNELS, "auto")
    if kernel is None:
        return {"attention": "fused"}
    profile, known = _kernels(s, machine)
    if kernel not in known:
        s.notes.append(f"{backend}: profile {profile} has no {kernel} by name, so auto is simulated")
        return {"attention": "fused"}
    if kernel == "flash2" and "flash3" in known:
        said = "taken for FlashAttention-2; where FlashAttention-3 is installed, training.attention_kernel is flash3"
        s.notes.append(f"{backend}: {said}")
    return {"attention": "fused", "attention_kernel": kernel}


def note_mask(s: Settings, sequence: int, sequences: int) -> None:
    """Say that a long sequence's mask, which the data loader makes by default and copies for each micro-batch, is not
    simulated (training/utils.py: `get_batch_on_this_tp_rank`, a byte for each pair of tokens)."""
    mask_bytes = sequences * sequence**2
    of_loader = s.prefix and "deepspeed" not in s.values  # Megatron-DeepSpeed's loader makes none (pretrain_gpt.py)
    if of_loader and MASKLESS not in s.values and mask_bytes >= LARGE_MASK_BYTES:
        copied = f"{mask_bytes / 2**30:.3g} GiB to the GPU for each micro-batch, are not simulated"
        s.notes.append(f"attention masks from the data loader, {copied}; --{MASKLESS} leaves them out")


def _kernels(s: Settings, machine: Machine) -> tuple[str, set[str]]:
    """The profile of the machine's GPU, and the attention kernels that it has by name."""
    gpu = resolve_cluster(machine.cluster, 1, Source(str(s.file), {"cluster": machine.cluster})).gpu
    profile = load_profile(profile_of(gpu))
    return profile.name, Costs(profile, gpu).attention_kernels
