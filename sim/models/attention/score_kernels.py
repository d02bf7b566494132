"""Kernels over all q·kv scores of unfused attention, between its two matmuls: bytes for each score.

Frameworks with one kernel (Megatron's scale-mask-softmax, a compiler's) read scores and write probabilities.
Transformers' own function (models/llama/modeling_llama.py: eager_attention_forward) has a kernel for each torch
operator: `matmul * scaling`, `+ mask`, `softmax(dtype=float32)`, `.to(query.dtype)`. Its mask has the dtype of the
embedding's rows, which autocast leaves in fp32, so that under autocast the sum is in fp32, too. Without autocast
torch casts bf16 before the softmax; of fp16 the softmax reads 16 bits and writes fp32, and backward the other way
(aten/src/ATen/native/SoftMax.cpp: softmax). All were counted in captured programs
(`tests/sim/models/test_eager_attention.py`).
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import TORCH_SOFTMAX_UNALIGNED, Compute, Phase, Program
from sim.models.dims import Dims
from sim.models.elementwise import MASK_BYTES
from sim.models.operators import memory_op
from sim.models.precision.casts import casts_apart, lists_apart, lists_hold
from sim.models.torch_kernels.softmax_rows import torch_softmax, torch_softmax_backward


class Scored(Protocol):
    """The part of an attention's shapes (`sim.models.attention.core.Core`) that says what becomes of its scores."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def q_len(self) -> int:
        """Queries of a head."""

    @property
    def kv_len(self) -> int:
        """Keys of a head."""

    @property
    def v_head_dim(self) -> int:
        """Numbers of a head's result."""

    @property
    def softcap(self) -> bool:
        """Tell whether scores are capped."""

    @property
    def sinks(self) -> bool:
        """Tell whether sinks are joined to them."""

    @property
    def visible(self) -> float:
        """Scores of a head that the mask leaves."""


class ScorePass(Struct, frozen=True):
    """Bytes of each score, and kernels that share them. `kernel`, `casts`: see `Compute`. `single`: torch has no
    vectorized kernel for it."""

    name: str
    bytes: float
    kernels: int = 1
    kind: str = "softmax"
    kernel: str = ""
    casts: int = 0
    single: bool = False

    def plus(self, bytes_: float, kernels: int) -> ScorePass:
        """The pass with more bytes for each score, and more kernels."""
        return replace(self, bytes=self.bytes + bytes_, kernels=self.kernels + kernels)

    def run(self, name: str, phase: Phase, scores: float, act: str) -> Compute:
        """The pass's kernels over `scores` scores; `name`: the attention's, which begins the operator's name."""
        made = memory_op(
            f"{name}_{self.name}", phase, self.kind, scores, self.bytes * scores, act, self.kernels, self.kernel
        )
        return replace(made, single_elements=scores, casts=self.casts) if self.single else made


Passes = tuple[ScorePass, ...]
RAISED = "added and raised"  # of `ModelCode.mask`


def score_passes(d: Dims, c: Scored) -> tuple[Passes, Passes]:
    """Forward and backward. Megatron's causal kernel reads only what the mask leaves
    (scaled_upper_triang_masked_softmax).

    Soft caps: division, tanh and product (2e each); backward product (2e), tanh (3e), division (2e).
    """
    if d.framework.softmax_in_fp32:
        ahead, back = (_with_sinks if joins_sinks(d, c) else _by_operators)(d, c)
        if c.softcap:
            e = d.act_bytes
            ahead = (*ahead[:1], ScorePass("softcap", 6 * e, 3, "elementwise"), *ahead[1:])
            back = (*back[:-1], ScorePass("softcap", 7 * e, 3, "elementwise"), *back[-1:])
        return ahead, back
    e = d.act_bytes
    seen = c.visible / (c.q_len * c.kv_len) if d.framework.skips_masked_scores else 1.0
    forward, backward = ScorePass("softmax", (1.0 + seen) * e), ScorePass("softmax", (1.0 + 2.0 * seen) * e)
    if c.softcap and not d.framework.fuses_chains:
        forward, backward = forward.plus(6 * e, 3), backward.plus(7 * e, 3)
    if c.sinks and not d.framework.fuses_chains:
        forward, backward = forward.plus(5 * e, 3), backward.plus(4 * e, 2)
    return (forward,), (backward,)


def joins_sinks(d: Dims, c: Scored) -> bool:
    """Tell whether sinks are one more key of each row (else none, or a factor: `sim.models.attention.sink_factor`)."""
    return c.sinks and d.code.sinks == "joined"


def _with_sinks(d: Dims, c: Scored) -> tuple[Passes, Passes]:
    """Scores with a column of sinks, in their own dtype (models/gpt_oss/modeling_gpt_oss.py: eager_attention_forward).

    Forward: scale, mask, the column joined to them, their largest value found and subtracted, softmax. Backward: zeros
    around the gradient, softmax, the subtracted value's gradient negated, summed, put into zeros and added, scale. What
    reads the rows without their sink, casts or else the scale's gradient, reads parts of rows, one element at a time.
    Code that does not subtract the largest value (flint/modeling_flint.py) has none of its kernels. Sinks that stay
    fp32 make fp32 rows of 16-bit scores, which are cast back behind the softmax (`sinks_in_fp32`).
    """
    e, given = d.act_bytes, scored_bytes(d)
    masked = masked_bytes(d, given)
    scale, row = ScorePass("scale", 2 * given, kind="elementwise"), c.kv_len + 1
    joined = max(masked, FP32_BYTES) if d.code.sinks_in_fp32 else masked
    shift, shift_back = _shift(joined) if d.code.shifts_by_largest else ((), ())
    ahead = (
        scale,
        *_adding(d, c, given, masked),
        ScorePass("sinks", masked + joined, kind="copy", kernel="cat", single=True),
        *shift,
        _softmax(2 * joined, torch_softmax(row, joined)),
        *((ScorePass("softmax_cast", joined + e, kind="cast", single=True),) if joined > e else ()),
    )
    back = (
        *((ScorePass("softmax_cast", e + joined, kind="cast", casts=2, single=True),) if joined > e else ()),
        ScorePass("sinks", 3 * joined, 2, "copy", "slice_backward", single=True),
        _softmax(3 * joined, torch_softmax_backward(row)),
        *shift_back,
        *((ScorePass("mask_cast", joined + given, kind="cast", single=True),) if joined > given else ()),
        replace(scale, single=joined == given),
    )
    return ahead, back


def _shift(masked: float) -> tuple[Passes, Passes]:
    """The largest score of a row, found and subtracted, and the gradients of both."""
    ahead = (
        ScorePass("largest", masked, kind="elementwise"),
        ScorePass("shift", 2 * masked, kind="elementwise", single=True),
    )
    back = (
        ScorePass("negated", 2 * masked, kind="elementwise"),
        ScorePass("shift", masked, kind="elementwise"),
        ScorePass("zeros", masked, kind="elementwise"),
        ScorePass("largest", 3 * masked, kind="elementwise"),
    )
    return ahead, back


def _sums(masked: float) -> tuple[Passes, Passes]:
    """The exponentials of a row summed (`sim.models.attention.sink_factor`), and their gradient, which is added to the
    scores'.

    One number of each row is subtracted and multiplied, for which torch has no vectorized kernel.
    """
    ahead = (ScorePass("sums", 6 * masked, 4, "elementwise"),)
    back = (
        ScorePass("sums_difference", 2 * masked, kind="elementwise", single=True),
        ScorePass("sums_exponential", 2 * masked, kind="elementwise"),
        ScorePass("sums_product", 2 * masked, kind="elementwise", single=True),
        ScorePass("sums_gradient", 3 * masked, kind="elementwise"),
    )
    return ahead, back


def _softmax(bytes_: float, kernel: str) -> ScorePass:
    return ScorePass("softmax", bytes_, kernel=kernel, single=kernel == TORCH_SOFTMAX_UNALIGNED)


def _by_operators(d: Dims, c: Scored) -> tuple[Passes, Passes]:
    """Forward: scale, biases, mask (one for all heads), sums of sinks that are a factor, the largest score subtracted,
    softmax, cast. Backward: cast, softmax, mask, cast, scale.

    `sim.variants.model_code` says which of them a model has. In fp32 there are no casts.
    """
    code, e, scored, made = d.code, d.act_bytes, scored_bytes(d), softmax_bytes(d, c)
    given = FP32_BYTES if code.alibi else scored  # to the mask
    masked = masked_bytes(d, given)
    scale = (ScorePass("scale", 2 * scored, kind="elementwise"),) if code.scale == "scores" else ()
    slopes = FP32_BYTES / (d.batch * c.q_len)  # one number for each key
    biased = ScorePass("alibi", scored + given + slopes, kind="elementwise", casts=3 * (scored < given), single=True)
    replaced, added = _replacing(d, c, given), _adding(d, c, given, masked)
    widened, read = _widened(d, masked, made)
    shift, shift_back = _shift(masked) if code.shifts_by_largest == "all" else ((), ())
    sums, sums_back = _sums(masked) if c.sinks else ((), ())
    raised, raised_back = _raising(masked) if code.mask == RAISED else ((), ())
    ahead = (
        *scale,
        *((biased,) if code.alibi else ()),
        *replaced,
        *added,
        *raised,
        *sums,
        *shift,
        *((ScorePass("softmax_widening", masked + made, kind="cast", casts=2, single=True),) if widened else ()),
        _softmax(read + made, torch_softmax(c.kv_len, read, converts=made != read)),
        *((ScorePass("softmax_cast", made + e, kind="cast"),) if made > e else ()),
    )
    back = (
        *((ScorePass("softmax_cast", e + made, kind="cast", casts=2, single=True),) if made > e else ()),
        _softmax(2 * made + read, torch_softmax_backward(c.kv_len)),
        *((ScorePass("softmax_widening", made + masked, kind="cast"),) if widened else ()),
        *shift_back,
        *sums_back,
        *raised_back,
        *((ScorePass("mask_cast", masked + given, kind="cast"),) if masked > given else ()),
        *replaced,
        *((ScorePass("alibi_cast", given + scored, kind="cast"),) if given > scored else ()),
        *scale,
    )
    return ahead, back


def _widened(d: Dims, masked: float, made: float) -> tuple[bool, float]:
    """Return whether a kernel casts scores to the softmax's dtype before it, and the bytes of a score that it reads."""
    widened = made > masked and d.act != "fp16"
    return widened, made if widened else masked


def scored_bytes(d: Dims) -> float:
    """Return the bytes of a score as its matmul writes it; autocast casts what the model casts to fp32, unless the
    model's code turns it off."""
    narrows = lists_hold(d) and not d.code.scores_without_autocast
    return FP32_BYTES if d.code.scores_in_fp32 and not narrows else d.act_bytes


def masked_bytes(d: Dims, given: float) -> float:
    """Return the bytes of a masked score, of `given` before. A mask that is added has the dtype of the embedding's
    rows, which autocast leaves in fp32; others are truths."""
    return max(given, _added_bytes(d)) if d.code.mask != "filled" else given


def _added_bytes(d: Dims) -> float:
    return FP32_BYTES if casts_apart(d) else d.act_bytes


def softmax_bytes(d: Dims, c: Scored) -> float:
    """Return the bytes of a number that the softmax of separate operators writes; one with sinks writes the dtype of
    what it reads (gpt_oss/modeling_gpt_oss.py: eager_attention_forward)."""
    if not joins_sinks(d, c) and (d.code.softmax_in_fp32 or lists_apart(d)):
        return FP32_BYTES
    return masked_bytes(d, scored_bytes(d))


def score_gradient_bytes(d: Dims, c: Scored) -> float:
    """Return the bytes for each score that the gradient of an unfused softmax needs beside what the layer keeps.

    The gradients of its result and of its input. torch's softmax also multiplies its result and the gradient into a
    tensor of its own (ATen/native/cuda/SoftMax.cu: softmax_backward_cuda_out). What the value's gradient and dropout
    have read, which the layer kept, is free by then.
    """
    e = d.act_bytes
    if not d.framework.softmax_in_fp32:
        return 2 * e
    masked = masked_bytes(d, FP32_BYTES if d.code.alibi else scored_bytes(d))
    made = softmax_bytes(d, c)
    _, read = _widened(d, masked, made)
    freed = (e if made > e else 0.0) + (e + MASK_BYTES if d.attention_dropout else 0.0)
    return 2 * made + read - freed


def _replacing(d: Dims, c: Scored, given: float) -> Passes:
    """A kernel that replaces scores where a mask of truths, of one byte, says so: one for all heads, or for all."""
    if d.code.mask == "filled":  # a copy, which is filled in place
        filled = ScorePass("mask", 2 * given + 1 / c.heads, kind="elementwise", single=True)
        return (ScorePass("mask_copy", 2 * given, kind="copy"), filled)
    if d.code.mask == "chosen and added":
        return (ScorePass("chosen", 2 * given + 1 / (d.batch * c.heads), kind="elementwise", single=True),)
    return ()


def _raising(masked: float) -> tuple[Passes, Passes]:
    """`torch.max` of scores and their least number, one fp32 number on the GPU (xglm/modeling_xglm.py:
    XGLMAttention.forward), and its gradient: half of it where both are equal, none where a score is less
    (tools/autograd/derivatives.yaml: maximum). Each comparison writes truths.
    """
    casts = 3 * (masked < FP32_BYTES)
    compared = ScorePass("mask_compared", masked + MASK_BYTES, kind="elementwise", casts=casts, single=True)
    back = (
        compared,
        ScorePass("mask_half", 2 * masked, kind="elementwise"),
        compared,
        ScorePass("mask_chosen", 3 * masked + MASK_BYTES, kind="elementwise"),
        ScorePass("mask_copy", 2 * masked, kind="copy"),
        ScorePass("mask_zeros", 2 * masked + MASK_BYTES, kind="elementwise"),
    )
    return (ScorePass("mask_raised", 2 * masked, kind="elementwise", casts=casts, single=True),), back


def _adding(d: Dims, c: Scored, given: float, masked: float) -> Passes:
    """A kernel that adds a mask, one for all heads."""
    if d.code.mask == "filled":
        return ()
    added = _added_bytes(d)
    moved, casts = given + masked + added / c.heads, 3 * (given != added)
    return (ScorePass("mask", moved, kind="elementwise", casts=casts, single=True),)


def run_passes(passes: Passes, name: str, phase: Phase, scores: float, act: str) -> Program:
    """The kernels of all passes over `scores` attention scores."""
    return tuple(p.run(name, phase, scores, act) for p in passes)
