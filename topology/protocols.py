"""Hold the costs of NCCL's protocols beyond the bare links: startup, steps, part of the bandwidth.

LL sends 8-byte words, half data and half flag, so it does not wait for the receiver but has a fraction of the
bandwidth. LL128 does the same with 120 data bytes of 128. Simple moves whole chunks and synchronizes on each. All
figures are from NCCL's own cost model (version 2.21, src/graph/tuning.cc: `baseLat`, `hwLat`, the bandwidth factors
in `ncclTopoTuneModel`). They are stated relative to a ring's step in Simple, which is a cluster's `latency_s`, so a
cluster with latencies of zero has none at all.
"""

from __future__ import annotations

from msgspec import Struct

SIMPLE_NVLINK_S = 3.4e-6  # hwLat of a ring's step in Simple: NVLink
SIMPLE_NETWORK_S = 14e-6  # and network
# Channels within a node behind NVLink switches, as logs of eight A100 (github.com/NVIDIA/nccl-tests, issue 100) and of
# eight H100 (github.com/NVIDIA/nccl, issue 1685) print them.
NODE_CHANNELS = 24


class Protocol(Struct, frozen=True):
    """Hold one protocol of one algorithm: startup and steps relative to each level's `latency_s`, part of bandwidth."""

    name: str
    base: float
    step: float
    inter_step: float
    bandwidth: float


def _protocol(name: str, base_us: float, nvlink_us: float, network_us: float, bandwidth: float) -> Protocol:
    step, inter_step = nvlink_us * 1e-6 / SIMPLE_NVLINK_S, network_us * 1e-6 / SIMPLE_NETWORK_S
    return Protocol(name, base_us * 1e-6 / SIMPLE_NVLINK_S, step, inter_step, bandwidth)


PLAIN = (Protocol("", 0.0, 1.0, 1.0, 1.0),)
"""No protocol: α–β of the bare links, for hosts without NVLink (gloo, MPI)."""

RING = (
    _protocol("LL", 6.6, 0.6, 2.7, 1 / 4),
    _protocol("LL128", 14.0, 1.9, 4.0, 0.92),  # NCCL writes 0.92 for 120/128 in rings, 120/128 in trees
    _protocol("Simple", 8.4, 3.4, 14.0, 1.0),
)
TREE = (
    _protocol("LL", 6.8, 0.6, 5.0, 0.92 / 3.8),
    _protocol("LL128", 14.0, 1.25, 8.5, 0.92 * 120 / 128),
    _protocol("Simple", 0.0, 28.0, 28.0, 0.92),
)
# NCCL counts 23 µs in all; the closed form has 5 steps (an all-gather has 4, which makes no difference here).
NVLS = (_protocol("Simple", 0.0, 23 / 5, 14.0, 1.0),)
