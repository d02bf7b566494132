"""What kernels of layers with a state keep for their backward, under the names by which Transformers imports them.

On a CPU neither `mamba_ssm` nor `fla` nor `causal_conv1d` runs, and Transformers scans in plain torch. Here each of
their functions gives a result of its shape and keeps the tensors that the library's keeps: `CausalConv1dFn`
(causal_conv1d/causal_conv1d_interface.py), `MambaSplitConv1dScanCombinedFn` (mamba_ssm/ops/triton/ssd_combined.py),
`MambaInnerFn` with its checkpoint level 1 and `SelectiveScanFn` (mamba_ssm/ops/selective_scan_interface.py),
`ChunkGatedDeltaRuleFunction` (fla/ops/gated_delta_rule/chunk.py), `ChunkKDAFunction` (fla/ops/kda/chunk.py, with its
recomputation). No gradient is right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

CHUNK, SCANNED = 64, 2048  # tokens of a chunk (fla), and for which a selective scan keeps a state


class _Kept(torch.autograd.Function):
    """Give an empty result and keep tensors, which may be made within the function."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *tensors: torch.Tensor | None) -> torch.Tensor:
        result, kept = run(*tensors)
        ctx.save_for_backward(*kept)
        ctx.given = len(tensors)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None,) * (1 + ctx.given)


def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Any:
    """Keep the input, copied unless one of its two last dimensions is contiguous."""

    def run(x: Any, weight: Any, bias: Any) -> Any:
        x = x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()
        return torch.empty_like(x), (x, weight, bias)

    return _Kept.apply(run, x, weight, bias)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    dt_bias: Any,
    A: Any,
    D: Any,
    chunk_size: int,
    rmsnorm_weight: Any = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None,
    outproj_bias: Any = None,
    headdim: int = 0,
    ngroups: int = 1,
    activation: Any = None,
    norm_before_gate: bool = True,
    return_final_states: bool = False,
    dt_limit: Any = None,
) -> Any:
    """Keep the projected input and the scanned result; the norm's statistics, if it has a norm."""

    def run(projected: Any, *weights: Any) -> Any:
        batch, seq, _ = projected.shape
        scanned = projected.new_empty(batch, seq, len(D), headdim)
        rstd = None if rmsnorm_weight is None else projected.new_empty(batch * seq * ngroups, dtype=torch.float32)
        return projected.new_empty(batch, seq, len(outproj_weight)), (projected, scanned, rstd, *weights)

    weights = (conv1d_weight, conv1d_bias, A, D, dt_bias, rmsnorm_weight, outproj_weight, outproj_bias)
    return _Kept.apply(run, zxbcdt, *weights)


def mamba_inner_fn(
    xz: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    x_proj_weight: Any,
    delta_proj_weight: Any,
    out_proj_weight: Any,
    out_proj_bias: Any,
    A: Any,
    B: Any = None,
    C: Any = None,
    D: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = True,
    b_rms_weight: Any = None,
    c_rms_weight: Any = None,
    dt_rms_weight: Any = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Any:
    """Keep the projected input, steps of low rank with B and C, B and C by themselves, and the scanned result."""

    def run(xz: Any, *weights: Any) -> Any:
        batch, twice, seq = xz.shape
        state, narrow = A.shape[-1], len(x_proj_weight)
        shared = [xz.new_empty(batch, 1, state, seq) for _ in range(2)]
        low, out = xz.new_empty(batch * seq, narrow), xz.new_empty(batch, twice // 2, seq)
        kept = (xz.contiguous(), low, *shared, out, _states(out, state), *weights)
        return xz.new_empty(batch, seq, len(out_proj_weight)), kept

    weights = (conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, A, D, delta_bias)
    return _Kept.apply(run, xz, *weights, b_rms_weight, c_rms_weight, dt_rms_weight)


def selective_scan_fn(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Keep all that it reads, contiguous over tokens, and the result before the gate."""

    def run(*given: Any) -> Any:
        u, delta, B, C, z = (x if x.stride(-1) == 1 else x.contiguous() for x in given[:5])
        out, x = torch.empty_like(u), _states(u, A.shape[-1])
        return torch.empty_like(u), (u, delta, B, C, z, out, x, *given[5:])

    return _Kept.apply(run, u, delta, B, C, z, A, D, delta_bias)


def _states(u: torch.Tensor, state: int) -> torch.Tensor:
    batch, channels, seq = u.shape
    return u.new_empty(batch, channels, -(-seq // SCANNED), 2 * state, dtype=torch.float32)


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> Any:
    """Keep normed queries and keys with their statistics, values, summed decays, steps, and the chunks' systems."""
    return _delta_rule(q, k, v, g, beta, squares=1, given=False), None


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> Any:
    """Keep, beside what the gated delta rule's keep, the decays that were given, and scores of each chunk."""
    return _delta_rule(q, k, v, g, beta, squares=2, given=True), None


def _delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, squares: int, given: bool) -> Any:
    def run(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        of_chunks = [v.new_empty(*v.shape[:3], CHUNK) for _ in range(squares)]
        decays = (torch.empty_like(g, dtype=torch.float32), *((g,) if given else ()))
        return torch.empty_like(v), (*_normed(q), *_normed(k), v, *decays, beta, *of_chunks)

    return _Kept.apply(run, q, k, v, g, beta)


def _normed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's result and its statistics."""
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def put_in_place() -> None:
    """Make the libraries' names importable; before Transformers' models are imported."""
    own = {
        "causal_conv1d": (causal_conv1d_fn,),
        "fla.ops.gated_delta_rule": (chunk_gated_delta_rule,),
        "fla.ops.kda": (chunk_kda,),
        "mamba_ssm.ops.triton.ssd_combined": (mamba_split_conv1d_scan_combined,),
        "mamba_ssm.ops.selective_scan_interface": (mamba_inner_fn, selective_scan_fn),
    }
    for name, functions in own.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = ModuleType(path)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        for function in functions:
            setattr(sys.modules[name], function.__name__, function)
