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

Which communicators a trainer makes is its record's fact. Of one whose communicators nobody counted, one is assumed for
each dimension of the mesh that has several ranks. As this limit is an assumption, a step is said not to fit only where
the odds are below `ASSUMED_ODDS`: runs that are published ran, at predicted peaks of up to 5 % more (Llama 3 405B on
8,192 GPUs: 79.7 of 76.1 GiB).
"""

from __future__ import annotations

from typing import NamedTuple

from sim.inputs.scenario import Scenario
from sim.results.fit import EVEN
from sim.variants.frameworks.records import framework_of
from topology.protocols import NODE_CHANNELS
from topology.spec import GpuSpec

# Assumption: CUDA's context with the kernels of torch, cuBLAS and NCCL on a data-centre GPU.
CONTEXT_BYTES = 0.5 * 2**30
CONNECTION_BYTES = 12.0 * 2**20
CONNECTIONS = 3
ASSUMED_ODDS = 0.25


def communicators(scenario: Scenario) -> int:
    """NCCL communicators of a rank. Where its trainer's were counted: that of all ranks, and one for each set of ranks
    that the trainer joins; else one for each dimension of the mesh."""
    p = scenario.parallelism
    sizes = {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp, "ep": p.ep}
    joined = framework_of(scenario.for_training).communicators
    axes_of = joined or tuple((axis,) for axis in sizes)
    found = {frozenset(axis for axis in axes if sizes[axis] > 1) for axes in axes_of} - {frozenset[str]()}
    return len(found) + bool(found and joined)


class MemoryLimit(NamedTuple):
    """The most that torch's allocator can have of a GPU, what it cannot have of its nominal memory, and the odds below
    which a step is said not to fit (`sim.results.fit`)."""

    limit: float
    beside: float
    least_odds: float = EVEN


def memory_limit(scenario: Scenario, gpu: GpuSpec) -> MemoryLimit:
    """Return the memory of a GPU that a training step can have."""
    buffers = 0.0 if gpu.chip.is_host else communicators(scenario) * NODE_CHANNELS * CONNECTIONS * CONNECTION_BYTES
    counted = framework_of(scenario.for_training).communicators or not buffers
    return left_of(gpu, buffers)._replace(least_odds=EVEN if counted else ASSUMED_ODDS)


def left_of(gpu: GpuSpec, buffers_bytes: float = 0.0) -> MemoryLimit:
    """Return what CUDA's context and `buffers_bytes` leave of a GPU; all of a host's memory, which has no context."""
    context = 0.0 if gpu.chip.is_host else CONTEXT_BYTES
    limit = max(1.0, gpu.shown_bytes - context - buffers_bytes)  # a share of nothing would be no number
    return MemoryLimit(limit, gpu.memory_bytes - limit)
