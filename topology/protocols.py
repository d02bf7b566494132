"""Hold NCCL's protocols: what each one sends and waits for, and what NCCL's cost model assumes of it.

LL sends 8-byte words, half data and half flag, so it does not wait for the receiver but has a fraction of the
bandwidth. LL128 does the same with 120 data bytes of 128. Simple moves whole chunks and synchronizes on each.

The figures of `Estimate` are from NCCL's own cost model (version 2.21, src/graph/tuning.cc: `baseLat`, `hwLat`, the
bandwidth factors in `ncclTopoTuneModel`). They are stated relative to a ring's step in Simple, which is a cluster's
`latency_s`, so a cluster with latencies of zero has none at all.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")

SIMPLE_NVLINK_S = 3.4e-6  # hwLat of a ring's step in Simple: NVLink
SIMPLE_NETWORK_S = 14e-6  # and network
# Channels within a node behind NVLink switches, as logs of eight A100 (github.com/NVIDIA/nccl-tests, issue 100) and of
# eight H100 (github.com/NVIDIA/nccl, issue 1685) print them.
NODE_CHANNELS = 24


class Protocol(Struct, frozen=True):
    """Hold the facts of one protocol.

    `number`: NCCL's own (src/include/nccl_common.h), the place of the protocol in tables with a value for each.
    `sent_bytes`: the bytes on the links for a byte of data. `window_bytes`: the data that fills a tree hop by hop.
    `streams`: whether a GPU passes on words or lines as they arrive; otherwise it stores a whole chunk first.
    `waits`: whether a sender between nodes waits until its receiver is ready. `slices`: whether the second half of a
    ring's block arrives while the first is sent on. `few_channels`: whether a message's channels limit its bandwidth;
    otherwise the links do.
    """

    name: str
    number: int
    sent_bytes: float
    window_bytes: float
    streams: bool = True
    waits: bool = True
    slices: bool = True
    few_channels: bool = False

    def of(self, values: tuple[T, T, T]) -> T:
        """Return this protocol's value of those for LL, LL128 and Simple."""
        return values[self.number]


# Windows: half of a step's 64 KiB of words is data, on up to 32 channels; chunks of 128 KiB (src/enqueue.cc) on 16; a
# buffer step of 1 MiB on each of 16.
LL = Protocol("LL", 0, 2.0, float(1 << 20), waits=False, slices=False, few_channels=True)
LL128 = Protocol("LL128", 1, 128 / 120, float(2 << 20))
SIMPLE = Protocol("Simple", 2, 1.0, float(16 << 20), streams=False)


class Estimate(Struct, frozen=True):
    """Hold what NCCL assumes of one protocol of one algorithm when it chooses.

    `base`, `step`, `inter_step`: startup and steps relative to each level's `latency_s`. `bandwidth`: part of the
    links'. `protocol`: None for the bare links.
    """

    protocol: Protocol | None
    base: float
    step: float
    inter_step: float
    bandwidth: float


def _estimate(protocol: Protocol, base_us: float, nvlink_us: float, network_us: float, bandwidth: float) -> Estimate:
    step, inter_step = nvlink_us * 1e-6 / SIMPLE_NVLINK_S, network_us * 1e-6 / SIMPLE_NETWORK_S
    return Estimate(protocol, base_us * 1e-6 / SIMPLE_NVLINK_S, step, inter_step, bandwidth)


PLAIN = (Estimate(None, 0.0, 1.0, 1.0, 1.0),)
"""No protocol: α–β of the bare links, for hosts without NVLink (gloo, MPI)."""

RING = (
    _estimate(LL, 6.6, 0.6, 2.7, 1 / 4),
    _estimate(LL128, 14.0, 1.9, 4.0, 0.92),  # NCCL writes 0.92 for 120/128 in rings, 120/128 in trees
    _estimate(SIMPLE, 8.4, 3.4, 14.0, 1.0),
)
# One GPU a node, before 2.23: "sending/receiving at the same GPU through the NIC" (`ppn < 2`; alike in 2.20.3, 2.22.3).
RING_ALONE = (RING[0], _estimate(LL128, 14.0, 1.9, 4.0, 0.7), RING[2])
TREE = (
    _estimate(LL, 6.8, 0.6, 5.0, 0.92 / 3.8),
    _estimate(LL128, 14.0, 1.25, 8.5, 0.92 * 120 / 128),
    _estimate(SIMPLE, 0.0, 28.0, 28.0, 0.92),
)
# NCCL counts 23 µs in all; the closed form has 5 steps (an all-gather has 4, which makes no difference here).
NVLS = (_estimate(SIMPLE, 0.0, 23 / 5, 14.0, 1.0),)
# NCCL counts 18 µs for the network's switches beside them, and 31 µs where GPUs gather for the switches by themselves.
NVLS_SHARP_S, COLLNET_S = 18e-6, 31e-6
COLLNET_NVLINK_S, COLLNET_PEER_S = 3.7e-6, 0.4e-6
NVLS_SHARP = (_estimate(SIMPLE, 0.0, 23 / 5, 18.0, 1.0),)
COLLNET = (_estimate(SIMPLE, 0.0, 3.7, 31.0, 1.0),)

# PAT, and rings with one GPU a node beside it: NCCL 2.28, src/graph/tuning.cc. PAT has a step of 14 µs on the network
# for each power of two, of which 1 / 3.5 shows, 2.8 µs for each rank, and three quarters of the bandwidth.
PAT_START_S, PAT_RANK_S, PAT_SHOWS, PAT_SHARE = 8e-6, 2.8e-6, 1 / 3.5, 0.75
PAT = (_estimate(SIMPLE, 8.0, 2.8, 14.0, PAT_SHARE),)
RING_BESIDE_PAT = (
    _estimate(LL, 6.6, 0.6, 5.0, 1 / 2),
    _estimate(LL128, 14.0, 1.9, 8.5, 0.92),
    _estimate(SIMPLE, 8.4, 3.4, 14.0, 1.0),
)
