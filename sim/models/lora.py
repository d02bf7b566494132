"""Low-rank adapters (Hu et al. 2021, LoRA, arXiv 2106.09685): W x + (alpha / rank) · B A x with W frozen.

Frozen weights need the input's gradient alone: no weight gradient, nothing kept for one, no gradient and no optimizer
state in memory. An adapter of a matrix [n, k] has rank·(k + n) parameters: A [rank, k], B [n, rank]; it keeps x and
A x. Matmuls of a token cost 4 flops a frozen weight and 6 an adapter's, in place of 6. Backward ends at the first
adapter of the model: what lies before it needs no gradient.

As `peft` does it in eager mode: A and B are matmuls of their own, scaling and sum one kernel each; adapters are kept
and multiplied in the dtype of the other parameters. Left out: dropout before A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.dtypes import dtype_bytes
from sim.models.dims import Dims
from sim.models.operators import (
    F,
    I,
    Linear,
    Part,
    W,
    accumulate,
    gemm,
    memory_op,
    weight_gradient,
    weight_gradient_bytes,
)
from sim.program import Compute, Item, Saved

ADAPTER = "_lora"


def frozen(part: Part) -> Part:
    """A part whose parameters get no gradient: what its weight gradient alone needs is neither kept nor computed.

    A norm's input gradient needs its input as well, also where a compiler makes a linear layer's input of it again.
    """
    return replace(
        part,
        backward=tuple(i for i in part.backward if i.phase is not W),
        saved=tuple(s for s in part.saved if not s.weight_grad or s.name.endswith("norm input")),
        params=0,
        frozen=part.params,
        weights=(),
    )


def with_adapters(d: Dims, spec: Linear, base: Part) -> Part:
    """A linear layer frozen, with an adapter for each of its matrices where its name is among the targets.

    Without one the output projection still keeps its input: fused attention's backward reads its own output.
    """
    unneeded = weight_gradient_bytes(d, spec.k * max(spec.outs))
    part = replace(frozen(base), backward_bytes=base.backward_bytes - unneeded)
    if d.lora is None or spec.name not in d.lora.targets:
        fused = d.fused_attention and spec.name == "attention_out"
        output = Saved("attention", "output", spec.rows * spec.k * d.act_bytes, False)
        return replace(part, saved=(*part.saved, output)) if fused else part
    r, rows, k, e = d.lora.rank, spec.rows, spec.k, d.act_bytes
    forward: list[Item] = []
    backward: list[Item] = []
    for i, n in enumerate(spec.outs):
        name, out = f"{spec.out_name(i)}{ADAPTER}", rows * n
        kernels = 2 if d.style == "eager" else 1  # scaling, sum
        forward += [
            gemm(f"{name}_a", F, rows, r, k, d.linear),
            gemm(f"{name}_b", F, rows, n, r, d.linear),
            memory_op(f"{name}_sum", F, "elementwise", out, (2 * kernels + 1) * e * out, d.act, kernels),
        ]
        backward += [
            memory_op(f"{name}_scale{ADAPTER}_dgrad", I, "elementwise", out, 2 * e * out, d.act),
            gemm(f"{name}_b{ADAPTER}_dgrad", I, rows, r, n, d.linear),
            *weight_gradient(d, f"{name}_b_wgrad", rows, r, n),
            *weight_gradient(d, f"{name}_a_wgrad", rows, k, r),
            gemm(f"{name}_a_dgrad", I, rows, k, r, d.linear),
            accumulate(d, f"{name}_dgrad_sum", rows * k),
        ]
    wide = len(spec.outs) * rows * r * e
    inputs = tuple(s for s in base.saved if s.weight_grad)
    saved = (*part.saved, *inputs, Saved(spec.part, f"{spec.name} A x", wide, True))
    return replace(
        part, forward=(*part.forward, *forward), backward=(*backward, *part.backward), saved=saved,
        params=trainable_parameters(r, [(n, k) for n in spec.outs]),
        forward_bytes=part.forward_bytes + rows * max(spec.outs) * e,
        backward_bytes=part.backward_bytes + wide + weight_gradient_bytes(d, r * max(k, *spec.outs)),
    )  # fmt: skip


def only_behind_adapters(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts of the model's first layer: up to the first adapter nothing needs a gradient, nor keeps anything for it."""
    first = next((i for i, p in enumerate(parts) if p.params), len(parts))
    out = [replace(p, backward=(), saved=(), backward_bytes=0.0) for p in parts[:first]]
    for p in parts[first : first + 1]:
        needed = tuple(i for i in p.backward if i.phase is W or _of_adapter(i))
        saved = p.saved if any(s.name == f"{p.name} input" for s in p.saved) else (_input(p), *p.saved)
        out.append(replace(p, backward=needed, saved=saved))
    return (*out, *parts[first + 1 :])


def _input(part: Part) -> Saved:
    """What a compiler keeps for A's weight gradient where nothing that it could be made of again is kept."""
    gradient = next(i for i in part.backward if isinstance(i, Compute) and i.name.endswith("_a_wgrad"))
    _, _, k, rows = gradient.shape
    return Saved(part.saved[-1].part, f"{part.name} input", k * rows * dtype_bytes(gradient.dtype), True)


def _of_adapter(item: Item) -> bool:
    return isinstance(item, Compute) and item.name.endswith(f"{ADAPTER}_dgrad")


def trainable_parameters(rank: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Parameters of adapters on matrices of these (outputs, inputs).

    >>> trainable_parameters(16, [(4096, 4096)])
    131072
    """
    return sum(rank * (n + k) for n, k in shapes)
