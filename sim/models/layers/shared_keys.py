"""Attention to the keys and values of an earlier layer (Gemma 4 E2B and E4B: their last layers).

Such a layer has queries alone. It reads what the last layer of its kind with keys of its own has made, which keeps them
for its backward and, in serving, in the cache; their gradients are added up over the layers that read them
(`Gemma4TextAttention` in transformers/models/gemma4/modeling_gemma4.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.models.attention.head_copies import repeated
from sim.models.dims import Dims, Shard
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.matrix import Matrix
from sim.models.norm import norm
from sim.models.operators import I, Operator, accumulate
from sim.models.serving.operators import ServingDims

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class SharedKeysAttention(GroupedQueryAttention, frozen=True):
    """Sizes of the whole model; `kv_heads`: of the layer whose keys and values are read."""

    def qkv_and_out(self, tp: int) -> tuple[Matrix, Matrix]:
        """The projection of queries (keys and values are an earlier layer's) and that of the output."""
        first, out = super().qkv_and_out(tp)
        return replace(first, outputs=first.outputs[:1]), out

    def rope_heads(self, tp: int) -> int:
        """The heads that rope rotates: queries alone."""
        return self.heads_of(tp)[0]

    def attended(self, scenario: Scenario, d: Dims, shard: Shard) -> Operator:
        """The core, which keeps keys and values only where it copies them for each query head."""
        core = super().attended(scenario, d, shard)
        own = repeated(d, self.core(d)).repeats == 1
        saved = tuple(s for s in core.saved if not (own and s.keys))
        elements = d.tokens * self.heads_of(d.tp)[1] * sum(self.widths)
        added = accumulate(d, "shared_keys_grad_sum", elements, phase=I)
        return replace(core, saved=saved, backward=(*core.backward, added))

    def _split(self, d: Dims) -> tuple[Operator, ...]:
        """No operator: the projection's result is the queries, with nothing to take apart."""
        return ()

    def _head_norms(self, d: Dims) -> tuple[Operator, ...]:
        """The norm of queries."""
        rows, vectors = d.tokens * self.heads_of(d.tp)[0], int(self.norm_weights)
        return (norm(d, "query_norm", "rmsnorm", rows, self.head_dim, vectors),) if self.qk_norm else ()

    def other_parameters(self) -> int:
        """Weights of the norm of queries."""
        return self.head_dim if self.qk_norm and self.norm_weights else 0

    def key(self, seq_len: int) -> str:
        """Return what of a block's key the model's own sizes do not say."""
        return f"{super().key(seq_len)} shared keys of {self.kv_heads}x{self.head_dim}"

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Nothing: the layer whose keys these are keeps them."""
        return 0.0

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token's queries on one rank."""
        return self.heads_of(tp)[0] * self.head_dim
