"""Records of what all GPUs of one architecture have in common, beside the figures of their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin", "cpu", "other"]
CollectivesOf = Literal["v100", "a100", "h100", "b200", "gb200", "gb300"]  # GPUs of topology.timing.TIMINGS

A100_FLOP_J = 0.96e-12
MIB = 2.0**20


class Chip(Struct, frozen=True):
    """Hold the facts of one architecture. Facts that a record leaves out are those of a chip of which nothing is known.

    Behind each fact stand its meaning and, in brackets, its source. NCCL is version 2.27.
    """

    collectives_like: CollectivesOf = "h100"
    """the GPU whose measured startup and step times NCCL's collectives have [topology.timing]"""
    nvlink_bytes_per_s: float = 25e9
    """bandwidth of one NVLink per direction [NCCL: src/graph/topo.h]"""
    nvlink_efficiency: float | None = None
    """part of it that is left for data, None: NCCL does not say [NCCL: src/graph/topo.h]"""
    nvls_efficiency: float = 0.0
    """part of the links' bandwidth that a reduction in the switches reaches, 0: they cannot reduce [NCCL:
    src/graph/tuning.cc, `nvlsEfficiency`]"""
    has_cuda: bool = False
    """CUDA and NCCL run on it"""
    is_host: bool = False
    """it is the host's own processor: nothing is issued ahead, and no kernel library is modelled"""
    mixes_ll128: bool = False
    """NCCL keeps its protocol LL128 where several such architectures are in a group [NCCL: src/graph/tuning.cc,
    `ncclTopoTuneModel`]"""
    large_workspaces: bool | None = None
    """torch's and Transformer Engine's cuBLAS workspaces have 32 MiB, None: if the chip has 8-bit floating point
    [ATen/cuda/CublasHandlePool.cpp; TE module/base.py, from compute capability 9.0 on]"""
    reads_both_orders: bool = False
    """8-bit matmuls read operands in both memory orders [TE common/util: is_non_tn_fp8_gemm_supported]"""
    fuses_experts: bool = False
    """Transformer Engine has a fused grouped MLP for it [TE ops/fused/forward_grouped_mlp.py: is_supported]"""
    flop_energy_j: float = 0.0
    """energy of a dense 16-bit FLOP by tensor cores beyond half of the power limit, 0: unknown [A100: fitted to steps,
    `power_at_peak` of its profile; older and other chips of its generation need no less]"""
    cache_bytes: float = 0.0
    """the largest L2 cache that a GPU of it has, 0: unknown [NVIDIA's whitepapers of V100, Turing, A100, Ada, H100
    (full GH100) and RTX Blackwell (GB202; a B200 has 126 MB)]"""
    kernels_of: Architecture | None = None
    """the architecture whose kernels and defaults serving engines have on it, None: its own [compute capability 10.7 is
    of Blackwell's family, 10.x]"""
    rounds_fp32: bool = False
    """torch may round fp32 operands to tf32 [torch: allow_tf32; on CUDA alone]"""
    sends_to_all: bool = False
    """the vendor's library sends directly to every rank of a full mesh, which NCCL never does"""


ARCHITECTURES: Mapping[Architecture, Chip] = {
    "volta": Chip(
        "v100",
        nvlink_efficiency=20 / 25,
        has_cuda=True,
        cache_bytes=6 * MIB,
        large_workspaces=False,
        flop_energy_j=A100_FLOP_J,
        rounds_fp32=True,
    ),
    # NCCL's model treats compute capabilities below 8.0 as Volta (src/graph/tuning.cc). A T4 has no NVLink.
    "turing": Chip("v100", has_cuda=True, cache_bytes=6 * MIB, large_workspaces=False, flop_energy_j=A100_FLOP_J),
    "ampere": Chip(
        "a100",
        nvlink_efficiency=20 / 25,
        has_cuda=True,
        cache_bytes=40 * MIB,
        large_workspaces=False,
        flop_energy_j=A100_FLOP_J,
        rounds_fp32=True,
    ),
    # NCCL's model treats compute capabilities below 9.0 as Ampere (src/graph/tuning.cc). Ada has no NVLink.
    "ada": Chip("a100", has_cuda=True, cache_bytes=96 * MIB, large_workspaces=False, rounds_fp32=True),
    "hopper": Chip(
        "h100",
        nvlink_efficiency=20.6 / 25,
        nvls_efficiency=0.85,
        has_cuda=True,
        cache_bytes=60 * MIB,
        mixes_ll128=True,
        large_workspaces=True,
        rounds_fp32=True,
    ),
    "blackwell": Chip(
        "b200",
        nvlink_bytes_per_s=50e9,
        nvlink_efficiency=40.1 / 50,
        nvls_efficiency=0.74,
        has_cuda=True,
        cache_bytes=128 * MIB,
        mixes_ll128=True,
        large_workspaces=True,
        reads_both_orders=True,
        fuses_experts=True,
        rounds_fp32=True,
    ),
    # Nobody published measurements: NCCL's constants are those of `src/graph/topo.h` and `src/tuning/nvls.cc` of 2.32.
    "rubin": Chip(
        "gb300",
        nvlink_bytes_per_s=50e9,
        nvlink_efficiency=31.2 / 50,
        nvls_efficiency=0.74,
        has_cuda=True,
        mixes_ll128=True,
        large_workspaces=True,
        reads_both_orders=True,
        fuses_experts=True,
        kernels_of="blackwell",
        rounds_fp32=True,
    ),
    "cpu": Chip(is_host=True, rounds_fp32=True),
    "other": Chip(sends_to_all=True),
}
