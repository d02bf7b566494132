"""Costs of a machine's collectives beyond its links: starts, steps, shares, fills; one record per measured GPU.

`protocols` holds the constants NCCL chooses with; the constants here give the time that its choice then takes. Those
inside a domain, and those of `MATCHED` with the shares, were fitted to half the rows of the tables that
docs/collectives.md names and judged on the other half; no coefficient belongs to one size or one number of ranks.
Those of `HOST` and `POSTED` are NCCL's own constants (`near_step_s` is `MATCHED`'s): no table has InfiniBand, and one
run over TCPX showed which of them `HOST` needs, so it is no blind test.
GPUs without measurements take those of their architecture, `other` ones Hopper's. All starts and steps inside a domain
are stated for a `latency_s` of 3.4 µs and scale with it.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct
from msgspec.structs import fields, replace

from topology.spec import Architecture, GpuSpec, InterNode

CHANNEL_LL_BYTES = 16384.0  # of a message on one channel, that go in LL: NCCL_P2P_LL_THRESHOLD, src/enqueue.cc
MESSAGE_CHANNELS = 32  # inside a domain, for messages to all peers: MAXCHANNELS, src/include/device.h, before Blackwell


class Kernel(Struct, frozen=True):
    """One family of collectives inside a domain.

    `ll_`: protocol LL; LL128 starts as Simple does and has steps of its own. `share`: of the bandwidth that the links
    leave for data, what the kernels sustain. `ll_bytes`: bytes sent in LL for a byte of data; of messages, what the
    kernels sustain over what one channel carries in LL. `fill`: steps' worth of transfer spent filling and draining
    the pipeline, or copying the own block; once an operation.
    """

    ll_start_s: float
    ll_step_s: float
    start_s: float
    step_s: float
    share: float
    fill: float
    ll128_step_s: float = 0.0
    ll_bytes: float = 2.0


class Timing(Struct, frozen=True):
    """Rings and trees; sends, receives and exchanges; NVLS of one machine.

    `message_channels`: over how many channels a message in LL is spread, by the NCCL that was measured.
    """

    ring: Kernel
    direct: Kernel
    nvls_start_s: float
    nvls_share: float
    message_channels: int = 1

    @property
    def message_ll_bytes(self) -> float:
        """Up to here a message inside a domain goes in LL."""
        return CHANNEL_LL_BYTES * self.message_channels


class Fabric(Struct, frozen=True):
    """Steps between nodes.

    `ll_step_s`, `ll128_step_s`, `step_s`: a tree's hop. `near_step_s`: a tree's hop inside, when it goes in chunks
    (Simple). `ring_steps_s`: a ring's hop between nodes in LL, LL128, Simple; `message_step_s`: a
    message's, which goes in Simple. `ring_floor_s`: the least time between two blocks on that hop.
    `rendezvous_s` comes on top of a hop's step in LL from `RENDEZVOUS_BYTES` on. `ll_bytes`: as in `Kernel`.
    `lines`: LL128 works, which passes data on in lines as they arrive. `nvls_tree_`: NVLS with trees between domains
    is considered from this size on, over so many domains at most.
    """

    ll_step_s: float
    ll128_step_s: float
    step_s: float
    near_step_s: float
    ring_steps_s: tuple[float, float, float]
    message_step_s: float
    ring_floor_s: float
    rendezvous_s: float
    ll_bytes: float
    lines: bool
    nvls_tree_bytes: float = 0.0
    nvls_tree_domains: float = inf


RENDEZVOUS_BYTES = 4096.0
WINDOW_BYTES = float(16 << 20)  # a buffer step of 1 MiB on each of 16 channels: fills a tree before it flows
LL_WINDOW_BYTES = float(1 << 20)  # LL: half of a step's 64 KiB of lines is data, on up to 32 channels
LINES_WINDOW_BYTES = float(2 << 20)  # LL128: chunks of 128 KiB (NCCL, src/enqueue.cc) on as many channels
WINDOW_NICS = 4  # whose channels these windows are (GH200's node); fewer NICs have fewer (NCCL, src/graph/connect.cc)
WINDOW_FILL = 0.686  # of the passage of what fills a tree at each hop, what the next hop does not hide
NETWORK_SHARE = 0.983  # of what NICs leave for data, what rings and trees sustain
TREE_SHARE = 0.673  # of the NICs, where a node has more than one neighbour in a tree
USUAL_LATENCY_S = 14e-6  # what the steps below are stated for: NCCL's step on InfiniBand, protocol Simple

MATCHED = Fabric(6.94e-6, 31.1e-6, 31.1e-6, 0.92e-6, (2.7e-6, 14e-6, 14e-6), 14e-6, 38.3e-6, 13.4e-6, 9.92, False)
"""Libfabric and others that match sender and receiver for each message (GH200 over Slingshot)."""
HOST = Fabric(5e-6, 14e-6, 14e-6, 0.92e-6, (2.7e-6, 14e-6, 14e-6), 14e-6, 0.0, 0.0, 2.0, False, nvls_tree_domains=1)
"""Posted buffers, but through the host's memory or kernel: no LL128, and no NVLS (TCPX; the machines that have it set
NCCL_ALGO=Ring,Tree and NCCL_NVLS_ENABLE=0: NVIDIA DGX Cloud, "GCP TCPXO Networking")."""
POSTED = Fabric(5e-6, 8.5e-6, 28e-6, 0.92e-6, (5e-6, 8.5e-6, 28e-6), 14e-6, 0.0, 0.0, 2.0, True)
"""InfiniBand and RoCE: receivers post buffers ahead (NCCL, src/transport/net_ib.cc); steps are NCCL's own.

A ring's hop is its network latency with nothing hidden, as for trees (src/graph/tuning.cc takes the tree's for rings of
one GPU a node, "latencies are fully exposed"): the closed form follows a block over every hop; what the other half of a
block hides of it is in `durations`.
"""

EFA = replace(POSTED, nvls_tree_bytes=float(30 << 20), nvls_tree_domains=2)
"""AWS's network. Its plugin takes NVLS with trees for eight GPUs on each of two nodes from 30 MiB on; over more nodes,
trees and rings until sizes far above those of training (aws-ofi-nccl, src/tuner/nccl_ofi_regions.c, P5)."""


def fabric_of(inter: InterNode) -> Fabric:
    """The kind of transport: matched per message; RDMA; or, if its latency is far above RDMA's, the host's."""
    if inter.transport == "posted":
        return EFA
    if inter.rendezvous:
        return MATCHED
    return POSTED if inter.latency_s <= 2 * USUAL_LATENCY_S else HOST


_US = 1e-6
# Fitted by the rule of docs/collectives.md. V100: the vTrain all-reduce table; A100, H100 with H200, B200, GB200:
# NVIDIA AIConfigurator's NCCL tables (16-bit). V100's exchanges are A100's, untested. GB200's NVLS is B200's start with
# the share of two GB300 rows; GB300's exchanges, three rows. A100's exchanges in Simple are measured from 1 MiB a
# message on only, so their start is LL's by H100's ratio. NVLS of B200 is poor: 20 % off on either half. Hopper's and
# Blackwell's step in LL128 is NCCL's (1.9 µs, tuning.cc), for no row of theirs shows that protocol.


def _kernel(
    ll: float, ll_step: float, start: float, step: float, share: float, fill: float, ll128: float = 2.0
) -> Kernel:
    return Kernel(ll * _US, ll_step * _US, start * _US, step * _US, share, fill, ll128 * _US)


def _exchange(ll: float, start: float, share: float, fill: float, ll_bytes: float) -> Kernel:
    return Kernel(ll * _US, 0.0, start * _US, 0.0, share, fill, 0.0, ll_bytes)


_A100 = Timing(
    ring=_kernel(9.35, 0.944, 24.0, 5.76, 0.936, 0.461, 0.756),
    direct=_exchange(12.8, 22.1, 0.818, 0.239, 85.1),
    nvls_start_s=0.0,
    nvls_share=1.0,
    message_channels=32,  # NCCL 2.27: the limit is 16 KiB for each of a peer's channels; in 2.29, of those that it uses
)
_V100 = replace(_A100, ring=_kernel(9.0, 3.02, 19.3, 3.04, 1.15, 0.048, 4.45))
_H100 = Timing(
    ring=_kernel(4.83, 0.893, 10.6, 1.99, 0.961, 0.542),
    direct=_exchange(7.02, 12.7, 0.813, 0.11, 41.0),
    nvls_start_s=18.4 * _US,
    nvls_share=0.829,
)
_B200 = Timing(
    ring=_kernel(8.05, 1.31, 12.3, 6.21, 1.05, 0.765),
    direct=_exchange(10.2, 16.2, 0.807, 0.722, 82.9),
    nvls_start_s=32.2 * _US,
    nvls_share=0.703,
)
_GB200 = Timing(
    ring=_kernel(8.59, 1.27, 11.2, 7.33, 1.05, 0.754),
    direct=_exchange(10.6, 16.0, 0.819, 0.74, 59.4),
    nvls_start_s=32.2 * _US,
    nvls_share=0.937,
)
_GB300 = replace(_GB200, direct=_exchange(10.6, 16.0, 0.924, 0.144, 59.4))

_TIMINGS = {"v100": _V100, "a100": _A100, "h100": _H100, "b200": _B200, "gb200": _GB200, "gb300": _GB300}
_MEASURED: dict[Architecture, str] = {
    "volta": "v100",
    "ampere": "a100",
    "ada": "a100",  # NCCL's own model takes what is below compute capability 9.0 for Ampere (src/graph/tuning.cc)
    "hopper": "h100",
    "blackwell": "b200",
    "cpu": "h100",  # of no effect: over PCIe the bare forms are used
    "other": "h100",
}


def timing_of(gpu: GpuSpec) -> Timing:
    """Starts and steps of a GPU's collectives: of the GPU that it names, else measured on its architecture."""
    return _TIMINGS[gpu.collectives_like or _MEASURED[gpu.architecture]]


def slower(one: Timing, other: Timing) -> Timing:
    """A group of two machines: of every start and step the longer, of every share the smaller."""
    if one == other:
        return one
    return Timing(
        _slower_kernel(one.ring, other.ring),
        _slower_kernel(one.direct, other.direct),
        max(one.nvls_start_s, other.nvls_start_s),
        min(one.nvls_share, other.nvls_share),
        min(one.message_channels, other.message_channels),
    )


def _slower_kernel(one: Kernel, other: Kernel) -> Kernel:
    longest = {
        field.name: max(getattr(one, field.name), getattr(other, field.name))
        for field in fields(Kernel)
        if field.name != "share"
    }
    return Kernel(**longest, share=min(one.share, other.share))
