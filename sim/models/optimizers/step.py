"""The optimizer's step and the gradients' clipping for n parameters: bound by memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.operator_kinds import HOST_UPDATE
from sim.core.program import BLOCK_END, Compute, ModelPart, Phase, Program
from sim.models.operators import items_of_part, memory_op
from sim.models.optimizers.loops import ONCE, Loops
from sim.models.optimizers.muon import Dealt, muon_items
from sim.models.torch_kernels.lists_of_tensors import FUNCTION_CLOCKS, NORM_CLOCKS
from sim.variants.frameworks.parts import TensorLoop
from sim.variants.frameworks.records import framework_of
from sim.variants.optimizers import OPTIMIZERS, REMAINDERS, Optimizer, UpdateOperators

if TYPE_CHECKING:
    from sim.inputs.training_config import Training

# torch/optim/adam.py, `_multi_tensor_adam`. Parameters: decay (2), addcdiv (2); gradients: lerp, addcmul;
# first moment: lerp (2), addcdiv; second: mul (2), addcmul (2), sqrt; the root, a tensor of its own: written, divided
# (2), shifted (2), addcdiv.
FOREACH_ACCESSES = {"parameter": 4, "gradient": 2, "moments": 8, "root": 6}
FOREACH_KERNELS = 8
# First moment scaled (2 accesses) and joined by the gradient (3), second likewise (2 and 3), its root (2) divided (2)
# and shifted (2), the parameter moved (4). Without decay, for which a kernel runs only where it is not zero.
ADAMW_OPERATOR_ACCESSES = 20
NOTHING_DEALT = Dealt()  # to an optimizer that updates whole matrices
INT8_BLOCK = 256  # numbers that share an fp32 scale (bitsandbytes, functional.py: `optimizer_update_8bit_blockwise`)


def optimizer_items(n_params: int, t: Training, dealt: Dealt = NOTHING_DEALT, loops: Loops = ONCE) -> Program:
    """The update of a rank's `n_params` parameters (of its shard, if they are sharded), in one pass or a loop.

    Muon updates the matrices that are `dealt` to it (`sim.models.optimizers.muon`), and AdamW the rest. AdamW reads the
    gradient; it reads and writes the parameter and two moments (24 bytes in fp32). With an fp32 master copy, it also
    writes the low-precision parameter. Some frameworks read the copy once more for that (`Framework.copies_updated`).
    For AdamW of several kernels see `ADAMW_OPERATOR_ACCESSES`. SGD without momentum reads the gradient, and reads and
    writes the parameter. Lion reads and writes one moment beside it (csrc/lion of DeepSpeed), AdEMAMix three; Adafactor
    is made of torch's operators, and so is Lion in some frameworks (`Framework.lion_operators`).

    >>> from types import SimpleNamespace as N
    >>> t = N(param_dtype="bf16", grad_dtype="fp32", optimizer="adamw", optimizer_dtype="fp32", master_weights=None,
    ...       framework="eager", software_date=None, adamw_kernels=None, lora=None)
    >>> optimizer_items(1000, t)[0].bytes
    30000.0
    """
    if n_params <= 0:
        return ()
    held = kept_bytes(t)
    kept = trained_bytes(t)
    updated = held.master or kept
    written = kept + held.master * framework_of(t).copies_updated if held.master else 0.0
    if t.master_weights == REMAINDERS:  # one kernel reads and writes parameter and remainder
        updated, written = FP32_BYTES, 0.0
    optimizer = OPTIMIZERS[t.optimizer]
    if optimizer.whole_matrices:
        rest = _one_pass(OPTIMIZERS[optimizer.others_by], dealt.rest, t, held, updated, written)
        step = (*rest, *muon_items(dealt.matrices, main_gradient_bytes(t), updated, moment_bytes(t), written))
    else:
        step = _one_pass(optimizer, n_params, t, held, updated, written, loops.tensors)
    return items_of_part(ModelPart.OPTIMIZER, step)


def _one_pass(
    optimizer: Optimizer, n_params: int, t: Training, held: KeptBytes, updated: float, written: float, tensors: int = 1
) -> Program:
    """Return the update of `n_params` parameters; `held`, `updated` and `written` are bytes of each.

    It is one kernel, or a loop over `tensors` for an optimizer that is made of operators.
    """
    if n_params <= 0:
        return ()
    if optimizer.is_adam and adamw_kernels(t) == "foreach":
        return _foreach(n_params, t, updated, written)
    loop = framework_of(t).adamw_loop
    if optimizer.is_adam and loop.kernels:
        return _adamw_loop(n_params, n_params * (ADAMW_OPERATOR_ACCESSES * updated + written), loop, tensors)
    operators = framework_of(t).lion_operators if optimizer.is_lion else optimizer.operators
    if operators is not None:
        return _by_operators(optimizer, n_params, t, updated, written, operators, tensors)
    state = 2.0 * (updated + held.moments)
    moved = n_params * (main_gradient_bytes(t) + state + written)
    step = memory_op(optimizer.name, Phase.OPTIMIZER, "optimizer", n_params, moved, "fp32", kernel=optimizer.name)
    # Instructions bound torch's fused AdamW where all is in 16 bits.
    of_torch = optimizer.is_adam and framework_of(t).plain_host
    return (replace(step, single_elements=float(n_params)) if of_torch else step,)


def _adamw_loop(n_params: int, moved_bytes: float, loop: TensorLoop, tensors: int) -> Program:
    """Return AdamW tensor by tensor; all tensors are taken for equally large.

    Where the host reads each tensor's number of steps, two operators are added for each tensor: one counts the step,
    one copies the number to the host. The host then issues a tensor's kernels only after the kernels before have ended.
    """
    if not loop.reads_steps:
        return (_looped("adamw", n_params, moved_bytes, loop.kernels * tensors),)
    counted = _looped("adamw_steps", tensors, tensors * 2 * FP32_BYTES, tensors)
    step = _looped("adamw", n_params / tensors, moved_bytes / tensors, loop.kernels + 1)
    return (counted, *((BLOCK_END, step) * tensors))


def _looped(name: str, elements: float, moved_bytes: float, kernels: int) -> Compute:
    """Kernels of a loop over tensors, which needs no autograd: torch's AdamW issued its 80 kernels over ten tensors in
    0.70 ms on an H100 and 0.72 on an H200 (`optimizer:adamw_single_tensor` of scenarios/cuda/h100.json, h200.json)."""
    made = memory_op(name, Phase.OPTIMIZER, "elementwise", elements, moved_bytes, "fp32", kernels)
    return replace(made, one_call=True)


def _by_operators(
    optimizer: Optimizer,
    n_params: int,
    t: Training,
    updated: float,
    written: float,
    operators: UpdateOperators,
    tensors: int,
) -> Program:
    """An update of torch's operators, in a loop over `tensors`."""
    gradient, moment = main_gradient_bytes(t), moment_bytes(t)
    casts, update = 0.0, updated
    if optimizer.in_fp32:
        casts = sum(count * (n + FP32_BYTES) for count, n in ((2, updated), (1, gradient)) if n < FP32_BYTES)
        updated = gradient = update = FP32_BYTES
    each = (
        operators.parameter * updated
        + operators.gradient * gradient
        + operators.moment * moment
        + operators.update * update
    )
    moved = n_params * (each + casts + written)
    return (_looped(optimizer.name, n_params, moved, operators.kernels * tensors),)


def adamw_kernels(t: Training) -> str:
    """Return which kernels AdamW is made of (`training.adamw_kernels`); 8-bit moments have a kernel of their own."""
    if t.optimizer_dtype == "int8":
        return "fused"
    return t.adamw_kernels or next(iter(framework_of(t).adamw_kernels), "fused")


def _foreach(n_params: int, t: Training, updated: float, written: float) -> Program:
    """AdamW as one kernel over lists of tensors for each operator (`FOREACH_ACCESSES`); bytes as in `_one_pass`."""
    sizes = {"parameter": updated, "gradient": dtype_bytes(t.grad_dtype)}
    moment = moment_bytes(t)
    each = sum(count * sizes.get(what, moment) for what, count in FOREACH_ACCESSES.items()) + written
    kernels = FOREACH_KERNELS + bool(written)
    step = memory_op("adamw", Phase.OPTIMIZER, "elementwise", n_params, n_params * each, "fp32", kernels)
    return (replace(step, clocks=FUNCTION_CLOCKS * FOREACH_KERNELS * n_params),)


def update_temporary_bytes(t: Training) -> float:
    """Bytes of a parameter that an update on the GPU holds for itself: AdamW over lists of tensors takes the roots of
    all second moments at once (torch/optim/adam.py: `_multi_tensor_adam`); one fused kernel needs none."""
    by_lists = OPTIMIZERS[t.optimizer].is_adam and adamw_kernels(t) == "foreach" and t.optimizer_offload != "cpu"
    return moment_bytes(t) if by_lists else 0.0


class KeptBytes(NamedTuple):
    """Bytes of a parameter that the optimizer keeps: Adam's moments, and the fp32 copy of a 16-bit parameter."""

    moments: float
    master: float

    @property
    def total(self) -> float:
        """Bytes of a parameter that the optimizer keeps: moments and master copy together."""
        return self.moments + self.master


def kept_bytes(t: Training) -> KeptBytes:
    """Optimizer states of a parameter: 8 + 4 bytes for AdamW on 16-bit parameters, 4 where all is in 16 bits.

    With 16-bit moments and no master copy a parameter, its 16-bit gradient and its states take 2 + 2 + 4 bytes. Muon
    keeps these of what it leaves to AdamW: `matrix_kept_bytes` of its matrices.
    """
    narrow = trained_bytes(t)
    copied = 0.0 if t.master_weights is False else FP32_BYTES - (narrow if t.master_weights == REMAINDERS else 0.0)
    return KeptBytes(OPTIMIZERS[t.optimizer].moments * moment_bytes(t), copied if narrow < FP32_BYTES else 0.0)


def trained_bytes(t: Training) -> float:
    """Bytes of a parameter that is trained: of `param_dtype`, or fp32 where adapters have it beside 16-bit weights
    (peft/tuners/tuners_utils.py: `cast_adapter_dtype`), which then need no copy in fp32."""
    wide = t.lora is not None and framework_of(t).adapters_in_fp32
    return FP32_BYTES if wide else dtype_bytes(t.param_dtype)


def matrix_kept_bytes(t: Training) -> KeptBytes:
    """Optimizer states of a parameter in a layer's matrix: Muon has one momentum, the others what `kept_bytes` says."""
    return kept_bytes(t)._replace(moments=OPTIMIZERS[t.optimizer].matrix_moments * moment_bytes(t))


def state_bytes(n_params: int, dealt: Dealt, t: Training) -> float:
    """Optimizer states of a rank's `n_params`; with Muon of the matrices that are `dealt` to it, and the rest."""
    usual = kept_bytes(t).total
    if not OPTIMIZERS[t.optimizer].whole_matrices:
        return n_params * usual
    return dealt.rest * usual + sum(s.elements for s in dealt.matrices) * matrix_kept_bytes(t).total


def moment_bytes(t: Training) -> float:
    """Bytes of one number of a moment; in 8 bits with its part of a block's scale (Dettmers et al. 2021, arXiv
    2110.02861, section 2.1). Small tensors, which bitsandbytes keeps in fp32, are taken for 8-bit too."""
    scale = FP32_BYTES / INT8_BLOCK if t.optimizer_dtype == "int8" else 0.0
    return dtype_bytes(t.optimizer_dtype) + scale


def host_update_items(n_params: int, t: Training, takes_norm: bool = False) -> Program:
    """AdamW on the host's CPUs over `n_params` of a rank, in fp32: scaling of gradients (8 bytes each; 4 more if the
    host `takes_norm`, too), the update (28), and the copy of the parameter in `param_dtype` (4 and its own bytes).

    Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 5.1; DeepSpeed, runtime/zero/stage_1_and_2.py, `step`.

    >>> from types import SimpleNamespace as N
    >>> host_update_items(1000, N(gradient_clipping=True, param_dtype="bf16"))[0].bytes
    42000.0
    """
    each = 7 * FP32_BYTES + (2 + takes_norm) * FP32_BYTES * t.gradient_clipping
    copied = dtype_bytes(t.param_dtype)
    each += FP32_BYTES + copied if copied < FP32_BYTES else 0
    made = memory_op("adamw on the host", Phase.OPTIMIZER, HOST_UPDATE, n_params, float(n_params * each), "fp32")
    return items_of_part(ModelPart.OPTIMIZER, (made,))


def main_gradient_bytes(t: Training) -> float:
    """Bytes of a gradient as the optimizer reads it: fp32 where the framework copies it so (`widens_gradients`)."""
    kept, framework = dtype_bytes(t.grad_dtype), framework_of(t)
    aware = moment_bytes(t) < FP32_BYTES or t.master_weights == REMAINDERS  # use_precision_aware_optimizer
    widened = framework.widens_gradients and kept_bytes(t).master and not aware
    return max(kept, FP32_BYTES) if widened else kept


class EndOfStep(NamedTuple):
    """The operators of a rank after its gradients are reduced: gradients are prepared (cast, unscaled), their norm is
    taken, they are scaled by the clipping factor, and the parameters are updated."""

    prepared: Program
    norm: Program
    scaling: Program
    update: Program


def prepared_gradients(n_params: int, t: Training) -> Program:
    """The operators that make a rank's gradients ready for clipping and update.

    They are copied to fp32 (`Framework.widens_gradients`), and with fp16 divided by the loss's scale and looked through
    for overflows (`Framework.unscales_gradients`; torch's scaler refuses 16-bit gradients).

    >>> from types import SimpleNamespace as N
    >>> t = N(framework="megatron", grad_dtype="fp16", param_dtype="fp16", precision="fp16", software_date=None,
    ...       optimizer="adamw", optimizer_dtype="fp32", master_weights=None, optimizer_offload=False, lora=None)
    >>> [(i.name, i.bytes) for i in prepared_gradients(1000, t)]
    [('grad_widen', 6000.0), ('grad_unscale', 8000.0)]
    """
    if n_params <= 0:
        return ()
    kept, read, made = dtype_bytes(t.grad_dtype), main_gradient_bytes(t), list[Compute]()
    if read > kept:
        moved = n_params * (kept + read)
        made.append(memory_op("grad_widen", Phase.OPTIMIZER, "elementwise", n_params, moved, "fp32"))
    if unscales(t):
        made.append(_multiplied("grad_unscale", n_params, t))
    return items_of_part(ModelPart.OPTIMIZER, made)


def unscales(t: Training) -> bool:
    """Tell whether a pass of its own takes the loss's scale, which fp16 needs, out of the gradients."""
    scaled = t.precision == "fp16" and main_gradient_bytes(t) >= FP32_BYTES and t.optimizer_offload != "cpu"
    return scaled and framework_of(t).unscales_gradients


def _multiplied(name: str, n_params: int, t: Training) -> Compute:
    """A pass that multiplies all gradients by one number, as torch's functions over lists of tensors do."""
    moved = 2.0 * n_params * main_gradient_bytes(t)
    made = memory_op(name, Phase.OPTIMIZER, "elementwise", n_params, moved, "fp32", kernel="grad_scale")
    return replace(made, clocks=FUNCTION_CLOCKS * n_params) if framework_of(t).plain_host else made


def clip_items(n_params: int, t: Training, loops: Loops = ONCE) -> tuple[Program, Program]:
    """The gradients' norm (read once), and their scaling by the clipping factor (read and written), in one pass each
    or, where clipping loops, in a kernel for each tensor.

    Between the two the squared norms of all ranks' parts are summed: four bytes over the model's groups.
    """
    if n_params <= 0 or not t.gradient_clipping:
        return (), ()
    size = n_params * main_gradient_bytes(t)
    norm = memory_op("grad_norm", Phase.OPTIMIZER, "elementwise", n_params, size, "fp32", kernel="grad_norm")
    scaling = _multiplied("grad_scale", n_params, t)
    if loops.clips:
        norm, scaling = (replace(i, kernels=loops.tensors, clocks=0.0, one_call=True) for i in (norm, scaling))
    elif framework_of(t).plain_host:  # torch.nn.utils.clip_grad_norm_
        norm = replace(norm, clocks=NORM_CLOCKS * n_params)
    return items_of_part(ModelPart.OPTIMIZER, (norm,)), items_of_part(ModelPart.OPTIMIZER, (scaling,))


def shard_items(n_params: int, t: Training) -> Program:
    """Return the kernel that a framework runs on its shard of the gradients before the optimizer reads it: ZeRO engines
    that move `ZeroEngine.shard_bytes` for each of `n_params`."""
    moved = n_params * framework_of(t).zero.shard_bytes
    if not moved:
        return ()
    made = memory_op("grad_shard", Phase.OPTIMIZER, "elementwise", n_params, moved, "fp32")
    return items_of_part(ModelPart.OPTIMIZER, (made,))


def gradient_buffer_items(n_params: int, t: Training, replicas: int) -> Program:
    """Return what the framework does to the whole gradient buffer of `n_params` besides reducing it.

    The framework's record says what: it may read the buffer for a norm that shows NaNs (`checks_gradients`), scale it
    to the mean over `replicas` data-parallel ranks before it is reduced (`averages_gradients`), and zero it for the
    next step (`zeroes_gradients`); plain torch does none of these, because NCCL averages and gradients are freed. With
    `calculate_per_token_loss` it is scaled by the number of all tokens behind its reduction in place of that mean
    (`finalize_model_grads`; two messages of four bytes are left out). Where each micro-batch's gradients are reduced
    (ZeRO-2 and -3) no more is kept than a shard: `n_params` are those of it.

    Source: megatron/core/distributed: `check_grads`, `start_grad_sync`, `zero_grad_buffer`.

    >>> from types import SimpleNamespace as N
    >>> t = N(framework="megatron", grad_dtype="fp32", software_date=None, calculate_per_token_loss=False)
    >>> [i.bytes for i in gradient_buffer_items(1000, t, replicas=2)]
    [4000.0, 8000.0, 4000.0]
    """
    if n_params <= 0:
        return ()
    framework, size = framework_of(t), n_params * dtype_bytes(t.grad_dtype)
    passes = {
        "grad_check": 1 * framework.checks_gradients,
        "grad_average": 2 * (framework.averages_gradients and replicas > 1 and not t.calculate_per_token_loss),
        "grad_per_token": 2 * t.calculate_per_token_loss,
        "grad_zero": 1 * framework.zeroes_gradients,
    }
    made = [
        memory_op(name, Phase.OPTIMIZER, "elementwise", n_params, count * size, "fp32")
        for name, count in passes.items()
        if count
    ]
    return items_of_part(ModelPart.OPTIMIZER, made)
