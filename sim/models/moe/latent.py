"""Routed experts of a narrower token: projected down for them and up again (Nemotron 3's LatentMoE, arXiv 2512.20856).

Megatron-Core 0.19, transformer/moe/moe_layer.py: `fc1_latent_proj` stands in `preprocess`, behind the router and before
the dispatcher, `fc2_latent_proj` behind the combine and before the sum with shared experts, which read and give whole
tokens, as the router does. Each is a `TELinear` that all ranks of tp have whole (`parallel_mode="duplicated"`), over a
rank's own tokens.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.models.dims import Dims
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.operators import Operator
from sim.models.precision.casts import casts_apart


def latent_matrices(hidden: int, latent: int | None, bias: bool) -> tuple[Matrix, ...]:
    """Return the projections to `latent` numbers and back to `hidden`; none without `latent`."""
    if latent is None:
        return ()
    return (
        Matrix("latent_down", hidden, (latent,), "plain", bias, sixteen_bit=True),
        Matrix("latent_up", latent, (hidden,), "plain", bias, sixteen_bit=True),
    )


def around(d: Dims, matrices: tuple[Matrix, ...], tokens: int) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Return what runs before tokens are exchanged, and what runs after.

    The first projection reads the router's input, which the router keeps for the backward in 16 bits. A copy of it in
    fewer bits is kept for the projection itself.
    """
    if not matrices:
        return (), ()
    down, up = matrices
    apart = d.recipe is not None or casts_apart(d)
    first = linear(d, replace(down.linear(tokens, save_input=apart), wide=True))
    return (replace(first, graph="moe_preprocess"),), (linear(d, up.linear(tokens)),)
