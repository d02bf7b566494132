"""Chooses the kernel of scaled dot product attention as torch does on a Hopper GPU.

aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: of the kernels that the code allows (`sdpa_kernel`) torch takes
the first that can run. They are cuDNN's (`check_prefer_cudnn_attention`: on compute capability 9 and 10),
FlashAttention-2, the memory-efficient one, and plain matmuls with a softmax. A GPU of another kind takes
FlashAttention-2 before cuDNN's kernel; there `sim.models.captured` prices FlashAttention-2.
"""

from __future__ import annotations

from typing import cast

import torch

HALF = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest head size of FlashAttention-2
CUDNN_HEAD_DIM = 128  # and of cuDNN's kernel, but for
CUDNN_HEAD_DIMS = ((192, 128), (256, 256))
DROPOUT_STEPS = 16.0  # a probability of cuDNN's is a multiple of 1 / 16 (check_cudnn_dropout)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run attention by the kernel that torch chooses on a GPU. The memory-efficient one has no grouped queries."""
    aten, allowed = torch.ops.aten, torch.backends.cuda
    wants_grad = any(x.requires_grad for x in (query, key, value))
    if query.size(-3) != key.size(-3) and not enable_gqa:  # no fused kernel broadcasts heads
        out = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
        )
        return cast(torch.Tensor, out[0])
    if allowed.cudnn_sdp_enabled() and cudnn_can_run(query, key, value, dropout_p):
        bias = None if attn_mask is None else added(attn_mask, query.dtype)
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, wants_grad, dropout_p, is_causal, False, scale=scale
        )
        return cast(torch.Tensor, out[0])
    if allowed.flash_sdp_enabled() and attn_mask is None and flash_can_run(query, key, value, is_causal):
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return cast(torch.Tensor, out[0])
    if not allowed.mem_efficient_sdp_enabled():
        how = {"scale": scale, "enable_gqa": enable_gqa}
        out = aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, None, **how)
        return cast(torch.Tensor, out[0])
    if enable_gqa and key.size(-3) != query.size(-3):
        repeats = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    bias = None
    if attn_mask is not None:
        bias = added(attn_mask, query.dtype).expand(query.size(0), query.size(1), query.size(2), key.size(2))
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, wants_grad, dropout_p, is_causal, scale=scale
    )
    return cast(torch.Tensor, out[0])


def added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as numbers to add to the scores (attention.cpp, convert_boolean_attn_mask)."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), torch.full((), float("-inf"), dtype=dtype), 0.0)


def cudnn_can_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> bool:
    """Return whether cuDNN's kernel takes these tensors (check_cudnn_tensor_shapes, check_cudnn_dropout)."""
    sizes, keys = (query.size(-1), value.size(-1)), key.size(-2)
    fits = max(sizes) <= CUDNN_HEAD_DIM or sizes in CUDNN_HEAD_DIMS
    dropout = not dropout_p or ((dropout_p * DROPOUT_STEPS).is_integer() and query.size(-2) > 1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return query.dtype in HALF and fits and not any(n % 8 for n in sizes) and keys > 1 and dropout and not deterministic


def flash_can_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> bool:
    """Return whether FlashAttention-2 takes these tensors; its causal mask of other lengths than torch's is another."""
    square = query.size(-2) == key.size(-2) or not is_causal
    return query.dtype in HALF and query.size(-1) == value.size(-1) <= FLASH_HEAD_DIM and square
