"""The ways in which layers with a state compute a sequence chunk by chunk, as the matmuls of their kernels.

A chunk has Q tokens, a head a state of N by P numbers. What one group of heads shares (B and C of Mamba 2) has N
numbers a token and group, what a head has of its own P. `sim/presets/scans.yaml` has the ways, with their papers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

_FILE = Path(__file__).parents[2] / "presets" / "scans.yaml"


class Product(Struct, frozen=True, array_like=True):
    """Matmul of each chunk: `[m, k] x [k, n]` for every head or group, sizes named Q, N, P.

    `moves`: what it reads and writes. X: P numbers a token and head; W: N a token and head; K: N a token and group; A:
    Q scores a token and group, fp32; T: Q a token and head; S: the states of all chunks, fp32.
    """

    name: str
    owner: Literal["head", "group"]
    sizes: str  # m, n, k
    moves: str


class Scan(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of scan. `gates`: numbers that the input projection makes for a token and head beside x, z, B and C (or
    value, gate, key and query); `per_head`: learned numbers of a head; `passes`: accesses of all states between
    chunks, forward and backward; `keeps_convolved`: convolved inputs are kept, not computed again."""

    gates: int
    per_head: int
    forward: tuple[Product, ...]
    backward: tuple[Product, ...]
    passes: tuple[float, float]
    keeps_convolved: bool
    norm_of_head: bool = False  # the gated norm has weights for one head, which all share
    systems: bool = False  # a triangular system of each chunk is kept, and the gates that made it
    channel_gates: bool = False  # a gate for every channel, and the norm's, each through a matrix of rank P
    around: str = ""  # Megatron-Core's kernels around it, by their name in `sim.models.layers.state_kernels`
    modules: str = ""  # those of Transformers' modules, by their name in `sim.models.layers.state_modules`
    projects: bool = False  # there the scan's function has the output projection in it, whose input it computes again
    whole_gates: bool = False  # the same through matrices of full rank, which are parts of the input projection

    def flops_per_token(self, sizes: dict[str, int], heads: int, groups: int) -> float:
        """Return the FLOPs of a token's forward: 2·m·n·k of every product over the chunk's tokens.

        For SSD this is 2·(G·Q·N + H·(Q·P + 2·N·P)), the paper's count (section 6.3).

        >>> ssd = scans()["mamba2"]
        >>> ssd.flops_per_token({"Q": 256, "N": 128, "P": 64}, 80, 1) / 2 == 256 * 128 + 80 * (256 * 64 + 2 * 128 * 64)
        True
        """
        total = 0.0
        for product in self.forward:
            m, n, k = (sizes[letter] for letter in product.sizes)
            total += 2.0 * m * n * k * (heads if product.owner == "head" else groups)
        return total / sizes["Q"]


@cache
def scans() -> dict[str, Scan]:
    """The kinds of scans by name."""
    return msgspec.yaml.decode(_FILE.read_bytes(), type=dict[str, Scan])
