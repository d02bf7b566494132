"""Each bare closed form on a group with round numbers, worked out by hand from the formula of its docstring.

S = 1,200 bytes. In a domain a GPU sends 100 bytes/s (50 along a chain, 80 to one other), through its NIC 10 bytes/s (20
if it sends alone). A step takes 1 s inside a domain and 10 s between domains.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from topology.collectives import ALGORITHMS, choose
from topology.group import Group
from topology.presets import GPUS
from topology.protocols import LL, LL128, SIMPLE, Protocol
from topology.timing import POSTED, timing_of

THREE = Group(
    ranks=12,
    domains=3,
    members=4,
    members_max=4,
    ring_bytes_per_s=100.0,
    chain_bytes_per_s=50.0,
    exchange_bytes_per_s=100.0,
    pair_bytes_per_s=80.0,
    latency_s=1.0,
    inter_ring_bytes_per_s=10.0,
    inter_tree_bytes_per_s=10.0,
    inter_exchange_bytes_per_s=10.0,
    inter_pair_bytes_per_s=20.0,
    inter_latency_s=10.0,
    nics=4.0,
    nvls_share=0.5,
    nvls_tree_bytes=0.0,
    protocols=False,
    timing=timing_of(GPUS["h100-sxm"]),
    fabric=POSTED,
    torus_steps=4,
)
TWO, ONE = replace(THREE, ranks=8, domains=2), replace(THREE, ranks=8, domains=1, torus_steps=0)
APART = replace(THREE, ranks=3, members=1, members_max=1, torus_steps=0)
UNEVEN = replace(THREE, members=2)


@pytest.mark.parametrize(
    ("kind", "algorithm", "group", "latency_s", "transfer_s"),
    [
        ("all_gather", "ring", ONE, 7, 1200 * 7 / 8 / 100),
        ("all_gather", "ring", replace(THREE, torus_steps=0), 8 + 30, 1100 / 40),
        ("all_gather", "ring", replace(THREE, ring_bytes_per_s=10.0, torus_steps=0), 38, 1100 * 3 / 4 / 10),
        ("all_gather", "ring", APART, 20, 800 / 10),  # of three ranks' two steps both cross
        ("all_reduce", "ring", replace(THREE, torus_steps=0), 2 * 38, 2 * 1100 / 40),
        ("broadcast", "ring", replace(THREE, torus_steps=0), 38, 1200 / 40),
        ("all_reduce", "tree", ONE, 2 * 3, 1200 / 50),
        ("all_reduce", "tree", TWO, 2 * (3 + 10), 1200 / 40),
        ("all_reduce", "tree", THREE, 2 * (3 + 20), 2 * 1200 / 40),
        ("all_reduce", "nvls", ONE, 5, 1200 * 9 / 8 / 50),
        ("all_gather", "nvls", ONE, 4, 1200 * 7 / 8 / 50),
        ("all_reduce", "nvls_tree", TWO, 5 + 20, 1200 / 40),
        ("all_reduce", "nvls_tree", THREE, 5 + 40, 2 * 1200 / 40),
        ("all_reduce", "nvls_tree", replace(TWO, ring_bytes_per_s=10.0), 5 + 20, 1200 * 5 / 4 / 5),
        ("all_reduce", "nvls_sharp", THREE, 5 + 10, 1200 / 40),
        ("all_reduce", "nvls_sharp", replace(THREE, ring_bytes_per_s=10.0), 5 + 10, 1200 * 5 / 4 / 5),
        ("all_reduce", "collnet_direct", THREE, 2 * (1 + 3 * 0.4 / 3.7) + 10, 1200 / 40),
        ("all_reduce", "collnet_direct", replace(THREE, exchange_bytes_per_s=20.0), 2 + 2.4 / 3.7 + 10, 1800 / 20),
        ("all_reduce", "collnet_direct", APART, 10, 1200 / 10),
        ("all_gather", "pat", APART, 3 + 10 / 3.5, 1200 / 10),
        ("reduce_scatter", "pat", replace(APART, ranks=17, domains=17), 17 + 4 * 10 / 3.5, 1200 / 10),
        ("all_gather", "mesh", ONE, 1, 1200 * 7 / 8 / 100),
        ("all_reduce", "mesh", ONE, 2, 2 * 1200 * 7 / 8 / 100),
        ("all_gather", "torus", THREE, 40, 1100 / 40),
        ("all_reduce", "torus", THREE, 80, 2 * 1100 / 40),
        ("all_to_all", "pairwise", THREE, 10, 8 * 100 / 10),
        ("all_to_all", "pairwise", replace(THREE, inter_exchange_bytes_per_s=1e3), 10, 3 * 100 / 100),
        ("all_to_all", "pairwise", UNEVEN, 10, 10 * 100 / 10),  # two members send to ten others outside
        ("all_to_all", "pairwise", replace(THREE, ranks=1200), 10 * 10, 1196 / 10),  # 128 sends are in flight at once
        ("send_recv", "direct", ONE, 1, 1200 / 80),
        ("send_recv", "direct", THREE, 10, 1200 / 20),
        ("send_recv", "direct", replace(THREE, pair_bytes_per_s=5.0), 10, 1200 / 5),
        ("send_recv", "direct", replace(APART, pair_bytes_per_s=5.0), 10, 1200 / 20),
    ],
)
def test_a_closed_form_is_its_formula(
    kind: str, algorithm: str, group: Group, latency_s: float, transfer_s: float
) -> None:
    cost = ALGORITHMS[kind][algorithm](group, 1200.0)
    assert (cost.latency_s, cost.transfer_s) == (pytest.approx(latency_s), pytest.approx(transfer_s))


@pytest.mark.parametrize(("transfer_us", "chosen"), [(8.7, LL), (8.9, LL128), (176.0, LL128), (178.0, SIMPLE)])
def test_nccl_weighs_each_protocols_start_and_steps_against_its_part_of_the_bandwidth(
    transfer_us: float, chosen: Protocol
) -> None:
    """14 steps: 6.6 + 14 · 0.6 + 4x us in LL, 14 + 14 · 1.9 + x/0.92 in LL128, 8.4 + 14 · 3.4 + x in Simple."""
    ring = replace(ONE, protocols=True, nvls_share=0.0, latency_s=3.4e-6, ring_bytes_per_s=1e11, chain_bytes_per_s=1.0)
    size = transfer_us * 1e-6 * 1e11 / (2 * 7 / 8)
    assert choose("all_reduce", ring, size) == ("ring", chosen)
