"""The ways in which layers with a state compute a sequence chunk by chunk, as the matmuls of their kernels.

A chunk has Q tokens, a head a state of N by P numbers. What one group of heads shares (B and C of Mamba 2) has N
numbers a token and group, what a head has of its own P.

- `SSD`: state-space duality (Dao and Gu 2024, arXiv 2405.21060, section 6), kernel by kernel as `mamba_ssm` has them
  (ops/triton/ssd_combined.py: `_mamba_chunk_scan_combined_fwd` and `_bwd`; backward computes scores and states again).
- `GATED_DELTA`: the gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3.3), by the paper's formulas, not
  held to a library's kernels; the triangular system of a chunk is taken for a product of two squares, and
  its kernel for the states, which goes through the chunks one by one, for parallel.
- `KIMI_DELTA`: the same with a decay for every channel (Kimi Linear, arXiv 2510.26692, section 3).
- `LIGHTNING`: linear attention with one decay a head that nobody learns (Lightning Attention-2, arXiv 2401.04658,
  section 3.2), as MiniMax has it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace


class Product(Struct, frozen=True):
    """Matmul of each chunk: `[m, k] x [k, n]` for every head or group, sizes named Q, N, P.

    `moves`: what it reads and writes. X: P numbers a token and head; W: N a token and head; K: N a token and group; A:
    Q scores a token and group, fp32; T: Q a token and head; S: the states of all chunks, fp32.
    """

    name: str
    owner: Literal["head", "group"]
    sizes: str  # m, n, k
    moves: str


class Scan(Struct, frozen=True):
    """One way. `gates`: numbers that the input projection makes for a token and head beside x, z, B and C (or
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

    def flops_per_token(self, sizes: dict[str, int], heads: int, groups: int) -> float:
        """Of a token's forward: 2·m·n·k of every product over the chunk's tokens.

        For SSD this is 2·(G·Q·N + H·(Q·P + 2·N·P)), the paper's count (section 6.3).

        >>> SSD.flops_per_token({"Q": 256, "N": 128, "P": 64}, 80, 1) / 2 == 256 * 128 + 80 * (256 * 64 + 2 * 128 * 64)
        True
        """
        total = 0.0
        for product in self.forward:
            m, n, k = (sizes[letter] for letter in product.sizes)
            total += 2.0 * m * n * k * (heads if product.owner == "head" else groups)
        return total / sizes["Q"]


_SCORES = Product("chunk_scores", "group", "QQN", "KKA")
_STATES = Product("chunk_states", "head", "PNQ", "XKS")
SSD = Scan(
    gates=1,
    per_head=3,
    forward=(
        _SCORES,
        _STATES,
        Product("chunk_inside", "head", "QPQ", "AX"),
        Product("chunk_carried", "head", "QPN", "KSX"),
    ),
    backward=(
        _SCORES,
        _STATES,
        Product("chunk_states_grad", "head", "PNQ", "XKS"),
        Product("chunk_x_inside", "head", "QPQ", "AX"),
        Product("chunk_x_carried", "head", "QPN", "KSX"),
        Product("chunk_b", "head", "QNP", "XSK"),
        Product("chunk_c", "head", "QNP", "XSK"),
        Product("chunk_scores_grad", "head", "QQP", "XXA"),
        Product("chunk_scores_b", "group", "QNQ", "AKK"),
        Product("chunk_scores_c", "group", "QNQ", "AKK"),
        Product("chunk_decay", "head", "QQP", "XXA"),
    ),
    passes=(2.0, 6.0),  # states read and written; again for the backward, whose own reads both and writes both
    keeps_convolved=False,
)

_CORRECTED = (
    Product("delta_keys", "head", "QNQ", "TWW"),
    Product("delta_values", "head", "QPQ", "TXX"),
    Product("delta_new_values", "head", "QPN", "WSX"),
    Product("delta_states", "head", "NPQ", "WXS"),
)
GATED_DELTA = Scan(
    gates=2,
    per_head=2,
    forward=(
        Product("delta_products", "head", "QQN", "WT"),
        Product("delta_solve", "head", "QQQ", "TT"),
        *_CORRECTED,
        Product("delta_scores", "head", "QQN", "WW"),
        Product("delta_inside", "head", "QPQ", "X"),
        Product("delta_carried", "head", "QPN", "SX"),
    ),
    backward=(
        *_CORRECTED,
        Product("delta_scores_again", "head", "QQN", "WW"),
        Product("delta_values_inside", "head", "QPQ", "XX"),
        Product("delta_states_from_out", "head", "NPQ", "WXS"),
        Product("delta_values_from_states", "head", "QPN", "WSX"),
        Product("delta_states_from_values", "head", "NPQ", "WX"),
        Product("delta_scores_grad", "head", "QQP", "XX"),
        Product("delta_queries_carried", "head", "QNP", "XSW"),
        Product("delta_queries_inside", "head", "QNQ", "WW"),
        Product("delta_keys_carried", "head", "QNP", "XSW"),
        Product("delta_keys_inside", "head", "QNQ", "WW"),
        Product("delta_corrections", "head", "QNP", "XSW"),
        Product("delta_system_keys", "head", "QQN", "WWT"),
        Product("delta_system_values", "head", "QQP", "XXT"),
        Product("delta_solve_left", "head", "QQQ", "TT"),
        Product("delta_solve_right", "head", "QQQ", "TT"),
        Product("delta_from_keys", "head", "QNQ", "TWW"),
        Product("delta_from_values", "head", "QPQ", "TXX"),
        Product("delta_from_products", "head", "QNQ", "TWW"),
    ),
    passes=(0.0, 0.0),  # inside the kernels of the states
    keeps_convolved=True,
    norm_of_head=True,
    systems=True,
)
KIMI_DELTA = replace(GATED_DELTA, gates=1, per_head=1, channel_gates=True)
LIGHTNING = Scan(
    gates=0,
    per_head=0,
    forward=(
        Product("lightning_scores", "head", "QQN", "WW"),
        Product("lightning_inside", "head", "QPQ", "XX"),
        Product("lightning_carried", "head", "QPN", "WSX"),
        Product("lightning_states", "head", "NPQ", "WXS"),
    ),
    backward=(
        Product("lightning_scores_again", "head", "QQN", "WW"),
        Product("lightning_values_inside", "head", "QPQ", "XX"),
        Product("lightning_scores_grad", "head", "QQP", "XX"),
        Product("lightning_queries_inside", "head", "QNQ", "WW"),
        Product("lightning_keys_inside", "head", "QNQ", "WW"),
        Product("lightning_states_again", "head", "NPQ", "WXS"),
        Product("lightning_queries_carried", "head", "QNP", "XSW"),
        Product("lightning_states_grad", "head", "NPQ", "WXS"),
        Product("lightning_keys_carried", "head", "QNP", "XSW"),
        Product("lightning_values_carried", "head", "QPN", "WSX"),
    ),
    passes=(0.0, 0.0),  # inside the kernels
    keeps_convolved=True,
)
SCANS = {"mamba2": SSD, "gated_delta": GATED_DELTA, "kda": KIMI_DELTA, "lightning": LIGHTNING}
