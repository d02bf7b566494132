"""What NCCL's protocols cost beside the bare links: a start, shorter or longer steps, a share of the
bandwidth.

LL sends 8-byte words of half data, half flag: no waiting for the receiver, a fraction of the bandwidth. LL128
does so with 120 bytes of 128. Simple moves whole chunks and synchronizes on each. All figures are those of
NCCL's own cost model (version 2.21, src/graph/tuning.cc: `baseLat`, `hwLat`, and the bandwidth factors in
`ncclTopoTuneModel`), as ratios of a ring's step in Simple, for that is what a cluster's `latency_s` states: a
cluster with latencies of zero has none at all.
"""

from __future__ import annotations

from msgspec import Struct

SIMPLE_NVLINK_S = 3.4e-6  # hwLat of a ring's step in Simple: NVLink
SIMPLE_NETWORK_S = 14e-6  # and network


class Protocol(Struct, frozen=True):
    """One protocol under one algorithm: start, steps relative to `latency_s` of each level, share of
    bandwidth."""

    name: str
    base: float
    step: float
    inter_step: float
    bandwidth: float


def _protocol(name: str, base_us: float, nvlink_us: float, network_us: float, bandwidth: float) -> Protocol:
    step, inter_step = nvlink_us * 1e-6 / SIMPLE_NVLINK_S, network_us * 1e-6 / SIMPLE_NETWORK_S
    return Protocol(name, base_us * 1e-6 / SIMPLE_NVLINK_S, step, inter_step, bandwidth)


PLAIN = (Protocol("", 0.0, 1.0, 1.0, 1.0),)
"""No protocol at all: α–β of the bare links, for hosts without NVLink (gloo, MPI)."""

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
# NCCL counts 23 µs for all of it; the closed form has 5 steps (an all-gather's 4 are not told apart).
NVLS = (_protocol("Simple", 0.0, 23 / 5, 14.0, 1.0),)

PROTOCOLS = {"ring": RING, "tree": TREE, "nvls": NVLS, "nvls_tree": NVLS, "mesh": RING}
