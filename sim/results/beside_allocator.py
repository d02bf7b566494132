"""Memory of a GPU that torch's allocator cannot have: what CUDA does not show, its context, NCCL's buffers.

What CUDA shows is a fact of the GPU (`memory_shown`).

A connection of a channel holds a receive buffer of three protocols (NCCL `src/init.cc`, `computeBuffSizes`: 8 · 512 · 8
lines of 16 bytes for LL, 120 · 640 · 8 words of 8 for LL128, 4 MiB for Simple; 10 MiB in pages of 2) and a sender's
page of 2 MiB, the two sizes that its log shows on eight H100 (github.com/NVIDIA/nccl, issue 1685). A rank has three a
channel: a ring's, and up and down a tree. Every communicator has its own (issue 864: 1.6 GB with one, 6 GB with three
and more).

Which communicators a trainer makes is its record's fact. Of one whose communicators nobody counted nothing is taken
off, so that its runs are said to fit in the whole memory.
"""

from __future__ import annotations

from sim.inputs.scenario import Scenario
from sim.models.frameworks import framework_of
from topology.spec import GpuSpec

# Assumption: CUDA's context with the kernels of torch, cuBLAS and NCCL on a data-centre GPU.
CONTEXT_BYTES = 0.5 * 2**30
CONNECTION_BYTES = 12.0 * 2**20
CONNECTIONS = 3
CHANNELS = 24  # within a node of NVLink switches; fewer and longer ones between nodes are taken for as many
NVIDIA = ("volta", "ampere", "ada", "hopper", "blackwell")


def communicators(scenario: Scenario) -> int:
    """NCCL communicators of a rank: that of all ranks, and one for each set of ranks that the trainer joins."""
    p = scenario.parallelism
    sizes = {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp, "ep": p.ep}
    joined = framework_of(scenario.for_training).communicators
    found = {frozenset(axis for axis in axes if sizes[axis] > 1) for axes in joined} - {frozenset[str]()}
    return len(found) + 1 if found else 0


def allocator_bytes(scenario: Scenario, gpu: GpuSpec) -> float:
    """The most that torch's allocator can have of a GPU in a training step."""
    if scenario.training is None or gpu.architecture not in NVIDIA:
        return gpu.memory_bytes
    if not framework_of(scenario.training).communicators:
        return gpu.memory_bytes
    buffers = communicators(scenario) * CHANNELS * CONNECTIONS * CONNECTION_BYTES
    return max(0.0, gpu.memory_bytes * gpu.memory_shown - CONTEXT_BYTES - buffers)
