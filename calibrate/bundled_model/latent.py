"""Multi-head latent attention's queries, keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Each token has one latent from which the keys and values of all heads are computed. Queries are computed from a second
latent or from the hidden state. A query or key head has a part without rope and a part with rope; all key heads share
the part with rope. Training computes every head's keys and values (section 2.1.2's absorption is for decoding).
DeepSeek's code rotates neighbouring elements, this code rotates halves, which is the same up to the order of the
matrices' rows.

Documentation: docs/operators.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear, WeightGrads
from calibrate.bundled_model.norm import Norm
from calibrate.bundled_model.rotation import Constants, rotate
from sim.inputs.model_config import ModelConfig


class LatentNorm(Norm):
    """RMSNorm over a latent, also in models whose other norms are LayerNorm."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(width))
        self.rms, self.bias = True, None


class WholeLinear(Linear):
    """A matrix that computes latents: without bias, and not split by tensor parallelism."""

    def __init__(self, n_in: int, n_out: int, store: WeightGrads | None) -> None:
        super().__init__(n_in, n_out, False, store)


class LatentHeads(nn.Module):
    """[b, s, h] → queries and keys [b, s, heads, nope + rope] and values [b, s, heads, v].

    Under tensor parallelism `query` and `kv_up` compute this rank's heads. `shared_key` gathers the keys' shared part
    over the ranks under sequence parallelism, and its backward sums the gradients of all ranks' heads.
    """

    def __init__(self, m: ModelConfig, store: WeightGrads | None) -> None:
        super().__init__()
        assert m.mla is not None
        self.sizes, self.heads, rank = m.mla, m.heads, m.mla.q_lora_rank
        self.rope = m.positions == "rope"
        self.query_down = None if rank is None else WholeLinear(m.hidden, rank, store)
        self.query_norm = None if rank is None else LatentNorm(rank)
        self.query = Linear(rank or m.hidden, m.heads * m.head_dim, False, store)
        self.kv_down = WholeLinear(m.hidden, m.mla.kv_lora_rank + m.mla.qk_rope_head_dim, store)
        self.kv_norm = LatentNorm(m.mla.kv_lora_rank)
        self.kv_up = Linear(m.mla.kv_lora_rank, m.heads * (m.mla.qk_nope_head_dim + m.mla.v_head_dim), False, store)
        self.shared_key: Callable[[Tensor], Tensor] = lambda key: key

    def forward(self, x: Tensor, c: Constants) -> tuple[Tensor, Tensor, Tensor]:
        m = self.sizes
        q = self.query(self._query_latent(x))
        latent, key = self.kv_down(x).split((m.kv_lora_rank, m.qk_rope_head_dim), -1)
        kv = self.kv_up(self.kv_norm(latent.contiguous()))  # else the norm would keep the key's part for backward too
        key = self._turned(self.shared_key(key)[:, :, None], c)
        own = (*kv.shape[:2], self.heads, -1)
        plain, turned = q.view(own).split((m.qk_nope_head_dim, m.qk_rope_head_dim), -1)
        k, v = kv.view(own).split((m.qk_nope_head_dim, m.v_head_dim), -1)
        q = torch.cat((plain, self._turned(turned, c)), -1)
        k = torch.cat((k, key.expand(-1, -1, self.heads, -1)), -1)
        return q, k, v.contiguous()

    def _turned(self, x: Tensor, c: Constants) -> Tensor:
        return rotate(x, c) if self.rope else x

    def _query_latent(self, x: Tensor) -> Tensor:
        if self.query_down is None or self.query_norm is None:
            return x
        out: Tensor = self.query_norm(self.query_down(x))
        return out
