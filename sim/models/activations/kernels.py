"""Activation functions of an MLP: bound by memory, counted access by access.

`sim.variants.activations` has a record for each. Accesses are per element of the MLP's inner width, times the
activations' bytes. Fused (`fuses_activation`): one kernel that reads what the projections give; eager: one kernel for
every torch operator.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import Compute, NeededBy, Phase, Program, Saved
from sim.models.dims import Dims
from sim.models.elementwise import Traffic, launches_alone
from sim.models.operators import F, I, Operator, memory_op
from sim.models.precision.casts import lists_apart, mixed
from sim.variants.activations import ACTIVATIONS, CLAMP_TRUTH_BYTES, CLAMPS, Activation, Mixed, Passes, Promoted

FP8_BYTES = 1.0


def is_gated(mlp: str) -> bool:
    """Tell whether a second projection of the input gates the first."""
    return ACTIVATIONS[mlp].gated


def activation_traffic(d: Dims, mlp: str) -> Traffic:
    """Bytes of an element of the MLP's inner width, and kernels."""
    record, e, fused = ACTIVATIONS[mlp], d.act_bytes, _fused(d, ACTIVATIONS[mlp])
    if (own := promoted(d, mlp)) is not None:
        return Traffic(own.forward_bytes, own.forward_kernels, own.backward_bytes, own.backward_kernels)
    passes = record.fused if fused else record.eager
    apart = _clamps_apart(d, record)
    if apart:
        passes = Passes(*(own + more for own, more in zip(passes, CLAMPS, strict=True)))
    # gate and up cut out of one matmul's result: their gradients are joined, two reads and two writes (torch.split)
    joined = int(record.gated and d.framework.merges_projections and not fused)
    backward, kernels = passes.backward + 4 * joined, passes.backward_kernels + joined
    truths = CLAMP_TRUTH_BYTES if apart else 0.0
    return Traffic(passes.forward * e, passes.forward_kernels, backward * e + truths, kernels)


def promoted(d: Dims, mlp: str) -> Promoted | None:
    """Return what the activation reads, writes and keeps where autocast runs a part of it in fp32, so that its result
    has fp32, too; None where no part of it does."""
    return None if _fused(d, ACTIVATIONS[mlp]) or not lists_apart(d) else ACTIVATIONS[mlp].promoted


def _fused(d: Dims, record: Activation) -> bool:
    """Tell whether the activation is one kernel: a fused one, or torch's own."""
    own = bool(record.torch_kernel) and not d.framework.writes_activations_out
    return d.framework.fuses_activation or own


def _clamps_apart(d: Dims, record: Activation) -> bool:
    return record.clamped and d.framework.fuses_activation and d.framework.clamps_apart


def activation_saved(d: Dims, mlp: str, elements: float) -> tuple[Saved, ...]:
    """Return what is kept of `elements` of the inner width."""
    record, size = ACTIVATIONS[mlp], elements * d.act_bytes
    if (own := promoted(d, mlp)) is not None:
        return tuple(Saved(name, elements * each, NeededBy.INPUT_GRAD, record.role) for name, each in own.kept)
    names = record.kept_fused if _fused(d, record) else record.kept
    names += ("clamped gate", "clamped up") if _clamps_apart(d, record) else ()
    saved = tuple(Saved(name, size, role=record.role) for name in names)
    if _fused(d, record) or not record.truths:
        return saved
    return (*saved, Saved("comparison", record.truths * elements))


def activation(d: Dims, mlp: str, elements: float, merged: bool = False, weighted: bool = False) -> Operator:
    """The activation of `elements` of the inner width, whose operators carry its name, or that of torch's kernel.

    `merged`: the model's own code cuts gate and up out of one matmul's result (Phi 3). Separate operators then read
    both where they lie, and torch.cat joins their gradients (two reads, two writes). `weighted`: the fused kernel also
    multiplies by the router's weights.
    """
    t, record = activation_traffic(d, mlp), ACTIVATIONS[mlp]
    name = record.torch_kernel if record.torch_kernel and _fused(d, record) else mlp
    inputs, back = 2 if is_gated(mlp) else 1, f"{name}_backward"
    cut = merged and is_gated(mlp) and not (_fused(d, record) or d.framework.merges_projections)
    halves = cut and not record.alternate
    if halves or (is_gated(mlp) and d.framework.reads_strided):
        forwards, backwards = _strided(d, name, elements, t)
    else:
        singly = ((0.0, 0), (0.0, 0)) if _fused(d, record) or (record.alternate and not cut) else record.singly
        forwards = _run(d, mlp, name, F, elements, (t.forward_bytes, t.forward_kernels), singly[0])
        backwards = _run(d, mlp, back, I, elements, (t.backward_bytes, t.backward_kernels), singly[1])
    if not _fused(d, record):
        forwards += launches_alone(f"{name}_numbers", F, record.numbers[0])
        backwards += launches_alone(f"{back}_numbers", I, record.numbers[1])
    if halves:
        join = memory_op(f"{mlp}_join_backward", I, "copy", 2 * elements, 4 * elements * d.act_bytes, d.act)
        forwards, backwards = _one_by_one(forwards, elements), (*_one_by_one(backwards, elements), join)
    ahead, behind = _instructions(d, record, weighted)
    made = Operator(
        name,
        _issuing(forwards, ahead * elements),
        _issuing(backwards, behind * elements),
        activation_saved(d, mlp, elements),
        backward_bytes=(1 + inputs) * elements * d.act_bytes,
    )
    return _kept_in_8_bits(d, made) if d.fp8_activation_input else made


def _instructions(d: Dims, record: Activation, weighted: bool) -> tuple[float, float]:
    """Return what the forward's and the backward's kernel take for an element, where they were counted, else 0."""
    known = record.compiled
    if not d.framework.compiles_activation:
        return 0.0, 0.0
    if weighted:
        return known.weighted, known.joined_weighted
    return known.forward, known.joined if record.gated and d.framework.merges_projections else known.backward


def _issuing(program: Program, instructions: float) -> Program:
    """Return a fused activation's program with the instructions that all threads of its kernel issue."""
    return tuple(replace(x, instructions=instructions) if isinstance(x, Compute) else x for x in program)


def _kept_in_8_bits(d: Dims, made: Operator) -> Operator:
    """The activation, with a copy of its input in E4M3 kept and cast back before the backward (Megatron-Core's
    `activation_func_fp8_input_store`, fusions/fused_bias_swiglu.py). torch's kernel of the cast to 8 bits is
    vectorized, that of the cast from them is not (aten/src/ATen/native/cuda/Copy.cu: `float8_copy_kernel_cuda`)."""
    kept = sum(s.bytes for s in made.saved) / d.act_bytes  # in elements
    moved = (d.act_bytes + FP8_BYTES) * kept
    narrow, wide = (
        memory_op(f"{made.name}_{name}", phase, "cast", kept, moved, d.act)
        for name, phase in (("input_cast", F), ("input_cast_back", I))
    )
    return replace(
        made,
        forward=(replace(narrow, plain_host=True), *made.forward),
        backward=(replace(mixed(wide, 2), plain_host=True), *made.backward),
        saved=tuple(s._replace(bytes=s.bytes * FP8_BYTES / d.act_bytes) for s in made.saved),
        backward_bytes=made.backward_bytes + kept * d.act_bytes,
    )


def _one_by_one(program: Program, elements: float) -> Program:
    """Kernels over strided tensors, for each of which it is known how many elements it handles one at a time."""
    return tuple(
        replace(op, strided=False, single_elements=op.kernels * elements)
        if isinstance(op, Compute) and op.strided
        else op
        for op in program
    )


def _strided(d: Dims, name: str, elements: float, t: Traffic) -> tuple[Program, Program]:
    """Gate and up are read where they lie: forward throughout; backward by whatever is fused, or by two of the eager
    kernels, three accesses each."""
    back, forward, backward = f"{name}_backward", t.forward_bytes * elements, t.backward_bytes * elements
    ahead = memory_op(name, F, "elementwise", elements, forward, d.act, t.forward_kernels, name, strided=True)
    whole = d.framework.fuses_activation
    halves, kernels = (backward, t.backward_kernels) if whole else (6 * d.act_bytes * elements, 2)
    rest = t.backward_kernels - kernels
    others = memory_op(f"{back}_rest", I, "elementwise", elements, backward - halves, d.act, rest, back)
    kernel = memory_op(back, I, "elementwise", elements, halves, d.act, kernels, back, strided=True)
    return (ahead,), (kernel, others) if rest else (kernel,)


def _run(
    d: Dims, mlp: str, name: str, phase: Phase, elements: float, of_all: tuple[float, int], singly: tuple[float, int]
) -> Program:
    """Kernels `of_all`: bytes of an element, and their number. Those over both dtypes are apart, and without such
    those that torch does not vectorize (`singly`: accesses and how many)."""
    own = promoted(d, mlp)
    apart: tuple[Mixed, ...] = () if own is None else own.mixed[phase is not F]
    single = singly if own is None else (0.0, 0)
    moved = of_all[0] - sum(m.bytes * m.kernels for m in apart) - single[0] * d.act_bytes
    kernels = of_all[1] - sum(m.kernels for m in apart) - single[1]
    rest = memory_op(name, phase, "elementwise", elements, moved * elements, d.act, kernels, name)
    return (
        *(_over_both(d, f"{name}_mixed", phase, elements, m) for m in apart),
        *(_singly(d, f"{name}_singly", phase, elements, *single) if single[1] else ()),
        rest,
    )


def _singly(d: Dims, name: str, phase: Phase, elements: float, accesses: float, kernels: int) -> Program:
    made = memory_op(name, phase, "elementwise", elements, accesses * d.act_bytes * elements, d.act, kernels)
    return (replace(made, single_elements=kernels * elements),)


def _over_both(d: Dims, name: str, phase: Phase, elements: float, m: Mixed) -> Compute:
    kind, moved = "cast" if m.operands == 2 else "elementwise", m.bytes * m.kernels * elements
    made = mixed(memory_op(name, phase, kind, elements, moved, d.act, m.kernels), m.operands)
    return replace(made, single_elements=float(m.kernels * elements))
