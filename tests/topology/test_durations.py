"""What a chosen algorithm takes: its limits, its steps, the pipeline that fills; NCCL's choice apart from it."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from topology.collectives import Choice, choose
from topology.durations import duration
from topology.group import Group
from topology.network import Network
from topology.presets import CLUSTERS, GPUS
from topology.protocols import LL, LL128, SIMPLE, SIMPLE_NETWORK_S, Protocol
from topology.shares import collective_load
from topology.spec import ClusterSpec, InterNode, IntraNode
from topology.timing import (
    HOST,
    MATCHED,
    NETWORK_SHARE,
    POSTED,
    RENDEZVOUS_BYTES,
    TREE_SHARE,
    WINDOW_FILL,
    fabric_of,
    timing_of,
)

SLINGSHOT = ClusterSpec(
    gpu=CLUSTERS["dgx-h100"].gpu,
    gpus_per_node=4,
    nodes=512,
    intra_node=IntraNode(kind="nvlink_mesh"),
    inter_node=InterNode(nics_per_node=4, nic_bandwidth_bytes_per_s=25e9, rendezvous=True),
)


def group(cluster: ClusterSpec, ranks: range) -> Group:
    return Network(cluster).group(ranks)


@pytest.mark.parametrize("ranks", [range(4), range(8), range(64), range(0, 64, 4)])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("protocol", [LL, LL128, SIMPLE])
def test_time_of_one_algorithm_grows_with_size_from_its_latency_on(
    ranks: range, algorithm: str, protocol: Protocol
) -> None:
    where = group(SLINGSHOT, ranks)
    costs = [duration("all_reduce", algorithm, protocol, where, 4.0**power) for power in range(4, 17)]
    assert all(a.seconds < b.seconds for a, b in pairwise(costs))
    assert costs[0].latency_s == costs[-1].latency_s > 0


def test_a_tree_pays_its_depth_for_the_first_window_and_flows_after_it() -> None:
    where = group(SLINGSHOT, range(64))

    def slope(start: float, end: float) -> float:
        a, b = (duration("all_reduce", "tree", SIMPLE, where, size).seconds for size in (start, end))
        return (b - a) / (end - start)

    filling = slope(SIMPLE.window_bytes / 8, SIMPLE.window_bytes)
    assert filling == pytest.approx(slope(SIMPLE.window_bytes / 2, SIMPLE.window_bytes))
    assert filling > 1.5 * slope(2 * SIMPLE.window_bytes, 8 * SIMPLE.window_bytes)
    deeper = replace(where, domains=2 * where.domains, ranks=2 * where.ranks)
    more = duration("all_reduce", "tree", SIMPLE, deeper, SIMPLE.window_bytes).seconds
    assert more > duration("all_reduce", "tree", SIMPLE, where, SIMPLE.window_bytes).seconds


def test_a_matched_ring_is_held_back_by_its_messages_until_bytes_cover_them() -> None:
    where = group(SLINGSHOT, range(64))
    held, free = ({"fabric": fabric} for fabric in (MATCHED, replace(MATCHED, ring_floor_s=0.0)))

    def seconds(size: float, fabric: dict[str, object]) -> float:
        return duration("all_reduce", "ring", SIMPLE, replace(where, **fabric), size).seconds  # type: ignore[arg-type]

    small, large = 64 * 2.0**17, 64 * 2.0**24
    assert seconds(small, held) - seconds(small, free) == pytest.approx(126 * MATCHED.ring_floor_s, rel=0.2)
    assert seconds(large, held) == pytest.approx(seconds(large, free))


def test_of_single_gpus_a_block_s_first_half_is_sent_while_the_other_arrives() -> None:
    """A step takes max(bytes/b, α + bytes/2b): while α counts, half of the transfer is hidden."""
    where = group(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 4}), range(0, 32, 8))

    def slope(start: float) -> float:
        one, two = (duration("all_gather", "ring", SIMPLE, where, size).seconds for size in (start, 2 * start))
        return (two - one) / start

    filled = where.timing.ring.fill / 4 / where.inter_ring_bytes_per_s
    sent = 3 / 4 / (where.inter_ring_bytes_per_s * NETWORK_SHARE)
    assert [slope(2.0**20) - filled, slope(2.0**26) - filled] == [pytest.approx(sent / 2), pytest.approx(sent)]


@pytest.mark.parametrize(("latency_s", "step_s"), [(7e-6, 14e-6), (14e-6, 28e-6), (20e-6, 34e-6)])
def test_a_step_between_nodes_scales_below_the_usual_latency_and_grows_by_what_exceeds_it(
    latency_s: float, step_s: float
) -> None:
    where = group(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 4}), range(0, 32, 8))
    cost = duration("all_gather", "ring", SIMPLE, replace(where, inter_latency_s=latency_s), 2.0**20)
    assert cost.latency_s - where.timing.ring.starts_s[SIMPLE.number] == pytest.approx(3 * step_s)


def test_small_trees_meet_their_receivers_only_where_the_transport_matches() -> None:
    where = group(SLINGSHOT, range(64))
    below, above = RENDEZVOUS_BYTES - 1, RENDEZVOUS_BYTES

    def jump(place: Group) -> float:
        a, b = (duration("all_reduce", "tree", LL, place, size).seconds for size in (below, above))
        return b - a

    assert jump(where) == pytest.approx(8 * MATCHED.rendezvous_s, rel=0.01)  # 16 nodes: 4 hops up, 4 down
    for latency_s in (SIMPLE_NETWORK_S / 2, SIMPLE_NETWORK_S, 75e-6):  # a far hop's latency is counted once
        assert jump(replace(where, fabric=POSTED, inter_latency_s=latency_s)) < 1e-9


def test_the_transport_follows_from_what_the_fabric_says() -> None:
    assert fabric_of(InterNode(rendezvous=True)) is MATCHED
    assert fabric_of(InterNode(latency_s=5e-5)) is HOST
    # A network described by hand is InfiniBand or RoCE, as that of the preset with the same figures.
    assert fabric_of(InterNode()) is fabric_of(CLUSTERS["dgx-h100"].inter_node) is POSTED


def test_what_a_choice_takes_does_not_move_the_choice() -> None:
    where = group(SLINGSHOT, range(64))
    slower = replace(where, fabric=replace(MATCHED, ring_floor_s=1.0))
    sizes = [2.0**power for power in range(3, 33)]
    chosen = [choose("all_reduce", where, size) for size in sizes]
    assert chosen == [choose("all_reduce", slower, size) for size in sizes]
    assert chosen[0] == ("tree", LL)
    assert chosen[-1] == ("ring", SIMPLE)


def test_gpus_without_measurements_borrow_from_their_nearest_relative() -> None:
    unknown = GPUS["a100-sxm"].model_copy(update={"name": "b60", "architecture": "other"})  # no B200, whatever its name
    assert timing_of(GPUS["h200-sxm"]) is timing_of(GPUS["h100-sxm"]) is timing_of(unknown)
    assert timing_of(GPUS["b300-sxm"]) is timing_of(GPUS["b200-sxm"])
    assert timing_of(GPUS["gb300"]).ring == timing_of(GPUS["gb200"]).ring
    assert timing_of(GPUS["a100-pcie"]) is timing_of(GPUS["a100-sxm"])


def test_large_blocks_hide_the_latency_of_a_ring_with_one_gpu_a_node() -> None:
    """64 nodes, one GPU each: half of a block goes on while the other half comes in; small blocks pay every hop."""
    network = Network(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 64}))
    ranks = range(0, 512, 8)
    nic = CLUSTERS["dgx-h100"].inter_node.usable_bytes_per_s
    large, small = (network.collective("reduce_scatter", ranks, size) for size in (1 << 30, 1 << 20))
    assert large.bus_bandwidth_bytes_per_s > 0.95 * nic
    assert small.bus_bandwidth_bytes_per_s < 0.2 * nic
    sizes = [1 << i for i in range(16, 34)]
    seconds = [network.collective("reduce_scatter", ranks, size).seconds for size in sizes]
    assert seconds == sorted(seconds)


def test_lines_pass_through_a_domain_as_they_arrive() -> None:
    """LL and LL128 forward words and lines, so a deep domain costs a tree its hops' latency and no stores."""
    where = group(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 16}), range(128))
    size, share = float(1 << 20), 8 * 48e9 * NETWORK_SHARE
    for protocol, stored in ((LL, 2.0), (LL128, WINDOW_FILL)):  # bytes of a byte at each of 8 hops between nodes
        cost = duration("all_reduce", "tree", protocol, where, size)
        assert cost.transfer_s == pytest.approx(8 * stored * size / share)
    deep = replace(where, members=64, members_max=64, ranks=64 * where.domains)
    cost = duration("all_reduce", "tree", LL, deep, size)
    assert cost.transfer_s == pytest.approx(2 * size / (where.chain_bytes_per_s * where.timing.ring.share))


def test_blackwells_rings_over_nodes_step_as_hoppers_do_on_the_same_nics() -> None:
    """Their hops in LL128 inside a node are NVLink's on both (1.9 µs in NCCL's tuning.cc)."""
    b200, h100 = (
        Network(CLUSTERS[name].model_copy(update={"nodes": 128})).collective("all_gather", range(1024), 256 << 20)
        for name in ("dgx-b200", "dgx-h100")
    )
    assert b200.algorithm == h100.algorithm == "ring LL128"
    assert b200.seconds == pytest.approx(h100.seconds, rel=0.05)


def test_one_adapter_fills_a_tree_with_the_channels_that_it_has() -> None:
    """A data-parallel group beside tensor parallelism: a quarter of the window over a quarter of the NICs."""
    cluster = CLUSTERS["dgx-a100"].model_copy(update={"nodes": 16})
    where, whole = group(cluster, range(0, 128, 8)), group(cluster, range(128))
    size, share = 2.0 * (1 << 20), 24e9 * NETWORK_SHARE
    cost = duration("all_reduce", "tree", LL128, where, size)
    stored, rest = 8 * WINDOW_FILL * size / 4, 0.75 * size * 128 / 120 * 2 / TREE_SHARE
    assert cost.transfer_s == pytest.approx((stored + rest) / share)
    assert whole.nics == 8
    four = replace(whole, nics=4.0)
    assert duration("all_reduce", "tree", SIMPLE, whole, 1e9) == duration("all_reduce", "tree", SIMPLE, four, 1e9)


@pytest.mark.parametrize("protocol", [LL, LL128, SIMPLE])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_times_and_loads_come_from_a_protocol_s_facts_not_from_its_name(protocol: Protocol, algorithm: str) -> None:
    network, size = Network(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 4})), 2.0**22
    renamed = replace(protocol, name="A")
    for ranks in (range(8), range(32), range(0, 32, 8)):
        costs = [duration("all_reduce", algorithm, each, network.group(ranks), size) for each in (protocol, renamed)]
        assert costs[0] == costs[1]
        loads = [
            collective_load(network, "all_reduce", ranks, size, Choice(algorithm, each))
            for each in (replace(protocol, sent_bytes=1.0), protocol, renamed)
        ]
        assert loads[1] == loads[2]
        for link, plain in loads[0].bytes.items():
            assert loads[1].bytes[link] == pytest.approx(plain * protocol.sent_bytes)


@pytest.mark.parametrize("machine", ["mi300x-node", "dgx-v100", "gaudi3-node"])
def test_a_small_message_on_few_links_of_a_mesh_is_no_slower_than_one_of_many_on_all_links(machine: str) -> None:
    network, size = Network(CLUSTERS[machine]), 16384
    whole = network.collective("all_to_all", range(8), 8 * size).seconds
    assert all(network.collective("all_to_all", range(n), n * size).seconds <= whole for n in (2, 4))
    assert network.collective("send_recv", range(2), size).seconds <= whole
    assert network.send(0, 1, size) <= whole
    switched = Network(CLUSTERS["dgx-h100"])
    assert switched.group(range(4)).exchange_links == switched.path(0, 1).links == 1.0
