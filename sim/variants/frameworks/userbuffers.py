"""What messages of tensor parallelism take from the matmuls beside them in Transformer Engine's userbuffers."""

from __future__ import annotations

from typing import NamedTuple


class UserBuffers(NamedTuple):
    """Hold the multiprocessors that messages beside a matmul take, of attention's and of the MLP's layers.

    Each has three: a column layer's input is gathered beside its input gradient, that gradient is scattered beside its
    weight gradient ("bulk"), a row layer's result is scattered chunk by chunk ("pipeline"). What comes round a ring
    ("ring_exchange") is moved by copy engines (common/comm_gemm_overlap/userbuffers/userbuffers.cu: `use_ce`), which
    take none. `rings_of_low_precision`: with 8- and 4-bit matmuls a row layer's result goes round a ring, too: each
    rank multiplies its own rows last, and a kernel sums what arrived (comm_gemm_overlap.cpp: CommOverlapP2PBase,
    split_overlap_rs).

    The defaults are those of pytorch/module/base.py: `initialize_ub`, get_default_config.
    """

    attention: tuple[int, int, int] = (16, 16, 16)
    mlp: tuple[int, int, int] = (16, 16, 16)
    rings_of_low_precision: bool = False


# Of NVIDIA's recipes (Megatron-Bridge, training/comm_overlap.py: userbuffers_*), that of Llama 3 70B on H100. Those of
# other sizes and GPUs have 2 to 16, 4 to 32 and 16 to 32 for attention, 2 to 4, 2 to 16 and 8 to 24 for the MLP.
RECIPES = UserBuffers((4, 24, 24), (2, 4, 16), rings_of_low_precision=True)
