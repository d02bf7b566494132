"""The bundled model: a GPT or Llama in plain torch, made of blocks from which pipeline stages are built.

A block is the embedding, one layer, or the head with its loss. A block's forward keeps for its backward exactly the
bytes that the simulator counts (Korthikanti et al. 2022, arXiv 2205.05198, sec. 4: 34sbh + 5as²b bytes for a 16-bit GPT
layer with dropout). Dropout masks take one byte for each element, all layers share constants such as masks and rotation
tables, and norms keep their input once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.attention_dropout import Dropped, DroppedAttention
from calibrate.bundled_model.dropout import Share, dropout
from calibrate.bundled_model.fp8 import Linear8
from calibrate.bundled_model.latent import LatentHeads
from calibrate.bundled_model.linear import Linear, WeightGrads
from calibrate.bundled_model.norm import Norm
from calibrate.bundled_model.rotation import Constants, make_constants, rotate
from sim.inputs.model_config import ModelConfig, MoeConfig
from sim.inputs.training_config import Training


def activation(mlp: str, x: Tensor) -> Tensor:
    """Apply an MLP's or expert's activation between its two matrices; swiglu's first half is the gate."""
    if mlp == "swiglu":
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    if mlp == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh")


Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # [b, heads, s, d], [b, kv_heads, s, d] twice → [b, heads, s, d]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute fused attention: q [b, heads, s, d], k and v [b, kv_heads, s, d] → [b, heads, s, d]."""
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
    """Return the expert settings of a model that has experts."""
    assert m.moe is not None
    return m.moe


class Router(nn.Module):
    """Chooses each token's experts and their weights, which sum to one (Mixtral, arXiv 2401.04088, sec. 2.1).

    `balanced`: experts are chosen in turn by token number, so that all get equally many tokens (Megatron-LM's
    --moe-router-force-load-balancing). The weights are still the router's probabilities.
    """

    balanced = True

    def __init__(self, m: ModelConfig, store: WeightGrads | None) -> None:
        super().__init__()
        moe = moe_of(m)
        self.experts, self.top_k, self.capacity_factor = moe.experts, moe.top_k, moe.capacity_factor
        self.matrix = Linear(m.hidden, moe.experts, False, store)

    def forward(self, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens [tokens, h] with numbers [tokens] → weights and experts, both [tokens, top_k].

        A dropped copy of a token has the expert number `experts`.
        """
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
        """Drop the copies above each expert's capacity, the last in the order of tokens.

        Fedus et al. 2021, Switch Transformer, arXiv 2101.03961, sec. 2.2. A token lacks the output of dropped copies.
        """
        if self.capacity_factor is None:
            return chosen
        capacity = math.ceil(self.capacity_factor * chosen.numel() / self.experts)
        flat = chosen.reshape(-1)
        taken = torch.nn.functional.one_hot(flat, self.experts).cumsum(0)  # copies of each expert up to this one
        place = taken.gather(1, flat[:, None])[:, 0]
        return torch.where(place > capacity, self.experts, flat).view(chosen.shape)


class Experts(nn.Module):
    """Mixture of experts, computed one expert after the other. [b, s, h] → [b, s, h]"""

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
    """Attention, then an MLP or experts, each after a norm and with a residual sum. [b, s, h] → [b, s, h]"""

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
        self.tokens: Share | None = None  # this rank's part of a micro-batch's activations; None: all of them
        self.scores: Share | None = None  # this rank's part of the scores [b · kv_heads, rows, s]; None: all of them

    def forward(self, x: Tensor) -> Tensor:
        p, tokens = self.m.dropout, self.tokens
        x = x + dropout(self.proj(self.attention(self.norm1(x))), p, tokens)
        return x + dropout(self.mlp(self.norm2(x)), p, tokens)

    def mlp(self, x: Tensor) -> Tensor:
        """Compute the dense MLP, or routed experts and shared experts."""
        routed: Tensor | None = None if self.moe is None else self.moe(x)
        dense: Tensor | None = self.down(self.activation(self.up(x))) if self.dense else None
        if routed is not None and dense is not None:
            return routed + dense
        out = dense if routed is None else routed
        assert out is not None  # a layer has experts or a dense MLP
        return out

    def activation(self, x: Tensor) -> Tensor:
        return activation(self.m.mlp, x)

    def attention(self, x: Tensor) -> Tensor:
        """Compute causal attention: [b, s, h] → [b, s, heads · d]."""
        q, k, v = self._heads(self.qkv(x)) if self.latent is None else self.latent(x, self.constants)
        if not self.fused:
            return self.unfused(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.core(q, k, v).transpose(1, 2).flatten(2)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [b, s, (heads + 2 kv_heads) · d] into queries, keys and values [b, s, heads or kv_heads, d]."""
        m, (b, s, _) = self.m, qkv.shape
        q, k, v = qkv.view(b, s, -1, m.head_dim).split((m.heads, m.kv_heads, m.kv_heads), 2)
        if m.positions == "rope":
            q, k, v = rotate(q, self.constants), rotate(k, self.constants), v.contiguous()
        return q, k, v

    def unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention as two batched matmuls around softmax and dropout.

        The query heads of one KV head are stacked as rows.
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
        x = self.look_up(tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[-1]]
        return dropout(x, self.m.dropout)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the tokens' rows, without positions."""
        return F.embedding(tokens, self.weight)


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
    """Hold the settings by which blocks are made: device, dtype, seed, and where weight gradients are deferred to."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    store: WeightGrads | None = None


def make_blocks(m: ModelConfig, t: Training, wanted: Sequence[int], build: Build) -> list[nn.Module]:
    """Make blocks of the model by number: 0 the embedding, 1 to `layers` the layers, `layers` + 1 the head with loss.

    A block's parameters depend only on the seed and its number, so ranks can make their stages independently.
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
        else:  # a copy with the initial values of the embedding, which is on another rank
            head.output.weight.data = first.weight.data
    return blocks


def _make_block(m: ModelConfig, t: Training, i: int, store: WeightGrads | None, constants: Constants) -> nn.Module:
    if i == 0:
        return Embedding(m)
    if i == m.layers + 1:
        return Head(m, store)
    return Layer(m, t, store, constants, m.is_moe_layer(i - 1))


def _initialize(block: nn.Module, seed: int) -> None:
    """Set weights to normal numbers of standard deviation 0.02 and norms near one.

    Biases are small instead of zero, so that a lost bias shows.
    """
    device = next(block.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, p in block.named_parameters():
            values = torch.randn(p.shape, generator=generator, device=device) * 0.02
            p.copy_(values + 1.0 if "norm" in name and name.endswith("weight") else values)


def parameter_count(blocks: Sequence[nn.Module]) -> int:
    """Return the number of distinct parameters of `blocks`."""
    return sum(p.numel() for p in {id(p): p for block in blocks for p in block.parameters()}.values())
