"""What Transformers' own modules run around the scan of a layer with a state, and what they keep, in 16 bits.

The scans are `mamba_ssm`'s and `flash-linear-attention`'s where these are installed (Transformers'
integrations/hub_kernels.py: `use_kernel_func_from_hub_with_fallback`); all around them is torch's operators, each a
kernel. `tests/real/kept_by_kernels.py` has what the libraries' functions keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Phase, Program, Saved
from sim.models.layers.state_kernels import Around, Sizes, gated_norm
from sim.models.operators import F, I, memory_op


class Gates(NamedTuple):
    """Kernels of the decays, on numbers of a head or of its channels: bytes and kernels, forward and backward, and the
    bytes that are kept of each number beside its sum over the chunk."""

    per_channel: bool
    forward: tuple[float, int]
    backward: tuple[float, int]
    kept: float


# Copied to fp32 (6), its bias added (8), softplus (8), times a number of the head (8). Kept: the sum and softplus.
OF_HEADS = Gates(False, (30.0, 4), (42.0, 6), 2 * FP32_BYTES)
# kimi_linear/modeling_kimi_linear.py: KimiLinearForgetGate, whose softplus is written out: a comparison (5), exp, 1 +,
# log (8 each), a choice (13). Kept: exp, 1 + exp, the choice and the comparison; the scan keeps its fp32 result.
OF_CHANNELS = Gates(True, (64.0, 8), (84.0, 10), 4 * FP32_BYTES + 1)
# bailing_hybrid/modeling_bailing_hybrid.py: BailingHybridForgetGate, a sigmoid of what a number of the head multiplies
# (8 each), cast to 16 bits (6), which the scan keeps.
OF_WHOLE_CHANNELS = Gates(True, (44.0, 6), (60.0, 8), 2 * FP32_BYTES + 2)
# RMSNormGated (qwen3_next/modeling_qwen3_next.py): 12 kernels on the scan's result and its gate in fp32. Bytes of a
# number of the result: casts 6, 4, 6, 6, powers 8, their mean 4, products 8, 6 and 10, SiLU 8.
GATED_NORM, GATED_NORM_BACKWARD = (66.0, 12), (149.5, 22)
# Kept: input, gate and its SiLU in fp32, normed and weighted in 16 bits; with weights in fp32 (Kimi) the first and the
# sigmoid in fp32, normed and weighted in fp32.
GATED_NORM_KEPT = 16.0


def projecting(s: Sizes) -> Around:
    """`MambaSplitConv1dScanCombinedFn` with the output projection in it, whose input the norm's backward writes again
    (mamba_ssm/ops/triton/layernorm_gated.py: `recompute_output`)."""
    plain = gated_norm(s)
    again = s.tokens * s.inner * s.size
    back = tuple(replace(x, bytes=x.bytes + again) if isinstance(x, Compute) else x for x in plain.after_back)
    return plain._replace(after_back=back)


def delta(s: Sizes, gates: Gates) -> Around:
    """Qwen3NextGatedDeltaNet, OlmoHybridGatedDeltaNet, KimiLinearDeltaAttention.

    Forward: queries, keys and values are joined for the convolution (2) and cut out of its result by copies (2, fla's
    `input_guard`); queries and keys are normed (2 each). Backward: norms (3 each), the three gradients joined
    (2, torch.split). Kept: what the convolution takes, normed queries and keys, values, the gates' numbers, and the
    chunks' triangular systems; of channels' gates scores as large as those (`ChunkKDAFunction`).
    """
    n, rule = s.tokens * s.inner, s.tokens * s.heads
    numbers = s.tokens * s.spread if gates.per_channel else rule
    squares = rule * s.chunk * s.size
    kept = (
        Saved("convolution input", s.tokens * s.convolved * s.size),
        Saved("normed keys and values", s.tokens * s.convolved * s.size),
        Saved("key norm statistics", 2 * s.tokens * s.groups * FP32_BYTES),
        Saved("decays", numbers * (FP32_BYTES + gates.kept)),
        Saved("steps", rule * s.size),
        Saved("triangular systems", squares * (2 if gates.per_channel else 1)),
        Saved("gated norm", GATED_NORM_KEPT * n),
        Saved("gated norm statistics", rule * FP32_BYTES),
    )
    low = (Saved("gate's low rank", s.tokens * s.low_rank * s.size),) if s.low_rank else ()
    return Around(
        before=(_copies(s, "convolved_join", F, 2 * s.convolved, 1),),
        between=(
            _copies(s, "keys_and_values_copied", F, 2 * s.convolved, 3),
            _copies(s, "key_norms", F, 4 * s.shared, 2),
            *_over("state_steps", F, numbers, gates.forward, s),
        ),
        after=_over("gated_norm", F, n, GATED_NORM, s),
        after_back=_over("gated_norm_backward", I, n, GATED_NORM_BACKWARD, s),
        between_back=(
            *_over("state_steps_backward", I, numbers, gates.backward, s),
            _copies(s, "key_norms_backward", I, 6 * s.shared, 2),
            _copies(s, "convolved_join_backward", I, 2 * s.convolved, 1),
        ),
        kept=(*kept, *low),
    )


def _over(name: str, phase: Phase, numbers: float, of_all: tuple[float, int], s: Sizes) -> Program:
    moved, kernels = of_all
    return (memory_op(name, phase, "elementwise", numbers, moved * numbers, s.dtype, kernels),)


def _copies(s: Sizes, name: str, phase: Phase, accesses: float, kernels: int) -> Compute:
    return memory_op(name, phase, "copy", s.tokens * accesses / 2, s.tokens * accesses * s.size, s.dtype, kernels)


# Of frameworks that run Transformers' modules, by `Scan.modules`.
MODULES: Mapping[str, Callable[[Sizes], Around]] = {
    "": gated_norm,
    "projecting": projecting,
    "delta": lambda s: delta(s, OF_HEADS),
    "kda": lambda s: delta(s, OF_CHANNELS),
    "kda_whole": lambda s: delta(s, OF_WHOLE_CHANNELS),
}
