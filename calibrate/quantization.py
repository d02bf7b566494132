"""Matrix products with quantized operands, and the perplexity of a small language model with each of them.

    python -m calibrate.quantization

Dettmers et al. 2022, "LLM.int8()", arXiv 2208.07339: section 2 (absmax, zero-point), section 3.1 (vector-wise), 3.2
(outlier decomposition), table 1 (the order of their perplexities). Frantar et al. 2022, "GPTQ", arXiv 2210.17323
(4-bit weights in groups, here rounded to nearest); Micikevicius et al. 2022, arXiv 2209.05433 (fp8).

All methods take X [rows, k] and W [n, k] and return X Wᵀ [rows, n]. 8-bit integers are multiplied and summed exactly,
as tensor cores do in 32 bits. Here they are doubles, which hold such sums exactly and which a CPU multiplies faster.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear
from calibrate.bundled_model.model import Build, Layer, make_blocks
from sim.commands.command import Command, run_command
from sim.core.quantization import INT4_GROUP
from sim.inputs.model_config import ModelConfig
from sim.inputs.training_config import Training

OUTLIER_THRESHOLD = 6.0  # section 3.2: a feature with any value of this magnitude is multiplied in 16 bits
FP8_MAX = 448.0  # largest finite E4M3
SMALL = ModelConfig(layers=2, hidden=64, heads=4, vocab=64, positions="learned", max_positions=64)
SEQ, BATCH = 64, 16

Product = Callable[[Tensor, Tensor], Tensor]


def _scale(x: Tensor, dim: int | None, largest: float = 127.0) -> Tensor:
    """Return absmax scales: of the whole tensor, or along `dim`, which is kept."""
    top = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return top.clamp_min(1e-12) / largest


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-127, 127).double()


def _symmetric(x: Tensor, w: Tensor, rows: bool, columns: bool) -> Tensor:
    """Multiply with one scale for X or one for each row, and one for W or one for each output: C = s_x s_w (X₈ W₈ᵀ)."""
    sx, sw = _scale(x, 1 if rows else None), _scale(w, 1 if columns else None)
    return (_int8(x, sx) @ _int8(w, sw).T).to(x.dtype) * sx * sw.reshape(1, -1)


def _affine(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Quantize to 8 bits with a zero point, so that asymmetric values use the whole range.

    Returns integers with the zero point subtracted, and the scale.
    """
    low, high = (x.amin(), x.amax()) if dim is None else (x.amin(dim, keepdim=True), x.amax(dim, keepdim=True))
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    scale = ((high - low) / 255).clamp_min(1e-12)
    zero = (-128 - low / scale).round()
    q = (x / scale + zero).round().clamp(-128, 127)
    return (q - zero).double(), scale


def _zero_point(x: Tensor, w: Tensor, vectors: bool) -> Tensor:
    (xq, sx), (wq, sw) = _affine(x, 1 if vectors else None), _affine(w, 1 if vectors else None)
    return (xq @ wq.T).to(x.dtype) * sx * sw.reshape(1, -1)


def _decomposed(x: Tensor, w: Tensor, inner: Product) -> Tensor:
    """Multiply features with outliers in full precision and the rest by `inner` (equation 8)."""
    outlier = (x.abs() >= OUTLIER_THRESHOLD).any(0)
    rest = ~outlier
    if outlier.all():
        return x @ w.T
    return x[:, outlier] @ w[:, outlier].T + inner(x[:, rest], w[:, rest])


def absmax(x: Tensor, w: Tensor) -> Tensor:
    """Multiply in 8 bits with one scale for each tensor."""
    return _symmetric(x, w, False, False)


def row_wise(x: Tensor, w: Tensor) -> Tensor:
    """Multiply in 8 bits with a scale for each row of X, one for W."""
    return _symmetric(x, w, True, False)


def vector_wise(x: Tensor, w: Tensor) -> Tensor:
    """Multiply in 8 bits with a scale for each row of X and each column of Wᵀ."""
    return _symmetric(x, w, True, True)


def zero_point(x: Tensor, w: Tensor) -> Tensor:
    """Multiply in 8 bits with a scale and a zero point for each tensor."""
    return _zero_point(x, w, False)


def zero_point_vector_wise(x: Tensor, w: Tensor) -> Tensor:
    """Multiply in 8 bits with a scale and a zero point for each row of X and each column of Wᵀ."""
    return _zero_point(x, w, True)


def row_wise_decomposed(x: Tensor, w: Tensor) -> Tensor:
    """Multiply row-wise in 8 bits, features with outliers in full precision."""
    return _decomposed(x, w, row_wise)


def llm_int8(x: Tensor, w: Tensor) -> Tensor:
    """Multiply as LLM.int8(): vector-wise in 8 bits, features with outliers in full precision."""
    return _decomposed(x, w, vector_wise)


def llm_int8_zero_point(x: Tensor, w: Tensor) -> Tensor:
    """Multiply as LLM.int8() with zero points: vector-wise and asymmetric, outliers in full precision."""
    return _decomposed(x, w, zero_point_vector_wise)


def int8_weight_only(x: Tensor, w: Tensor) -> Tensor:
    """Multiply with weights rounded to 8 bits, with one scale for each output, and converted back."""
    scale = _scale(w, 1)
    return x @ (_int8(w, scale).to(x.dtype) * scale).T


def int4_weight_only(x: Tensor, w: Tensor) -> Tensor:
    """Multiply with weights rounded to 4 bits (−8 to 7), with one scale for each group of 128 inputs of an output."""
    n, k = w.shape
    padded = F.pad(w, (0, -k % INT4_GROUP)).view(n, -1, INT4_GROUP)
    scale = padded.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7.0
    back = ((padded / scale).round().clamp(-8, 7) * scale).view(n, -1)[:, :k]
    return x @ back.T


def fp8(x: Tensor, w: Tensor) -> Tensor:
    """Multiply with both operands in E4M3 and one scale each; errors are relative, so outliers do little harm."""
    sx, sw = _scale(x, None, FP8_MAX), _scale(w, None, FP8_MAX)
    xq, wq = ((t / s).to(torch.float8_e4m3fn).to(x.dtype) for t, s in ((x, sx), (w, sw)))
    return (xq @ wq.T) * sx * sw


METHODS: Mapping[str, Product] = {
    f.__name__: f
    for f in (
        absmax,
        row_wise,
        vector_wise,
        zero_point,
        zero_point_vector_wise,
        row_wise_decomposed,
        llm_int8,
        llm_int8_zero_point,
        int8_weight_only,
        int4_weight_only,
        fp8,
    )
}
WEIGHT_BITS: Mapping[str, float] = {**dict.fromkeys(METHODS, 8.0), "int4_weight_only": 4 + 16 / INT4_GROUP}


class QuantizedLinear(nn.Module):
    """A linear layer whose product is one of `METHODS`."""

    def __init__(self, linear: Linear, product: Product) -> None:
        super().__init__()
        self.weight, self.bias, self.product = linear.weight, linear.bias, product

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def quantized(blocks: list[nn.Module], product: Product) -> list[nn.Module]:
    """Copy a model and quantize the linear layers of its transformer layers; embedding and output are unchanged."""
    out = copy.deepcopy(blocks)
    for layer in cast(list[Layer], out[1:-1]):
        for name in ("qkv", "proj", "up", "down"):
            setattr(layer, name, QuantizedLinear(getattr(layer, name), product))
    return out


def next_words(vocab: int = SMALL.vocab) -> Tensor:
    """Return the made-up language's four next tokens, likeliest first [vocab, 8, 4].

    They depend on the last token and on the class (one of 8) of the token before it.
    """
    return torch.randint(0, vocab, (vocab, 8, 4), generator=torch.Generator().manual_seed(12345))


def text(rows: int, seed: int, vocab: int = SMALL.vocab, length: int = SEQ + 1) -> Tensor:
    """Draw sentences of the made-up language [rows, length]: each token depends on the two before it."""
    choices = next_words(vocab)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length), generator=draw)
    chance = torch.tensor([0.6, 0.25, 0.1, 0.05])
    pick = torch.multinomial(chance, rows * length, True, generator=draw).view(rows, length)
    for i in range(2, length):
        tokens[:, i] = choices[tokens[:, i - 1], tokens[:, i - 2] % 8, pick[:, i]]
    return tokens


def loss(blocks: list[nn.Module], tokens: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the next token, in nats."""
    x = tokens[:, :-1]
    for block in blocks[:-1]:
        x = block(x)
    found: Tensor = blocks[-1](x, tokens[:, 1:].contiguous())
    return found


@torch.no_grad()
def perplexity(blocks: list[nn.Module], tokens: Tensor) -> float:
    """Compute the perplexity: exp of the mean cross-entropy."""
    return math.exp(float(loss(blocks, tokens)))


def make_small(seed: int = 0, config: ModelConfig = SMALL) -> list[nn.Module]:
    """Make the untrained small model."""
    training = Training(seq_len=SEQ, global_batch_size=BATCH, precision="fp32")
    return make_blocks(config, training, range(config.layers + 2), Build(seed=seed))


def draw(step: int) -> Tensor:
    """Draw a step's text of the made-up language."""
    return text(BATCH, 1000 + step)


def train(
    blocks: list[nn.Module], steps: int = 300, rate: float = 4e-3, batch: Callable[[int], Tensor] = draw
) -> list[nn.Module]:
    """Train with AdamW on a new batch in every step, at a rate that rises and falls once; return the same blocks."""
    optimizer = torch.optim.AdamW([p for b in blocks for p in b.parameters()], lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss(blocks, batch(step)).backward()
        optimizer.step()
        schedule.step()
    return blocks


@torch.no_grad()
def plant_outliers(
    blocks: list[nn.Module], features: int = 2, factor: float = 60.0, shift: float = 1.5
) -> list[nn.Module]:
    """Copy a model and turn a few features of every norm's output into outliers without changing what it computes.

    The paper finds such outliers in models above 6.7 billion parameters (section 4): the same few features in all
    layers, of one sign, up to twenty times as large as all others. Here a norm's feature is scaled by `factor` and
    shifted. The next matrix's weights for it are divided by `factor`, and its bias takes the shift off again.
    """
    out = copy.deepcopy(blocks)
    for layer in cast(list[Layer], out[1:-1]):
        for norm, linear in ((layer.norm1, layer.qkv), (layer.norm2, layer.up)):
            assert norm.bias is not None
            assert linear.bias is not None
            for j in range(features):
                norm.weight[j] *= factor
                norm.bias[j] = norm.bias[j] * factor + shift * factor
                linear.bias.sub_(linear.weight[:, j] * shift)
                linear.weight[:, j] /= factor
    return out


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """One method: the model's perplexity, and the relative error of the first layer's products."""

    method: str
    weight_bits: float
    perplexity: float
    error: float


def table(steps: int = 300) -> list[QuantizationResult]:
    """Train, plant outliers, and measure every method on held-out text."""
    blocks = plant_outliers(train(make_small(), steps))
    held_out = text(64, 1)
    rows = [QuantizationResult("fp32", 32.0, perplexity(blocks, held_out), 0.0)]
    for name, product in METHODS.items():
        found = perplexity(quantized(blocks, product), held_out)
        rows.append(QuantizationResult(name, WEIGHT_BITS[name], found, product_error(blocks, held_out, product)))
    return rows + torchao_rows(blocks, held_out)


def torchao_rows(blocks: list[nn.Module], held_out: Tensor) -> list[QuantizationResult]:
    """Measure torchao's formats; if it is not installed, return nothing and say so on standard error."""
    from calibrate import quantization_torchao as ao

    if not ao.here():
        print(ao.ABSENT, file=sys.stderr)
        return []
    rows = []
    for name in ao.configs():
        made = ao.quantized_by_torchao(blocks, name)
        bits = 4 + 16 / ao.GROUP if "int4" in name else 8.0
        error = product_error(blocks, held_out, _without_bias(cast(Layer, made[1]).qkv))
        rows.append(QuantizationResult(name, bits, perplexity(made, held_out), error))
    return rows


def _without_bias(layer: nn.Module) -> Product:
    return lambda x, w: layer(x) - layer.bias


@torch.no_grad()
def product_error(blocks: list[nn.Module], tokens: Tensor, product: Product) -> float:
    """Return the relative error (Frobenius) of the first layer's query-key-value product on real activations."""
    layer = cast(Layer, blocks[1])
    x = layer.norm1(blocks[0](tokens[:, :-1])).flatten(0, 1)
    exact = x @ layer.qkv.weight.T
    return float((product(x, layer.qkv.weight) - exact).norm() / exact.norm())


@click.command("quantization", cls=Command)
def main() -> None:
    """Print every method's perplexity and product error."""
    torch.set_num_threads(1)
    print(f"{'':24} {'weight bits':>11} {'perplexity':>11} {'product error':>14}")
    for row in table():
        print(f"{row.method:24} {row.weight_bits:11.3f} {row.perplexity:11.4f} {row.error:14.2%}")


if __name__ == "__main__":
    run_command(main)
