"""What a machine's collectives cost beyond its links: starts, steps, shares, fills; one record per GPU.

NCCL chooses with the constants of its own model (`protocols`); what its choice then takes is told by these. Each was
fitted to every second row of the measured tables that docs/collectives.md names, and judged on the other half; no
coefficient belongs to one size or one number of ranks. GPUs without measurements take those of their nearest
relative. All starts and steps inside a domain are stated for a `latency_s` of 3.4 µs and scale with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.spec import InterNode


@dataclass(frozen=True, slots=True)
class Kernel:
    """One family of collectives inside a domain.

    `ll_`: protocol LL; LL128 starts as Simple does and has steps of its own. `share`: of the bandwidth that the links
    leave for data, what the kernels sustain. `ll_bytes`: bytes sent in LL for a byte of data. `fill`: steps' worth of
    transfer spent filling and draining the pipeline, or copying the own block; once an operation.
    """

    ll_start_s: float
    ll_step_s: float
    start_s: float
    step_s: float
    share: float
    fill: float
    ll128_step_s: float = 0.0
    ll_bytes: float = 2.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Rings and trees; sends, receives and exchanges; NVLS of one machine."""

    ring: Kernel
    direct: Kernel
    nvls_start_s: float
    nvls_share: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """Steps between nodes.

    `ll_step_s`, `ll128_step_s`, `step_s`: a tree's hop. `near_step_s`: a tree's hop inside, when it goes in chunks
    (Simple). `ring_steps_s`: a ring's hop between nodes, or a message's, in LL, LL128,
    Simple. `ring_floor_s`: the least time between two blocks on that hop.
    `rendezvous_s` comes on top of a hop's step in LL from `RENDEZVOUS_BYTES` on. `ll_bytes`: as in `Kernel`.
    `lines`: LL128 works, which passes data on in lines as they arrive.
    """

    ll_step_s: float
    ll128_step_s: float
    step_s: float
    near_step_s: float
    ring_steps_s: tuple[float, float, float]
    ring_floor_s: float
    rendezvous_s: float
    ll_bytes: float
    lines: bool


RENDEZVOUS_BYTES = 4096.0
WINDOW_BYTES = float(16 << 20)  # a buffer step of 1 MiB on each of 16 channels: fills a tree before it flows
LINES_WINDOW_BYTES = float(2 << 20)  # LL128: chunks of 128 KiB (NCCL, src/enqueue.cc) on as many channels
WINDOW_FILL = 0.7  # of the window's passage at each hop, what the next hop does not hide
NETWORK_SHARE = 0.96  # of what NICs leave for data, what rings and trees sustain: so on Slingshot as on TCPX
TREE_SHARE = 0.66  # of the NICs, where a node has more than one neighbour in a tree
USUAL_LATENCY_S = 14e-6  # what the steps below are stated for: NCCL's step on InfiniBand, protocol Simple

MATCHED = Fabric(7e-6, 22.5e-6, 22.5e-6, 10e-6, (2.7e-6, 14e-6, 14e-6), 38e-6, 13.5e-6, 13.0, False)
"""Libfabric and others that match sender and receiver for each message (GH200 over Slingshot)."""
HOST = Fabric(5e-6, 14e-6, 14e-6, 10e-6, (2.7e-6, 14e-6, 14e-6), 0.0, 0.0, 2.0, False)
"""Posted buffers, but through the host's memory or kernel: no LL128 (TCPX)."""
POSTED = Fabric(5e-6, 8.5e-6, 28e-6, 10e-6, (2.7e-6, 4e-6, 14e-6), 0.0, 0.0, 2.0, True)
"""InfiniBand and RoCE: receivers post buffers ahead (NCCL, src/transport/net_ib.cc); steps are NCCL's own."""


def fabric_of(inter: InterNode) -> Fabric:
    """The kind of transport: matched per message; RDMA; or, if its latency is far above RDMA's, the host's."""
    if inter.rendezvous:
        return MATCHED
    return POSTED if inter.latency_s <= 2 * USUAL_LATENCY_S else HOST


_US = 1e-6
# Sources: V100: the vTrain all-reduce table; A100, H100 with H200, B200, GB200: NVIDIA AIConfigurator's NCCL tables
# (16-bit); half of the rows of each. V100's exchanges are A100's; NVLS on GB200: B200's start, its share by the
# 8 GiB rows of the GB300 table, which also tell GB300's share and fill of exchanges.


def _kernel(
    ll: float, ll_step: float, start: float, step: float, share: float, fill: float, ll128: float = 2.0
) -> Kernel:
    return Kernel(ll * _US, ll_step * _US, start * _US, step * _US, share, fill, ll128 * _US)


def _exchange(ll: float, start: float, share: float, fill: float, ll_bytes: float) -> Kernel:
    return Kernel(ll * _US, 0.0, start * _US, 0.0, share, fill, 0.0, ll_bytes)


# fmt: off
_V100 = Timing(_kernel(9.0, 5.0, 19.1, 2.98, 1.14, 0.04, 4.45), _exchange(12.5, 22.4, 0.78, 0.22, 4.4), 0.0, 1.0)
_A100 = Timing(_kernel(9.6, 0.90, 22.2, 5.51, 0.936, 0.48, 1.14), _exchange(12.5, 22.4, 0.78, 0.22, 4.4), 0.0, 1.0)
_H100 = Timing(_kernel(4.9, 0.87, 14.8, 0.0, 0.942, 0.53, 2.0), _exchange(7.7, 13.0, 0.773, 0.05, 5.5), 21 * _US, 0.885)
_B200 = Timing(_kernel(8.1, 1.32, 10.8, 7.34, 1.10, 0.88, 2.0), _exchange(11.2, 17.8, 0.805, 0.79, 5.3), 40 * _US, 0.8)
_GB200 = Timing(_kernel(8.6, 1.27, 9.6, 8.87, 1.09, 0.85, 2.0), _exchange(11.0, 16.2, 0.847, 0.94, 7.5), 40 * _US, 1.0)
_GB300 = Timing(_GB200.ring, _exchange(11.0, 16.2, 0.97, 0.35, 7.5), 40 * _US, 1.0)
# fmt: on

_TIMINGS = (
    ("v100", _V100),
    ("a100", _A100),
    ("h", _H100),
    ("b", _B200),
    ("gb300", _GB300),
    ("gb", _GB200),
)


def timing_of(gpu: str) -> Timing:
    """The machine class of a GPU by its name; Hopper's for names that none has."""
    found = [timing for prefix, timing in _TIMINGS if gpu.startswith(prefix)]
    return found[0] if found else _H100
