"""An algorithm that the project has never heard of: a closed form, the time of its protocols, and its traits."""

from __future__ import annotations

import math

import pytest

from topology.algorithms import TRAITS, Traits
from topology.collectives import ALGORITHMS, AlphaBeta, Choice, ring_all_reduce
from topology.durations import DURATIONS
from topology.group import Group
from topology.network import Network
from topology.presets import CLUSTERS
from topology.protocols import RING, SIMPLE, Protocol
from topology.shares import collective_load

NAME, MIB = "halving", 1 << 20
LATENCY_S = 3e-6  # of a step, as if measured


def halving(group: Group, size_bytes: float) -> AlphaBeta:
    """2⌈log2 n⌉α + 2S(n-1)/n / B: recursive halving, then doubling (Thakur 2005, section 4.5)."""
    steps = 2 * math.ceil(math.log2(group.ranks))
    return AlphaBeta(steps * group.latency_s, ring_all_reduce(group, size_bytes).transfer_s)


def halving_s(group: Group, protocol: Protocol, size_bytes: float) -> AlphaBeta:
    return AlphaBeta(2 * math.log2(group.ranks) * LATENCY_S, halving(group, size_bytes).transfer_s)


def usable(group: Group, size_bytes: float) -> bool:
    return group.domains == 1 and group.ranks.bit_count() == 1


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS["all_reduce"], NAME, halving)
    monkeypatch.setitem(DURATIONS["all_reduce"], NAME, halving_s)
    monkeypatch.setitem(TRAITS, NAME, Traits(TRAITS["ring"].sent_bytes, protocols=RING, usable=usable))


def test_it_is_chosen_where_it_is_fastest_and_can_run() -> None:
    network = Network(CLUSTERS["dgx-a100"])
    found = network.collective("all_reduce", range(8), MIB)
    assert found.choice.algorithm == NAME
    assert found.seconds == pytest.approx(halving_s(network.group(range(8)), SIMPLE, MIB).seconds)
    for ranks in (range(6), range(16)):
        assert network.chosen("all_reduce", ranks, MIB).algorithm != NAME
    assert network.chosen("all_gather", range(8), MIB).algorithm == "ring"


def test_its_load_on_links_is_its_traits() -> None:
    network = Network(CLUSTERS["dgx-a100"])
    load = collective_load(network, "all_reduce", range(8), MIB, Choice(NAME, SIMPLE))
    assert load.bytes == {"domain": pytest.approx(2 * MIB * 7 / 8)}
    assert 0 < load.flowing < 1
