"""What a framework runs around the scan of a layer with a state: copies, gates, norms.

Without a record here these are one gated norm each way: a norm and a gate in one kernel, as in `mamba_ssm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from sim.core.program import Compute, Phase, Program, Saved
from sim.models.operators import F, I, memory_op


class Sizes(NamedTuple):
    """Sizes on one rank: sequences and tokens; numbers of a token that the input projection makes (`projected`), that
    the convolution takes (`convolved`), that the scan gives (`inner`); its vectors of one kind for all groups
    (`shared`, keys) and for all heads (`spread`); `low_rank`: numbers from which the norm's gate is projected, where
    it is; bytes of a number and its dtype."""

    batch: int
    tokens: int
    projected: int
    convolved: int
    inner: int
    shared: int
    spread: int
    heads: int
    groups: int
    chunk: int
    low_rank: int
    size: float
    dtype: str


class Around(NamedTuple):
    """Forward before the convolution, between it and the scan, and after the scan; backward before the scan's, between
    it and the convolution's, and after that; what is kept besides, or in place of what other frameworks keep (`kept`).
    """

    before: Program = ()
    between: Program = ()
    after: Program = ()
    after_back: Program = ()
    between_back: Program = ()
    before_back: Program = ()
    saved: tuple[Saved, ...] = ()
    kept: tuple[Saved, ...] = ()


def gated_norm(s: Sizes) -> Around:
    """Norm and gate in one kernel: two reads and a write, backward three and two."""
    forward = _moves(s, "gated_norm", F, "norm", 3 * s.inner, 1)
    backward = _moves(s, "gated_norm_backward", I, "norm", 5 * s.inner, 2)
    return Around(after=(forward,), after_back=(backward,))


def mamba(s: Sizes) -> Around:
    """Megatron-Core's MambaMixer (core/ssm/mamba_mixer.py: `_ssm_training`).

    The scan's last kernel gates (z read, a gated result written beside the plain one, which
    `MambaSplitConv1dScanCombinedFn` keeps), and a norm of its own follows (2), whose input is kept. Backward: the norm
    (3), then the gate's gradient in a kernel of the scan (`_chunk_scan_bwd_dz`: 3 read, 2 written). With several
    sequences tokens are brought into sequences' order and back.
    """
    return Around(
        before=_in_order(s, "projected_copy", F, s.projected),
        after=(*_in_order(s, "scanned_copy", F, s.inner), _moves(s, "gated_norm", F, "norm", 4 * s.inner, 1)),
        after_back=(_moves(s, "gated_norm_backward", I, "norm", 8 * s.inner, 3),),
        before_back=_in_order(s, "projected_copy_backward", I, s.projected),
        saved=(_kept(s, "gated", s.inner),),
    )


def delta(s: Sizes) -> Around:
    """Megatron-Core's GatedDeltaNet (core/ssm/gated_delta_net.py: `forward`, `_apply_gated_norm`).

    Forward: what the convolution takes is transposed (2); queries and keys are copied and normed (2, 2 each), repeated
    for the heads that share them; values and gates are copied (2, 2). Steps, nine kernels on a number a head: both
    copied, one cast (6), its bias added (8), softplus (8), times a number of the head (8; two kernels make it), the
    other's sigmoid (4). The norm (2) is Transformer Engine's, the gate a compiled kernel (3).
    Backward: gate (5) and norm (3); sums over the heads that share a key, norms (3 each), the steps' (as forward,
    without copies); the gradients of queries, keys and values joined (2, torch.split), transposed for the convolution
    (2, causal_conv1d_bwd), and joined with those of gates and steps (2). With several sequences tokens are brought
    into sequences' order and back. Kept besides: repeated queries and keys, what the gate reads.
    """
    repeats, times = s.spread > s.shared, 2 * (s.shared + s.spread)
    normed = _moves(s, "key_norms", F, "copy", 8 * s.shared, 4)
    unnormed = _moves(s, "key_norms_backward", I, "copy", 6 * s.shared, 2)
    steps = ("state_steps", 8 * s.size + 30.0, 9), ("state_steps_backward", 4 * s.size + 38.0, 9)
    forward_steps, backward_steps = (
        memory_op(name, phase, "elementwise", s.tokens * s.heads, moved * s.tokens * s.heads, s.dtype, kernels)
        for (name, moved, kernels), phase in zip(steps, (F, I), strict=True)
    )
    return Around(
        before=(_moves(s, "convolved_transpose", F, "copy", 2 * s.convolved, 1),),
        between=(
            normed,
            *((_moves(s, "keys_repeated", F, "copy", times, 2),) if repeats else ()),
            _moves(s, "values_copied", F, "copy", 4 * s.inner, 2),
            forward_steps,
        ),
        after=(
            _moves(s, "gated_norm", F, "norm", 5 * s.inner, 2),
            *_in_order(s, "scanned_copy", F, s.inner),
        ),
        after_back=(
            *_in_order(s, "scanned_copy_backward", I, s.inner),
            _moves(s, "gated_norm_backward", I, "norm", 8 * s.inner, 3),
        ),
        between_back=(
            backward_steps,
            *((_moves(s, "keys_repeated_backward", I, "copy", times, 2),) if repeats else ()),
            unnormed,
            _moves(s, "convolved_join_backward", I, "copy", 4 * s.convolved, 2),
        ),
        before_back=(
            _moves(s, "projected_join_backward", I, "copy", 2 * s.projected, 1),
            *_in_order(s, "projected_copy_backward", I, s.projected),
        ),
        saved=(*((_kept(s, "repeated keys", 2 * s.spread),) if repeats else ()), _kept(s, "normed", s.inner)),
    )


# Of frameworks with `Framework.copies_around_scans`, by `Scan.around`.
AROUND: Mapping[str, Callable[[Sizes], Around]] = {"": gated_norm, "mamba": mamba, "delta": delta}


def _moves(s: Sizes, name: str, phase: Phase, kind: str, accesses: float, kernels: int) -> Compute:
    """A memory-bound operator that reads or writes `accesses` numbers for each token. The elements of a norm are the
    numbers that it normalizes; of others, half the accesses."""
    elements = s.tokens * (s.inner if kind == "norm" else accesses / 2)
    return memory_op(name, phase, kind, elements, s.tokens * accesses * s.size, s.dtype, kernels)


def _in_order(s: Sizes, name: str, phase: Phase, width: int) -> Program:
    """A copy from tokens' order to sequences' order or back: one sequence has both."""
    return (_moves(s, name, phase, "copy", 2 * width, 1),) if s.batch > 1 else ()


def _kept(s: Sizes, name: str, width: int) -> Saved:
    return Saved(name, s.tokens * width * s.size)
