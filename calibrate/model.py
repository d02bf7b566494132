"""The reference model: a GPT or Llama in plain torch, cut into blocks that pipeline stages are made of.

A block is the embedding, one layer, or the head with its loss. What a block's forward keeps for its
backward is what the simulator counts (Korthikanti et al. 2022, arXiv 2205.05198, sec. 4: 34sbh + 5as²b
bytes for a 16-bit GPT layer with dropout): dropout masks take one byte, constants such as masks and
rotation tables are shared by all layers, and norms keep their input once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.attention_dropout import Dropped, DroppedAttention
from calibrate.dropout import Share, dropout
from calibrate.fp8 import Linear8
from calibrate.latent import LatentHeads
from calibrate.linear import Linear, WeightGrads
from calibrate.norm import Norm
from calibrate.rotation import Constants, make_constants, rotate
from sim.inputs.model_config import ModelConfig, MoeConfig
from sim.inputs.scenario import Training


def activation(mlp: str, x: Tensor) -> Tensor:
    """Between the two matrices of an MLP or an expert; of swiglu's two halves the first is the gate."""
    if mlp == "swiglu":
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    if mlp == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh")


Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # [b, heads, s, d], [b, kv_heads, s, d] twice → [b, heads, s, d]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, heads, s, d], [b, kv_heads, s, d] twice → [b, heads, s, d]"""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Expert(nn.Module):
    """One expert: an MLP of inner size `moe.ffn`. [tokens, h] → [tokens, h]"""

    def __init__(self, m: ModelConfig, ffn: int, store: WeightGrads | None) -> None:
        super().__init__()
        self.mlp = m.mlp
        self.up = Linear(m.hidden, ffn * (2 if m.mlp == "swiglu" else 1), m.bias, store)
        self.down = Linear(ffn, m.hidden, m.bias, store)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(activation(self.mlp, self.up(x)))
        return out


def moe_of(m: ModelConfig) -> MoeConfig:
    """The experts of a model that has some."""
    assert m.moe is not None
    return m.moe


class Router(nn.Module):
    """The experts of each token and their weights, which sum to one (Mixtral, arXiv 2401.04088, sec. 2.1).

    `balanced`: the experts are taken in turn by token number, whatever the probabilities say, so that all get
    as many (Megatron-LM's --moe-router-force-load-balancing); the weights are the probabilities all the same.
    """

    balanced = True

    def __init__(self, m: ModelConfig, store: WeightGrads | None) -> None:
        super().__init__()
        moe = moe_of(m)
        self.experts, self.top_k, self.capacity_factor = moe.experts, moe.top_k, moe.capacity_factor
        self.matrix = Linear(m.hidden, moe.experts, False, store)

    def forward(self, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, h], [tokens] → weights and experts, [tokens, top_k] both; a dropped copy has expert `experts`."""
        logits = self.matrix(x)
        probabilities = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        if self.balanced:
            turn = torch.arange(self.top_k, device=x.device)
            chosen = (numbers[:, None] * self.top_k + turn) % self.experts
            weights = probabilities.gather(1, chosen)
        else:
            weights, chosen = probabilities.topk(self.top_k)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), self._within_capacity(chosen)

    def _within_capacity(self, chosen: Tensor) -> Tensor:
        """Of each expert's copies the first ones, in the tokens' order, up to its capacity (Fedus et al. 2021, Switch
        Transformer, arXiv 2101.03961, sec. 2.2): what is above is dropped, and its token is the poorer for it."""
        if self.capacity_factor is None:
            return chosen
        capacity = math.ceil(self.capacity_factor * chosen.numel() / self.experts)
        flat = chosen.reshape(-1)
        taken = torch.nn.functional.one_hot(flat, self.experts).cumsum(0)  # copies of each expert until here
        place = taken.gather(1, flat[:, None])[:, 0]
        return torch.where(place > capacity, self.experts, flat).view(chosen.shape)


class Experts(nn.Module):
    """Mixture of experts, one after the other, no token dropped. [b, s, h] → [b, s, h]"""

    def __init__(self, m: ModelConfig, store: WeightGrads | None) -> None:
        super().__init__()
        self.router = Router(m, store)
        self.experts = nn.ModuleDict({str(e): Expert(m, moe_of(m).ffn, store) for e in range(moe_of(m).experts)})

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows, torch.arange(len(rows), device=x.device))
        out = torch.zeros_like(rows)
        for e, expert in self.experts.items():
            token, slot = (chosen == int(e)).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view(x.shape)


class Layer(nn.Module):
    """Attention and MLP or experts, each after a norm and added to its input. [b, s, h] → [b, s, h]"""

    def __init__(
        self, m: ModelConfig, t: Training, store: WeightGrads | None, constants: Constants, moe: bool = False
    ) -> None:
        super().__init__()
        self.m, self.fused, self.constants = m, t.attention == "fused", constants
        drops = self.fused and m.dropout > 0
        self.core: Core = DroppedAttention(Dropped(m.dropout)) if drops else causal_attention
        heads, kv = m.heads * (m.head_dim if m.mla is None else m.mla.v_head_dim), m.kv_heads * m.head_dim
        self.norm1 = Norm(m)
        linear = Linear8 if t.precision == "fp8" else Linear
        self.latent = None if m.mla is None else LatentHeads(m, store)
        if self.latent is None:
            self.qkv = linear(m.hidden, heads + 2 * kv, m.bias, store)
        self.proj = linear(heads, m.hidden, m.bias and m.mla is None, store)
        self.norm2 = Norm(m)
        self.moe: nn.Module | None = Experts(m, store) if moe else None
        ffn = moe_of(m).ffn * moe_of(m).shared_experts if moe else m.ffn
        if ffn:
            self.up = linear(m.hidden, ffn * (2 if m.mlp == "swiglu" else 1), m.bias, store)
            self.down = linear(ffn, m.hidden, m.bias, store)
        self.dense = ffn > 0
        self.tokens: Share | None = None  # of a micro-batch's tokens, and of the scores [b · kv_heads, rows, s]:
        self.scores: Share | None = None  # what this rank has, where that is not all

    def forward(self, x: Tensor) -> Tensor:
        p, tokens = self.m.dropout, self.tokens
        x = x + dropout(self.proj(self.attention(self.norm1(x))), p, tokens)
        return x + dropout(self.mlp(self.norm2(x)), p, tokens)

    def mlp(self, x: Tensor) -> Tensor:
        """The dense MLP, or routed experts and the shared ones that see every token."""
        routed: Tensor | None = None if self.moe is None else self.moe(x)
        dense: Tensor | None = self.down(self.activation(self.up(x))) if self.dense else None
        if routed is not None and dense is not None:
            return routed + dense
        out = dense if routed is None else routed
        assert out is not None  # a layer has one of the two
        return out

    def activation(self, x: Tensor) -> Tensor:
        return activation(self.m.mlp, x)

    def attention(self, x: Tensor) -> Tensor:
        """[b, s, h] → [b, s, heads · d], causal."""
        q, k, v = self._heads(self.qkv(x)) if self.latent is None else self.latent(x, self.constants)
        if not self.fused:
            return self.unfused(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.core(q, k, v).transpose(1, 2).flatten(2)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, (heads + 2 kv_heads) · d] → queries, keys and values, [b, s, heads or kv_heads, d]."""
        m, (b, s, _) = self.m, qkv.shape
        q, k, v = qkv.view(b, s, -1, m.head_dim).split((m.heads, m.kv_heads, m.kv_heads), 2)
        if m.positions == "rope":
            q, k, v = rotate(q, self.constants), rotate(k, self.constants), v.contiguous()
        return q, k, v

    def unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Two batched matmuls around softmax and dropout; the query heads of one KV head are stacked as
        rows.
        """
        m, (b, s, _, d) = self.m, q.shape
        group = m.heads // m.kv_heads
        q = q.view(b, s, m.kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(b * m.kv_heads, group * s, d)
        k, v = (x.transpose(1, 2).reshape(b * m.kv_heads, s, -1) for x in (k, v))
        mask = self.constants.mask[:s, :s].repeat(group, 1) if group > 1 else self.constants.mask[:s, :s]
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5)
        out = torch.bmm(dropout(torch.softmax(scores, -1), m.dropout, self.scores), v)
        return out.view(b, m.kv_heads, group, s, -1).permute(0, 3, 1, 2, 4).reshape(b, s, -1)


class Embedding(nn.Module):
    """Token and learned position embeddings. [b, s] int64 → [b, s, h]"""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.m = m
        self.weight = nn.Parameter(torch.empty(m.padded_vocab(1), m.hidden))
        self.positions = nn.Parameter(torch.empty(m.max_positions, m.hidden)) if m.positions == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[-1]]
        return dropout(x, self.m.dropout)


class Head(nn.Module):
    """Final norm, output matmul and mean cross-entropy. [b, s, h], [b, s] → scalar"""

    def __init__(self, m: ModelConfig, store: WeightGrads | None, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = Norm(m)
        self.output = Linear(m.hidden, m.padded_vocab(1), False, store)
        if tied is not None:
            self.output.weight = tied

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.view(-1, wide.shape[-1]), targets.reshape(-1))


@dataclass(frozen=True, slots=True)
class Build:
    """How blocks are made: device, dtype, seed, and whether weight gradients can be split off."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    store: WeightGrads | None = None


def make_blocks(m: ModelConfig, t: Training, wanted: Sequence[int], build: Build) -> list[nn.Module]:
    """Blocks of the model by number: 0 the embedding, 1 … layers, layers + 1 the head with its loss.

    Each block's parameters depend on the seed and its number alone, so stages made apart fit together.
    """
    constants = make_constants(m, t.seq_len, build.device, build.dtype)
    blocks: list[nn.Module] = []
    for i in wanted:
        with torch.device("meta"):
            block = _make_block(m, t, i, build.store, constants)
        block = block.to_empty(device=build.device).to(build.dtype)
        _initialize(block, build.seed * 100_003 + i)
        blocks.append(block)
    if m.tied_embeddings and m.layers + 1 in wanted:
        head = blocks[wanted.index(m.layers + 1)]
        (first,) = [blocks[wanted.index(0)]] if 0 in wanted else make_blocks(m, t, [0], build)
        assert isinstance(head, Head)
        assert isinstance(first, Embedding)
        if 0 in wanted:
            head.output.weight = first.weight
        else:  # a copy, as the embedding on another rank begins
            head.output.weight.data = first.weight.data
    return blocks


def _make_block(m: ModelConfig, t: Training, i: int, store: WeightGrads | None, constants: Constants) -> nn.Module:
    if i == 0:
        return Embedding(m)
    if i == m.layers + 1:
        return Head(m, store)
    return Layer(m, t, store, constants, m.is_moe_layer(i - 1))


def _initialize(block: nn.Module, seed: int) -> None:
    """Normal weights of deviation 0.02, biases small rather than zero so that a lost bias shows; norms near
    one.
    """
    device = next(block.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, p in block.named_parameters():
            values = torch.randn(p.shape, generator=generator, device=device) * 0.02
            p.copy_(values + 1.0 if "norm" in name and name.endswith("weight") else values)


def parameter_count(blocks: Sequence[nn.Module]) -> int:
    """Distinct parameters of `blocks`."""
    return sum(p.numel() for p in {id(p): p for block in blocks for p in block.parameters()}.values())
