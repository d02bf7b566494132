"""Activation functions of an MLP: bound by memory, counted access by access.

One record for each activation that `model.mlp` can name. Accesses are per element of the MLP's inner width, times the
activations' bytes. Fused (`fuses_activation`): one kernel that reads what the projections give; eager: one kernel for
every torch operator.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from sim.core.program import NeededBy, Program, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.elementwise import Traffic
from sim.models.operators import F, I, Operator, memory_op


class Passes(NamedTuple):
    """Accesses of an element and kernels, forward and backward."""

    forward: int
    forward_kernels: int
    backward: int
    backward_kernels: int


class Activation(Struct, frozen=True):
    """One activation. `gated`: a second projection of the input multiplies the result. `kept`: what eager code keeps
    of it for the backward, each as wide as the inner width; `kept_fused`: what one kernel keeps; `role`: of both.
    `truths`: how many comparisons eager code keeps, a byte for each element.
    `clamped`: gate and up are clamped first. `torch_kernel`: torch's kernel of a formula that a model's own code writes
    out (`writes_activations_out`).
    """

    gated: bool
    eager: Passes
    fused: Passes
    kept: tuple[str, ...]
    kept_fused: tuple[str, ...]
    role: TensorRole = TensorRole.INNER
    clamped: bool = False
    truths: int = 0
    torch_kernel: str = ""


_ONE = Passes(2, 1, 3, 1)
_GATED_EAGER, _GATED_FUSED = Passes(5, 2, 9, 3), Passes(3, 1, 5, 1)
ACTIVATIONS = {
    "gelu": Activation(False, _ONE, _ONE, ("gelu input",), ("gelu input",), TensorRole.INPUT),
    # 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) as GPT-2's code writes it (NewGELUActivation in Transformers'
    # activations.py). Forward: power, product (2, 2), sum (3), product, tanh, 1 + (2, 2, 2), 0.5·x (2), product (3).
    # Backward: the product's factors (3, 3), 0.5 (2), tanh (3), two factors (2, 2), the power's x², 3 and product
    # (2, 2, 3), two sums of the input's gradients (3, 3).
    "gelu_new": Activation(
        False,
        Passes(18, 8, 28, 11),
        _ONE,
        ("gelu input", "tanh", "half the input", "1 + tanh"),
        ("gelu input",),
        TensorRole.INPUT,
        torch_kernel="gelu",
    ),
    # Eager code keeps its result, which is the next matmul's input (torch derivatives.yaml: relu).
    "relu": Activation(False, _ONE, _ONE, (), ("relu input",), TensorRole.INPUT),
    "relu2": Activation(False, Passes(4, 2, 8, 3), _ONE, ("relu output",), ("relu output",)),
    # xIELU (arXiv 2411.13010) as Transformers' activations.py writes it. Forward: a comparison (2), the positive half
    # (2, 3, 2, 3), the negative one (2, 2, 3, 2, 2, 3), the choice (4). Backward: the choice (5), beta·x twice (4), the
    # square's factors and alpha (3, 3, 2, 4), the negative half's (2, 4, 2, 5), the minimum's (2, 2, 2, 3, 2), sums of
    # the input's gradients (15).
    "xielu": Activation(
        False,
        Passes(30, 12, 60, 25),
        _ONE,
        ("xielu input", "alpha times input", "expm1", "difference"),
        ("xielu input",),
        TensorRole.INPUT,
        truths=1,
    ),
    "swiglu": Activation(True, _GATED_EAGER, _GATED_FUSED, ("gate", "silu(gate)", "up"), ("gate", "up")),
    "geglu": Activation(True, _GATED_EAGER, _GATED_FUSED, ("gate", "gelu(gate)", "up"), ("gate", "up")),
    # gpt-oss: gate and up clamped (2, 2), alpha times gate (2), its sigmoid (2), their product (3), up + 1 (2), product
    # (3). Backward: the product's two factors (3, 3), the gate's two (3, 3), sigmoid (3), alpha (2), sum (3), clamps
    # (3, 3), and both strided halves of one tensor: zeroed, filled, added (14)
    # (transformers/models/gpt_oss/modeling_gpt_oss.py: GptOssExperts._apply_gate).
    "clamped_swiglu": Activation(
        True,
        Passes(16, 7, 40, 14),
        _GATED_FUSED,
        ("gate", "up", "clamped gate", "sigmoid", "up + 1", "gated"),
        ("gate", "up"),
        clamped=True,
    ),
    # DeepSeek V4: gate and up clamped (2, 2), silu (2), product (3). Backward: product (3, 3), silu (3), clamps (3, 3)
    # (transformers/models/deepseek_v4/modeling_deepseek_v4.py: DeepseekV4Experts._apply_gate).
    "limited_swiglu": Activation(
        True,
        Passes(9, 4, 15, 5),
        _GATED_FUSED,
        ("gate", "up", "clamped gate", "silu(gate)", "clamped up"),
        ("gate", "up"),
        clamped=True,
    ),
}
# Where a framework clamps before the fused kernel: two halves clamped (2, 2) and joined (2, 2). Backward, by operators
# of torch (derivatives: clamp_backward): is the gate at most its limit (1), is up at least and at most its own (1, 1),
# each half's gradient where it was within (2, 2), both put into one (4); the four truths are bytes, and two zeros are
# made. The halves stay kept beside what they were joined to.
CLAMPS = Passes(8, 3, 11, 9)
CLAMP_TRUTH_BYTES = 8.0  # written (1, 1, 1), joined (3), read (1, 1)


def is_gated(mlp: str) -> bool:
    """Tell whether a second projection of the input gates the first."""
    return ACTIVATIONS[mlp].gated


def activation_traffic(d: Dims, mlp: str) -> Traffic:
    """Bytes of an element of the MLP's inner width, and kernels."""
    record, e, fused = ACTIVATIONS[mlp], d.act_bytes, _fused(d, ACTIVATIONS[mlp])
    passes = record.fused if fused else record.eager
    # backward writes the output again, for the weight gradient
    again = int(d.framework.rebuilds_pointwise and passes.forward_kernels == 1)
    apart = _clamps_apart(d, record)
    if apart:
        passes = Passes(*(own + more for own, more in zip(passes, CLAMPS, strict=True)))
    # gate and up cut out of one matmul's result: their gradients are joined, two reads and two writes (torch.split)
    joined = int(record.gated and d.framework.merges_projections and not fused)
    backward, kernels = passes.backward + again + 4 * joined, passes.backward_kernels + joined
    truths = CLAMP_TRUTH_BYTES if apart else 0.0
    return Traffic(passes.forward * e, passes.forward_kernels, backward * e + truths, kernels)


def _fused(d: Dims, record: Activation) -> bool:
    """Tell whether the activation is one kernel: a fused one, or torch's own."""
    own = bool(record.torch_kernel) and not d.framework.writes_activations_out
    return d.framework.fuses_activation or own


def _clamps_apart(d: Dims, record: Activation) -> bool:
    return record.clamped and d.framework.fuses_activation and d.framework.clamps_apart


def activation_saved(d: Dims, mlp: str, elements: float, part: str) -> tuple[Saved, ...]:
    """Return what is kept of `elements` of the inner width."""
    record, size = ACTIVATIONS[mlp], elements * d.act_bytes
    needed = NeededBy.BOTH if d.framework.rebuilds_pointwise else NeededBy.INPUT_GRAD  # the output is made of them
    names = record.kept_fused if _fused(d, record) else record.kept
    names += ("clamped gate", "clamped up") if _clamps_apart(d, record) else ()
    saved = tuple(Saved(part, name, size, needed, record.role) for name in names)
    if _fused(d, record) or not record.truths:
        return saved
    return (*saved, Saved(part, "comparison", record.truths * elements, needed))


def activation(d: Dims, mlp: str, elements: float, part: str = "mlp") -> Operator:
    """The activation of `elements` of the inner width, whose operators carry its name, or that of torch's kernel."""
    t, record = activation_traffic(d, mlp), ACTIVATIONS[mlp]
    name = record.torch_kernel if record.torch_kernel and _fused(d, record) else mlp
    inputs, back = 2 if is_gated(mlp) else 1, f"{name}_backward"
    forward, backward = t.forward_bytes * elements, t.backward_bytes * elements
    strided = is_gated(mlp) and d.framework.reads_strided
    if strided:
        # Gate and up are read where they lie: forward throughout; backward by whatever is fused, or by two of the eager
        # kernels, three accesses each.
        whole = d.framework.fuses_activation
        halves, kernels = (backward, t.backward_kernels) if whole else (6 * d.act_bytes * elements, 2)
        rest = t.backward_kernels - kernels
        others = memory_op(f"{back}_rest", I, "elementwise", elements, backward - halves, d.act, rest, back)
        kernel = memory_op(back, I, "elementwise", elements, halves, d.act, kernels, back, strided=True)
        backwards: Program = (kernel, others) if rest else (kernel,)
    else:
        backwards = (memory_op(back, I, "elementwise", elements, backward, d.act, t.backward_kernels, back),)
    return Operator(
        name,
        (memory_op(name, F, "elementwise", elements, forward, d.act, t.forward_kernels, name, strided=strided),),
        backwards,
        activation_saved(d, mlp, elements, part),
        backward_bytes=(1 + inputs) * elements * d.act_bytes,
    )
