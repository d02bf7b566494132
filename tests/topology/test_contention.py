"""Max-min fair sharing: textbook cases, and the definition as a property of random ones."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.max_min import max_min_rates, transfer_seconds
from topology.contention import shared_fractions

Case = tuple[list[list[int]], dict[int, float]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 8))
    capacity = {each: draw(st.floats(0.1, 1000)) for each in range(count)}
    way = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    return draw(st.lists(way, min_size=1, max_size=12)), capacity


@given(cases())
def test_no_link_carries_more_than_it_can(case: Case) -> None:
    flows, capacity = case
    rates = max_min_rates(flows, capacity)
    for each, limit in capacity.items():
        carried = sum(rate for rate, flow in zip(rates, flows, strict=True) if each in flow)
        assert carried <= limit * (1 + 1e-9)


@given(cases())
def test_every_flow_has_a_full_link_on_which_none_is_faster(case: Case) -> None:
    flows, capacity = case
    rates = max_min_rates(flows, capacity)
    for rate, flow in zip(rates, flows, strict=True):
        bottlenecks = 0
        for each in flow:
            sharing = [other for other, way in zip(rates, flows, strict=True) if each in way]
            full = sum(sharing) >= capacity[each] * (1 - 1e-9)
            bottlenecks += full and rate >= max(sharing) * (1 - 1e-9)
        assert bottlenecks > 0


@given(cases())
def test_the_order_of_flows_does_not_matter(case: Case) -> None:
    flows, capacity = case
    rates = max_min_rates(flows, capacity)
    assert max_min_rates(flows[::-1], capacity)[::-1] == pytest.approx(rates)


@given(cases(), st.floats(0.5, 100))
def test_transfers_deliver_every_byte_and_no_faster_than_alone(case: Case, size: float) -> None:
    flows, capacity = case
    ends = transfer_seconds(flows, [size] * len(flows), capacity)
    for end, flow in zip(ends, flows, strict=True):
        assert end >= size / min(capacity[each] for each in flow) * (1 - 1e-9)
    load = Counter(each for flow in flows for each in flow)
    for each, number in load.items():
        assert max(ends) >= size * number / capacity[each] * (1 - 1e-9)


def test_one_long_flow_over_three_links_of_the_line_network() -> None:
    # Bertsekas & Gallager, section 6.5.2: the long flow and the short one on the narrowest link halve it.
    flows = [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert max_min_rates(flows, {"a": 1.0, "b": 2.0, "c": 4.0}) == [0.5, 0.5, 1.5, 3.5]


def test_a_transfer_speeds_up_when_another_ends() -> None:
    # Both at 5 bytes/s until the short one ends at 2 s; then 20 of the other's 30 bytes are left, at 10.
    assert transfer_seconds([["a"], ["a"]], [10.0, 30.0], {"a": 10.0}) == [2.0, 4.0]


def test_flows_without_links_and_links_without_capacity() -> None:
    assert max_min_rates([[], ["a"]], {"a": 0.0}) == [float("inf"), 0.0]
    assert max_min_rates([["a", "a"]], {"a": 4.0}) == [4.0]
    assert transfer_seconds([[], ["a"]], [5.0, 5.0], {"a": 0.0}) == [0.0, float("inf")]
    with pytest.raises(ValueError, match="'b' has capacity None"):
        max_min_rates([["b"]], {"a": 1.0})


Loads = tuple[list[dict[int, float]], dict[int, float]]


@st.composite
def loads(draw: st.DrawFn) -> Loads:
    """Flows that put unlike amounts on links, none more than a link carries."""
    flows, capacity = draw(cases())
    share = st.floats(0.01, 1.0)
    return [{each: capacity[each] * draw(share) for each in flow} for flow in flows], capacity


@given(cases())
def test_flows_that_could_take_any_link_whole_get_max_min_rates(case: Case) -> None:
    flows, capacity = case
    alone = max(capacity.values())
    fractions = shared_fractions([dict.fromkeys(flow, alone) for flow in flows], capacity)
    assert [f * alone for f in fractions] == pytest.approx(max_min_rates(flows, capacity))


@given(loads())
def test_a_flow_is_as_fast_as_alone_or_has_a_full_link_on_which_none_sends_more(case: Loads) -> None:
    flows, capacity = case
    fractions = shared_fractions(flows, capacity)
    sent = [{each: load * f for each, load in flow.items()} for flow, f in zip(flows, fractions, strict=True)]
    carried = {each: sum(s.get(each, 0.0) for s in sent) for each in capacity}
    level = [max(s.values()) for s in sent]  # what grows evenly: a flow's bytes on the link that it loads most
    assert all(carried[each] <= limit * (1 + 1e-9) for each, limit in capacity.items())
    for i, flow in enumerate(flows):
        full = [each for each in flow if carried[each] >= capacity[each] * (1 - 1e-9)]
        no_faster = any(
            all(level[i] >= level[j] * (1 - 1e-9) for j, o in enumerate(flows) if each in o) for each in full
        )
        assert fractions[i] == 1.0 or no_faster


@given(loads(), st.randoms(use_true_random=False), st.integers(2, 4))
def test_order_and_equal_copies_change_no_bit(case: Loads, order: random.Random, copies: int) -> None:
    flows, capacity = case
    fractions = shared_fractions(flows, capacity)
    many = [
        (i, {(copy, each): load for each, load in flow.items()})
        for copy in range(copies)
        for i, flow in enumerate(flows)
    ]
    order.shuffle(many)
    limits = {(copy, each): limit for copy in range(copies) for each, limit in capacity.items()}
    again = shared_fractions([flow for _, flow in many], limits)
    assert again == [fractions[i] for i, _ in many]
