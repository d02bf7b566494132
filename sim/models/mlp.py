"""The dense MLP: up (and gate) projection, activation, down projection, split over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.models.dims import Dims, ceil_div
from sim.models.elementwise import activation
from sim.models.linear import linear
from sim.models.operators import Linear, Part

if TYPE_CHECKING:
    from sim.inputs.scenario import ModelConfig


def separate_matmuls(d: Dims, mlp: str) -> bool:
    """Llama code in plain PyTorch runs gate and up (query, key and value) as matmuls of their own."""
    return mlp == "swiglu" and d.style != "megatron"


def mlp_parts(d: Dims, model: ModelConfig) -> tuple[Part, ...]:
    """Parts of the dense MLP, norm and residual apart.

    Keeps, at 16 bits and in units of s·b·h for GELU at ffn 4h: up's input 2, GELU's input 8, down's input 8
    (Korthikanti 2022, section 4.1; the dropout mask is the residual's).
    """
    return projections(d, model, model.ffn, "mlp", d.tokens)


def projections(d: Dims, model: ModelConfig, ffn: int, part: str, rows: int, mode: bool = True) -> tuple[Part, ...]:
    """Up, activation, down of inner width `ffn`; `mode`: split over tp."""
    inner = ceil_div(ffn, d.tp) if mode else ffn
    outs = (inner,) if model.mlp != "swiglu" else ((inner, inner) if separate_matmuls(d, model.mlp) else (2 * inner,))
    keep = d.style != "compiled"
    up = Linear("mlp_up", part, rows, d.hidden, outs, "column" if mode else "plain", model.bias, keep)
    down = Linear("mlp_down", part, rows, inner, (d.hidden,), "row" if mode else "plain", model.bias, keep)
    return linear(d, up), activation(d, model.mlp, rows * inner, part), linear(d, down)
