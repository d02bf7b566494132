"""Memory of a GPU that torch's allocator cannot have: what CUDA does not show, its context, NCCL's buffers.

What CUDA shows is a fact of the GPU (`memory_shown`).

A connection of a channel holds a receive buffer of three protocols (NCCL `src/init.cc`, `computeBuffSizes`: 8 · 512 · 8
lines of 16 bytes for LL, 120 · 640 · 8 words of 8 for LL128, 4 MiB for Simple; 10 MiB in pages of 2) and a sender's
page of 2 MiB, the two sizes that its log shows on eight H100 (github.com/NVIDIA/nccl, issue 1685). A rank has three a
channel: a ring's, and up and down a tree. Every communicator has its own (issue 864: 1.6 GB with one, 6 GB with three
and more).

`NODE_CHANNELS` are those of eight GPUs behind NVLink switches. The same is assumed of other links and between nodes,
where logs show fewer (eight H800: 16, issue 892; two nodes of two H20: 8, issue 1189): there too much is taken off, on
eight H800 a third of the buffers.

Which communicators a trainer makes is its record's fact. Of one whose communicators nobody counted nothing is taken
off, so that its runs are said to fit in the whole memory: runs that are published ran, and peaks are predicted within
some GiB (Llama 3 405B with 8,192 GPUs needs 79.65 of 79.11 GiB). A search proposes no layout above what CUDA shows.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.inputs.scenario import Scenario
from sim.variants.frameworks.records import framework_of
from topology.protocols import NODE_CHANNELS
from topology.spec import GpuSpec

# Assumption: CUDA's context with the kernels of torch, cuBLAS and NCCL on a data-centre GPU.
CONTEXT_BYTES = 0.5 * 2**30
CONNECTION_BYTES = 12.0 * 2**20
CONNECTIONS = 3
TIGHT_BYTES = 2.0 * 2**30  # CUDA's context, NCCL's buffers and the driver take about so much or more


def communicators(scenario: Scenario) -> int:
    """NCCL communicators of a rank: that of all ranks, and one for each set of ranks that the trainer joins."""
    p = scenario.parallelism
    sizes = {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp, "ep": p.ep}
    joined = framework_of(scenario.for_training).communicators
    found = {frozenset(axis for axis in axes if sizes[axis] > 1) for axes in joined} - {frozenset[str]()}
    return len(found) + 1 if found else 0


class MemoryLimit(NamedTuple):
    """The most that torch's allocator can have of a GPU, and what it cannot have; None where nobody counted that."""

    limit: float
    beside: float | None


def memory_limit(scenario: Scenario, gpu: GpuSpec) -> MemoryLimit:
    """Return the memory of a GPU that a training step can have; all of it while serving."""
    if not _counted(scenario, gpu):
        return MemoryLimit(gpu.memory_bytes, None)
    buffers = communicators(scenario) * NODE_CHANNELS * CONNECTIONS * CONNECTION_BYTES
    limit = max(1.0, _without_context_bytes(gpu) - buffers)  # a share of nothing would be no number
    return MemoryLimit(limit, gpu.memory_bytes - limit)


def allocator_bytes(scenario: Scenario, gpu: GpuSpec) -> float:
    """The most that torch's allocator can have of a GPU in a training step."""
    return memory_limit(scenario, gpu).limit


def most_proposed_bytes(scenario: Scenario, gpu: GpuSpec) -> float:
    """Return the most memory of a layout that a search proposes."""
    return min(allocator_bytes(scenario, gpu), gpu.shown_bytes)


def most_proposed_bytes_of_any(scenario: Scenario, gpu: GpuSpec) -> float:
    """Return the most memory of any layout that a search proposes: NCCL's buffers, which depend on it, are left out."""
    return _without_context_bytes(gpu) if _counted(scenario, gpu) else gpu.shown_bytes


def is_tight(peak_bytes: float, limit: MemoryLimit, gpu: GpuSpec) -> bool:
    """Tell whether a peak fits and leaves little for CUDA and NCCL, whose memory the limit does not count."""
    left = limit.limit - peak_bytes
    return limit.beside is None and 0 <= left < TIGHT_BYTES and not gpu.chip.is_host


def _counted(scenario: Scenario, gpu: GpuSpec) -> bool:
    """Tell whether the communicators of the trainer are known, and the GPU is one that has CUDA and NCCL."""
    trains = scenario.training is not None and gpu.chip.has_cuda
    return trains and bool(framework_of(scenario.for_training).communicators)


def _without_context_bytes(gpu: GpuSpec) -> float:
    return max(1.0, gpu.shown_bytes - CONTEXT_BYTES)
