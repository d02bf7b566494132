"""Figures of attention kernels that `profile_coefficients.py` puts into shipped profiles, with sources.

A figure is called KERNEL_FIELD: a kernel such as `flash2` and a field of `sim.prices.coefficients.AttentionSpeed`.
`tools/fit_attention.py` fits those whose source names it.
"""

from __future__ import annotations

from functools import partial

Coefficients = dict[str, tuple[float, str]]  # name: value and source


def _flash(name: str, sizes: tuple[float, float, float], ramp: float, share: float, source: str) -> Coefficients:
    """Return efficiencies at head sizes 64, 128 and 256, ramp in tokens, and backward's share of forward's speed."""
    out = {f"{name}_efficiency_{d}": (e, source) for d, e in zip((64, 128, 256), sizes, strict=True) if e}
    return out | {f"{name}_ramp_tokens": (ramp, source), f"{name}_backward_share": (share, source)}


_TRITON = (
    "FlashAttention of 2022-23 in Triton (flash_attn_triton.py), as this profile's software. Prior: FlashAttention-2 "
    "is 1.4 times as fast forward and twice backward (Dao 2023, section 4.1); fitted to every fifth row of "
    "mosaic_mpt_a100_80gb (tools/fit_attention.py --steps)"
)
_TRITON_H100 = (
    "the A100 profile's attention, at the ratio of FlashAttention-2's speeds on both GPUs (flash2), whose instructions "
    "these kernels share (mma.sync); no H100 row was fitted"
)
_FLASH2 = "FlashAttention-2 as published, every second row of flash_attention.json (tools/fit_attention.py)"
_FLASH = "as published, every second row of flash_attention.json (tools/fit_attention.py)"
_CUDNN = "Transformer Engine's (cuDNN), every second row of b200_kernels.json (tools/fit_attention.py)"
_TE = "{}, which Transformer Engine picks there (get_attention_backend)"
_SUMS = "1: dK and dV of query heads that share a KV head are summed afterwards (flash_api.cpp, mha_bwd: dk_expanded)"
_BUNDLED = (
    "the FlashAttention-2 that torch bundles: 0.84 of the published one's speed, the median of 67 forwards and of 93 "
    "backwards that calibrate.run measured on an H200 (scenarios/cuda/h200.json)"
)
_EFFICIENT = (
    "torch's memory-efficient kernel in 16 bits: the published FlashAttention-2's speed by 2.58 and 2.17, heads of 64 "
    "and 128, and by 2.73 and 2.42 backward: medians of 20 shapes each that calibrate.run measured on an H200 "
    "(scenarios/cuda/h200.json)"
)
_DROPOUT = "{} with and without dropout on an H100, seven shapes (tools/gpu_dropout.py)"


def _dropout(kernel: str, clocks: tuple[float, float], *names: str) -> Coefficients:
    """Return the clocks of dropout, forward and backward, of attention kernels of one library."""
    source = _DROPOUT.format(kernel)
    return {
        f"{name}_{part}": (value, source)
        for name in names
        for part, value in zip(("dropout_clocks", "dropout_backward_clocks"), clocks, strict=True)
    }


_flash_dropout = partial(_dropout, "torch's FlashAttention-2", (0.08, 0.12))
_efficient_dropout = partial(_dropout, "assumption: as torch's FlashAttention-2", (0.08, 0.12), "efficient")
_cudnn_dropout = partial(_dropout, "cuDNN's attention", (0.22, 0.12))

_HEADS = "sizes of heads that {} has kernels for"
_CUDNN_HEADS = (
    "heads of 96 take cuDNN's backward no less time than heads of 128: neox_4l in scenarios/measured/gpu_programs"
)


def _heads(library: str, step: float, *names: str) -> Coefficients:
    """Return the step of head sizes of attention kernels of one library."""
    return {f"{name}_head_step": (step, _HEADS.format(library)) for name in names}


def _cudnn_heads(*names: str) -> Coefficients:
    return {f"{name}_backward_head_step": (64.0, _CUDNN_HEADS) for name in names}


_MASKED = (
    "cuDNN's attention with a mask of numbers beside all pairs without one on an H200, the median of ten shapes "
    "(scenarios/measured/gpu_kernels/h200.json)"
)


_TORCH_ON_HOPPER = (
    "cudnn, which torch's attention picks on Hopper; with torch 2.11 heads of 64 reach 0.76 of the speed of heads of "
    "128, 4,096 tokens on an H200, both ways (scenarios/measured/gpu_kernels/h200.json)"
)


def _cudnn_masks(*names: str) -> Coefficients:
    return {
        f"{name}_{part}": (value, _MASKED)
        for name in names
        for part, value in (("masked_slowdown", 1.84), ("masked_backward_slowdown", 1.78))
    }


_EFFICIENT_A100 = (
    "assumption: slower than FlashAttention-2 by as much as on an H200 (2.58 and 2.17, heads of 64 and 128, and 2.73 "
    "and 2.42 backward; scenarios/cuda/h200.json), since both have Ampere's instructions alone (mma.sync)"
)
_MASKED_A100 = (
    "the memory-efficient kernel's time, which torch takes for masks where cuDNN's is not preferred (sdp_utils.cpp: "
    "check_for_attn_mask); geometric mean of heads of 64 and 128. {}"
)


def _efficient_masks(*names: str) -> Coefficients:
    return {
        f"{name}_{part}": (value, _MASKED_A100.format(_EFFICIENT_A100))
        for name in names
        for part, value in (("masked_slowdown", 2.37), ("masked_backward_slowdown", 2.57))
    }


_EFFICIENT_HEADS = "the memory-efficient kernel (mem_eff_attention/gemm_kernel_utils.h: ThreadK)"
_flash2_heads = partial(_heads, "FlashAttention-2 (static_switch.h: HEADDIM_SWITCH)", 32.0)
_flash1_heads = partial(_heads, "FlashAttention-1 (fmha_api.cpp)", 64.0)
_triton_heads = partial(_heads, "flash_attn_triton.py (BLOCK_HEADDIM)", 64.0)

A100_FLASH = (
    _flash("attention", (0.483, 0.484, 0), 210, 0.575, _TRITON)
    | _flash("flash1", (0.364, 0.304, 0), 81, 0.85, _FLASH)
    | _flash("flash2", (0.651, 0.735, 0), 284, 0.85, _FLASH)
    | _triton_heads("attention")
    | _flash1_heads("flash1")
    | _flash2_heads("flash2")
)
A100_FLASH2 = (
    _flash("megatron", (0.651, 0.735, 0), 284, 0.85, _TE.format("flash2"))
    | _flash("torch", (0.651, 0.735, 0), 284, 0.85, "flash2, which torch has had since 2.2")
    | _flash("torch_2024", (0.651, 0.735, 0), 284, 0.85, "flash2, which torch has had since 2.2")
    | _flash("efficient", (0.252, 0.339, 0), 284, 0.78, _EFFICIENT_A100)
    | {f"{name}_group_sums": (1.0, _SUMS) for name in ("megatron", "torch", "flash2", "torch_2024", "efficient")}
    | _flash2_heads("megatron", "torch", "torch_2024")
    | _heads(_EFFICIENT_HEADS, 32.0, "efficient")
    | _efficient_masks("torch")
    | _flash_dropout("attention", "flash1", "flash2", "megatron", "torch", "torch_2024")
    | _efficient_dropout()
)
H100_FLASH = (
    _flash("attention", (0.331, 0.386, 0.375), 170, 0.85, _FLASH2)
    | _flash("flash2", (0.331, 0.386, 0.375), 170, 0.85, _FLASH2)
    | _flash("torch_2024", (0.278, 0.324, 0.315), 170, 0.85, _BUNDLED)
    | _flash("torch", (0.47, 0.621, 0.621), 140, 0.85, _TORCH_ON_HOPPER)
    | _flash("efficient", (0.128, 0.178, 0), 170, 0.78, _EFFICIENT)
    | {f"{name}_group_sums": (1.0, _SUMS) for name in ("attention", "flash2", "torch_2024", "efficient")}
    | _flash("flash1", (0.185, 0.161, 0), 53, 0.85, _FLASH)
    | _flash("triton_2022", (0.246, 0.255, 0), 210, 0.575, _TRITON_H100)
    | _flash("flash3", (0.51, 0.698, 0.791), 283, 0.85, _FLASH)
    | _flash("cudnn", (0.417, 0.621, 0.621), 140, 0.85, _FLASH)
    | _flash("megatron", (0.417, 0.621, 0.621), 140, 0.85, _TE.format("cudnn"))
    | _flash("triton", (0.417, 0.415, 0), 156, 0.85, _FLASH)
    | _flash2_heads("attention", "flash2", "torch_2024", "flash3")
    | _heads(_EFFICIENT_HEADS, 32.0, "efficient")
    | _flash1_heads("flash1")
    | _triton_heads("triton", "triton_2022")
    | _cudnn_heads("cudnn", "torch", "megatron")
    | _cudnn_masks("cudnn", "torch", "megatron")
    | _flash_dropout("attention", "flash1", "flash2", "torch_2024")
    | _efficient_dropout()
    | _cudnn_dropout("cudnn", "torch", "megatron")
)
_LIKE_A100 = "assumption: as FlashAttention-2's published on A100; the points are forwards"
PCIE_ATTENTION: Coefficients = {"attention_backward_share": (0.85, _LIKE_A100)}
_NARROW_HEADS = (
    "0.656 of heads of 128: measured prefill kernels of B200, GB200, B300 and GB300 profiles, the median of four "
    "medians, 342 pairs of calls (tools/narrow_heads.py); the backward likewise (assumption)"
)
B200_FLASH = {"attention_efficiency_64": (0.436, _NARROW_HEADS)} | _flash(
    "attention", (0, 0.665, 0.373), 79, 0.637, _CUDNN
)
B200_FLASH |= {
    "attention_tile_rows": (384.0, _CUDNN),
    "attention_backward_tile_rows": (64.0, _CUDNN),
    "attention_overlap": (1.5, _CUDNN),
    **_cudnn_heads("attention"),
    **_cudnn_masks("attention"),
    **_cudnn_dropout("attention"),
}


_SPARSE = (
    "AIConfigurator 0.12.0 (NVIDIA, Apache-2.0), sglang 0.5.14 on {}, glm5_{}_module_perf (batch_size, isl, step, "
    "latency), {}: median of flops by peak and latency of {} calls of {} from {} on; taken by hand, no tool reads it"
)
_BACKWARD = "assumption: as FlashAttention's"


def sparse(gpu: str, calls: tuple[int, int], attention: float, scores: float) -> Coefficients:
    """Return efficiencies of DeepSeek's sparse attention (one thread block for each token) and of its indexer."""
    heads = ("64 heads, 2,048 keys a token", "32 index heads of 128, causal pairs")
    kernel = _SPARSE.format(gpu, "dsa_attn", heads[0], calls[0], "flash_mla_sparse_fwd", "4,096 tokens")
    index = _SPARSE.format(gpu, "mqa_logits", heads[1], calls[1], "deep_gemm.fp8_mqa_logits", "3e11 flops")
    return {
        "sparse_mla_efficiency_128": (attention, kernel),
        "sparse_mla_backward_share": (0.85, _BACKWARD),
        "sparse_mla_overlap": (4.0, "one thread block a token: up to as many tokens as SMs take as long as one"),
        "mqa_logits_efficiency_128": (scores, index),
        "mqa_logits_backward_share": (0.85, _BACKWARD),
    }
