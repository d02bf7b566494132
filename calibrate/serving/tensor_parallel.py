"""Tensor parallelism of the served model over the ranks of torch's process group, as serving engines split it.

Every rank runs the same scheduler and has all tokens. It holds its share of heads, of a dense MLP and of the vocabulary
(Megatron's split: two all-reduces in a layer, one for the look-up, one gather of logits). Experts are whole on every
rank, as with `ep` and `expert_tp` 1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear
from calibrate.bundled_model.model import Embedding
from calibrate.serving.forward import Model
from sim.inputs.model_config import ModelConfig


class SummedLinear(nn.Module):
    """A row-parallel matrix: this rank's columns, then the sum over ranks and the bias."""

    def __init__(self, whole: Linear, columns: slice) -> None:
        super().__init__()
        self.bias, whole.bias = whole.bias, None
        whole.weight = nn.Parameter(whole.weight.detach()[:, columns].clone())
        self.part = whole

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


class SharedTable(Embedding):
    """This rank's part of the vocabulary's rows; a look-up is the sum over ranks."""

    def __init__(self, whole: Embedding, rows: slice) -> None:
        nn.Module.__init__(self)
        self.m, self.first, self.positions = whole.m, rows.start, whole.positions
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())

    def look_up(self, tokens: Tensor) -> Tensor:
        """Look up tokens in this rank's part of the vocabulary, and sum over the ranks."""
        own = tokens - self.first
        absent = (own < 0) | (own >= len(self.weight))
        x = F.embedding(own.masked_fill(absent, 0), self.weight).masked_fill(absent[:, None], 0.0)
        dist.all_reduce(x)
        return x


class GatheredLogits(nn.Module):
    """This rank's outputs of the last matrix, gathered over ranks."""

    def __init__(self, whole: Linear, rows: slice) -> None:
        super().__init__()
        _keep_rows(whole, rows)
        self.part = whole

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.part(x)
        all_ = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(all_, own)
        return torch.cat(all_, -1)


def split(model: Model) -> Model:
    """Return this rank's part of a whole model, which is changed.

    Raises:
        ValueError: if the number of ranks does not divide heads, KV heads, the MLP or the vocabulary.
    """
    m, rank, ranks = model.config, dist.get_rank(), dist.get_world_size()
    embedding, layers, head = model.parts
    rows = head.output.weight.shape[0]
    sizes = {"heads": m.heads, "kv_heads": m.kv_heads, "ffn": m.ffn, "vocab": rows}
    for name, size in sizes.items():
        if size % ranks:
            raise ValueError(f"{ranks} ranks do not divide {name} ({size})")

    def own(n: int) -> slice:
        return slice(rank * n // ranks, (rank + 1) * n // ranks)

    for layer in layers:
        q, kv = (torch.arange(n * m.head_dim)[own(n * m.head_dim)] for n in (m.heads, m.kv_heads))
        first, width = m.heads * m.head_dim, m.kv_heads * m.head_dim
        _keep_rows(layer.qkv, torch.cat((q, kv + first, kv + first + width)))
        layer.proj = SummedLinear(layer.proj, own(m.heads * m.head_dim))  # type: ignore[assignment]
        if layer.dense:
            inner = layer.down.weight.shape[1]
            mine = torch.arange(inner)[own(inner)]
            _keep_rows(layer.up, torch.cat((mine, mine + inner)) if m.mlp == "swiglu" else mine)
            layer.down = SummedLinear(layer.down, own(inner))  # type: ignore[assignment]
    head.output = GatheredLogits(head.output, own(rows))  # type: ignore[assignment]
    sizes_here = {"heads": m.heads // ranks, "kv_heads": m.kv_heads // ranks, "head_dim": m.head_dim}
    config: ModelConfig = m.model_copy(update=sizes_here)
    return Model(config, [SharedTable(embedding, own(rows)), *layers, head])


def from_rank_0(seconds: float) -> float:
    """Return rank 0's number on every rank, so that all schedulers see one clock."""
    said = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(said, 0)
    return float(said)


def _keep_rows(linear: Linear, rows: Tensor | slice) -> None:
    linear.weight = nn.Parameter(linear.weight.detach()[rows].clone())
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[rows].clone())
