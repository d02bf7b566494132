"""Windows and packed documents that torch's fused attention gets as a mask, as its function has neither
(`masks_windows`).

transformers/masking_utils.py, `sliding_window_causal_mask_function`: True where a query sees a key; no mask is made
where the sequence is shorter than the window (`_ignore_causal_mask_sdpa`): in one as long as the window it hides
nothing. torch/nn/functional.py, `scaled_dot_product_attention`: a mask and `is_causal` exclude
each other, so all pairs are computed. It makes numbers of the activations' dtype of the mask in every call
(aten/src/ATen/native/transformers/attention.cpp, `convert_boolean_attn_mask`), and keeps them for the backward.
Documents packed into a sequence, whose positions begin again, are a mask likewise (`find_packed_sequence_indices`).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import NeededBy, Saved
from sim.inputs.packed_documents import PackedBatch
from sim.models.attention.core import Core
from sim.models.dims import Dims
from sim.models.operators import F, Operator, memory_op

MASK_KERNELS = 3  # two numbers, chosen between (torch 2.14)
FILLED_KERNELS = 4  # zeros, truths inverted, the zeros copied and filled


def masked_window(d: Dims, own: Core, batch: PackedBatch | None = None) -> Core:
    """The core as torch computes it: all pairs of tokens, if windows are masks and the sequence fills one, or the
    causal mask is one, too, or if sequences have several documents."""
    filled = own.window is not None and own.window.tokens <= own.kv_len
    several = batch is not None and sum(number for _, number in batch.documents) > 1
    made = filled or several or (own.causal and (d.framework.masks_causal or bool(d.code.masks_causal)))
    if not made or not d.sees_masks:
        return own
    return replace(own, window=None, causal=False, masked=True)


def with_mask(d: Dims, core: Core, part: Operator) -> Operator:
    """The part with its mask, [batch, 1, q_len, kv_len].

    Bytes of a pair of tokens: the truth of one sequence is read (1), and for each sequence a number is written
    (`act_bytes`), which is kept for the backward. A compiler makes the numbers once for all layers; they are not
    counted. A mask of each head is filled by the model's own code: zeros (e), truths inverted (2), zeros copied (2e)
    and filled (2e + 1).
    """
    if not core.masked or d.framework.masks_causal or d.code.masks_causal == "numbers":
        return part
    pairs, e = float(core.q_len * core.kv_len), d.act_bytes
    moved = pairs + d.batch * pairs * e
    numbers, kernels = d.batch * pairs * core.mask_heads, MASK_KERNELS
    if core.mask_heads > 1:
        moved, kernels = (5 * e + 3) * numbers, FILLED_KERNELS
    made = memory_op("attention_mask", F, "elementwise", numbers, moved, d.act, kernels)
    kept = Saved("attention mask", numbers * e, NeededBy.INPUT_GRAD)
    return replace(part, forward=(made, *part.forward), saved=(*part.saved, kept))
