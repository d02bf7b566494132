"""Tensor parallelism: splits the matrices of a layer, the embedding and the loss over the ranks of a group.

A column-parallel matrix holds some of the outputs, a row-parallel matrix some of the inputs. So a column-parallel
matrix followed by a row-parallel one needs one sum over the ranks forward and one backward (Shoeybi et al. 2019,
Megatron-LM, arXiv 1909.08053, sec. 3). With sequence parallelism, norms, dropout and residual sums between such pairs
are split over the tokens. The sums become reduce-scatters, and all-gathers collect the tokens again. The backward
gathers them once more for the weight gradient, as each rank keeps only its own tokens (Korthikanti et al. 2022, arXiv
2205.05198, sec. 4.2.2).

Tokens are split as consecutive rows of [b · s, h].

Documentation: docs/tensor_parallel.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.attention_dropout import DroppedAttention
from calibrate.bundled_model.dropout import Share, dropout
from calibrate.bundled_model.latent import LatentHeads
from calibrate.bundled_model.linear import Linear, bias_gradient, weight_gradient
from calibrate.bundled_model.model import Embedding, Head, Layer
from calibrate.parallel.chunked import ChunkedColumn, ChunkedRow
from calibrate.parallel.tensor_split import TensorSplit
from sim.inputs.model_config import ModelConfig


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.layer = layer
        return F.linear(layer.cut.gather(x), weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,), layer = ctx.saved_tensors, ctx.layer
        cut, weight, bias, late = layer.cut, layer.weight, layer.bias, layer.cut.overlap
        gathered = cut.start_gather(x) if late else None
        summed = cut.start_sum(grad @ weight, blocking=not late)
        grad_x = None if late else summed()
        grad_weight = grad_bias = None
        if layer.store is not None:
            layer.store.add(x, grad, weight, bias, cut.gather)
        else:
            grad_weight = weight_gradient(cut.gather(x) if gathered is None else gathered(), grad)
            grad_bias = bias_gradient(grad, bias)
        return summed() if late else grad_x, grad_weight, grad_bias, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.layer = layer
        y = layer.cut.sum(F.linear(x, weight))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,), layer = ctx.saved_tensors, ctx.layer
        weight, bias, grad_weight = layer.weight, layer.bias, None
        grad_bias = bias_gradient(grad, bias)
        whole = layer.cut.gather(grad)
        grad_x = whole @ weight
        if layer.store is not None:
            layer.store.add(x, whole, weight, None)
        else:
            grad_weight = weight_gradient(x, whole)
        return grad_x, grad_weight, grad_bias, None


class OwnRows(Linear):
    """The outputs `rows` of a whole matrix."""

    def __init__(self, whole: Linear, rows: Tensor) -> None:
        nn.Module.__init__(self)
        self.rows, self.store = rows, whole.store
        self.weight = nn.Parameter(whole.weight.detach()[rows])
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach()[rows])

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole parameter's shape."""
        return whole[self.rows]


class OwnColumns(Linear):
    """The inputs `columns` of a whole matrix, with the whole bias, which is added to the sum over the ranks."""

    def __init__(self, whole: Linear, columns: slice) -> None:
        nn.Module.__init__(self)
        self.columns, self.store = columns, whole.store
        self.weight = nn.Parameter(whole.weight.detach()[:, columns].clone())
        self.bias = whole.bias

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole parameter's shape; every rank has the whole bias."""
        return whole[:, self.columns] if name == "weight" else whole

    def deferred_parameters(self) -> list[nn.Parameter]:
        """Return the weight alone: the bias is added outside the matmul, so autograd computes its gradient."""
        return [self.weight]


class ColumnLinear(OwnRows):
    """A column-parallel matrix. [b, s, h] or this rank's tokens [rows, h] → [b, s, own outputs]

    `rows` are the numbers of this rank's rows of the whole matrix. From the `copied`-th on, `copies` ranks hold the
    same rows: key and value heads, if there are fewer than ranks.
    """

    def __init__(self, whole: Linear, cut: TensorSplit, rows: Tensor, copies: int = 1, copied: int = 0) -> None:
        super().__init__(whole, rows)
        self.cut, self.copies, self.copied = cut, copies, copied

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (ChunkedColumn if self.cut.chunked else _Column).apply(x, self.weight, self.bias, self)
        return out


class RowLinear(OwnColumns):
    """A row-parallel matrix. [b, s, own inputs] → [b, s, h] or this rank's tokens [rows, h]"""

    def __init__(self, whole: Linear, cut: TensorSplit) -> None:
        super().__init__(whole, cut.share(whole.weight.shape[1]))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (ChunkedRow if self.cut.chunked else _Row).apply(x, self.weight, self.bias, self)
        return out


def cut_layer(layer: Layer, m: ModelConfig, cut: TensorSplit) -> None:
    """Replace a layer's matrices by this rank's parts: heads / tp query heads, and at least one KV head."""
    q, kv, copies = _heads(m, cut)
    if layer.latent is not None:
        _cut_latent(layer.latent, cut, q)
    else:
        d = m.head_dim
        first = m.heads * d
        rows = [torch.arange(q.start * d, q.stop * d)]
        rows += [torch.arange(kv.start * d, kv.stop * d) + first + i * m.kv_heads * d for i in (0, 1)]
        layer.qkv = ColumnLinear(layer.qkv, cut, torch.cat(rows), copies, len(rows[0]))
    layer.proj = RowLinear(layer.proj, cut)
    layer.scores = _scores(m, cut, layer.constants.mask.shape[0], q)
    if isinstance(layer.core, DroppedAttention):
        layer.core = DroppedAttention(replace(layer.core.dropped, first_head=q.start))
    layer.m = m.model_copy(update={"heads": q.stop - q.start, "kv_heads": kv.stop - kv.start})
    if layer.dense:
        inner = layer.down.weight.shape[1]
        own = torch.arange(inner)[cut.share(inner)]
        gate_and_up = m.mlp == "swiglu"
        layer.up = ColumnLinear(layer.up, cut, torch.cat((own, own + inner)) if gate_and_up else own)
        layer.down = RowLinear(layer.down, cut)


def _cut_latent(latent: LatentHeads, cut: TensorSplit, own: slice) -> None:
    """Replace the matrices from latents to heads by this rank's parts; those to latents stay whole.

    With sequence parallelism each rank computes its own tokens' latents, and latents and the shared key are gathered
    instead of the hidden state.
    """
    for name in ("query", "kv_up"):
        whole = getattr(latent, name)
        each = whole.weight.shape[0] // latent.heads
        setattr(latent, name, ColumnLinear(whole, cut, torch.arange(own.start * each, own.stop * each)))
    latent.heads = own.stop - own.start
    latent.shared_key = lambda key: _SharedKey.apply(key, cut)


class _SharedKey(torch.autograd.Function):
    """The keys' part that all heads share, gathered over tokens; its gradient is summed over all ranks' heads."""

    @staticmethod
    def forward(ctx, key, cut):  # type: ignore[no-untyped-def]
        ctx.cut = cut
        return cut.gather(key) if cut.sequence else key.view_as(key)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.cut.sum(grad if ctx.cut.sequence else grad.clone()), None  # `sum` overwrites its input


def _scores(m: ModelConfig, cut: TensorSplit, s: int, heads: slice) -> Share:
    """Return this rank's query heads as a part of the attention scores, which `Layer.unfused` stacks by KV head."""
    group = m.heads // m.kv_heads

    def own(whole: Tensor) -> Tensor:
        return whole.view(cut.batch, m.heads, s, s)[:, heads]

    return Share((cut.batch * m.kv_heads, group * s, s), own)


def _heads(m: ModelConfig, cut: TensorSplit) -> tuple[slice, slice, int]:
    """Return this rank's query heads and KV heads, and how many ranks share these KV heads."""
    tp = cut.group.size
    if m.kv_heads >= tp:
        return cut.share(m.heads), cut.share(m.kv_heads), 1
    copies = tp // m.kv_heads
    one = cut.group.index // copies
    return cut.share(m.heads), slice(one, one + 1), copies


class _Sum(torch.autograd.Function):
    """Sum over the ranks; each rank's term has the sum's gradient, which sequence parallelism gathers."""

    @staticmethod
    def forward(ctx, x, cut):  # type: ignore[no-untyped-def]
        ctx.cut = cut
        if not cut.sequence:
            ctx.mark_dirty(x)
        return cut.sum(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.cut.gather(grad), None


class VocabularyEmbedding(Embedding):
    """Every rank looks up the tokens of its part of the vocabulary, with zeros for all others; then ranks sum.

    `at`: positions of the tokens that this rank has after the sum. `tokens`: their part of the micro-batch's.
    """

    def __init__(self, whole: Embedding, cut: TensorSplit, at: Tensor, tokens: Share | None = None) -> None:
        nn.Module.__init__(self)
        self.m, self.cut, self.at, self.tokens = whole.m, cut, at, tokens
        self.own = cut.share(whole.weight.shape[0])
        self.weight = nn.Parameter(whole.weight.detach()[self.own].clone())
        self.positions = whole.positions

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.look_up(tokens)
        if self.positions is not None:
            x = x + self.positions[self.at]
        return dropout(x, self.m.dropout, self.tokens)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the tokens' rows, without positions: this rank's part of them with sequence parallelism."""
        if self.cut.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.own.start
        absent = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill_(absent, 0), self.weight)
        out: Tensor = _Sum.apply(x.masked_fill(absent[..., None], 0.0), self.cut)
        return out

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole parameter's shape; every rank has all positions."""
        return whole[self.own] if name == "weight" else whole


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy over logits [tokens, vocabulary / ranks]; ranks exchange three numbers for each token."""

    @staticmethod
    def forward(ctx, logits, targets, group):  # type: ignore[no-untyped-def]
        maximum = group.all_reduce(logits.max(-1).values, dist.ReduceOp.MAX)
        shifted = logits - maximum[:, None]
        local = targets - group.index * logits.shape[-1]
        absent = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill_(absent, 0)[:, None]
        target = group.all_reduce(shifted.gather(1, local)[:, 0].masked_fill_(absent, 0.0))
        probability = shifted.exp_()
        total = group.all_reduce(probability.sum(-1))
        probability.div_(total[:, None])
        ctx.save_for_backward(probability, local, absent)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        probability, local, absent = ctx.saved_tensors
        each = grad / len(probability)
        out = probability * each
        out.scatter_add_(1, local, -each * (~absent[:, None]).to(out.dtype))
        return out, None, None


class VocabularyHead(Head):
    """Final norm, this rank's part of the logits, and the loss over all parts."""

    def __init__(self, whole: Head, cut: TensorSplit) -> None:
        nn.Module.__init__(self)
        self.norm, self.cut = whole.norm, cut
        n = whole.output.weight.shape[0]
        self.output = ColumnLinear(whole.output, cut, torch.arange(n)[cut.share(n)])

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss: Tensor = _CrossEntropy.apply(wide.view(-1, wide.shape[-1]), targets.reshape(-1), self.cut.group)
        return loss
