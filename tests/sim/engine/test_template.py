"""Programs compiled to streams: what overlaps, what waits, and that one task can stand for a closed program."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.core.program import BLOCK_END, Comm, Compute, Phase, Wait
from sim.prices.price import Priced, together_s
from sim.programs.compile import compile_program
from sim.programs.interleave import interleave

F = Phase.FORWARD


def price(item: Compute | Comm) -> Priced:
    return Priced(item.bytes, "measured", 0.0)


def work(name: str, seconds: float) -> Compute:
    return Compute(name, "elementwise", (1,), "fp32", 0.0, seconds, F)


def talk(seconds: float, handle: str = "", group: str = "tp") -> Comm:
    return Comm("message", "all_reduce", group, seconds, F, not handle, handle)


def test_blocking_communication_adds_up() -> None:
    t = compile_program((work("a", 1), talk(2), work("b", 3)), price)
    assert (t.makespan_s, t.compute_s, t.exposed_s, t.alone) == (6, 4, 2, True)


def test_asynchronous_communication_hides_under_computation() -> None:
    t = compile_program((work("a", 1), talk(2, "h"), work("b", 3), Wait("h", F), work("c", 1)), price)
    assert (t.makespan_s, t.exposed_s, t.alone) == (5, 0, True)


def test_it_starts_after_the_last_computation_before_it() -> None:
    t = compile_program((work("a", 1), talk(5, "h"), work("b", 3), Wait("h", F), work("c", 1)), price)
    assert (t.makespan_s, t.exposed_s) == (7, 2)


def test_one_stream_is_in_order_and_two_are_not() -> None:
    same = compile_program((talk(2, "x"), talk(2, "y"), Wait("x", F), Wait("y", F), work("a", 1)), price)
    other = compile_program((talk(2, "x"), talk(2, "y", "cp"), Wait("x", F), Wait("y", F), work("a", 1)), price)
    assert (same.makespan_s, other.makespan_s) == (5, 3)


def test_what_nobody_waits_for_stays_open() -> None:
    t = compile_program((work("a", 1), talk(9, "h")), price)
    assert t.alone
    assert [(x.stream, x.lag_s, x.seconds) for x in t.launches] == [("tp", 1, 9)]
    assert [h for h, _ in t.open] == ["h"]


def test_a_result_waits_for_a_last_blocking_communication() -> None:
    t = compile_program((work("a", 1), talk(2)), price)
    assert t.tail == (1,)
    assert t.makespan_s == 3


def test_a_wait_for_an_earlier_action_is_external() -> None:
    t = compile_program((Wait("before", F), work("a", 1), talk(2)), price)
    assert t.external == t.tasks[0].external == ("before",)
    assert t.alone


def test_one_task_stands_for_no_program_that_waits_for_earlier_actions_midway() -> None:
    later = compile_program((work("a", 1), talk(1), Wait("before", F), work("b", 1)), price)
    beside = compile_program((Wait("before", F), talk(2, "h"), work("a", 1)), price)
    assert not later.alone
    assert not beside.alone


def exchange(seconds: float, phase: Phase = F) -> Comm:
    return Comm("tokens", "all_to_all", "ep", seconds, phase)


def in_phase(name: str, seconds: float, phase: Phase) -> Compute:
    return Compute(name, "elementwise", (1,), "fp32", 0.0, seconds, phase)


@pytest.mark.parametrize("exchange_s", [0.5, 2.0])
def test_a_forward_and_a_backward_take_turns_and_hide_each_others_exchanges(exchange_s: float) -> None:
    forward = (work("attention", 2), exchange(exchange_s), work("experts", 2), exchange(exchange_s), work("sum", 2))
    backward = tuple(replace(i, phase=Phase.INPUT_GRAD) for i in forward)
    both = interleave(forward, backward, price)
    assert both.compute_s == 12
    assert both.makespan_s == 12
    assert [t.kind for t in both.tasks if t.group] == ["all_to_all"] * 4
    assert both.alone


def test_other_messages_of_a_pair_are_waited_for() -> None:
    """Computations of a pair share one stream, in a fixed order: none of the other program fills a gap."""
    forward = (work("a", 2), talk(5), work("b", 2), exchange(1), work("c", 2))
    backward = (in_phase("d", 2, Phase.INPUT_GRAD), exchange(1, Phase.INPUT_GRAD), in_phase("e", 2, Phase.INPUT_GRAD))
    assert interleave(forward, backward, price).makespan_s == 10 + 5


def test_exchanges_of_long_chains_queue_in_turn() -> None:
    """Exchanges take longer than all computations: the first starts after the backward's first computation."""
    forward = (work("a", 1), exchange(10), work("b", 1), exchange(10), work("c", 1))
    backward = tuple(replace(i, phase=Phase.INPUT_GRAD) for i in forward)
    assert interleave(forward, backward, price).makespan_s == 1 + 4 * 10 + 1


def test_gradients_of_weights_do_not_delay_the_exchange() -> None:
    """The backward's exchange needs the input's gradient alone, and runs beside the weights' gradients."""
    first, second = Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
    backward = (in_phase("x", 1, first), in_phase("w", 4, second), exchange(4, first), in_phase("y", 1, first))
    assert interleave((), backward, price).makespan_s == 1 + 4 + 1
    assert interleave((), backward, price, delays=False).makespan_s == 1 + 4 + 4 + 1
    assert compile_program(backward, price).makespan_s == 1 + 4 + 4 + 1


def test_the_host_gains_nothing_in_one_block_for_the_next() -> None:
    """A block that the host is late for, then one that the device is busy with: each takes its own time."""
    layer, head = work("a", 1), work("head", 30)

    def hosted(item: Compute | Comm) -> Priced:
        return Priced(item.bytes, "measured", 0.0, host_s=10.0)

    apart = compile_program((layer, BLOCK_END, head, BLOCK_END), hosted)
    assert apart.makespan_s == pytest.approx(together_s(10, 1) + together_s(10, 30))
    assert compile_program((layer, head), hosted).makespan_s == pytest.approx(together_s(20, 31))
    assert len(apart.tasks) == 1


@pytest.mark.parametrize("handle", ["h", ""])
def test_a_communication_that_is_only_started_does_not_hold_up_the_host(handle: str) -> None:
    """A bucket of gradients sent in the midst of a block: issued as if it were not there."""

    def hosted(item: Compute | Comm) -> Priced:
        return Priced(item.bytes, "measured", 0.0, host_s=10.0 if isinstance(item, Compute) else 0.0)

    t = compile_program((work("matmul", 30), talk(1, handle), work("sum", 1), BLOCK_END), hosted)
    apart_s = together_s(10, 30) + together_s(10, 1)
    assert t.compute_s == pytest.approx(together_s(20, 31) if handle else apart_s)
    assert together_s(20, 31) < 0.85 * apart_s
