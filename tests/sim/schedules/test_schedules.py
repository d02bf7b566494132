"""Every schedule is valid, and its bubble and memory are its paper's, on unit times."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.core.actions import Action, Kind, Overlap, Schedule, grid, parts, validate
from sim.graph.schedule_columns import NUMBER, ScheduleColumns
from sim.schedules import FORMS, ONE_RANK, build
from sim.schedules.unit_time import Timed, UnitTimes, evaluate
from sim.schedules.zb_search import zb_search
from tests.sim.schedule_facts import bubble_ratio, idle_s, in_flight, inner_idle_s

ANY_M = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "zb_search")
RANKS = st.integers(1, 9)
EXTRA = st.integers(0, 24)
DURATION = st.integers(1, 9).map(float)


def picture(schedule: Schedule) -> list[list[str | None]]:
    """Rows for `sim.core.actions.grid`: a column per unit of time with F = I = W = 1, B = 2 and free messages.

    The second unit of a full backward shows `-`; an overlap's backward follows its forward, after a `+`.
    """
    rows: list[list[str | None]] = []
    for entries, starts in zip(schedule.ranks, evaluate(schedule).start_s, strict=True):
        row: list[str | None] = []
        for entry, start in zip(entries, starts, strict=True):
            row += [None] * (round(start) - len(row))
            for i, action in enumerate(parts(entry)):
                row += ["+" * i + str(action)] + ["-"] * (action.kind is Kind.B)
        rows.append(row)
    return rows


def make(name: str, p: int, m: int, v: int | None = None) -> tuple[Schedule, Timed]:
    schedule = build(name, p, m, v)
    return schedule, evaluate(schedule)


@pytest.mark.parametrize("name", ANY_M)
@settings(deadline=None, max_examples=40)
@given(p=RANKS, m=st.integers(1, 40))
def test_any_number_of_micro_batches_is_valid(name: str, p: int, m: int) -> None:
    validate(build(name, p, m))


@settings(deadline=None, max_examples=40)
@given(p=RANKS, rounds=st.integers(1, 6), v=st.integers(2, 5))
def test_interleaved_is_valid(p: int, rounds: int, v: int) -> None:
    validate(build("interleaved_1f1b", p, p * rounds, v))


@settings(deadline=None, max_examples=40)
@given(half=st.integers(1, 5), extra=EXTRA)
def test_dualpipe_is_valid(half: int, extra: int) -> None:
    schedule = build("dualpipe", 2 * half, 4 * half + 2 * extra)
    validate(schedule)
    assert sorted(schedule.part_of_stage) == sorted([*range(2 * half)] * 2)
    for r in range(2 * half):
        own = [s for s, rank in enumerate(schedule.rank_of_stage) if rank == r]
        assert {schedule.part_of_stage[s] for s in own} == {r, 2 * half - 1 - r}


@settings(deadline=None, max_examples=40)
@given(p=RANKS, extra=EXTRA)
def test_dualpipe_v_is_valid(p: int, extra: int) -> None:
    validate(build("dualpipe_v", p, 2 * p + extra))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1"])
@settings(deadline=None, max_examples=40)
@given(p=RANKS, m=st.integers(1, 40))
def test_blocking_messages_pass(name: str, p: int, m: int) -> None:
    validate(build(name, p, m), p2p_overlap=False)


@pytest.mark.parametrize(("p", "rounds", "v"), [(1, 3, 2), (2, 1, 2), (4, 2, 3), (8, 3, 2)])
def test_interleaved_in_pairs(p: int, rounds: int, v: int) -> None:
    """Each steady forward runs with a backward of another micro-batch or stage; a rank leads by one forward more."""
    paired = FORMS["interleaved_1f1b"].paired.build(p, p * rounds, v)
    validate(paired)
    for rank, entries in enumerate(paired.ranks):
        lead = min(p * rounds * v, (v - 1) * p + 2 * (p - 1 - rank) + 1)
        pairs = [e for e in entries if isinstance(e, Overlap)]
        assert len(pairs) == p * rounds * v - lead
        assert all(e.forward[::2] != e.backward[::2] for e in pairs)
        assert [a for a in entries[:lead] if a.kind is Kind.F] == list(entries[:lead])


@pytest.mark.parametrize("m", [1, 2, 5])
def test_one_rank_in_pairs(m: int) -> None:
    """Every forward but the first runs with the backward of the micro-batch before it."""
    paired = ONE_RANK.paired.build(1, m)
    validate(paired)
    (entries,) = paired.ranks
    assert entries[0] == Action(0, Kind.F, 0)
    assert entries[-1] == Action(0, Kind.B, m - 1)
    pairs = [e for e in entries if isinstance(e, Overlap)]
    assert [(e.forward, e.backward) for e in pairs] == [
        (Action(0, Kind.F, i), Action(0, Kind.B, i - 1)) for i in range(1, m)
    ]
    assert ONE_RANK.build(1, m) == build("1f1b", 1, m)


@settings(deadline=None, max_examples=30)
@given(p=st.integers(2, 8), rounds=st.integers(2, 4), v=st.integers(2, 4))
def test_interleaved_messages_of_a_forward_and_a_backward_go_at_once(p: int, rounds: int, v: int) -> None:
    """As in Megatron-LM without overlap; with a batch after each action ranks wait in a circle."""
    schedule = build("interleaved_1f1b", p, p * rounds, v)
    validate(schedule, p2p_overlap=False)
    with pytest.raises(ValueError, match="blocking messages after it never pass"):
        validate(replace(schedule, joint=()), p2p_overlap=False)


@pytest.mark.parametrize("name", ["zb_h2", "zb_v", "dualpipe", "dualpipe_v"])
def test_schedules_that_need_messages_posted_ahead(name: str) -> None:
    """Their ranks send where the taker is not yet receiving: batches of messages wait in a circle."""
    with pytest.raises(ValueError, match="blocking messages after it never pass"):
        validate(build(name, 4, 8), p2p_overlap=False)


# Bubbles. With F = I = W = 1 and B = 2, over the common makespan.


@settings(deadline=None, max_examples=60)
@given(p=RANKS, m=st.integers(1, 40))
def test_bubble_of_naive_gpipe_and_1f1b(p: int, m: int) -> None:
    assert bubble_ratio(make("naive", p, m)[1]) == pytest.approx(p - 1)
    assert bubble_ratio(make("gpipe", p, m)[1]) == pytest.approx((p - 1) / m)
    assert bubble_ratio(make("1f1b", p, m)[1]) == pytest.approx((p - 1) / m)


@settings(deadline=None, max_examples=40)
@given(p=RANKS, rounds=st.integers(1, 6), v=st.integers(2, 5), f=DURATION, i=DURATION, w=DURATION)
def test_bubble_of_interleaved(p: int, rounds: int, v: int, f: float, i: float, w: float) -> None:
    timed = evaluate(build("interleaved_1f1b", p, p * rounds, v), UnitTimes(f, i, w))
    assert bubble_ratio(timed) == pytest.approx((p - 1) / (v * p * rounds))


@settings(deadline=None, max_examples=60)
@given(p=RANKS, extra=EXTRA, f=DURATION, i=DURATION, w=DURATION)
def test_bubble_of_zb_h1(p: int, extra: int, f: float, i: float, w: float) -> None:
    """(p−1)(F + I − W) on each rank over the common makespan, where W fits beside both F and I."""
    w = min(f, i, w)
    timed = evaluate(build("zb_h1", p, p + extra), UnitTimes(f, i, w))
    assert idle_s(timed) == pytest.approx([(p - 1) * (f + i - w)] * p)


@settings(deadline=None, max_examples=60)
@given(p=RANKS, extra=EXTRA, f=DURATION, i=DURATION, w=DURATION)
def test_bubble_of_zb_h2(p: int, extra: int, f: float, i: float, w: float) -> None:
    """(p−1)(F + I − 2W) at most between a rank's first and last action: none with F = I = W."""
    w = min(f, i, w)
    timed = evaluate(build("zb_h2", p, 2 * p - 1 + extra), UnitTimes(f, i, w))
    assert max(inner_idle_s(timed)) == pytest.approx((p - 1) * (f + i - 2 * w))


@settings(deadline=None, max_examples=40)
@given(p=RANKS, extra=EXTRA, unit=DURATION)
def test_bubble_of_zb_v(p: int, extra: int, unit: float) -> None:
    """None between a rank's first and last action; over the common makespan the way down to the last rank."""
    timed = evaluate(build("zb_v", p, 2 * p - 1 + extra), UnitTimes(unit, unit, unit))
    assert inner_idle_s(timed) == pytest.approx([0.0] * p)
    assert idle_s(timed) == pytest.approx([(p - 1) * unit] * p)


@settings(deadline=None, max_examples=60)
@given(half=st.integers(1, 5), extra=EXTRA, f=DURATION, w=DURATION, hidden=st.sampled_from([0, 0.25, 0.5]))
def test_bubble_of_dualpipe(half: int, extra: int, f: float, w: float, hidden: float) -> None:
    """(p/2−1)(F&B + B − 3W) for F = I ≥ W, `hidden` of F saved by overlapping; a V has p for p/2."""
    w = min(f, w)
    backward, together = f + w, 2 * f + w - hidden * f
    times = UnitTimes(f, f, w, overlap_s=together)
    bubble = (half - 1) * (together + backward - 3 * w)
    two_ways = evaluate(build("dualpipe", 2 * half, 4 * half + 2 * extra), times)
    assert max(idle_s(two_ways)) == pytest.approx(bubble)
    v_shaped = evaluate(build("dualpipe_v", half, 2 * half + extra), times)
    assert max(idle_s(v_shaped)) == pytest.approx(bubble)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (16, 32)])
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "zb_search", "dualpipe", "dualpipe_v"])
def test_bubble_against_1f1b(name: str, p: int, m: int) -> None:
    """Over the common makespan, so with the skew that zero-bubble papers hide; a third is what holds."""
    assert bubble_ratio(make(name, p, m)[1]) <= 0.34 * bubble_ratio(make("1f1b", p, m)[1])


# Memory.


@settings(deadline=None, max_examples=60)
@given(p=RANKS, m=st.integers(1, 40))
def test_in_flight_with_one_stage_per_rank(p: int, m: int) -> None:
    def held(name: str, until: Kind) -> tuple[int, ...]:
        return in_flight(build(name, p, m), until)

    assert held("naive", Kind.W) == (1,) * p
    assert held("gpipe", Kind.W) == (m,) * p
    assert held("1f1b", Kind.W) == tuple(min(m, p - r) for r in range(p))
    assert held("zb_h1", Kind.I) == tuple(min(m, p - r) for r in range(p))
    assert held("zb_h1", Kind.W) == (min(m, p),) * p
    assert held("zb_h2", Kind.I) == tuple(min(m, 2 * (p - r) - 1) for r in range(p))
    assert held("zb_h2", Kind.W) == (min(m, 2 * p - 1),) * p


@settings(deadline=None, max_examples=40)
@given(p=RANKS, rounds=st.integers(2, 6), v=st.integers(2, 5))
def test_in_flight_of_interleaved(p: int, rounds: int, v: int) -> None:
    held = in_flight(build("interleaved_1f1b", p, p * rounds, v))
    assert held == tuple(v * p + p - 1 - 2 * r for r in range(p))


@settings(deadline=None, max_examples=40)
@given(half=st.integers(1, 5), extra=EXTRA)
def test_in_flight_of_v_and_two_way_schedules(half: int, extra: int) -> None:
    p = 2 * half
    assert max(in_flight(build("zb_v", p, 2 * p + extra), Kind.W)) == 2 * p
    assert max(in_flight(build("dualpipe", p, 2 * p + 2 * extra), Kind.W)) == p + 1
    assert max(in_flight(build("dualpipe_v", p, 2 * p + extra), Kind.W)) == 2 * p + 1


# The search.


@settings(deadline=None, max_examples=25)
@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 16), memory=st.sampled_from([0.5, 1, 1.5, 2, 4]))
def test_search_is_valid_within_memory_and_no_worse_than_the_handcrafted(
    data: st.DataObject, p: int, m: int, memory: float
) -> None:
    stages = st.lists(DURATION, min_size=p, max_size=p).map(tuple)
    message_s = data.draw(st.sampled_from([0.0, 0.5]))
    times = UnitTimes(data.draw(stages), data.draw(stages), data.draw(stages), message_s)
    if memory * p < 1:
        with pytest.raises(ValueError, match="less than one micro-batch"):
            zb_search(p, m, times, memory)
        return
    found = build("zb_search", p, m, times=times, memory=memory)
    validate(found)
    assert max(in_flight(found, Kind.W)) <= memory * p
    best = evaluate(found, times).makespan_s
    if memory >= 1:
        assert best <= evaluate(build("zb_h1", p, m), times).makespan_s
    if memory >= 2:
        assert best <= evaluate(build("zb_h2", p, m), times).makespan_s


def test_search_beats_the_handcrafted_where_stages_differ() -> None:
    """A slow second stage with a micro-batch more than 1F1B's: fixed orders do not see it."""
    times = UnitTimes((1.0, 1.5, 1.0, 1.0), (1.2, 1.8, 1.2, 1.2), (0.6, 0.9, 0.6, 0.6), message_s=0.3)
    found = evaluate(build("zb_search", 4, 12, times=times, memory=1.25), times).makespan_s
    assert found < 0.98 * evaluate(build("zb_h1", 4, 12), times).makespan_s


def test_search_uses_memory_between_h1_and_h2() -> None:
    times = UnitTimes(1.0, 1.2, 0.7, message_s=0.2)
    found = [build("zb_search", 8, 24, times=times, memory=x) for x in (0.5, 1.0, 1.5, 2.0)]
    spans = [evaluate(schedule, times).makespan_s for schedule in found]
    assert spans == sorted(spans, reverse=True)
    assert len(set(spans)) == 4


def test_forwards_in_flight_fall_from_rank_to_rank_as_in_the_authors_own_search() -> None:
    """Though a first stage with fewer layers leaves room in time: until I at most 1F1B's at its memory."""

    def in_flight_until_input_gradient(memory: float, m: int) -> tuple[int, ...]:
        times = UnitTimes((0.7, *[1.0] * 6, 1.2), (0.7, *[1.0] * 6, 1.2), (0.4, *[0.5] * 6, 0.8), message_s=0.05)
        return tuple(in_flight(build("zb_search", 8, m, times=times, memory=memory), Kind.I))

    assert in_flight_until_input_gradient(1.0, 24) == (8, 7, 6, 5, 4, 3, 2, 1)
    assert in_flight_until_input_gradient(2.0, 4)[:5] == (4, 4, 4, 4, 4)  # all micro-batches
    twice = in_flight_until_input_gradient(2.0, 24)
    assert sorted(set(twice), reverse=True) == list(twice)


# What is refused, and how fast it is.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("pipedream", 4, 8), "expected one of naive, gpipe, 1f1b"),
        (lambda: build("1f1b", 0, 8), "p=0, m=8"),
        (lambda: build("gpipe", 4, 0), "p=4, m=0"),
        (lambda: build("interleaved_1f1b", 4, 6), "m=6 micro-batches must be a multiple of 4, at least 4"),
        (lambda: build("interleaved_1f1b", 4, 8, 1), "v=1: it needs 2 or more"),
        (lambda: build("1f1b", 4, 8, 2), "v=2: it has 1 stage per rank"),
        (lambda: build("zb_v", 4, 8, 3), "v=3: it has 2 stages per rank"),
        (lambda: build("dualpipe", 3, 8), "p=3 ranks must be a multiple of 2"),
        (lambda: build("dualpipe", 4, 9), "m=9 micro-batches must be a multiple of 2"),
        (lambda: build("dualpipe", 4, 6), "m=6 .* at least 8"),
        (lambda: build("dualpipe_v", 4, 7), "m=7 .* at least 8"),
        (lambda: build("zb_search", 2, 8, memory=0.4), "less than one micro-batch"),
    ],
)
def test_what_is_refused(call: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_evaluate_names_a_deadlock() -> None:
    lists = ((Action(0, Kind.B, 0), Action(0, Kind.F, 0)), (Action(1, Kind.F, 0), Action(1, Kind.B, 0)))
    with pytest.raises(ValueError, match="deadlock: waits forever for the forward of stage 0"):
        evaluate(Schedule("test", 1, (0, 1), (0, 1), ((0, 1),), lists))


PAGE = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize("name", FORMS)
def test_the_page_shows_what_is_built(name: str) -> None:
    """The grid is the printer's, the ratios the evaluator's."""
    section = PAGE[PAGE.index(f"\n## {name}\n") :]
    arguments = r'"(\w+)", (\d+), (\d+)(?:, memory=([\d.]+))?'
    call = re.search(rf"`build\({arguments}\)`:\n\n```text\n(.*?)\n```", section, re.DOTALL)
    assert call is not None
    shown = build(call[1], int(call[2]), int(call[3]), memory=float(call[4] or 1))
    assert shown.name == name
    assert call[5] == grid(picture(shown))
    ratios = [f"{bubble_ratio(make(name, p, m)[1]):.4f}" for p, m in ((4, 8), (8, 32), (16, 32))]
    assert f"| {name} | {' | '.join(ratios)} |" in PAGE


@pytest.mark.parametrize("name", FORMS)
def test_the_same_lists_every_time(name: str) -> None:
    assert build(name, 4, 8) == build(name, 4, 8)


def test_every_schedule_does_the_same_work() -> None:
    """Each micro-batch passes each part of the model once forward, once for inputs and once for weights."""
    for name in FORMS:
        schedule = build(name, 4, 8)
        actions = [a for entries in schedule.ranks for e in entries for a in parts(e)]
        stages = len(schedule.rank_of_stage) // len(schedule.chains)
        for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
            work = {(schedule.part_of_stage[s], m) for s, kind, m in actions if kind in kinds}
            assert work == {(part, m) for part in range(stages) for m in range(8)}, (name, kinds)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_of_every_stage_the_first_forward_and_what_ends_its_gradients(name: str, pair: bool) -> None:
    schedule = build(name, 4, 8)
    lists = [[a for entry in entries for a in parts(entry)] for entries in schedule.ranks]
    forwards = {a.stage: a for actions in lists for a in reversed(actions) if a.kind is Kind.F}
    backwards = {a.stage: a for actions in lists for a in actions if a.kind in (Kind.B, Kind.W)}
    assert len(forwards) == len(backwards) == len(schedule.rank_of_stage)
    assert ScheduleColumns(schedule, pair).first_and_last == {*forwards.values(), *backwards.values()}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_steps_are_alike_that_run_the_same_on_one_rank(name: str, pair: bool) -> None:
    """Stages of odd and of even number are two sorts here, and even ones get their inputs from elsewhere."""
    schedule = build(name, 4, 8)
    lists = ScheduleColumns(schedule, pair)
    ends, stages = lists.first_and_last, np.arange(len(schedule.rank_of_stage))
    alike, examples = lists.equal_steps(stages % 2, lists.stage % 2 == 0)
    what = [
        (schedule.rank_of_stage[step[0].stage], tuple((a.stage % 2, a.kind, a in ends) for a in step))
        for step in lists.steps
    ]
    firsts = [i for each in examples for i in each]
    assert [what[firsts[i]] for i in alike] == what
    assert len(set(what)) == len(firsts)
    assert firsts == sorted(firsts, key=lambda i: alike[i])
    assert [tuple(row[: len(step)]) for row, step in zip(lists.micro_batch, lists.steps, strict=True)] == [
        tuple(a.micro_batch for a in step) for step in lists.steps
    ]


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_each_rank_has_its_actions_by_column_too(name: str, pair: bool) -> None:
    lists = ScheduleColumns(build(name, 4, 8), pair)
    for rank, (begin, end) in enumerate(pairwise(lists.begin)):
        listed = lists.of_rank(rank)
        actions, work, step = listed.actions, listed.work, listed.step
        assert actions == [a for step in lists.steps[begin:end] for a in step]
        assert work.tolist() == [a.stage * len(NUMBER) + NUMBER[a.kind] for a in actions]
        assert step.tolist() == [i for i, step in enumerate(lists.steps[begin:end]) for _ in step]
