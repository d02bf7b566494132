"""Chooses the kernel of scaled dot product attention as torch does on a Hopper GPU.

aten/src/ATen/native/transformers: of the kernels that the code allows (`sdpa_kernel`) torch takes the first that can
run (cuda/sdp_utils.cpp, `select_sdp_backend`; sdp_utils_cpp.h). They are cuDNN's (`check_prefer_cudnn_attention`: on
compute capability 9 and 10), FlashAttention-2, the memory-efficient one, and plain matmuls with a softmax. A GPU of
another kind takes FlashAttention-2 before cuDNN's kernel, and the memory-efficient one for a mask; an A100's profile
has their speeds under cuDNN's name. What the code does around a kernel is in attention.cpp,
`scaled_dot_product_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sim.models.attention.torch_choice import CUDNN_DROPOUT_STEPS, CUDNN_HEAD_DIM, CUDNN_HEAD_DIMS, FLASH_HEAD_DIM

HALF = (torch.bfloat16, torch.float16)
CUDNN_FORWARD_HEAD_DIM = 256  # the largest head size of cuDNN's kernel in a forward alone
ALIGNED = 8  # elements: head sizes of FlashAttention-2, rows of a mask of the memory-efficient kernel
EFFICIENT_ALIGNED = {2: 8, 4: 4}  # head sizes of the memory-efficient kernel by bytes (minimum_gemm_alignment)
# Since torch 2.14 the fused kernels broadcast one head of keys, the memory-efficient one knows grouped queries, and
# tensors of three dimensions are fused (pull requests 191085 and 192271).
BROADCASTS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)


class Attending(NamedTuple):
    """The arguments of an attention. `grouped`: the code says `enable_gqa`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def wants_grad(self) -> bool:
        """Tell whether a backward follows; the kernel then keeps the logarithms of its sums."""
        given = (*self.inputs, *(() if self.mask is None else (self.mask,)))
        return torch.is_grad_enabled() and any(x.requires_grad for x in given)


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
    """Run attention by the kernel that torch chooses on a GPU."""
    given = Attending(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if BROADCASTS and query.dim() == key.dim() == value.dim() == 3:
        mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (x.unsqueeze(0) for x in given.inputs)
        return _run(given._replace(query=query, key=key, value=value, mask=mask)).squeeze(0)
    return _run(given)


def _run(a: Attending) -> torch.Tensor:
    allowed = torch.backends.cuda
    if allowed.cudnn_sdp_enabled() and cudnn_can_run(a):
        return _cudnn(a)
    if allowed.flash_sdp_enabled() and flash_can_run(a):
        return _flash(a)
    if allowed.mem_efficient_sdp_enabled() and efficient_can_run(a):
        return _efficient(a)
    how = {"scale": a.scale, "enable_gqa": a.grouped}
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        *a.inputs, _added(a), a.dropout_p, a.is_causal, None, **how
    )[0]
    return out


def _cudnn(a: Attending) -> torch.Tensor:
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: torch.Tensor = run(*a.inputs, _added(a), a.wants_grad, a.dropout_p, a.is_causal, False, scale=a.scale)[0]
    return out


def _flash(a: Attending) -> torch.Tensor:
    """Run FlashAttention-2; heads of other sizes get zeros up to a multiple of 8."""
    size = a.query.size(-1)
    scale = size**-0.5 if a.scale is None else a.scale
    inputs = [padded(x) for x in a.inputs]
    run = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = run(*inputs, a.dropout_p, a.is_causal, False, scale=scale)[0]
    return out if out.size(-1) == size else out.narrow(-1, 0, size)


def _efficient(a: Attending) -> torch.Tensor:
    """Run the memory-efficient kernel; a mask's rows that are not aligned get zeros (preprocess_mask)."""
    bias = _added(a)
    if bias is not None:
        if any(stride % ALIGNED for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
            last = bias.size(-1)
            bias = padded(bias, always=True).narrow(-1, 0, last)
        bias = bias.expand(a.query.size(0), a.query.size(1), a.query.size(2), a.key.size(2))
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    out: torch.Tensor = run(*a.inputs, bias, a.wants_grad, a.dropout_p, a.is_causal, scale=a.scale)[0]
    return out


def padded(x: torch.Tensor, always: bool = False) -> torch.Tensor:
    """Return a tensor whose last dimension has zeros up to a multiple of 8; `always`: a copy, with at least one."""
    missing = ALIGNED - x.size(-1) % ALIGNED
    return x if missing == ALIGNED and not always else torch.ops.aten.constant_pad_nd(x, [0, missing])


def _added(a: Attending) -> torch.Tensor | None:
    """Return a mask as numbers to add to the scores (attention.cpp, convert_boolean_attn_mask)."""
    if a.mask is None or a.mask.dtype != torch.bool:
        return a.mask
    hidden = torch.full((), float("-inf"), dtype=a.query.dtype)
    return torch.where(a.mask, 0.0, hidden)


def cudnn_can_run(a: Attending) -> bool:
    """Return whether cuDNN's kernel takes these tensors (can_use_cudnn_attention)."""
    sizes, keys = (a.query.size(-1), a.value.size(-1)), a.key.size(-2)
    largest = CUDNN_HEAD_DIM if a.wants_grad else CUDNN_FORWARD_HEAD_DIM
    fits = (max(sizes) <= largest or sizes in CUDNN_HEAD_DIMS) and not any(n % 8 for n in sizes)
    dropout = not a.dropout_p or ((a.dropout_p * CUDNN_DROPOUT_STEPS).is_integer() and a.query.size(-2) > 1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not (a.query.dtype in HALF and fits and keys > 1 and dropout and not deterministic):
        return False
    return _dense(a) and _heads_fit(a, grouped=True) and _mask_fits(a)


def _mask_fits(a: Attending) -> bool:
    """Return whether cuDNN takes the mask: two or four dimensions, and no gradient (check_attn_mask_shape)."""
    if a.mask is None:
        return True
    if a.mask.requires_grad or a.mask.dim() not in (2, 4):
        return False
    wanted = (a.query.size(0), a.query.size(1), a.query.size(2), a.key.size(2))[-a.mask.dim() :]
    return all(n in (1, m) for n, m in zip(a.mask.shape, wanted, strict=True))


def flash_can_run(a: Attending) -> bool:
    """Return whether FlashAttention-2 takes these tensors (can_use_flash_attention).

    Its causal mask of other lengths than torch's is another.
    """
    square = a.query.size(-2) == a.key.size(-2) or not a.is_causal
    fits = a.query.size(-1) == a.value.size(-1) <= FLASH_HEAD_DIM
    return a.query.dtype in HALF and a.mask is None and fits and square and _dense(a) and _heads_fit(a, grouped=True)


def efficient_can_run(a: Attending) -> bool:
    """Return whether the memory-efficient kernel takes these tensors (can_use_mem_efficient_attention)."""
    aligned = EFFICIENT_ALIGNED.get(a.query.element_size())
    if aligned is None or any(x.size(-1) % aligned for x in a.inputs):
        return False
    return _dense(a) and _heads_fit(a, grouped=BROADCASTS)


def _dense(a: Attending) -> bool:
    """Return whether tensors have four dimensions, one batch, and neighbours in their last dimension.

    check_tensor_shapes, check_last_dim_stride_equals_1_dense, check_nonzero_sequence_lengths_dense.
    """
    if any(x.dim() != 4 for x in a.inputs) or len({x.size(0) for x in a.inputs}) > 1:
        return False
    apart = any(x.stride(-1) != 1 for x in a.inputs) and a.query.size(-1) != 1
    mask_apart = a.mask is not None and a.mask.stride(-1) != 1
    return not apart and not mask_apart and a.query.size(2) > 0 and a.key.size(2) > 0


def _heads_fit(a: Attending, grouped: bool) -> bool:
    """Return whether a kernel takes these heads; `grouped`: it knows grouped queries.

    check_batch_size_and_num_heads_dense, check_grouped_query_attention.
    """
    heads, of_keys, of_values = (x.size(1) for x in a.inputs)
    if a.grouped and grouped:
        return of_keys == of_values > 0 and heads % of_keys == 0
    return heads == of_keys == of_values or (BROADCASTS and of_keys == of_values == 1)
