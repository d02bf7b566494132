"""Operators with their flops and bytes. `Operator`: one operator forward and backward with what it keeps; `Linear`: the
shape of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes
from sim.core.program import Comm, Compute, Item, ModelPart, Phase, Program, Role, Saved, Wait
from sim.models.dims import Dims

if TYPE_CHECKING:
    from sim.inputs.training_config import GraphPart, LoraTarget, OffloadModule, RecomputeModule

F, I, W = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD  # noqa: E741
ROLES = {F: Role.OUTPUT, I: Role.INPUT_GRADIENT, W: Role.WEIGHT_GRADIENT}  # of a matmul where it is written down


class Operator(Struct, frozen=True):
    """One operator of a layer as one rank runs it, for one micro-batch.

    `forward_bytes` and `backward_bytes` are held while it runs, beyond what any part keeps: gradients of its
    output and input, gathered copies, temporaries. `outputs` are the forward results in order, for selective
    policies that keep some of them: (Compute name, bytes).
    """

    name: str
    forward: Program = ()
    backward: Program = ()
    saved: tuple[Saved, ...] = ()
    params: int = 0
    expert_params: int = 0
    frozen: int = 0  # parameters that are never updated
    frozen_matrices: int = 0  # of these, elements of weight matrices
    few_bits: int = 0  # of these, what is kept in 4 or 8 bits
    weights: tuple[tuple[int, int], ...] = ()  # shapes of its weight matrices
    products: tuple[tuple[int, int], ...] = ()  # of the products in them that Muon takes apart; none: as `weights`
    tensors: tuple[int, ...] = ()  # elements of each tensor that `params` counts, where it is more than one
    shared: tuple[int, ...] = ()  # elements of each tensor whose gradient is summed over tp, see `Block`
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    # A step's first backward keeps as the gradient what `backward_bytes` counts, if it then makes it (torch's
    # csrc/autograd/functions/accumulate_grad.h: accumulateGrad).
    returns_gradient: bool = False
    within: tuple[RecomputeModule, ...] = ()  # parts of a layer that it belongs to
    module: OffloadModule | None = None  # the part whose kept tensors may go to host memory
    graph: GraphPart | None = None  # the part of an expert layer that a CUDA graph may hold with it
    learns_alone: bool = False  # by a loss of its own, of inputs that get no gradient from it
    core: bool = False  # the attention core: what `selective` reruns and `selective_op` keeps
    output_bytes: float = 0.0  # of the core's result
    always_again: bool = False  # its matmuls are run again by `selective_op`, which does not count them
    adapters_alone: Program = ()  # of `backward` what its adapters' own weight gradients need
    unsaved_input: tuple[Saved, ...] = ()  # what a compiler makes again of other kept tensors

    @property
    def matrix_elements(self) -> int:
        """Elements of its weight matrices, frozen ones with the others."""
        return self.frozen_matrices + (self.expert_params or sum(n * k for n, k in self.weights))


class Linear(Struct, frozen=True):
    """`[rows, k] x [k, n]` for every n of `outs` (query, key, value as three matmuls have one input).

    `mode`: column (n is this rank's part, the input whole), row (k is this rank's part, the output summed),
    plain (every rank the whole). `rows` are those of the matmul, before any gather or after any scatter is
    undone. `target`: its key among `training.lora.targets`; None where it has none.
    """

    name: str
    rows: int
    k: int
    outs: tuple[int, ...]
    mode: str = "plain"
    bias: bool = False
    save_input: bool = True
    target: LoraTarget | None = None
    module: OffloadModule | None = None  # as an operator's
    original: bool = False  # its 16-bit input is kept, and quantized again for the weight gradient
    joins_norm: bool = True  # a norm before a column layer may do part of its quantization
    wide: bool | None = None  # under autocast its input has fp32; None: if a norm made it, as in mode column

    @property
    def n(self) -> int:
        return sum(self.outs)

    def out_name(self, i: int) -> str:
        return self.name if len(self.outs) == 1 else f"{self.name}_{i}"


def keeping(part: Operator, name: str, size: float) -> Operator:
    """The attention core `part`, which also keeps `size` bytes of what was made before it."""
    return replace(part, saved=(*part.saved, Saved(name, size)))


def of_part(part: ModelPart, operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators as the work of that part of a model, but for what is of a part already."""
    return tuple(
        replace(
            o,
            forward=items_of_part(part, o.forward),
            backward=items_of_part(part, o.backward),
            adapters_alone=items_of_part(part, o.adapters_alone),
        )
        for o in operators
    )


def items_of_part(part: ModelPart, program: Iterable[Item]) -> Program:
    """The program, its computations as the work of that part, but for what is of a part already."""
    return tuple(replace(i, part=part) if isinstance(i, Compute) and i.part is ModelPart.OTHER else i for i in program)


def forward_of(parts: Iterable[Operator]) -> Program:
    return tuple(item for part in parts for item in part.forward)


def backward_of(parts: Sequence[Operator]) -> Program:
    return tuple(item for part in reversed(parts) for item in part.backward)


def saved_of(parts: Iterable[Operator]) -> tuple[Saved, ...]:
    return tuple(s for part in parts for s in part.saved if s.bytes > 0)


def tensors_of(parts: Iterable[Operator]) -> tuple[int, ...]:
    """Elements of each dense parameter tensor, in forward order."""
    return tuple(n for p in parts if p.params for n in (p.tensors if sum(p.tensors) == p.params else (p.params,)))


def backward_peak(parts: Sequence[Operator], kept_bytes: float = 0.0) -> float:
    """Bytes beyond the saved ones at the worst moment of a backward.

    Walks back through the parts: each holds its own `backward_bytes`, plus `kept_bytes` (the residual
    branch's gradient), less what the parts already done have released.
    """
    return max((held + kept_bytes for held, _ in backward_moments(parts) if held + kept_bytes > 0), default=0.0)


def backward_moments(parts: Sequence[Operator]) -> tuple[tuple[float, int], ...]:
    """Bytes beyond the saved ones as each part runs, the last part first, and for how many parameters it and those
    before it have brought gradients: without its own where `backward_bytes` counts them."""
    released, params = 0.0, 0
    found = []
    for part in reversed(parts):
        before, params = params, params + part.params + part.expert_params
        found.append((part.backward_bytes - released, before if part.returns_gradient else params))
        released += sum(s.bytes for s in part.saved)
    return tuple(found)


def workspace(d: Dims, parts: Iterable[Operator]) -> float:
    """Return what Transformer Engine keeps for good: one empty weight gradient for every shape of a weight matrix.

    (`get_dummy_wgrad` in its module/base.py; autograd wants a gradient though the matmul has accumulated it.)
    """
    shapes = {shape for part in parts for shape in part.weights}
    return d.act_bytes * sum(n * k for n, k in shapes) if d.framework.keeps_empty_gradients else 0.0


def gemm(
    name: str,
    phase: Phase,
    m: int,
    n: int,
    k: int,
    dtype: str,
    batch: int = 1,
    out_bytes: float | None = None,
    role: Role | None = None,
    kernel: str = "",
) -> Compute:
    """`[m, k] x [k, n]`, `batch` times: 2·batch·m·n·k flops; both operands read, the result written once.

    `out_bytes` replaces the result's traffic where it is not one write in `dtype` (8-bit operands,
    accumulation). `role`: by the phase, but where a forward makes gradients. `kernel`: where it is not the usual one.
    """
    size = dtype_bytes(dtype)
    result = batch * m * n * max(size, 2.0) if out_bytes is None else out_bytes
    moved = batch * (m * k + k * n) * size + result
    shape, flops = (batch, m, n, k), 2.0 * batch * m * n * k
    return Compute(name, "gemm", shape, dtype, flops, moved, phase, role=role or ROLES[phase], kernel=kernel)


def memory_op(
    name: str,
    phase: Phase,
    kind: str,
    elements: float,
    moved_bytes: float,
    dtype: str,
    kernels: int = 1,
    kernel: str = "",
    strided: bool = False,
) -> Compute:
    """An operator bound by memory: `moved_bytes` read and written in `kernels` launches, a flop each.

    `kernel` names its own points in a profile (`KIND:KERNEL`). `strided`: see `Compute`.
    """
    return Compute(
        name,
        kind,
        (max(1, round(elements)),),
        dtype,
        float(elements) * max(kernels, 1),
        moved_bytes,
        phase,
        kernels,
        kernel=kernel,
        strided=strided,
    )


def elementwise_op(name: str, phase: Phase, elements: int, accesses: int, size: float, dtype: str) -> Compute:
    """An elementwise kernel that reads or writes each element `accesses` times, of `size` bytes each."""
    return memory_op(name, phase, "elementwise", elements, accesses * size * elements, dtype)


# Of one thread block: in a pass of cub's radix sort blocks wait for each other. Eight passes over int64 numbers take
# 63 us with their histogram on an H100 at 1.98 GHz, whether there are 8,192 or 65,536 numbers
# (scenarios/measured/gpu_programs).
RADIX_PASS_CLOCKS = 15_000.0


def small_kernels(name: str, phase: Phase, count: int, passes: int = 0) -> Compute:
    """Kernels over indices or statistics that one call of torch's issues; `passes` of them are those of a sort.

    Of the others only their start takes time.
    """
    one = Compute(name, "elementwise", (1,), "fp32", 0.0, float(count), phase, count, looped=True)
    return replace(one, lone_clocks=passes * RADIX_PASS_CLOCKS) if passes else one


def further_kernels(name: str, phase: Phase, count: int, passes: int = 0) -> Compute:
    """Small kernels that the call of the operator beside them issues, so that the host makes no call for them."""
    return replace(small_kernels(name, phase, count, passes), looped=False, within_call=True)


def collective(name: str, kind: str, bytes_: float, phase: Phase, handle: str = "", group: str = "tp") -> Comm:
    """A collective; with a `handle` it is asynchronous."""
    return Comm(name, kind, group, bytes_, phase, blocking=not handle, handle=handle)


def accumulate(d: Dims, name: str, elements: float, accesses: float = 3.0, phase: Phase = I) -> Compute:
    """Sum of two tensors, such as the gradients of two branches: two reads and a write."""
    return memory_op(name, phase, "elementwise", elements, accesses * d.act_bytes * elements, d.act)


def weight_gradient(d: Dims, name: str, m: int, k: int, n: int, dtype: str | None = None) -> Program:
    """`dW = dYᵀ X`, `[n, m] x [m, k]`, and its accumulation; in the linear layers' format unless `dtype` names one."""
    written, added = accumulation(d, name, n * k)
    kernel = "" if dtype else d.matmul
    return (gemm(name, W, n, k, m, dtype or d.linear, out_bytes=written, kernel=kernel), *added)


def accumulation(d: Dims, name: str, size: float) -> tuple[float, Program]:
    """Return how a weight gradient of `size` elements joins those kept: the matmul's written bytes, and a kernel.

    Megatron's matmul accumulates by itself (beta = 1: the gradient is read and written). Elsewhere the matmul
    writes a temporary; a second kernel adds it in every micro-batch but the first, whose gradient is taken as
    it is, so its traffic is counted at (n − 1)/n of n; a gradient kept in another dtype is
    always converted. Where each micro-batch's gradient is reduced at once, a rank adds its shard of it to the shard
    that it keeps (torch's FSDP2, `foreach_reduce`: `sharded_param.grad += `, or in the reduction's dtype
    `partial_reduce_output += ` where the sum waits for the replicas). FSDP2 also copies what it reduces into one buffer
    (`foreach_reduce_scatter_copy_in`), and casts the shard that comes back to the parameter's dtype.
    """
    if d.filled_bytes:
        return _into_bucket(d, name, size)
    if d.framework.accumulates_in_matmul:
        return 2.0 * d.grad_bytes * size, ()
    added = (d.accumulated - 1) / d.accumulated
    if d.autocast:
        return d.act_bytes * size, _cast_and_added(d, name, size, added)
    moved = (d.act_bytes + 2.0 * d.grad_bytes) * size * added
    if d.reduced_over > 1:
        moved += 3.0 * d.shard_sum_bytes * size / d.reduced_over * (d.micro_batches - 1) / d.micro_batches
        if d.copies_sent and d.kept_grad_bytes != d.grad_bytes:
            moved += (d.grad_bytes + d.kept_grad_bytes) * size / d.reduced_over
    if d.grad_bytes != d.act_bytes or (d.copies_sent and d.reduced_over > 1):
        moved += (d.act_bytes + d.grad_bytes) * size * (1.0 - added)
    if d.copies_sent and d.reduced_over == 1:
        moved += 2.0 * d.grad_bytes * size / d.micro_batches
    unlike = d.framework.reads_strided and d.grad_bytes != d.act_bytes
    kernel = memory_op(f"{name}_accumulate", W, "elementwise", size, moved, d.act, strided=unlike)
    # Added in a loop behind the backward, a tensor's kernel takes the host no more than a library's next one.
    return d.act_bytes * size, (replace(kernel, within_call=d.framework.adds_gradients_late),) if moved else ()


def _into_bucket(d: Dims, name: str, size: float) -> tuple[float, Program]:
    """`accumulation` where each micro-batch fills a bucket (`ZeroEngine.fills_buckets`): the matmul writes it, or a
    16-bit gradient that is copied there; the shard that comes back is added to the rank's in every micro-batch."""
    fused, shard = d.framework.accumulates_in_matmul, size / d.reduced_over
    added = (d.filled_bytes + 2.0 * d.shard_sum_bytes) * shard
    if fused:
        return d.filled_bytes * size, (memory_op(f"{name}_accumulate", W, "elementwise", shard, added, d.act),)
    moved = (d.act_bytes + d.filled_bytes) * size + added
    return d.act_bytes * size, (memory_op(f"{name}_accumulate", W, "elementwise", size, moved, d.act),)


def _cast_and_added(d: Dims, name: str, size: float, added: float) -> Program:
    """Under autocast a weight's gradient comes to fp32 by a kernel of its own, which may be the gradient that is kept;
    another one adds it to the sum in this part of micro-batches (`added`), or to a shard's."""
    widened = memory_op(f"{name}_cast", W, "cast", size, (d.act_bytes + d.grad_bytes) * size, d.act)
    moved = 3.0 * d.grad_bytes * size * added
    if d.reduced_over > 1:
        moved += 3.0 * d.shard_sum_bytes * size / d.reduced_over * (d.micro_batches - 1) / d.micro_batches
    summed = memory_op(f"{name}_accumulate", W, "elementwise", size, moved, "fp32")
    return (replace(widened, single_elements=float(size), casts=2), *((summed,) if moved else ()))


def weight_gradient_bytes(d: Dims, size: float) -> float:
    """Return what a matmul leaves for the accumulation: nothing where it adds up itself or is the gradient."""
    if d.autocast:
        return (d.act_bytes + (d.grad_bytes if d.accumulated > 1 else 0.0)) * size
    only = d.accumulated == 1 and d.grad_bytes == d.act_bytes and not d.filled_bytes
    return 0.0 if d.framework.accumulates_in_matmul or only else d.act_bytes * size


def rerun(program: Program) -> Program:
    """A forward as the recompute before a backward runs it: INPUT_GRAD items, handles of their own."""
    out: list[Item] = []
    for item in program:
        if isinstance(item, Compute):
            out.append(replace(item, phase=I))
        elif isinstance(item, Comm):
            handle = f"recompute.{item.handle}" if item.handle else ""
            out.append(replace(item, phase=I, handle=handle))
        else:
            out.append(Wait(f"recompute.{item.handle}", I))
    return tuple(out)
