"""Max-min fair sharing: textbook cases, and the definition as a property of random ones."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.contention import max_min_rates, transfer_seconds

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
