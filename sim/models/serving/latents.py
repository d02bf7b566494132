"""Small kernels of latent attention while serving, and its attention in the latent's width.

Facts of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM of 2026. `bundled` is assumed to do the same.

- RMSNorms of the query's and of the other latent, a kernel each (q_a_layernorm, kv_a_layernorm; vLLM, layers/mla.py).
- Keys of prompts are joined of every head's part and the rope key that all share (vLLM, mla_attention.py,
  `_concat_k_nope_k_pe`; SGLang, `concat_mla_k`).
- Latents that are cached before a chunk are gathered first (vLLM, `gather_and_maybe_dequant_cache`; SGLang,
  `_get_mla_kv_buffer`).
- Where attention to them is a kernel of its own, its result and that over the chunk are merged (`merge_attn_states`).
- TensorRT-LLM joins each token's latent and rope key before they are cached (_torch/modules/attention.py,
  `latent_cache`), and absorbs up-projections that a checkpoint has in blocks of fp8 in fp8 on Hopper
  (`fp8_block_scaling_bmm_out`).
- In decode some kernels take the absorbed query and its part with rope as one tensor, which is joined first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sim.core.attention_pairs import attended_pairs
from sim.core.program import Compute, Program
from sim.models.operators import F, memory_op

if TYPE_CHECKING:
    from sim.models.serving.operators import ServingDims


class LatentHeads(NamedTuple):
    """A rank's heads over a latent: their number, the width of a query's and a key's part without rope and with it,
    that of a value, and of the latent."""

    number: int
    plain: int
    rope: int
    value: int
    latent: int

    @property
    def shared(self) -> int:
        """Numbers of a token that all heads read: its latent and its rope key."""
        return self.latent + self.rope


def served_latent_norm(d: ServingDims, name: str, tokens: int, rank: int) -> Compute:
    """The RMSNorm of latents `[tokens, rank]`, read and written once."""
    n = tokens * rank
    return memory_op(name, F, "elementwise", n, 2 * n * d.act_bytes, d.act)


def keys_joined(d: ServingDims, tokens: int, h: LatentHeads) -> Compute:
    """Keys `[tokens, heads, plain + rope]` of a part of every head and of one that all share."""
    n, read = tokens * h.number * (h.plain + h.rope), tokens * (h.number * h.plain + h.rope)
    return memory_op("latent_keys_join", F, "copy", n, (n + read) * d.act_bytes, d.act)


def latents_joined(d: ServingDims, tokens: int, h: LatentHeads) -> Program:
    """Latents and rope keys `[tokens, latent + rope]` as one tensor, of an engine that joins them for its cache."""
    if not d.latents.joins_latents:
        return ()
    n = tokens * h.shared
    return (memory_op("latents_join", F, "copy", n, 2 * n * d.act_bytes, d.act),)


def queries_joined(d: ServingDims, tokens: int, h: LatentHeads) -> Program:
    """Queries `[tokens, heads, latent + rope]` of what was absorbed and their part with rope, for kernels that take
    them as one tensor."""
    if not d.latents.joins_queries:
        return ()
    n = tokens * h.number * h.shared
    return (memory_op("latent_queries_join", F, "copy", n, 2 * n * d.act_bytes, d.act),)


def context_gathered(d: ServingDims, tokens: int, h: LatentHeads, entry_bytes: float) -> Program:
    """Cached latents of `tokens` before chunks, copied out of their blocks in 16 bits."""
    if not tokens:
        return ()
    n = tokens * h.shared
    return (memory_op("latent_context_gather", F, "copy", n, tokens * entry_bytes + n * d.act_bytes, d.act),)


def context_merged(d: ServingDims, tokens: int, h: LatentHeads) -> Program:
    """Results `[tokens, heads, value]` of attention to what is cached and to the chunk itself, merged."""
    if not d.latents.merges_context:
        return ()
    n = tokens * h.number * h.value
    return (memory_op("latent_context_merge", F, "elementwise", n, 3 * n * d.act_bytes, d.act),)


def absorbed_core(d: ServingDims, batch: int, q_len: int, kv_len: int, h: LatentHeads, entry_bytes: float) -> Compute:
    """Causal attention of `batch` prompt chunks in the latent's width, all heads over one key and value."""
    flops = 2.0 * batch * h.number * float(attended_pairs(q_len, kv_len, True)) * (h.shared + h.latent)
    moved = batch * (q_len * h.number * (h.shared + h.latent) * d.act_bytes + kv_len * entry_bytes)
    shape = (batch, h.number, 1, q_len, kv_len, h.shared, h.latent, int(q_len > 1))
    return Compute("prefill", "attention_forward", shape, d.act, flops, moved, F, served=True)
