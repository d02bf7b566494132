"""The schedules' records say what their lists do, of any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.actions import Kind, Overlap, Schedule, parts, validate
from sim.schedules import FORMS, ScheduleForm
from sim.schedules.form import count_first_forwards
from sim.schedules.unit_time import evaluate
from tests.sim.schedule_facts import bubble_ratio, in_flight


def kinds_of(schedule: Schedule) -> set[Kind]:
    return {a.kind for entries in schedule.ranks for entry in entries for a in parts(entry)} - {Kind.F}


@st.composite
def sizes(draw: st.DrawFn, form: ScheduleForm) -> tuple[int, int, int]:
    """Any p, m and v that the form takes."""
    p = draw(st.integers(2, 9)) * form.ranks_multiple
    m = form.micro_batches_from(p, draw(st.integers(1, 5 * p)))
    return p, m, draw(st.integers(2, 4)) if form.least_stages else form.stages_per_rank


@pytest.mark.parametrize("name", FORMS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_built_lists_have_the_records_facts(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    p, m, v = data.draw(sizes(form))
    built = form.build(p, m, v)
    assert built.name == form.name
    assert len(built.rank_of_stage) == p * v
    assert len(set(built.part_of_stage)) == form.model_stages(p, v)
    assert kinds_of(built) <= kinds_of(form.example)
    assert form.pairs or not any(isinstance(entry, Overlap) for entries in built.ranks for entry in entries)
    assert form.ends_on_last_rank == all(built.rank_of_stage[chain[-1]] == p - 1 for chain in built.chains)
    if form.one_at_a_time:
        assert evaluate(built).makespan_s == m * p * v * 3  # F and B are 1 and 2 here


@pytest.mark.parametrize("name", FORMS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_forwards_first_are_those_of_the_whole_lists(name: str, data: st.DataObject) -> None:
    """Long lists are not built for it, so these tests are why it may be believed."""
    form = FORMS[name]
    p, m, v = data.draw(sizes(form))
    counted = count_first_forwards(form.build(p, m, v))
    if form.follows_times:
        assert all(a <= b for a, b in zip(form.forwards_first(p, m, v), counted, strict=True))
    else:
        assert form.forwards_first(p, m, v) == counted


@pytest.mark.parametrize("name", FORMS)
@settings(deadline=None, max_examples=30)
@given(p=st.integers(1, 9), m=st.integers(1, 40), v=st.integers(1, 4))
def test_what_a_form_has_no_problem_with_is_built(name: str, p: int, m: int, v: int) -> None:
    form = FORMS[name]
    if form.ranks_problem(p) or form.micro_batches_problem(p, m) or form.stages_problem(v):
        with pytest.raises(ValueError, match=f"schedule {name}: "):
            form.build(p, m, v)
    else:
        assert form.build(p, m, v).micro_batches == m


GROUPED = FORMS["interleaved_1f1b"]


@settings(deadline=None, max_examples=150)
@given(p=st.integers(1, 9), m=st.integers(1, 40), v=st.integers(2, 4), group=st.integers(1, 45))
def test_any_group_of_any_number_of_micro_batches_is_legal(p: int, m: int, v: int, group: int) -> None:
    """No rank waits for ever, and a stage takes its micro-batches group by group."""
    built = GROUPED.grouped(group).build(p, m, v)
    validate(built)
    assert GROUPED.grouped(group).forwards_first(p, m, v) == count_first_forwards(built)
    forwards = [a for a in built.ranks[0] if isinstance(a, tuple) and a[1] is Kind.F]
    size = min(group, m)
    expected = [
        (stage, i)
        for first in range(0, m, size)
        for stage in range(0, p * v, p)
        for i in range(first, min(first + size, m))
    ]
    assert [(a[0], a[2]) for a in forwards] == expected


@settings(deadline=None, max_examples=40)
@given(p=st.integers(2, 8), v=st.integers(2, 4), groups=st.integers(1, 4), more=st.integers(0, 9))
def test_whole_groups_of_p_or_more_have_the_bubble_and_memory_of_the_closed_forms(
    p: int, v: int, groups: int, more: int
) -> None:
    """(p−1)/(v·m), in flight (v−1)·N + 2·(p−1−r) + 1 (Megatron-LM, `get_pp_rank_microbatches`)."""
    n = p + more
    m = n * groups
    built = GROUPED.grouped(n).build(p, m, v)
    assert bubble_ratio(evaluate(built)) == pytest.approx((p - 1) / (v * m))
    assert in_flight(built) == tuple(min(m * v, (v - 1) * n + 2 * (p - 1 - r) + 1) for r in range(p))
    if n == p:
        assert built == GROUPED.build(p, m, v)
