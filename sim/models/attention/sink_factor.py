"""Sinks that multiply attention's result, in place of a key more: Granite's windows in Transformers.

transformers/models/granite_swa/modeling_granite_swa.py (5.24), eager_attention_forward: sigmoid(logsumexp(scores) -
sink) of each row is what a softmax with the sink as one more key would multiply by. torch's logsumexp finds the largest
score of each row, subtracts it, and sums the exponentials by four kernels over all scores, beside five over its results
(aten/src/ATen/native/ReduceOps.cpp: logsumexp_out_impl). Its backward subtracts the result from the scores, and
multiplies the exponentials by the gradient (torch/csrc/autograd/FunctionsManual.cpp: logsumexp_backward).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Phase, Program, Saved, TensorRole
from sim.models.attention.score_kernels import Scored
from sim.models.dims import Dims
from sim.models.elementwise import launches_alone
from sim.models.operators import F, I, memory_op

ROWS_FORWARD = 5 + 2  # kernels over rows alone: of logsumexp; difference, sigmoid
ROWS_BACKWARD = 3  # the sigmoid's, the gradient of the sinks negated and summed
ROW_CASTS = 2  # where rows are not in fp32, each way


def multiplies(d: Dims, c: Scored) -> bool:
    """Tell whether the sinks of an attention in separate operators are a factor of its result."""
    return c.sinks and d.framework.softmax_in_fp32 and d.code.sinks == "factor"


def factor_forward(d: Dims, c: Scored, name: str) -> Program:
    """The factor of each row, [batch, heads, q_len], and its product with the result."""
    if not multiplies(d, c):
        return ()
    rows, n = _sizes(d, c)
    product = _apart(f"{name}_sink_factor", F, n, 2 * n * d.act_bytes + rows * d.act_bytes, d.act)
    return (*launches_alone(f"{name}_sink_rows", F, ROWS_FORWARD + _casts(d)), product)


def factor_backward(d: Dims, c: Scored, name: str) -> Program:
    """The gradients of result and factor: two products, of which one is summed over each row."""
    if not multiplies(d, c):
        return ()
    (rows, n), e = _sizes(d, c), d.act_bytes
    return (
        _apart(f"{name}_sink_factor", I, n, 3 * n * e, d.act),
        _apart(f"{name}_sink_result", I, n, 2 * n * e + rows * e, d.act),
        memory_op(f"{name}_sink_sum", I, "elementwise", n, n * e, d.act),
        *launches_alone(f"{name}_sink_rows", I, ROWS_BACKWARD + _casts(d)),
    )


def factor_saved(d: Dims, c: Scored, scores: float, masked: float) -> list[Saved]:
    """What is kept beside probabilities: `scores` of `masked` bytes, the logarithms of their sums, the factor in fp32
    and as it multiplies, and the result before."""
    if not multiplies(d, c):
        return []
    rows, n = _sizes(d, c)
    factors = FP32_BYTES + (d.act_bytes if _casts(d) else 0.0)
    return [
        Saved("masked scores", scores * masked),
        Saved("sums' logarithms and sinks' factors", rows * (masked + factors), role=TensorRole.STATISTICS),
        Saved("result before the sinks' factor", n * d.act_bytes),
    ]


def _sizes(d: Dims, c: Scored) -> tuple[float, float]:
    """Return the rows of scores, and the numbers of the result."""
    rows = float(d.batch * c.heads * c.q_len)
    return rows, rows * c.v_head_dim


def _casts(d: Dims) -> int:
    return ROW_CASTS if d.act_bytes < FP32_BYTES else 0


def _apart(name: str, phase: Phase, elements: float, moved: float, act: str) -> Compute:
    """A kernel over tensors in unlike order, or with one number of each row, which torch does not vectorize."""
    return replace(memory_op(name, phase, "elementwise", elements, moved, act), single_elements=elements)
