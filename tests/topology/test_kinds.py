"""Kinds of networks beyond trees: rails alone, dragonfly+, GPUs of two kinds."""

from __future__ import annotations

import pytest

from tests.topology.link_flows import cluster
from topology.dragonfly import GLOBAL_S, dragonfly_plus
from topology.graph import described
from topology.graph_files import from_node_link
from topology.network import Network
from topology.recognise import recognise
from topology.routes import Routes
from topology.wiring import node_link


def test_rails_alone_have_no_spine_and_carry_what_rails_do() -> None:
    spec = cluster("dgx-h100", 4, nodes_per_leaf=4)
    assert not any(part.tier == "spine" for part in described(spec).parts.values())
    assert recognise(described(spec)) == spec
    passed = [src for src, _ in Routes(described(spec), spec).passage(0, 9).loads]
    assert passed[:3] == ["gpu0", "nvswitch0", "gpu1"]  # rail 1 is reached inside the node
    tree = Network(cluster("dgx-h100", 4))
    assert Network(spec).group(range(32)) == tree.group(range(32))


def test_a_dragonfly_blocks_between_groups_alone() -> None:
    """Four groups of two nodes: a group's spines have a third of what comes in for each other group."""
    spec = cluster("dgx-h100", 8, kind="fat_tree")
    found = recognise(dragonfly_plus(spec, 4))
    here, tree = Network(found), Network(spec)
    assert here.group((0, 8)) == tree.group((0, 8))
    near, far = here.path(0, 8), here.path(0, 16)
    assert near == tree.path(0, 8)
    assert far.bytes_per_s == pytest.approx(tree.path(0, 16).bytes_per_s / 3)
    assert far.inter_latency_s == pytest.approx(spec.inter_node.latency_s + GLOBAL_S)
    ring = tuple(range(0, 64, 8))  # of a group's two nodes one sends to the next group
    assert here.group(ring).inter_ring_bytes_per_s == pytest.approx(tree.group(ring).inter_ring_bytes_per_s * 2 / 3)
    everyone = range(64)  # an exchange uses all global links alike: 6/7 of the bytes leave a group's node pair
    assert here.group(everyone).inter_exchange_bytes_per_s == pytest.approx(
        tree.group(everyone).inter_exchange_bytes_per_s
    )


def test_nodes_divide_into_groups() -> None:
    with pytest.raises(ValueError, match="found 3 groups; must divide the 8 nodes"):
        dragonfly_plus(cluster("dgx-h100", 8), 3)


def test_gpus_of_two_kinds_are_told_apart() -> None:
    """A file whose second node holds another GPU: the most usual one is the cluster's, the other stands beside it."""
    data = node_link(described(cluster("dgx-h100", 3)))
    for node in data["nodes"]:
        if node["kind"] == "gpu" and node["rank"] in range(8, 16):
            node["gpu"] = "a100-sxm"
    found = recognise(from_node_link(data))
    assert [gpu.name for gpu in found.gpus] == ["h100-sxm", "a100-sxm"]
    assert [found.kind_of(rank) for rank in (0, 8, 15, 16)] == ["h100-sxm", "a100-sxm", "a100-sxm", "h100-sxm"]
    assert found.others[0].intra_node == found.intra_node
