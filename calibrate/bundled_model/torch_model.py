"""The bundled GPT or Llama made of torch.nn's own modules, which torch's parallelisms can split.

Query, key, value, gate and up are separate matrices here, because torch.distributed.tensor splits whole modules; the
bundled layers merge them into two matrices. Weights are those of the bundled model. `bundled_gradients` merges the
gradients again, so that both models can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from calibrate.bundled_model.model import Embedding, Head, Layer
from calibrate.bundled_model.norm import EPSILON
from calibrate.bundled_model.norm import Norm as BundledNorm
from calibrate.bundled_model.rotation import rotate
from sim.inputs.model_config import ModelConfig


class Attention(nn.Module):
    """Projections and causal attention; the projections' outputs give the number of heads. [b, s, h] → [b, s, h]"""

    def __init__(self, layer: Layer, m: ModelConfig) -> None:
        super().__init__()
        kv = m.kv_heads * m.head_dim
        self.head_dim, self.constants, self.rope = m.head_dim, layer.constants, m.positions == "rope"
        self.fused = layer.fused
        parts = [m.heads * m.head_dim, kv, kv]
        self.q, self.k, self.v = _split(layer.qkv, parts)
        self.proj = _linear(layer.proj.weight, layer.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, self.head_dim) for p in (self.q, self.k, self.v))
        if self.rope:
            q, k = rotate(q, self.constants), rotate(k, self.constants)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y: Tensor = self.proj(self.core(q, k, v).transpose(1, 2).reshape(b, s, -1))
        return y

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention: q [b, heads, s, d], k and v [b, kv_heads, s, d] → [b, heads, s, d]."""
        groups = q.shape[1] // k.shape[1]
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5 + self.constants.mask[: q.shape[2], : q.shape[2]]
        return torch.softmax(scores, -1) @ v


class Mlp(nn.Module):
    """Up (and gate), activation, down. [b, s, h] → [b, s, h]"""

    def __init__(self, layer: Layer, m: ModelConfig) -> None:
        super().__init__()
        self.kind = m.mlp
        *gates, up = _split(layer.up, [m.ffn, m.ffn] if m.mlp == "swiglu" else [m.ffn])
        gate = gates[0] if gates else None
        self.gate: nn.Module | None = gate
        self.up, self.down = up, _linear(layer.down.weight, layer.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is not None:
            inner = F.silu(self.gate(x)) * up
        else:
            inner = F.relu(up).square() if self.kind == "relu2" else F.gelu(up, approximate="tanh")
        y: Tensor = self.down(inner)
        return y


class TorchLayer(nn.Module):
    """Attention, then an MLP, each after a norm and with a residual sum. [b, s, h] → [b, s, h]"""

    def __init__(self, layer: Layer, m: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(layer.norm1), _norm(layer.norm2)
        self.attention, self.mlp = Attention(layer, m), Mlp(layer, m)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TorchEmbedding(nn.Module):
    """Token and learned position embeddings. [b, s] int64 → [b, s, h]"""

    def __init__(self, bundled: Embedding) -> None:
        super().__init__()
        self.tokens = _embedding(bundled.weight)
        self.positions = None if bundled.positions is None else _embedding(bundled.positions)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is None:
            return x
        out: Tensor = x + self.positions(torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens))
        return out


class TorchHead(nn.Module):
    """Final norm and logits. [b, s, h] → [b, s, vocabulary]"""

    def __init__(self, bundled: Head) -> None:
        super().__init__()
        self.norm, self.output = _norm(bundled.norm), _linear(bundled.output.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(x))
        return out


class TorchStage(nn.Module):
    """Consecutive blocks of the model; `numbers` as in `calibrate.bundled_model.model.make_blocks`."""

    def __init__(self, bundled: Sequence[nn.Module], numbers: Sequence[int], m: ModelConfig) -> None:
        super().__init__()
        self.numbers = list(numbers)
        self.blocks = nn.ModuleList(_block(b, m) for b in bundled)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of logits [b, s, vocabulary] and targets [b, s], as the bundled head does."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.view(-1, wide.shape[-1]), targets.reshape(-1))


def bundled_gradients(stage: TorchStage) -> dict[str, Tensor]:
    """Return a stage's whole gradients under the bundled model's names (`block number.parameter`), merged as there."""
    out = {}
    for number, block in zip(stage.numbers, stage.blocks, strict=True):
        for name, sources in _sources(block).items():
            parts = [_whole(block.get_parameter(s)) for s in sources]
            out[f"{number}.{name}"] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out


def _sources(block: nn.Module) -> dict[str, list[str]]:
    """Return the bundled name of each parameter, and the names here that are merged into it, in order."""
    out: dict[str, list[str]] = {}
    for name, _ in block.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if isinstance(block, TorchEmbedding):
            bundled = "weight" if owner == "tokens" else "positions"
        else:
            last = owner.rpartition(".")[2]
            joined = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}.get(last, last)
            bundled = f"{joined}.{leaf}"
        out.setdefault(bundled, []).append(name)
    for names in out.values():  # the order in the bundled matrices: query, key, value; gate, up
        names.sort(key=lambda n: ("q", "k", "v", "gate", "up").index(n.split(".")[1]) if len(names) > 1 else 0)
    return out


def _whole(p: nn.Parameter) -> Tensor:
    grad = p.grad
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _block(bundled: nn.Module, m: ModelConfig) -> nn.Module:
    if isinstance(bundled, Embedding):
        return TorchEmbedding(bundled)
    if isinstance(bundled, Head):
        return TorchHead(bundled)
    assert isinstance(bundled, Layer)
    return TorchLayer(bundled, m)


def _split(whole: nn.Module, sizes: Sequence[int]) -> list[nn.Linear]:
    weight, bias = whole.get_parameter("weight"), dict(whole.named_parameters()).get("bias")
    weights = weight.detach().split(list(sizes))
    biases: Sequence[Tensor | None] = [None] * len(sizes) if bias is None else bias.detach().split(list(sizes))
    return [_linear(w, b) for w, b in zip(weights, biases, strict=True)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    out.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        out.bias = nn.Parameter(bias.detach().clone())
    return out


def _embedding(weight: Tensor) -> nn.Embedding:
    found: nn.Embedding = nn.Embedding.from_pretrained(weight.detach().clone(), freeze=False)
    return found


def _norm(bundled: BundledNorm) -> nn.Module:
    h = bundled.weight.shape[0]
    out: nn.Module
    out = nn.RMSNorm(h, EPSILON) if bundled.rms else nn.LayerNorm(h, EPSILON, bias=bundled.bias is not None)
    out.weight = nn.Parameter(bundled.weight.detach().clone())
    if bundled.bias is not None:
        out.bias = nn.Parameter(bundled.bias.detach().clone())
    return out
