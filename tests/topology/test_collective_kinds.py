"""What the records of collectives say, against what ranks really send in their patterns of messages."""

from collections import Counter

import pytest

from sim.graph.collective_steps import pattern_of
from topology.collective_kinds import KINDS, bus_factor, sent_between_trees
from topology.collectives import ALGORITHMS


def test_each_kind_with_an_algorithm_has_a_record() -> None:
    assert set(KINDS) == set(ALGORITHMS)


@pytest.mark.parametrize("members", [2, 3, 8])
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("all_reduce", "ring"),
        ("all_reduce", "mesh"),
        ("all_gather", "ring"),
        ("reduce_scatter", "mesh"),
        ("all_to_all", "pairwise"),
        ("send_recv", "direct"),
    ],
)
def test_each_rank_sends_what_the_record_says(kind: str, algorithm: str, members: int) -> None:
    pattern = pattern_of(kind, algorithm, members)
    assert pattern is not None
    sent = Counter(hop.sender for hop in pattern.hops)
    assert [sent[i] * pattern.piece for i in range(members)] == pytest.approx([bus_factor(kind, members)] * members)


@pytest.mark.parametrize("domains", [2, 4, 5, 16])
def test_no_domain_sends_more_over_two_trees_than_the_form_says(domains: int) -> None:
    pattern = pattern_of("all_reduce", "tree", domains)
    assert pattern is not None
    sent = Counter(hop.sender for hop in pattern.hops)
    assert max(sent.values()) * pattern.piece == pytest.approx(sent_between_trees(domains))
