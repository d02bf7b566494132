"""Layer norms and RMS norms: bound by memory, counted access by access.

`sim.models.elementwise` says what shares a kernel in which framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import EAGER_NORM, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.elementwise import Traffic, launches_alone
from sim.models.operators import F, I, Operator, memory_op
from sim.models.precision.casts import cast, in_fp32, widens_norms
from sim.models.torch_kernels.norm_passes import backward_accesses, gradient_reads, without_weight

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig

NormWeight = Literal["none", "activations", "fp32", "cast", "from 1"]


def rms_norm_eager(e: float, weight: NormWeight = "activations", frozen: bool = False) -> Traffic:
    """RMSNorm in separate torch kernels, `e` bytes an activation.

    Forward: x.float() (e+4), pow (8), mean (4), rsqrt and epsilon (rows only), multiply (8), to dtype (4+e),
    weight (2e). Backward: the weight's two products and sum (2e, 3e, e), to fp32 (e+4), product with rsqrt
    and its row sum (8, 12, 4), pow (8, 12), sum of the two paths (12), to dtype (4+e). Without upcasts in
    fp32. `weight` is what the normalized value is multiplied by: a weight in the activations' dtype; a weight in fp32,
    before the cast back (OLMo 2: 8; 8, 12, 4); 1 plus such a weight (Gemma); or nothing. A `frozen` weight has the
    first of its two products alone.

    These kernels are those by which measured chains (`norm_eager`) are divided. Torch launches more. Backward: the
    mean's gradient is written to all elements, the square's gradient is doubled, and in fp32 one more kernel runs on a
    number a row. The measured time of a chain includes them, so only their launches are added. Where a 16-bit weight
    multiplies in fp32, its gradient is cast, Gemma 4 casts the weight (`cast`), and Gemma adds 1 to it as well.
    """
    dtype = FP32_BYTES if weight in ("fp32", "cast", "from 1") else e
    of_weight = (2 * dtype, 1) if frozen else (6 * dtype, 3)
    own, (back, kernels) = (0.0, (0.0, 0)) if weight == "none" else (2 * dtype, of_weight)
    ones, cast = weight == "from 1", e < dtype
    more = (ones * (1 + cast) + (weight == "cast" and cast), 2 + (cast and not frozen) + (e == FP32_BYTES))
    first, last = 5 + bool(kernels), 8 + kernels
    if e == FP32_BYTES:
        return Traffic(8 + 4 + 8 + own, first, back + 8 + 12 + 4 + 8 + 12 + 12, last, *more)
    ahead = (e + 4) + 8 + 4 + 8 + (4 + e) + own
    return Traffic(ahead, 2 + first, back + (e + 4) + 8 + 12 + 4 + 8 + 12 + 12 + (4 + e), 3 + last, *more)


def layer_norm_in_fp32(e: float, weighted: bool, frozen: bool = False) -> Traffic:
    """LayerNorm of activations of `e` bytes, computed in fp32 between two casts.

    Without weights torch's own kernel (OLMo: casts e+4 and 4+e, kernel 8; backward casts, kernel 12). With weights
    separate operators (Command R, CohereLayerNorm): mean (4), difference (8), its square (8) and mean (4), difference
    (8), product with rsqrt (8), weight (8), and four kernels on rows or the weight. Backward: the weight's products and
    sum (8, 12, 4), product with rsqrt and its row sum (8, 12, 4), the difference's gradient and row sum (8, 4, 4), the
    square's (8, 8, 12), its difference's (8, 4), sums of the paths (12, 4, 12), and five kernels on rows. A `frozen`
    weight has the first of its two products alone.
    """
    casts, kernels = (0.0, 0) if e == FP32_BYTES else (2 * (e + 4), 2)
    if not weighted:
        return Traffic(casts + 8, kernels + 1, casts + 12, kernels + 1)
    return Traffic(casts + 48, kernels + 10, casts + 132 - 16 * frozen, kernels + 22 - 2 * frozen)


def norm_traffic(d: Dims, kind: str, rows: int, width: int, after_sum: bool, weighted: bool = True) -> Traffic:
    """`after_sum`: the norm right after a residual sum, whose kernel a compiler extends by the norm.

    Adapters leave its weights frozen: autograd then asks for the input's gradient alone, and torch launches no kernel
    for that of weights (aten/src/ATen/native/cuda/layer_norm_kernel.cu: `LayerNormBackwardKernelImplInternal`); one
    pass that makes both gradients stays as it is.
    """
    e, frozen = d.act_bytes, d.lora is not None
    if kind == "rmsnorm" and not d.framework.fuses_rmsnorm:
        return rms_norm_eager(e, _norm_weight(d) if weighted else "none", frozen)
    if d.norm_in_fp32 and d.framework.norms_keep_operators:
        return layer_norm_in_fp32(e, weighted, frozen)
    # of 5 accesses dx takes 3, the weight's gradient reads x and dy once more; or partial sums of it come with dx
    accesses, gradients = backward_accesses(d, rows, width), gradient_reads(d, rows, width)
    backward = (accesses - gradients) * e + gradients * d.normed_bytes
    kernels = d.framework.norm_backward_kernels - without_weight(d)
    if after_sum and d.framework.fuses_chains:
        return Traffic(d.normed_bytes, 0, backward, kernels)
    ones = d.code.norm_weights_from_1 and d.framework.norms_keep_operators
    return Traffic(e + d.normed_bytes, 1, backward, kernels, int(ones))


def _norm_weight(d: Dims) -> NormWeight:
    if not d.norm_in_fp32:
        return "activations"
    if d.code.casts_norm_weights:
        return "cast"
    return "from 1" if d.code.norm_weights_from_1 else "fp32"


def stream_norm(m: ModelConfig, d: Dims, name: str, after_sum: bool = False, keeps_input: bool = True) -> Operator:
    """The model's norm of the residual stream (`norm` over the hidden size)."""
    if widens_norms(d):
        return _of_copies(m, d, name)
    own = norm(d, name, m.norm, d.rows, d.hidden, m.norm_vectors, after_sum, keeps_input)
    if not d.wide_stream:
        return own
    return replace(own, forward=(*launches_alone(f"{name}_weights", F, m.norm_vectors), *own.forward))


def _of_copies(m: ModelConfig, d: Dims, name: str) -> Operator:
    """torch's layer norm under autocast over a stream in 16 bits: of copies in fp32, of its input and of its weights.
    The input's copy is its own, whatever else reads the stream."""
    elements = d.rows * d.hidden
    own = norm(in_fp32(d), name, m.norm, d.rows, d.hidden, m.norm_vectors)
    copies = (cast(d, f"{name}_cast", F, elements, widens=True), *launches_alone(f"{name}_weights", F, m.norm_vectors))
    return replace(
        own,
        forward=(*copies, *own.forward),
        backward=(*own.backward, cast(d, f"{name}_grad_cast", I, elements)),
    )


def norm(
    d: Dims,
    name: str,
    kind: str,
    rows: int,
    width: int,
    vectors: int = 1,
    after_sum: bool = False,
    keeps_input: bool = True,
) -> Operator:
    """LayerNorm or RMSNorm over `width` of `rows` tokens.

    Its input is kept: 4sbh for a layer's two (Korthikanti 2022, section 4.1); row statistics (8 bytes a row,
    4 for RMSNorm) are left out there and here. What a norm of separate operators keeps besides: `_kept_by_operators`.
    `vectors`: of `width` that it learns: weights, and a layer norm's biases. `keeps_input`: false where another norm
    keeps the same tensor.
    """
    elements = rows * width
    fused = d.framework.fuses_rmsnorm or kind != "rmsnorm"
    kernel = d.framework.norm_kernel if fused else EAGER_NORM
    # Kernels that a compiler generates stream as fast with a reduction in them as without (docs/programs_checked.md).
    priced_as = "elementwise" if d.framework.fuses_chains else "norm"
    t = norm_traffic(d, kind, rows, width, after_sum, vectors > 0)
    kept = Saved(f"{name} input", elements * d.act_bytes, role=TensorRole.INPUT)
    saved: tuple[Saved, ...] = (kept,) if keeps_input else ()
    if d.framework.norms_keep_operators and (kind == "rmsnorm" or d.norm_in_fp32):
        shares = not keeps_input and d.act_bytes == FP32_BYTES  # no cast makes a copy of what the other norm keeps
        saved = _kept_by_operators(d, name, kind, rows, width, vectors > 0)[int(shares) :]
    forward, backward = t.forward_bytes * elements, t.backward_bytes * elements
    return Operator(
        name,
        (
            memory_op(name, F, priced_as, elements, forward, d.act, t.forward_kernels, kernel),
            *launches_alone(f"{name}_launches", F, t.forward_launches),
        ),
        (
            memory_op(f"{name}_backward", I, priced_as, elements, backward, d.act, t.backward_kernels, kernel),
            *launches_alone(f"{name}_backward_launches", I, t.backward_launches),
        ),
        saved,
        params=width * vectors,
        tensors=(width,) * vectors,
        shared=(width,) * vectors if d.tp > 1 and d.sp else (),
        backward_bytes=2 * elements * (d.act_bytes if fused else FP32_BYTES),
    )


def _kept_by_operators(d: Dims, name: str, kind: str, rows: int, width: int, weighted: bool) -> tuple[Saved, ...]:
    """An fp32 copy of the input (the input itself where that is fp32), the root mean square's reciprocal of each row,
    the normalized value for the weight's gradient: in fp32 where the weight multiplies in fp32 (`norm_in_fp32`: Gemma,
    OLMo 2, gpt-oss, Command R), else cast back before (Llama). A layer norm so written has two differences from the
    mean in place of the copy (transformers/models/cohere/modeling_cohere.py: CohereLayerNorm). Without weights, or with
    those that adapters leave frozen, the copy and the statistics are all (nanochat's RMS norm, OLMo's layer norm,
    torch's own kernel in fp32).
    """
    n = rows * width
    copies = 2 if kind == "layernorm" and weighted else 1
    normalized = FP32_BYTES if d.norm_in_fp32 else d.act_bytes
    kept = (
        Saved(f"{name} input in fp32", copies * n * FP32_BYTES, role=TensorRole.INPUT),
        Saved(f"{name} statistics", rows * FP32_BYTES, role=TensorRole.STATISTICS),
    )
    trained = weighted and d.lora is None
    return (*kept, Saved(f"{name} normalized", n * normalized)) if trained else kept
