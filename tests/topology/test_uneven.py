"""A network that is not regular: what its routes say changes, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.topology.link_flows import cluster
from topology.graph import described
from topology.group import Group
from topology.network import Network
from topology.presets import CLUSTERS
from topology.recognise import recognise
from topology.spec import ClusterSpec
from topology.wiring import Ends, Wiring

GROUPS = [range(8), range(8, 16), range(4), range(16), range(0, 16, 8), range(3, 16, 8), range(0, 32, 2), range(32)]


def changed(spec: ClusterSpec, ends: Ends, scale: float) -> ClusterSpec:
    """The cluster with one link at `scale` of its bandwidth in both directions; 0: taken out."""
    wiring = described(spec)
    links = dict(wiring.links)
    for way in (ends, ends[::-1]):
        each = links.pop(way)
        if scale:
            links[way] = each._replace(bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * scale)
    return recognise(Wiring(wiring.parts, links, wiring.name, wiring.source))


def as_graph(spec: ClusterSpec) -> Network:
    """The cluster asked by its routes, regular or not."""
    return Network(spec.model_copy(update={"topology": described(spec)}))


@pytest.mark.parametrize("name", CLUSTERS)
def test_routes_of_a_regular_network_give_the_closed_forms(name: str) -> None:
    spec = cluster(name, 4 if name != "cpu-host" else 2)
    graph, preset = as_graph(spec), Network(spec)
    ranks = spec.nodes * spec.gpus_per_node
    for members in (range(2), range(ranks), range(0, ranks, 2), range(1, ranks, spec.gpus_per_node)):
        assert graph.group(members) == preset.group(members)
    for dst in (1, ranks // 2, ranks - 1):
        assert graph.path(0, dst) == preset.path(0, dst)


def bandwidths(group: Group) -> dict[str, float]:
    names = [name for name in Group.__struct_fields__ if name.endswith("bytes_per_s")]
    return {name: getattr(group, name) for name in names}


@pytest.mark.parametrize("kind", ["rail_optimized", "fat_tree"])
def test_half_a_nic_halves_what_passes_it_and_nothing_else(kind: str) -> None:
    spec = cluster("dgx-h100", 4, kind=kind)
    leaf = "leaf1.2" if kind == "rail_optimized" else "leaf1"
    slow = changed(spec, ("nic1.2", leaf), 0.5)
    assert slow.topology is not None
    assert slow.model_copy(update={"topology": None}) == spec
    here, preset = Network(slow), Network(spec)
    for ranks in GROUPS:
        before, after = preset.group(ranks), here.group(ranks)
        halved = {"inter_ring_bytes_per_s", "inter_tree_bytes_per_s", "inter_exchange_bytes_per_s"}
        touched = 10 in ranks and before.domains > 1
        if not touched:
            assert after == before, ranks
            continue
        for name, value in bandwidths(after).items():
            part = 0.5 if name in halved | {"inter_pair_bytes_per_s"} else 1.0
            if name == "inter_pair_bytes_per_s" and not any(b - a == 8 for a, b in pairwise(ranks)):
                continue  # successive members are neighbours: which of them leaves the node depends on the group
            assert value == pytest.approx(part * bandwidths(before)[name]), (ranks, name)
    for src, dst in ((10, 18), (2, 10), (18, 10)):
        assert here.path(src, dst) == replace(preset.path(src, dst), bytes_per_s=preset.path(src, dst).bytes_per_s / 2)
    for src, dst in ((11, 19), (0, 1), (10, 11), (2, 18)):
        assert here.path(src, dst) == preset.path(src, dst)


def test_half_an_nvlink_slows_its_node_alone() -> None:
    spec = cluster("dgx-h100", 2)
    here, preset = Network(changed(spec, ("gpu3", "nvswitch0"), 0.5)), Network(spec)
    assert here.group(range(8)).ring_bytes_per_s == pytest.approx(preset.group(range(8)).ring_bytes_per_s / 2)
    assert here.group(range(8, 16)) == preset.group(range(8, 16))
    assert here.group(range(3)) == preset.group(range(3))
    assert here.group(range(0, 16, 8)) == preset.group(range(0, 16, 8))
    assert (
        here.collective("all_reduce", range(8), 1e9).seconds
        > 1.5 * preset.collective("all_reduce", range(8), 1e9).seconds
    )
    assert here.own_links_left(3)["domain"] == 0.5
    assert set(here.own_links_left(2).values()) == {1.0}


def test_a_slow_link_above_the_leaves_slows_what_crosses_it() -> None:
    spec = cluster("dgx-h100", 4, nodes_per_leaf=2)
    here, preset = Network(changed(spec, ("leaf0.5", "spine"), 0.25)), Network(spec)
    assert here.group((5, 13)) == preset.group((5, 13))  # under one leaf
    rail = (5, 13, 21, 29)
    assert here.group(rail).inter_ring_bytes_per_s == pytest.approx(preset.group(rail).inter_ring_bytes_per_s / 2)
    assert here.path(5, 21).bytes_per_s == pytest.approx(preset.path(5, 21).bytes_per_s / 4)
    assert here.group((4, 12, 20, 28)) == preset.group((4, 12, 20, 28))


def test_a_gpu_cut_off_nvlink_goes_over_pcie() -> None:
    spec = cluster("dgx-h100", 2)
    here = Network(changed(spec, ("gpu3", "nvswitch0"), 0))
    assert here.cluster.domain_gpus == 8
    assert here.path(3, 4).bytes_per_s == pytest.approx(spec.gpu.host_bandwidth_bytes_per_s)
    assert here.group(range(3)) == Network(spec).group(range(3))
    assert here.group(range(8)).ring_bytes_per_s == pytest.approx(spec.gpu.host_bandwidth_bytes_per_s)


def test_a_gpu_cut_off_its_nic_uses_all_others_of_its_node() -> None:
    spec = cluster("dgx-h100", 2, kind="fat_tree")
    here, preset = Network(changed(spec, ("nic0.3", "leaf0"), 0)), Network(spec)
    for ranks in ((3, 11), (7, 15)):  # all groups at once: eight GPUs' bytes over seven NICs
        left = here.group(ranks).inter_ring_bytes_per_s / preset.group(ranks).inter_ring_bytes_per_s
        assert left == pytest.approx(7 / 8)


def test_a_cut_link_of_a_torus_is_gone_round() -> None:
    spec = cluster("dgx-h100", 5, kind="torus", nics_per_node=1)
    here, preset = Network(changed(spec, ("router0", "router1"), 0)), Network(spec)
    assert here.cluster.inter_node.kind == "torus"
    assert here.path(0, 8).bytes_per_s == preset.path(0, 8).bytes_per_s  # nobody else goes backwards
    assert here.path(0, 8).inter_latency_s == pytest.approx(4 * preset.path(0, 8).inter_latency_s)


def test_mesh_links() -> None:
    spec = cluster("dgx-v100", 1)
    here, preset = Network(changed(spec, ("gpu0", "gpu1"), 0.5)), Network(spec)
    assert here.path(0, 1).bytes_per_s == preset.path(0, 1).bytes_per_s / 2
    assert here.path(4, 5) == preset.path(4, 5)
    assert here.group(range(8)).ring_bytes_per_s == pytest.approx(preset.group(range(8)).ring_bytes_per_s / 2)
    assert here.group((4, 5, 6, 7)) == preset.group((4, 5, 6, 7))
