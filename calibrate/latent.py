"""Multi-head latent attention's queries, keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are made of one latent of a token, queries of another or of the token itself. A query or
key head has a part without rope and a part with it; the keys' part with rope is one for all heads. In training every
head's keys and values are made (section 2.1.2's absorption is for decoding). DeepSeek's code turns neighbouring
numbers, this one halves: the same up to the order of the matrices' rows.

Beside it: docs/operators.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from calibrate.linear import Linear, WeightGrads
from calibrate.norm import Norm
from calibrate.rotation import Constants, rotate
from sim.inputs.model_config import ModelConfig


class LatentNorm(Norm):
    """RMSNorm over a latent, whatever the model's other norms are."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(width))
        self.rms, self.bias = True, None


class WholeLinear(Linear):
    """A matrix to latents: without bias, and whole on every tensor-parallel rank."""

    def __init__(self, n_in: int, n_out: int, store: WeightGrads | None) -> None:
        super().__init__(n_in, n_out, False, store)


class LatentHeads(nn.Module):
    """[b, s, h] → queries and keys [b, s, heads, nope + rope] and values [b, s, heads, v].

    Under tensor parallelism `query` and `kv_up` make some of the heads, and `shared_key` brings the part of all heads'
    keys that a rank has only some tokens of (sequence parallelism), or only some heads' gradient of, together.
    """

    def __init__(self, m: ModelConfig, store: WeightGrads | None) -> None:
        super().__init__()
        assert m.mla is not None
        self.sizes, self.heads, rank = m.mla, m.heads, m.mla.q_lora_rank
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
        kv = self.kv_up(self.kv_norm(latent.contiguous()))  # a copy, or the norm would keep the key's part too
        key = rotate(self.shared_key(key)[:, :, None], c)
        own = (*kv.shape[:2], self.heads, -1)
        plain, turned = q.view(own).split((m.qk_nope_head_dim, m.qk_rope_head_dim), -1)
        k, v = kv.view(own).split((m.qk_nope_head_dim, m.v_head_dim), -1)
        q = torch.cat((plain, rotate(turned, c)), -1)
        k = torch.cat((k, key.expand(-1, -1, self.heads, -1)), -1)
        return q, k, v.contiguous()

    def _query_latent(self, x: Tensor) -> Tensor:
        if self.query_down is None or self.query_norm is None:
            return x
        out: Tensor = self.query_norm(self.query_down(x))
        return out
