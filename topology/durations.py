"""Compute the time of the algorithm that NCCL has chosen: closed forms with startup, steps and filling of pipelines.

`collectives` has the bare α–β forms that NCCL compares. This module adds what measurements show beyond them:

- Rings: T = start + Σα + max(steps·h, bytes/b) + fill (Thakur, Rabenseifner, Gropp 2005, section 4). All blocks pass
  the slowest hop one after the other, at least h apart, the time that a transport needs between two messages. The
  transfer hides h, because NCCL keeps several slices in flight. Over RDMA with one GPU a node it also hides part of α:
  one of a block's two slices (NCCL's CHUNKSTEPS ÷ SLICESTEPS) is sent on while the other arrives, so a step takes
  max(bytes/b, α + bytes/2b).
- Trees: the first window W of the message fills the tree hop by hop, and only the rest flows:
  T = start + Σ(α + f·min(S, W)/B) over the hops + w·(S - min(S, W))/b. f: the part of the window's time that the next
  hop does not hide (`Fabric.fills`); w: bytes sent for a byte of data (`Protocol.sent_bytes`).
- Kernels sustain only a part of the links' bandwidth, and fill and drain their pipeline.

The coefficients are in `timing`. Hosts without NCCL's protocols use the bare forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from topology.collective_kinds import sent_between_trees
from topology.collectives import (
    ALGORITHMS,
    P2P_PER_ROUND,
    AlphaBeta,
    direct_send_recv,
    mesh_all_gather,
    message_protocol,
    nvls_all_gather,
    nvls_all_reduce,
    pairwise_exchange,
    ring_all_gather,
    ring_broadcast,
)
from topology.group import Group
from topology.protocols import (
    COLLNET_NVLINK_S,
    COLLNET_PEER_S,
    COLLNET_S,
    NVLS_SHARP_S,
    PAT_RANK_S,
    PAT_SHARE,
    PAT_SHOWS,
    PAT_START_S,
    SIMPLE,
    SIMPLE_NETWORK_S,
    SIMPLE_NVLINK_S,
    Protocol,
)
from topology.timing import (
    MESSAGE_CHANNELS,
    NETWORK_SHARE,
    RENDEZVOUS_BYTES,
    TREE_SHARE,
    WINDOW_FILL,
    WINDOW_NICS,
    Fabric,
    Kernel,
    Messages,
    Timing,
)

Duration = Callable[[Group, Protocol, float], AlphaBeta]


def _near(group: Group) -> float:
    """Return the factor on all startup and step times inside a domain."""
    return group.latency_s / SIMPLE_NVLINK_S


def _far(group: Group, step_s: float) -> float:
    """Return a step between nodes: scaled by a latency below the usual one, lengthened by what exceeds it."""
    return _far_step(group.inter_latency_s, step_s)


def _far_step(latency_s: float, step_s: float) -> float:
    return step_s * _part_of_usual(latency_s) + max(0.0, latency_s - SIMPLE_NETWORK_S)


def _part_of_usual(latency_s: float) -> float:
    """Return the latency between nodes as a part of the usual one, 1 if it exceeds it."""
    return min(1.0, latency_s / SIMPLE_NETWORK_S)


def _start(group: Group, kernel: Kernel, protocol: Protocol) -> tuple[float, float]:
    """Return the startup and step time of a kernel, in seconds."""
    return protocol.of(kernel.starts_s) * _near(group), protocol.of(kernel.steps_s) * _near(group)


def _window(group: Group, protocol: Protocol, size_bytes: float) -> float:
    """Return the bytes of a message that fill a tree."""
    return min(size_bytes, protocol.window_bytes * min(1.0, group.nics / WINDOW_NICS))


def _slow(group: Group, kernel: Kernel | Messages) -> Group:
    """Return the group with the bandwidths that kernels sustain."""
    return group.sustained(kernel.share, NETWORK_SHARE)


def _ring(group: Group, protocol: Protocol, block_bytes: float, steps: int, bare: AlphaBeta) -> AlphaBeta:
    """Return the time of `steps` ring steps; `bare`: the transfer alone, at the bandwidth that kernels sustain."""
    kernel = group.timing.ring
    start_s, step_s = _start(group, kernel, protocol)
    transfer_s = bare.transfer_s * protocol.sent_bytes
    if group.domains == 1:
        fill_s = kernel.fill * block_bytes * protocol.sent_bytes / group.ring_bytes_per_s / kernel.share
        return AlphaBeta(start_s + steps * step_s, transfer_s + fill_s)
    far_s = _far(group, protocol.of(group.fabric.ring_steps_s))
    far = min(group.domains, group.ranks - 1) * steps // (group.ranks - 1)
    hops_s = (steps - far) * step_s + far * far_s
    held_s = steps * _floor(group, protocol)
    fill_s = kernel.fill * block_bytes * protocol.sent_bytes / group.nodes_share_bytes_per_s
    halved = group.fabric.lines and group.members_max == 1 and protocol.slices
    hidden_s = min(hops_s, transfer_s / 2) if halved else 0.0
    return AlphaBeta(start_s + hops_s + held_s, max(0.0, transfer_s - held_s - hidden_s) + fill_s)


def _floor(group: Group, protocol: Protocol) -> float:
    """Return the least time between two blocks of a ring on the hop between nodes."""
    if not protocol.waits:
        return 0.0
    return group.fabric.ring_floor_s * _part_of_usual(group.inter_latency_s)


def ring_gather(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of an all-gather or reduce-scatter: n-1 steps of blocks of S/n."""
    bare = ring_all_gather(_slow(group, group.timing.ring), size_bytes)
    return _ring(group, protocol, size_bytes / group.ranks, group.ranks - 1, bare)


def ring_reduce(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of an all-reduce: 2(n-1) steps of blocks of S/n."""
    bare = ring_all_gather(_slow(group, group.timing.ring), size_bytes).twice()
    return _ring(group, protocol, size_bytes / group.ranks, 2 * (group.ranks - 1), bare)


def straight(passes: int) -> Duration:
    """Return the function for `passes` all-gathers or reduce-scatters over a mesh: a step each, nothing to fill.

    Startup, steps and shares are those of rings, because no measured table of a mesh is known here.
    """

    def duration(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
        kernel = group.timing.ring
        start_s, step_s = _start(group, kernel, protocol)
        bare = mesh_all_gather(_slow(group, kernel), size_bytes)
        return AlphaBeta(start_s + passes * step_s, passes * bare.transfer_s * protocol.sent_bytes)

    return duration


def ring_pipeline(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of a broadcast or reduce: S passes every hop in pieces; the first takes n-1 steps to the end."""
    bare = ring_broadcast(_slow(group, group.timing.ring), size_bytes)
    return _ring(group, protocol, size_bytes / group.ranks, group.ranks - 1, bare)


def tree_reduce(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of an all-reduce over two trees: 2(g-1) hops inside a domain, 2⌈log2 d⌉ between domains."""
    kernel, fabric = group.timing.ring, group.fabric
    start_s, step_s = _start(group, kernel, protocol)
    near, far = 2 * (group.members_max - 1), 2 * math.ceil(math.log2(group.domains))
    if group.domains == 1:
        chain = _slow(group, kernel).chain_bytes_per_s
        return AlphaBeta(start_s + near * step_s, size_bytes * protocol.sent_bytes / chain)
    share = group.members * group.inter_tree_bytes_per_s * NETWORK_SHARE
    run = fabric.as_run(protocol)
    if not run.streams:
        step_s = fabric.near_step_s * _near(group)
    latency_s = start_s + near * step_s + far * _far(group, run.of(fabric.tree_steps_s))
    window = _window(group, run, size_bytes)
    fill_s = window * far * run.of(fabric.fills) / share
    chain = group.chain_bytes_per_s * min(1.0, kernel.share)  # shares above 1 are rings'
    if run.streams:
        fill_s = max(fill_s, window * run.sent_bytes / chain)
    else:
        fill_s += window * near * WINDOW_FILL / group.ring_bytes_per_s
    if not run.waits and size_bytes >= RENDEZVOUS_BYTES:
        # A hop's step already has the latency that exceeds the usual one.
        fill_s += far * fabric.rendezvous_s * _part_of_usual(group.inter_latency_s)
    flow = 1.0 if group.domains == 2 else 2 / TREE_SHARE
    rest = (size_bytes - window) * run.sent_bytes
    return AlphaBeta(latency_s, fill_s + max(rest * flow / share, rest / chain))


def in_switch(bare: Callable[[Group, float], AlphaBeta]) -> Duration:
    """Return the function for NVLS: one startup, then its part of the links' bandwidth."""

    def duration(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
        timing = group.timing
        return AlphaBeta(timing.nvls_start_s * _near(group), bare(group, size_bytes).transfer_s / timing.nvls_share)

    return duration


def switches_and_trees(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of NVLS in each domain with trees between domains.

    It is NVLS's startup, one NCCL step for each hop between domains, the filling of the trees as in `tree_reduce`, and
    the slower of both levels for the rest. Nothing here was fitted: startup and shares are those of NVLS within a
    domain, a hop's step is NCCL's own. `TREE_SHARE` is not used, because it was measured on trees of chains.
    """
    hops = 2 * math.ceil(math.log2(group.domains))
    latency_s = group.timing.nvls_start_s * _near(group) + hops * _far(group, SIMPLE_NETWORK_S)
    near = nvls_all_reduce(replace(group, ranks=group.members), size_bytes)
    share = min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s) * group.members * NETWORK_SHARE
    window = _window(group, SIMPLE, size_bytes)
    rest = 1.0 - window / size_bytes if size_bytes else 0.0
    flow_s = max(near.transfer_s / group.timing.nvls_share, sent_between_trees(group.domains) * size_bytes / share)
    return AlphaBeta(latency_s, window * hops * WINDOW_FILL / share + rest * flow_s)


def both_switches(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of NVLS in each domain with SHARP between domains: NVLS's startup and share, NCCL's network step.

    Nothing here was fitted, because no table has SHARP; the steps are NCCL's own (18 µs).
    """
    near = nvls_all_reduce(replace(group, ranks=group.members), size_bytes)
    latency_s = group.timing.nvls_start_s * _near(group) + _far(group, NVLS_SHARP_S)
    return AlphaBeta(latency_s, max(near.transfer_s / group.timing.nvls_share, _reduced_between(group, size_bytes)))


def collnet_direct(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of CollNetDirect: a ring's startup and share inside a domain, NCCL's own steps."""
    kernel, g = group.timing.ring, group.members
    start_s, _ = _start(group, kernel, protocol)
    steps_s = 2 * (min(1, g - 1) * COLLNET_NVLINK_S + (g - 1) * COLLNET_PEER_S) * _near(group)
    inside = 2 * size_bytes * (g - 1) / g / (group.exchange_bytes_per_s * min(1.0, kernel.share))
    latency_s = start_s + steps_s + _far(group, COLLNET_S)
    return AlphaBeta(latency_s, max(inside, _reduced_between(group, size_bytes)))


def _reduced_between(group: Group, size_bytes: float) -> float:
    share = min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s)
    return size_bytes / (group.members * share * NETWORK_SHARE)


def parallel_trees(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of an all-gather or reduce-scatter over PAT: NCCL's model, for the bytes that leave a rank."""
    sent_bytes = size_bytes * (group.ranks - 1) / group.ranks
    steps_s = math.floor(math.log2(group.ranks)) * _far(group, SIMPLE_NETWORK_S) * PAT_SHOWS
    latency_s = (PAT_START_S + group.ranks * PAT_RANK_S) * _near(group) + steps_s
    share = min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s) * NETWORK_SHARE
    return AlphaBeta(latency_s, sent_bytes / (share * PAT_SHARE))


def exchange(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time of an all-to-all, gather or scatter: all sends at once, with the own block's copy beside them."""
    kernel = group.timing.direct
    bare = pairwise_exchange(_slow(group, kernel), size_bytes)
    start_s = protocol.of(kernel.starts_s) * _near(group)
    block_s = size_bytes / group.ranks / (group.exchange_bytes_per_s * kernel.share)
    if protocol.few_channels:
        wire = _in_channels(group.timing, protocol, group.ranks - 1, group.exchange_links)
        return AlphaBeta(start_s, wire * block_s)
    if group.domains == 1:
        return AlphaBeta(start_s, bare.transfer_s + kernel.fill * block_s)
    rounds = math.ceil((group.ranks - group.members) / P2P_PER_ROUND)
    return AlphaBeta(start_s + rounds * _far(group, group.fabric.message_step_s), bare.transfer_s)


def _channel_share(timing: Timing, messages: int) -> float:
    """Return how many equal LL messages' bytes one channel carries in the time of one message."""
    channels = timing.message_channels
    return math.ceil(messages * channels / MESSAGE_CHANNELS) / channels


def send_recv(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    """Return the time in which every rank sends S to the next."""
    kernel, bare = group.timing.direct, direct_send_recv(group, size_bytes)
    start_s = protocol.of(kernel.starts_s) * _near(group)
    if group.domains == 1:
        wire = _message_wire(group.timing, protocol, group.pair_links)
        return AlphaBeta(start_s, bare.transfer_s * wire / kernel.share)
    return AlphaBeta(start_s + _far(group, group.fabric.message_step_s), bare.transfer_s)


def _in_channels(timing: Timing, protocol: Protocol, messages: int, links: float) -> float:
    """Return the time of equal LL messages to as many ranks ÷ the time that their links need for one's bytes.

    `links`: the part of a GPU's links that they use. A channel is as fast on a few links as on all of them, so a mesh's
    few links need fewer channels, but are never faster than the flags beside the data let them.
    """
    return max(protocol.sent_bytes * messages, timing.direct.ll_channels * _channel_share(timing, messages) * links)


def _message_wire(timing: Timing, protocol: Protocol, links: float) -> float:
    """Return the time of one message's bytes ÷ the time that its links, a part of a GPU's, need for them."""
    return _in_channels(timing, protocol, 1, links) if protocol.few_channels else 1.0


class NetworkPath(Struct, frozen=True):
    """Describe the path between two ranks.

    `latency_s`, `inter_latency_s`: of its steps within domains and between them. `bytes_per_s`: of its narrowest link.
    `hops`: number of steps between domains. `alone`: the sender's part of the NICs ÷ a GPU's fair share of them.
    `links`: the part of a GPU's links inside its domain that the message uses; less than 1 on a mesh.
    """

    latency_s: float
    inter_latency_s: float
    bytes_per_s: float
    hops: int = 0
    alone: float = 1.0
    links: float = 1.0


_GATHERS: Mapping[str, Duration] = {
    "ring": ring_gather,
    "nvls": in_switch(nvls_all_gather),
    "pat": parallel_trees,
    "mesh": straight(1),
}
DURATIONS: Mapping[str, Mapping[str, Duration]] = {
    "all_reduce": {
        "ring": ring_reduce,
        "tree": tree_reduce,
        "nvls": in_switch(nvls_all_reduce),
        "nvls_tree": switches_and_trees,
        "nvls_sharp": both_switches,
        "collnet_direct": collnet_direct,
        "mesh": straight(2),
    },
    "all_gather": _GATHERS,
    "reduce_scatter": _GATHERS,
    "broadcast": {"ring": ring_pipeline},
    "reduce": {"ring": ring_pipeline},
    "all_to_all": {"pairwise": exchange},
    "gather": {"direct": exchange},
    "scatter": {"direct": exchange},
    "send_recv": {"direct": send_recv},
}
"""The function for each algorithm of `collectives.ALGORITHMS` with a protocol; rings of a torus run without one."""


def duration(kind: str, algorithm: str, protocol: Protocol | None, group: Group, size_bytes: float) -> AlphaBeta:
    """Return the seconds of a collective with the chosen algorithm and protocol; without a protocol the bare form."""
    if protocol is None:
        return ALGORITHMS[kind][algorithm](group, size_bytes)
    return DURATIONS[kind][algorithm](group, protocol, size_bytes)


def message_seconds(
    timing: Timing, fabric: Fabric, path: NetworkPath, near_latency_s: float, size_bytes: float
) -> float:
    """Return the seconds of one message between two ranks, with the protocol that its size gets: startup, steps, bytes.

    The startup includes the first step inside a domain. `near_latency_s`: the cluster's step inside a domain, which
    scales startup and steps.
    """
    kernel, scale = timing.direct, near_latency_s / SIMPLE_NVLINK_S
    protocol = message_protocol(timing, path.hops > 0, size_bytes)
    share = 1.0 if path.hops else kernel.share
    further_s = max(0.0, path.latency_s - (0.0 if path.hops else near_latency_s))
    step_s = SIMPLE_NVLINK_S if protocol == SIMPLE else protocol.of(timing.ring.steps_s)  # latencies are Simple's
    return (
        protocol.of(kernel.starts_s) * scale
        + further_s * step_s / SIMPLE_NVLINK_S
        + path.hops * _far_step(path.inter_latency_s / max(1, path.hops), fabric.message_step_s)
        + size_bytes * _message_wire(timing, protocol, path.links) / (path.bytes_per_s * share)
    )
