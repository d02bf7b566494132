"""What communications put on a GPU's links: the bytes that lie on the graph's, and never more than a link carries."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.topology.link_flows import Links, Transfer, cluster, exchange_transfers
from topology.collectives import Choice
from topology.loads import ring_transfers
from topology.network import Network
from topology.presets import CLUSTERS
from topology.protocols import SIMPLE
from topology.shares import (
    LINKS,
    Load,
    capacities,
    collective_load,
    copy_load,
    links_between,
    links_of,
    message_load,
    path_of,
)

RANKS = {"a node": range(8), "two nodes": range(16), "one a node": range(0, 64, 8), "four a node": range(0, 64, 2)}


def sent_bytes(links: Links, transfers: list[Transfer]) -> Counter[str]:
    """Bytes that go out over all links of a sort on the graph."""
    out: Counter[str] = Counter()
    for src, dst, size in transfers:
        for a, b in links.route(src, dst).loads:
            sort = {("gpu", "nvs"): "domain", ("nic", "lea"): "nic", ("lea", "spi"): "spine"}.get((a[:3], b[:3]))
            if sort is not None:
                out[sort] += size
    return out


def loaded(load: dict[str, float], members: int) -> dict[str, float]:
    return {name: members * size for name, size in load.items() if name != "host"}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1.0), ("all_reduce", 2.0)])
def test_rings_send_what_lies_on_the_graph(kind: str, passes: float, ranks: range) -> None:
    spec, n = cluster("dgx-a100", 8, kind="fat_tree", oversubscription=2.0, nodes_per_leaf=2), len(ranks)
    load = collective_load(Network(spec), kind, ranks, 1e9, Choice("ring", SIMPLE))
    transfers = ring_transfers(spec, ranks, passes * 1e9 * (n - 1) / n)
    found = sent_bytes(Links(spec), transfers)
    for name in ("domain", "nic", "spine"):
        crosses = name != "spine" or max(ranks) >= 16  # the first two nodes share leaves
        assert loaded(dict(load.bytes), n).get(name, 0.0) == pytest.approx(found[name] if crosses else 0.0), name


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_exchanges_send_what_lies_on_the_graph(ranks: range) -> None:
    spec, n = cluster("dgx-h100", 8, kind="fat_tree", oversubscription=2.0, nodes_per_leaf=2), len(ranks)
    load = collective_load(Network(spec), "all_to_all", ranks, 1e9, Choice("pairwise", SIMPLE))
    found = sent_bytes(Links(spec), exchange_transfers(ranks, 1e9))
    for name in ("domain", "nic", "spine"):
        assert loaded(dict(load.bytes), n).get(name, 0.0) == pytest.approx(found[name]), name


@pytest.mark.parametrize("name", [n for n in CLUSTERS if n != "dgx-v100"])
def test_alone_nothing_asks_for_more_than_a_link_carries(name: str) -> None:
    spec = CLUSTERS[name].model_copy(update={"nodes": 36})
    network, carried = Network(spec), capacities(spec)
    span = spec.gpus_per_node
    for ranks in (range(2), range(max(2, span)), range(2 * span), range(0, 8 * span, span)):
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"):
            for size in (1e4, 1e6, 1e9):
                load, seconds = collective_load(network, kind, ranks, size), network.collective(kind, ranks, size)
                assert 0 < load.flowing <= 1
                for link, sent in load.bytes.items():
                    assert link in links_of(network, ranks) or link == "host"
                    assert sent <= carried[link] * load.flowing * seconds.seconds * (1 + 1e-9), (
                        kind,
                        ranks,
                        size,
                        link,
                    )
    for other in (1, span, 3 * span + 1):
        load = message_load(network, 0, other, 1e8)
        assert set(load.bytes) <= {*links_between(network, 0, other), "host"}
        for link, sent in load.bytes.items():
            assert sent <= carried[link] * load.flowing * network.send(0, other, 1e8) * (1 + 1e-9)


def test_large_messages_fill_their_nic_and_copies_their_pcie() -> None:
    spec = cluster("dgx-h100", 2)
    network, carried = Network(spec), capacities(spec)
    load = message_load(network, 0, 8, 1e9)
    assert load.bytes["nic"] / (load.flowing * network.send(0, 8, 1e9)) == pytest.approx(carried["nic"], rel=0.01)
    load = copy_load(network, 1e9)
    assert load.bytes["host"] / (load.flowing * network.host_copy(1e9)) == pytest.approx(carried["host"])
    assert set(carried) == set(LINKS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_messages_of_equal_ways_have_equal_loads(name: str) -> None:
    spec = CLUSTERS[name].model_copy(update={"nodes": 36})
    inter = spec.inter_node.model_copy(update={"oversubscription": 2.0, "nodes_per_leaf": 2})
    network = Network(spec.model_copy(update={"inter_node": inter}), {(0, 1): 0.5, (1, 1): 0.25})
    known: dict[object, Load] = {}
    for src in range(0, 5 * spec.gpus_per_node, 3):
        for dst in range(1, 100, 7):
            if src != dst:
                load = message_load(network, src, dst, 1e7)
                assert known.setdefault(path_of(network, src, dst), load) == load, (src, dst)
                links = links_between(network, src, dst)
                assert set(load.bytes) <= {*links, "host"}, (src, dst)
                assert ("domain" in load.bytes) == ("domain" in links), (src, dst)
    assert len(known) > 1
