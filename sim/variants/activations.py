"""One record for each activation that `model.mlp` may name: accesses, kernels, what is kept for the backward.

The key's allowed values are the names of `ACTIVATIONS`. Accesses are per element of the MLP's inner width.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from sim.core.program import TensorRole


class Passes(NamedTuple):
    """Accesses of an element and kernels, forward and backward."""

    forward: int
    forward_kernels: int
    backward: int
    backward_kernels: int


class Mixed(NamedTuple):
    """Kernels over both dtypes, for which torch has none that is vectorized: bytes of an element and operands, with the
    result, of each; how many. Of two operands it is a cast."""

    bytes: float
    operands: int
    kernels: int = 1


class Promoted(NamedTuple):
    """What an activation moves whose formula has an operator that autocast runs in fp32, so that what follows has
    fp32, too: bytes of an element and kernels, forward and backward; what is kept of it, and its bytes; of those
    kernels the `mixed` ones, forward and backward."""

    forward_bytes: float
    forward_kernels: int
    backward_bytes: float
    backward_kernels: int
    kept: tuple[tuple[str, float], ...]
    mixed: tuple[tuple[Mixed, ...], tuple[Mixed, ...]] = ((), ())


class Instructions(NamedTuple):
    """A thread's instructions for each element of the inner width, in the kernels that torch.compile makes of the fused
    activation (`tools/count_instructions.py`, compute capability 9.0; of 10.0 there are up to a seventh less).

    `backward`: gate and up are tensors of their own; `joined`: halves of one tensor, and so are their gradients, for
    each number of which Inductor computes both and chooses one. An expert's also multiplies by the router's weight:
    `weighted`, `joined_weighted`, and `of_weight` for the weight's gradient. 0: no kernel, or not counted.
    """

    forward: float
    backward: float
    joined: float = 0.0
    weighted: float = 0.0
    joined_weighted: float = 0.0
    of_weight: float = 0.0


class Activation(Struct, frozen=True):
    """One activation. `gated`: a second projection of the input multiplies the result. `kept`: what eager code keeps
    of it for the backward, each as wide as the inner width; `kept_fused`: what one kernel keeps; `role`: of both.
    `truths`: how many comparisons eager code keeps, a byte for each element.
    `clamped`: gate and up are clamped first. `promoted`: what eager code has under autocast; without it autocast leaves
    it in 16 bits throughout. `torch_kernel`: torch's kernel of a formula that a model's own code writes out
    (`writes_activations_out`). `singly`: of eager kernels those that torch does not vectorize, forward and backward:
    accesses and how many. `numbers`: eager kernels of single numbers, forward and backward. `alternate`: a model's own
    code takes each second number of one result for the gate, so that no kernel joins both gradients; `singly` holds
    there alone. `compiled`: instructions of the fused kernels. `in_experts`: Transformer Engine's matmuls of experts
    compute it (ops/fused/grouped_mlp.py), as they do gated ones.
    """

    gated: bool
    eager: Passes
    fused: Passes
    kept: tuple[str, ...]
    kept_fused: tuple[str, ...]
    role: TensorRole = TensorRole.INNER
    clamped: bool = False
    promoted: Promoted | None = None
    truths: int = 0
    torch_kernel: str = ""
    singly: tuple[tuple[float, int], tuple[float, int]] = ((0.0, 0), (0.0, 0))
    numbers: tuple[int, int] = (0, 0)
    alternate: bool = False
    compiled: Instructions = Instructions(0.0, 0.0)
    in_experts: bool = False


_ONE = Passes(2, 1, 3, 1)
_GELU = Instructions(35.0, 43.0)
_SWIGLU = Instructions(24.0, 43.0, 102.0, 27.0, 122.0, 36.0)
_GEGLU = Instructions(34.0, 45.0, 100.0, 37.0, 93.0, 46.0)
_QUICK_GEGLU = Instructions(21.0, 29.0, 78.0, 24.0, 83.0, 34.0)
_GATED_EAGER, _GATED_FUSED = Passes(5, 2, 9, 3), Passes(3, 1, 5, 1)
ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(False, _ONE, _ONE, ("gelu input",), ("gelu input",), TensorRole.INPUT, compiled=_GELU),
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
        # Under autocast the power is of an fp32 copy. Forward: 0.5·x (4), the copy (6), power, product (8, 8), sum with
        # x (10), product, tanh, 1 + (8, 8, 8), product of both dtypes (10). Backward: the product's factors (10, 12),
        # one in 16 bits (6), tanh (12), product (8), its 16 bits for x (6), product, the power's x², 3 and product (8,
        # 8, 8, 12), in 16 bits (6), 0.5 (4), two sums (6, 6).
        promoted=Promoted(
            70.0,
            9,
            112.0,
            14,
            (("gelu input in fp32", 4.0), ("tanh", 4.0), ("half the input", 2.0), ("1 + tanh", 4.0)),
            ((Mixed(6.0, 2), Mixed(10.0, 3, 2)), (Mixed(10.0, 3),)),
        ),
        torch_kernel="gelu",
    ),
    # 0.5·x·(1 + tanh(0.798·x·(1 + 0.0447·x·x))), that formula without a power (FastGELUActivation in the same file),
    # which autocast leaves in 16 bits. Forward: 0.5·x, 0.798·x, 0.0447·x (2, 2, 2), x² (3), 1 + (2), product (3), tanh,
    # 1 + (2, 2), product (3). Backward: three products' factors (3 each, six in all), tanh (3), two numbers' and 0.5
    # (2, 2, 2), three sums of the input's gradients (3, 3, 3).
    "gelu_fast": Activation(
        False,
        Passes(21, 9, 36, 13),
        _ONE,
        ("gelu input", "0.0447 times input", "0.798 times input", "factor", "tanh", "half the input", "1 + tanh"),
        ("gelu input",),
        TensorRole.INPUT,
        torch_kernel="gelu",
    ),
    # The same formula in BLOOM's code (bloom/modeling_bloom.py: GeLUFunction), whose backward computes all of it again
    # from the input. Forward: as above. Backward: tanh's argument and tanh (14), 0.5·x (2), tanh² (3), 1 - (2), x²
    # times a number (2, 3), a sum (2), two products (3, 3), 0.5·(1 + tanh) (2, 2), sum and product (3, 3).
    "gelu_bloom": Activation(
        False, Passes(21, 9, 44, 18), _ONE, ("gelu input",), ("gelu input",), TensorRole.INPUT, torch_kernel="gelu"
    ),
    # x·sigmoid(1.702·x) (QuickGELUActivation in the same file), which is separate operators in plain torch, too.
    # Forward: 1.702·x, sigmoid (2, 2), product (3). Backward: its factors (3, 3), sigmoid (3), 1.702 (2), sum (3).
    "quick_gelu": Activation(
        False, Passes(7, 3, 14, 5), _ONE, ("gelu input", "sigmoid"), ("gelu input",), TensorRole.INPUT
    ),
    "swiglu": Activation(
        True, _GATED_EAGER, _GATED_FUSED, ("gate", "silu(gate)", "up"), ("gate", "up"), compiled=_SWIGLU
    ),
    "geglu": Activation(
        True, _GATED_EAGER, _GATED_FUSED, ("gate", "gelu(gate)", "up"), ("gate", "up"), compiled=_GEGLU
    ),
    # Eager code keeps its result, which is the next matmul's input (torch derivatives.yaml: relu).
    "relu": Activation(False, _ONE, _ONE, (), ("relu input",), TensorRole.INPUT),
    # Backward: the power's x, 2 and product (2, 2, 3), relu (3).
    # In experts' matmuls since Transformer Engine 2.17 (`ScaledSReLU`).
    "relu2": Activation(False, Passes(4, 2, 10, 4), _ONE, ("relu output",), ("relu output",), in_experts=True),
    # xIELU (arXiv 2411.13010) as Transformers' activations.py writes it. Forward: a comparison (2), the positive half
    # (2, 3, 2, 3), the negative one (2, 2, 3, 2, 2, 3), the choice (4). Backward: the choice (5), beta·x twice (4), the
    # square's factors and alpha (3, 3, 2, 4), the negative half's (2, 4, 2, 5), the minimum's (2, 2, 2, 3, 2, and 2 of
    # the copy that is masked), sums of the input's gradients (15).
    "xielu": Activation(
        False,
        Passes(30, 12, 62, 26),
        _ONE,
        ("xielu input", "alpha times input", "expm1", "difference"),
        ("xielu input",),
        TensorRole.INPUT,
        # Under autocast its fp32 numbers multiply to fp32. Forward: the comparison (3), the positive half (6, 10, 4,
        # 10), the negative one (4, 6, 8, 10, 8, 4, 10), the choice (13). Backward: the choice (9, 9), its 16 bits and
        # beta·x twice (6, 4, 6, 4), alpha's factors and sums (12, 8, 4, 8, 12, 10, 8, 10, 4), what comes to 16 bits (6
        # five times), the sign (8), expm1 (8), the square's other factor (12), the minimum's (4, 3, 7, 3, 4, 5), sums
        # of the input's gradients (6 six times).
        promoted=Promoted(
            96.0,
            13,
            214.0,
            31,
            (
                ("xielu input", 2.0),
                ("comparison", 1.0),
                ("alpha times input", 4.0),
                ("expm1", 4.0),
                ("difference", 4.0),
            ),
            (
                (Mixed(6.0, 2), Mixed(6.0, 3), Mixed(10.0, 3, 4), Mixed(4.0, 3, 3)),
                (Mixed(4.0, 3, 2), Mixed(3.0, 3, 2), Mixed(10.0, 3, 2)),
            ),
        ),
        truths=1,
        # Products, comparisons and choices with a number that is a tensor of its own (alpha, beta, eps), which torch
        # broadcasts: x times a number thrice, minimum, a difference times a number; backward the choices (2.5
        # each: one operand is of truths), four products (2) and two comparisons (1.5).
        singly=((10.0, 5), (16.0, 8)),
        # Both learned numbers' softplus and a sum; backward two zeros of the choices' and both gradients of softplus.
        numbers=(3, 4),
    ),
    # gpt-oss: gate and up clamped (2, 2), alpha times gate (2), its sigmoid (2), their product (3), up + 1 (2), product
    # (3). Backward: the product's two factors (3, 3), the gate's two (3, 3), sigmoid (3), alpha (2), sum (3), clamps in
    # six kernels (11 with their truths' bytes: three comparisons, both of the up's, two choices), and both strided
    # halves of one tensor: zeroed, filled, added (14)
    # (transformers/models/gpt_oss/modeling_gpt_oss.py: GptOssExperts._apply_gate).
    "clamped_swiglu": Activation(
        True,
        Passes(16, 7, 45, 18),
        _GATED_FUSED,
        ("gate", "up", "clamped gate", "sigmoid", "up + 1", "gated"),
        ("gate", "up"),
        clamped=True,
        alternate=True,
        # What reads or writes each second number: both clamps; backward the comparisons (1.5 each), the choices (2.5
        # each) and both fillings of zeros (2 each).
        singly=((4.0, 2), (13.5, 7)),
        numbers=(0, 2),  # zeros of the clamps' choices
        compiled=_QUICK_GEGLU,
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
        compiled=_SWIGLU,
    ),
}
# Where a framework clamps before the fused kernel: two halves clamped (2, 2) and joined (2, 2). Backward, by operators
# of torch (derivatives: clamp_backward): is the gate at most its limit (1), is up at least and at most its own (1, 1),
# each half's gradient where it was within (2, 2), both put into one (4); the four truths are bytes, and two zeros are
# made. The halves stay kept beside what they were joined to.
CLAMPS = Passes(8, 3, 11, 9)
CLAMP_TRUTH_BYTES = 8.0  # written (1, 1, 1), joined (3), read (1, 1)
