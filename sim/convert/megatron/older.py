"""Arguments of older Megatron-LM and of its forks, as those of today that mean the same.

- NVIDIA/Megatron-LM before 2022: `--checkpoint-activations`, `--batch-size`, `--model-parallel-size`; until mid-2022
  `--activations-checkpoint-method`; until the end of 2023 a layer's own code (`--transformer-impl local`) was the
  default, whose attention is fused with `--use-flash-attn` alone.
- microsoft/Megatron-DeepSpeed and bigscience-workshop/Megatron-DeepSpeed (megatron/arguments.py), of which
  `sim.convert.megatron.megatron_deepspeed` reads what the engine is told.
- stanford-futuredata/Megatron-LM, which databricks/megablocks trains with (exp/ of the latter).
"""

from __future__ import annotations

from typing import Any

RENAMED = {
    "use-megatron-fsdp-v2": "use-megatron-fsdp",  # which it switches on (docs of Megatron FSDP v2, 2026)
    "encoder-num-layers": "num-layers",  # as good as these (training/arguments.py: `validate_args`)
    "encoder-seq-length": "seq-length",
    "num-nodes": "nnodes",  # of DeepSpeed's launcher
    "num-gpus": "nproc-per-node",
    "batch-size": "micro-batch-size",
    "model-parallel-size": "tensor-model-parallel-size",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "checkpoint-num-layers": "recompute-num-layers",
    "ds-sequence-parallel-size": "context-parallel-size",  # Ulysses
    "pad-vocab-size-to": "vocab-size",
    "num-key-value-heads": "num-query-groups",
    "topk": "moe-router-topk",
    "moe-top-k": "moe-router-topk",
    "moe-num-experts": "num-experts",
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "moe-train-capacity-factor": "moe-expert-capacity-factor",
    "moe-capacity-factor": "moe-expert-capacity-factor",
}
# Deprecated switches of CUDA graphs, as values of --cuda-graph-impl (training/arguments.py, `validate_args`).
GRAPHS = {"enable-cuda-graph": "local", "external-cuda-graph": "transformer_engine"}
FULL = ("checkpoint-activations", "activations-checkpoint-method")  # recompute whole layers
# Arguments that releases since 2024 no longer have.
FORMER = ("data-impl", "DDP-impl", "deepspeed", *FULL, "batch-size", "model-parallel-size", "moe-num-experts")
# Of Megatron-LM before autumn 2021, where DeepSpeed is not in the command, and of BigScience's fork of it.
BEFORE_OVERLAP = ("checkpoint-activations", "batch-size", "model-parallel-size")
BIGSCIENCE = ("abort-on-unmet-fused-kernel-constraints", "train-weighted-split-paths-path", "pad-vocab-size-to")
PLAIN_LINEAR = "plain-linear"  # stands for their mpu/layers.py, which calls `F.linear`
SERIAL = "tensor parallelism's all-reduces in the backward wait, and weight gradients are added by themselves, as then"
FUSED = ("use-flash-attn", "use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton", "attention-backend")
POSITIONS = {"rotary": "rope", "alibi": "none"}
ALIBI = "--position-embedding-type alibi: its slopes are added in the softmax's kernel, at no cost"
ATTENTION = "attention of separate kernels, as Megatron-LM of that age computes it without --use-flash-attn"


def as_of_today(flags: dict[str, Any], notes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The flags by today's names, and how the file writes those that differ; what is assumed is added to `notes`."""
    found = dict(flags)
    if "moe-num-experts" in flags and "deepspeed" not in flags:
        found = {"moe-top-k": "1", **found, "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True}
    written: dict[str, str] = {}
    for old, new in RENAMED.items():
        if old in found and new not in flags:
            found[new], written[new] = found.pop(old), f"--{old}"
    for old, implementation in GRAPHS.items():
        if found.pop(old, False):
            found["cuda-graph-impl"], written["cuda-graph-impl"] = implementation, f"--{old}"
    if "num-key-value-heads" in flags:
        found["group-query-attention"] = True
    if any(name in found for name in FULL) or "--activations-checkpoint-method" in written.values():
        found.pop("checkpoint-activations", None)
        found["recompute-granularity"] = "full"
    if (position := POSITIONS.get(str(flags.get("position-embedding-type")))) is not None:
        found["position-embedding-type"] = position
        notes += [ALIBI] if position == "none" else []
    if str(found.get("moe-expert-capacity-factor", "1")).strip("0.") == "":  # 0: as many tokens as come
        del found["moe-expert-capacity-factor"]
    if any(name in flags for name in (BIGSCIENCE if "deepspeed" in flags else BEFORE_OVERLAP)):
        found |= {PLAIN_LINEAR: True, "no-gradient-accumulation-fusion": True}
        notes.append(SERIAL)
    if _separate_kernels(flags):
        found["attention-backend"] = "unfused"
        notes.append(ATTENTION)
    return found, written


def _separate_kernels(flags: dict[str, Any]) -> bool:
    """Whether attention is Megatron-LM's own matmuls and softmax, not a fused kernel."""
    impl = flags.get("transformer-impl")
    own = impl == "local" or (impl is None and any(name in flags for name in FORMER))
    return own and not any(name in flags for name in FUSED)
