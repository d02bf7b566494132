"""Frozen weights beside adapters that are kept in 4 or 8 bits, as bitsandbytes keeps them.

NF4 (Dettmers et al. 2023, QLoRA, arXiv 2305.14314): a matrix is made 16-bit before each of its matmuls, forward and
backward, one at a time (bitsandbytes 0.50, autograd/_functions.py: `MatMul4Bit`).
LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339): the forward quantizes its input by rows, and the product of 32-bit
integers becomes 16-bit; the backward makes the matrix 16-bit. The layer keeps its input, though nothing reads it
(`MatMul8bitLt`: `ctx.tensors`). The threshold for outliers is 6, as Transformers has it (`BitsAndBytesConfig`).
Approximate: the forward's matmul has the time of one in 16 bits. Left out: the columns of outliers, which are
multiplied in 16 bits, and the scales of rows, 4 bytes for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from sim.core.program import Compute, Saved
from sim.models.dims import Dims
from sim.models.operators import F, I, Linear, Operator, memory_op

if TYPE_CHECKING:
    from sim.inputs.training_config import Lora


class FrozenFormat(NamedTuple):
    """Bytes of a number, `data` that a shard holds a part of, and `scales` that stay whole."""

    data: float
    scales: float
    quantizes_inputs: bool = False

    @property
    def total(self) -> float:
        return self.data + self.scales


# NF4: 4 bits, an 8-bit scale for 64 numbers, and for 256 such scales one of 32 bits (Dettmers et al. 2023, section 3,
# double quantization: 0.127 bits a parameter)
FORMATS = {"nf4": FrozenFormat(0.5, 1 / 64 + 4 / (64 * 256)), "int8": FrozenFormat(1.0, 0.0, quantizes_inputs=True)}

# Passes over the input of a matmul (bitsandbytes, backends/cuda/ops.py: `int8_vectorwise_quant`): to fp16 (4 bytes a
# number), |x| (4), |x| >= 6 (3), any (1), any by columns (1), and the quantization (3).
INPUT_KERNELS, INPUT_BYTES = 6, 16.0
# Of the product: 32-bit integers to fp16 (6), and that to bf16 (4).
PRODUCT_KERNELS, PRODUCT_BYTES = 2, 10.0
# Of the matrix: to 16 bits (3), times its rows' scales (4).
MATRIX_KERNELS, MATRIX_BYTES = 2, 7.0


def format_of(lora: Lora | None) -> FrozenFormat | None:
    """The format of frozen matrices; None: as `param_dtype` says, or none is frozen."""
    return None if lora is None or lora.weights is None else FORMATS[lora.weights]


def kept_in_few_bits(d: Dims, spec: Linear, part: Operator) -> Operator:
    """A frozen linear layer whose matrices are kept in the format that `training.lora.weights` names."""
    kept = format_of(d.lora) if d.few_bits else None
    if kept is None:
        return part
    elements, widest = spec.k * spec.n, spec.k * max(spec.outs) * d.act_bytes
    matrices = len(spec.outs)
    again: Compute
    if kept.quantizes_inputs:
        before, behind = _around_matmul(d, spec)
        again = memory_op(
            f"{spec.name}_dequantize", I, "cast", elements, MATRIX_BYTES * elements, d.act, MATRIX_KERNELS * matrices
        )
        forward = (*before, *part.forward, *behind)
        passing = spec.rows * (spec.k * 3.0 + max(spec.outs) * 4.0)
    else:
        moved = elements * (kept.total + d.act_bytes)
        made, again = (
            memory_op(f"{spec.name}_dequantize", phase, "cast", elements, moved, d.act, matrices) for phase in (F, I)
        )
        forward, passing = (made, *part.forward), widest
    return replace(
        part,
        forward=forward,
        backward=(again, *part.backward),
        few_bits=elements,
        forward_bytes=part.forward_bytes + passing,
        backward_bytes=part.backward_bytes + widest,
    )


def quantized_experts(d: Dims, elements: int) -> tuple[Operator, ...]:
    """What keeps routed experts' weights in few bits and makes all of a layer's 16-bit at once; autograd keeps these
    for the inputs' gradients (bitsandbytes, nn/parametrize.py: `replace_parameter_4bit`; Axolotl,
    monkeypatch/moe_quant.py). `elements`: of a rank's experts. Nothing where they are kept in 16 bits."""
    kept = format_of(d.lora) if d.few_bits and d.lora is not None and d.lora.quantized_experts else None
    if kept is None:
        return ()
    moved = (kept.total + d.act_bytes) * elements
    made = memory_op("experts_dequantize", F, "cast", elements, moved, d.act, 2)
    wide = Saved("experts in 16 bits", elements * d.act_bytes)
    return (Operator("experts_dequantize", (made,), saved=(wide,), few_bits=elements),)


def _around_matmul(d: Dims, spec: Linear) -> tuple[tuple[Compute, ...], tuple[Compute, ...]]:
    """What quantizes the input of each of the layer's matmuls, and what makes its product 16-bit."""
    read, written, matrices = spec.rows * spec.k * len(spec.outs), spec.rows * spec.n, len(spec.outs)
    before = memory_op(f"{spec.name}_quantize", F, "cast", read, INPUT_BYTES * read, d.act, INPUT_KERNELS * matrices)
    behind = memory_op(
        f"{spec.name}_scale", F, "cast", written, PRODUCT_BYTES * written, d.act, PRODUCT_KERNELS * matrices
    )
    return (before,), (behind,)
