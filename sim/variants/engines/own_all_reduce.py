"""Serving engines' own all-reduces over NVLink, which take the place of NCCL's for small messages.

Profiles have what they take, as CUDA graphs replay them (`sim.prices.profile.CollectiveTable.source`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

KIB, MIB = 2**10, 2**20


class OwnAllReduce(NamedTuple):
    """Which messages an engine reduces by itself: those smaller than `below`, in bytes by the number of ranks; NCCL has
    all larger ones and other numbers of ranks.

    `uncertainty`: more than the seconds' own, of kernels that were not measured; `compared`: the sizes are those below
    which the kernel was measured to be the quicker one, so it takes no longer than NCCL's; `but_llama_above`: models of
    Llama's code that are wider leave all of them to NCCL.
    """

    below: Mapping[int, float]
    uncertainty: float = 0.0
    compared: bool = False
    but_llama_above: int | None = None


ARCHITECTURES = ("ampere", "hopper", "blackwell")
_EIGHT_MIB = dict.fromkeys((2, 4, 6, 8), 8 * MIB)
# vLLM since 0.3 (pull request 2192, January 2024): csrc/custom_all_reduce.cuh; distributed/device_communicators/
# custom_all_reduce.py (max_size). SGLang has the same files. Both have them on AMD's GPUs ("other"), too.
CUSTOM = dict.fromkeys((*ARCHITECTURES, "other"), OwnAllReduce(_EIGHT_MIB))
# vLLM since 0.11 (pull request 24111, September 2025), all_reduce_utils.py (CUSTOM_ALL_REDUCE_MAX_SIZES), at most the 8
# MiB of before; above, torch's symmetric memory reduces in the switch, as NCCL does.
CUSTOM_LESS = {
    "ampere": CUSTOM["ampere"],
    "other": CUSTOM["other"],
    "hopper": OwnAllReduce({2: 8 * MIB, 4: 8 * MIB, 6: 512 * KIB, 8: 256 * KIB}, compared=True),
    "blackwell": OwnAllReduce({2: 2 * MIB, 4: 2 * MIB, 6: MIB, 8: MIB}, compared=True),
}
# Since 0.19 of compute capability 10.3, too; above them NCCL's.
ULTRA = "blackwell ultra"  # those of this architecture with `ULTRA_BYTES`, where an engine has sizes of their own
CUSTOM_LESS_19 = CUSTOM_LESS | {ULTRA: OwnAllReduce({2: 4 * MIB, 4: 4 * MIB, 6: 8 * MIB, 8: 4 * MIB}, compared=True)}
# Since 0.29 FlashInfer's kernels come first (pull request 52998, August 2026: VLLM_ALLREDUCE_USE_FLASHINFER), up to the
# sizes of the fused norms (compilation/passes/fusion/allreduce_rms_fusion.py, FI_ALLREDUCE_FUSION_MAX_SIZE_MB).
# On 10.3, since 0.33 also on 8 of 10.0, those that do not norm are larger (all_reduce_utils.py,
# FI_MNNVL_ALLREDUCE_MAX_SIZE_MB; pull request 53318). Assumption: they take as long as vLLM's own.
# Not modelled: ranks of several nodes.
CUSTOM_LESS_29 = {
    "ampere": CUSTOM["ampere"],
    "other": CUSTOM["other"],
    "hopper": OwnAllReduce({2: 64 * MIB, 4: 8 * MIB, 6: 512 * KIB, 8: 512 * KIB}, 0.3, compared=True),
    "blackwell": OwnAllReduce({2: 64 * MIB, 4: 32 * MIB, 6: MIB, 8: MIB}, 0.3, compared=True),
    ULTRA: OwnAllReduce({2: 64 * MIB, 4: 80 * MIB, 6: 8 * MIB, 8: 64 * MIB}, 0.3, compared=True),
}
CUSTOM_LESS_33 = CUSTOM_LESS_29 | {
    name: own._replace(below={**own.below, 8: 128 * MIB})
    for name, own in CUSTOM_LESS_29.items()
    if name in ("blackwell", ULTRA)
}
# TensorRT-LLM 1.0, cpp/tensorrt_llm/thop/allreduceOp.cpp (strategy AUTO: MIN_LATENCY below these sizes).
_MIN_LATENCY = OwnAllReduce({2: 16e6, 4: 1e6, 8: 500e3})
MIN_LATENCY = dict.fromkeys(ARCHITECTURES, _MIN_LATENCY)
# 1.1: before Blackwell Llama's layers have NCCL's alone (pull request 7768, September 2025; modeling_llama.py,
# LlamaDecoderLayer, read on the main branch: "temporary fix to disable oneshot kernel for pre-Blackwell arch to avoid
# perf regressions", in use above a width of 4,096). Whether 1.0, of the same month, has it is not known.
NCCL_FOR_LLAMA = MIN_LATENCY | {
    name: own._replace(but_llama_above=4096) for name, own in MIN_LATENCY.items() if name != "blackwell"
}
# 1.2 (pull request 7870, October 2025): common/customAllReduceUtils.h, tables that benchmarks made, of compute
# capability 9.0, which earlier ones share, and of 10.0; of powers of two of tokens and widths, RESIDUAL_RMS_NORM. Its
# AutoTuner (pull request 8531) compares all kernels once more.
FROM_TABLES = dict.fromkeys(ARCHITECTURES, OwnAllReduce({2: 16 * MIB, 4: 8 * MIB, 8: MIB}, compared=True)) | {
    "blackwell": OwnAllReduce({2: 16 * MIB, 4: 8 * MIB, 8: 8 * MIB}, compared=True)
}
