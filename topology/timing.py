"""Hold the costs of collectives beyond the links: startup, steps, shares, fills; one record per measured GPU.

`protocols` has the constants with which NCCL chooses; the constants here give the time of its choice. Those inside a
domain, those of `MATCHED` and the shares were fitted to half the rows of the tables in docs/collectives.md and judged
on the other half. No coefficient is for a single size or number of ranks. Those of `HOST` and `POSTED` are NCCL's own
constants (`near_step_s` is `MATCHED`'s), because no table has InfiniBand. `HOST`'s were chosen with one run over TCPX,
so it does not test them. GPUs without measurements use those of their architecture; `other` uses Hopper's. Startup
and steps inside a domain are stated for a `latency_s` of 3.4 µs and scale with it.
"""

from __future__ import annotations

from math import inf
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from topology.architectures import CollectivesOf
from topology.protocols import LL, LL128, SIMPLE, SIMPLE_NETWORK_S, Protocol
from topology.spec import GpuSpec, InterNode

CHANNEL_LL_BYTES = 16384.0  # largest message in LL on one channel: NCCL_P2P_LL_THRESHOLD, src/enqueue.cc
MESSAGE_CHANNELS = 32  # inside a domain, for messages to all peers: MAXCHANNELS, src/include/device.h, before Blackwell


Each = tuple[float, float, float]
"""A value for each protocol: LL, LL128, Simple (`Protocol.of`)."""


class Kernel(Struct, frozen=True):
    """Hold the constants of rings and trees inside a domain.

    `share`: the part of the links' usable bandwidth that kernels sustain. `fill`: time to fill and drain the pipeline,
    as a number of steps' transfers; once per operation. LL128 has the startup of Simple.
    """

    starts_s: Each
    steps_s: Each
    share: float
    fill: float


class Messages(Struct, frozen=True):
    """Hold the constants of sends, receives and exchanges inside a domain.

    `share`: as in `Kernel`. `fill`: time to copy the own block of an exchange ÷ the time of a block on the links.
    `ll_channels`: the bandwidth that kernels sustain ÷ that of one channel in LL.
    """

    starts_s: Each
    share: float
    fill: float
    ll_channels: float


class Timing(Struct, frozen=True):
    """Hold the constants of one machine. `ring`: of rings and trees. `direct`: of sends, receives and exchanges.

    `message_channels`: the number of channels for a message in LL, in the NCCL version that was measured.
    """

    ring: Kernel
    direct: Messages
    nvls_start_s: float
    nvls_share: float
    message_channels: int = 1

    @property
    def message_ll_bytes(self) -> float:
        """Size of the largest message inside a domain that uses LL."""
        return CHANNEL_LL_BYTES * self.message_channels


class Fabric(Struct, frozen=True):
    """Hold the steps between nodes.

    `tree_steps_s`, `ring_steps_s`: a hop between nodes. `near_step_s`: a tree's hop inside a domain in Simple.
    `message_step_s`: a message's hop (in Simple). `ring_floor_s`: the least time between two blocks on a ring's hop.
    `rendezvous_s`: added to a hop's step in LL from `RENDEZVOUS_BYTES` on; steps of protocols that wait contain it.
    `fills`: the part of a tree's window's time on the NICs, at each hop, that the next hop does not hide. `lines`:
    whether LL128 works, which forwards lines of data as they arrive. `nvls_tree_bytes`, `nvls_tree_domains`: the least
    size and the most domains for which NVLS with trees between domains is considered.
    """

    tree_steps_s: Each
    near_step_s: float
    ring_steps_s: Each
    message_step_s: float
    ring_floor_s: float
    rendezvous_s: float
    fills: Each
    lines: bool
    nvls_tree_bytes: float = 0.0
    nvls_tree_domains: float = inf

    def as_run(self, protocol: Protocol) -> Protocol:
        """Return the protocol as which a tree between nodes runs: without lines LL128 is as slow as Simple."""
        return SIMPLE if protocol == LL128 and not self.lines else protocol


RENDEZVOUS_BYTES = 4096.0
WINDOW_NICS = 4  # NICs of the protocols' windows (GH200's node); fewer have fewer channels (NCCL, src/graph/connect.cc)
WINDOW_FILL = 0.686  # part of the window's time at each hop that the next hop does not hide, in LL128 and Simple
_FILLS = (LL.sent_bytes, WINDOW_FILL, WINDOW_FILL)
NETWORK_SHARE = 0.983  # part of the NICs' usable bandwidth that rings and trees sustain
TREE_SHARE = 0.673  # part of the NICs' bandwidth that a tree uses if a node has more than one neighbour in it
# The steps below are stated for a latency of SIMPLE_NETWORK_S between nodes.

MATCHED = Fabric(
    (6.94e-6, 31.1e-6, 31.1e-6),
    0.92e-6,
    (2.7e-6, 14e-6, 14e-6),
    14e-6,
    ring_floor_s=38.3e-6,
    rendezvous_s=13.4e-6,
    fills=(9.92, WINDOW_FILL, WINDOW_FILL),
    lines=False,
)
"""Libfabric and other transports that match sender and receiver for each message (GH200 over Slingshot)."""
HOST = Fabric(
    (5e-6, 14e-6, 14e-6), 0.92e-6, (2.7e-6, 14e-6, 14e-6), 14e-6, 0.0, 0.0, _FILLS, lines=False, nvls_tree_domains=1
)
"""Posted buffers, but through the host's memory or kernel: no LL128 and no NVLS (TCPX; its machines set
NCCL_ALGO=Ring,Tree and NCCL_NVLS_ENABLE=0: NVIDIA DGX Cloud, "GCP TCPXO Networking")."""
POSTED = Fabric((5e-6, 8.5e-6, 28e-6), 0.92e-6, (5e-6, 8.5e-6, 28e-6), 14e-6, 0.0, 0.0, _FILLS, lines=True)
"""InfiniBand and RoCE: receivers post buffers in advance (NCCL, src/transport/net_ib.cc); steps are NCCL's own.

A ring's hop has the full network latency, as a tree's hop (src/graph/tuning.cc uses the tree's for rings with one GPU a
node, "latencies are fully exposed"). `durations` has the part of it that the other half of a block hides.
"""

EFA = replace(POSTED, nvls_tree_bytes=float(30 << 20), nvls_tree_domains=2)
"""AWS's network. Its plugin chooses NVLS with trees for eight GPUs on each of two nodes from 30 MiB on. On more nodes
it chooses trees and rings up to sizes far above those of training (aws-ofi-nccl, src/tuner/nccl_ofi_regions.c, P5)."""


def fabric_of(inter: InterNode) -> Fabric:
    """Return the constants of the transport: matched per message, RDMA, or the host's if the latency is far above."""
    if inter.transport == "posted":
        return EFA
    if inter.rendezvous:
        return MATCHED
    return POSTED if inter.latency_s <= 2 * SIMPLE_NETWORK_S else HOST


_US = 1e-6
# Fitted by the rule of docs/collectives.md. V100: the vTrain all-reduce table; A100, H100 with H200, B200, GB200:
# NVIDIA AIConfigurator's NCCL tables (16-bit). V100's exchanges are A100's, untested. GB200's NVLS has B200's startup
# and two GB300 rows' share; GB300's exchanges are from three rows. A100's exchanges in Simple were measured only
# from 1 MiB a message on, so their startup is LL's times H100's ratio. NVLS of B200 is 20 % off on both halves. LL128's
# step of Hopper and Blackwell is NCCL's (1.9 µs, tuning.cc), because none of their rows uses that protocol.


def _kernel(
    ll: float, ll_step: float, start: float, step: float, share: float, fill: float, ll128: float = 2.0
) -> Kernel:
    return Kernel((ll * _US, start * _US, start * _US), (ll_step * _US, ll128 * _US, step * _US), share, fill)


def _messages(ll: float, start: float, share: float, fill: float, ll_channels: float) -> Messages:
    return Messages((ll * _US, start * _US, start * _US), share, fill, ll_channels)


_A100 = Timing(
    ring=_kernel(9.35, 0.944, 24.0, 5.76, 0.936, 0.461, 0.756),
    direct=_messages(12.8, 22.1, 0.818, 0.239, 85.1),
    nvls_start_s=0.0,
    nvls_share=1.0,
    message_channels=32,  # NCCL 2.27: 16 KiB for each channel of a peer; 2.29: for each that the message uses
)
_V100 = replace(_A100, ring=_kernel(9.0, 3.02, 19.3, 3.04, 1.15, 0.048, 4.45))
_H100 = Timing(
    ring=_kernel(4.83, 0.893, 10.6, 1.99, 0.961, 0.542),
    direct=_messages(7.02, 12.7, 0.813, 0.11, 41.0),
    nvls_start_s=18.4 * _US,
    nvls_share=0.829,
)
_B200 = Timing(
    ring=_kernel(8.05, 1.31, 12.3, 6.21, 1.05, 0.765),
    direct=_messages(10.2, 16.2, 0.807, 0.722, 82.9),
    nvls_start_s=32.2 * _US,
    nvls_share=0.703,
)
_GB200 = Timing(
    ring=_kernel(8.59, 1.27, 11.2, 7.33, 1.05, 0.754),
    direct=_messages(10.6, 16.0, 0.819, 0.74, 59.4),
    nvls_start_s=32.2 * _US,
    nvls_share=0.937,
)
_GB300 = replace(_GB200, direct=_messages(10.6, 16.0, 0.924, 0.144, 59.4))

TIMINGS: dict[CollectivesOf, Timing] = {
    "v100": _V100,
    "a100": _A100,
    "h100": _H100,
    "b200": _B200,
    "gb200": _GB200,
    "gb300": _GB300,
}


def timing_of(gpu: GpuSpec) -> Timing:
    """Return the constants of a GPU's collectives: of its `collectives_like`, or of its architecture."""
    return TIMINGS[gpu.collectives_like or gpu.chip.collectives_like]


def slower(one: Timing, other: Timing) -> Timing:
    """Return the constants of a group of two machines: the longer of all times, the smaller of all shares."""
    if one == other:
        return one
    return Timing(
        _slower_part(one.ring, other.ring),
        _slower_part(one.direct, other.direct),
        max(one.nvls_start_s, other.nvls_start_s),
        min(one.nvls_share, other.nvls_share),
        min(one.message_channels, other.message_channels),
    )


Part = TypeVar("Part", Kernel, Messages)


def _slower_part(one: Part, other: Part) -> Part:
    larger: dict[str, float | Each] = {}
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        larger[name] = tuple(map(max, a, b)) if isinstance(a, tuple) else max(a, b)
    return replace(one, **larger | {"share": min(one.share, other.share)})
