"""Parts of a step add up to it, and the advice fits the scenario."""

from __future__ import annotations

import io
from typing import Any

import pytest
import synthetic
from msgspec.structs import replace

from sim.core.timeline import Detail, RankClass, Span, from_spans
from sim.core.units import percent, seconds
from sim.inputs.scenario import load_scenario
from sim.results.losses import (
    exposed_by_stream,
    idle_parts,
    largest_losses,
    operators_whole,
    parts_of_step,
    teacher_s,
    waiting_s,
)
from sim.results.result import StepResult
from sim.simulation import simulate
from sim.views.headline import headline
from sim.views.summary import print_summary
from sim.views.terminal import Terminal


def example(**changes: Any) -> tuple[StepResult, Any]:
    timeline = synthetic.one_f_one_b()
    return synthetic.result_of(timeline, synthetic.memory_curves(timeline), **changes), timeline


def test_parts_add_up_to_the_step() -> None:
    result, timeline = example()
    parts = {p.key: p.seconds for p in parts_of_step(result, timeline)}
    assert sum(parts.values()) == pytest.approx(result.step_time_s)
    assert parts["useful"] == pytest.approx(0.45 * result.step_time_s)
    assert parts["optimizer"] == pytest.approx(0.006)
    passes = result.mean_rank.compute_s - 0.006
    assert parts["recompute"] == pytest.approx((1 - 0.45 / 0.55) * passes)


def test_losses_are_the_largest_first_and_never_the_useful_part() -> None:
    result, timeline = example()
    found = largest_losses(result, timeline)
    assert [p.key for p, _ in found] == ["bubble", "recompute", "below_peak"]
    assert "16 micro-batches" in found[0][1]
    assert "66 % of its memory free" in found[1][1]


def test_an_uneven_stage_is_named() -> None:
    result, timeline = example()
    slow = replace(result.ranks[7], compute_s=1.7 * result.ranks[7].compute_s)
    result = replace(result, ranks=(*result.ranks[:7], slow))
    advice = {p.key: text for p, text in largest_losses(result, timeline)}["bubble"]
    assert "ranks 56–63 compute 3" in advice


def test_reductions_over_replicas_are_named() -> None:
    short = load_scenario("scenarios/hsdp_llama8b_dp64.yaml", ["training.seq_len=512"])
    cause = {part.key: text for part, text in simulate(short).losses()}["communication"]
    assert "`replica`" in cause


def test_exposed_communication_is_what_no_computation_covers() -> None:
    detail = Detail("x")
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 1.0, detail),
        Span(0, "compute", "B", 0, 0, 2.0, 4.0, detail),
        Span(0, "tp", "ALL_REDUCE", -1, -1, 0.5, 2.5, detail),  # 1 s exposed
        Span(0, "dp", "ALL_REDUCE", -1, -1, 3.0, 7.0, detail),  # 3 s exposed
        Span(0, "recv_f", "RECV_F", 0, 1, 0.0, 9.0, detail),  # waiting: not counted
    ]
    assert exposed_by_stream(from_spans(spans, [RankClass(0, (0,), 0)])) == pytest.approx({"dp": 3.0, "tp": 1.0})


def test_a_step_without_a_length_has_no_parts() -> None:
    result, timeline = example(step_time_s=0.0)
    assert parts_of_step(result, timeline) == ()


def test_without_stages_it_is_slower_ranks_that_others_wait_for() -> None:
    found = simulate(load_scenario("scenarios/straggler_dp.yaml")).losses()
    waiting = {part.label: text for part, text in found}["Waiting for ranks"]
    assert waiting.startswith("Rank 5 computes ")
    assert "tage" not in waiting


def test_without_stages_all_waiting_is_one_number() -> None:
    """One slow rank of 32 with ZeRO-3: others wait at gathers, within the passes and behind them."""
    slow = ["parallelism.dp=32", "faults.stragglers.0.rank=3", "faults.stragglers.0.compute_scale=1.3"]
    result = simulate(load_scenario("scenarios/zero3_llama8b_dp64.yaml", slow)).outcome
    row = max(result.ranks, key=lambda row: row.count)
    (waited,) = result.waiting
    assert row.bubble_s + row.waiting_s == pytest.approx(waited.seconds, rel=0.01)
    assert row.waiting_s > row.bubble_s > 0.01
    said = {number.name: number.value for number in headline(result)}["Waiting for ranks"]
    assert said == percent((row.bubble_s + row.waiting_s) * row.count / 32 / result.step_time_s)
    assert [name for name, _ in idle_parts(result, row)] == ["waiting"]
    printed = io.StringIO()
    print_summary(result, Terminal(file=printed))
    assert f"{seconds(row.bubble_s + row.waiting_s)}   █" in printed.getvalue()
    assert "bubble" not in printed.getvalue()


@pytest.mark.parametrize(
    ("name", "within"), [("processes_dp16", "idle"), ("distill_logits", "idle"), ("1f1b_pp8", "bubble")]
)
def test_only_a_pipeline_has_a_bubble(name: str, within: str) -> None:
    result = simulate(load_scenario(f"scenarios/{name}.yaml")).outcome
    assert idle_parts(result, result.ranks[0])[0][0] == within


def test_waiting_for_the_host_is_part_of_what_is_below_the_peak() -> None:
    """Small experts of micro-batches of one: kernels are shorter than their launches."""
    wide = ["model=qwen3-30b-a3b", "parallelism.dp=8", "training.seq_len=512", "training.framework=megatron"]
    simulation = simulate(load_scenario("scenarios/dp8.yaml", [*wide, "parallelism.tp=1"]))
    host_s = max(p["seconds"] for row in simulation.result["time_by_part"] for p in row["parts"] if p["part"] == "host")
    said = {part.key: text for part, text in simulation.losses()}["below_peak"]
    assert f"For {seconds(host_s)}" in said
    graphed = simulate(load_scenario("scenarios/dp8.yaml", [*wide, "training.cuda_graphs=step"]))
    assert "the host" not in {part.key: text for part, text in graphed.losses()}["below_peak"]


def test_one_slow_rank_of_a_pipeline_is_not_an_uneven_stage() -> None:
    slow = ["faults.stragglers.0.rank=5", "faults.stragglers.0.compute_scale=3"]
    layout = ["parallelism.pp=4", "parallelism.dp=1", "parallelism.tp=2", "training.global_batch_size=8"]
    found = simulate(load_scenario("scenarios/dp8.yaml", [*layout, *slow])).losses()
    cause = {part.key: text for part, text in found}["bubble"]
    assert cause.startswith("Rank 5 computes ")
    assert "uneven" not in cause


def test_rounding_of_sums_is_no_waiting() -> None:
    """Without stages and faults no rank waits; the sums of floating-point numbers leave about 1e-16 of the step."""
    layout = ["model=llama3-70b", "parallelism.dp=512", "training.global_batch_size=512", "training.recompute=full"]
    result = simulate(load_scenario("scenarios/zero3_llama8b_dp64.yaml", layout)).outcome
    assert waiting_s(result) == 0.0
    assert {number.name: number.value for number in headline(result)}["Waiting for ranks"] == "0.0 %"


def test_memory_that_adds_up_to_more_than_its_peak_says_why() -> None:
    """Categories reach their maximum at different times; where that shows, the table says so."""
    for name, said in (("gpipe_pp8", True), ("dp8", False)):
        result = simulate(load_scenario(f"scenarios/{name}.yaml")).outcome
        printed = io.StringIO()
        print_summary(result, Terminal(file=printed))
        assert ("each at its maximum" in printed.getvalue()) == said


@pytest.mark.parametrize("name", ["distill_logits", "distill_logits_apart"])
def test_a_rank_of_a_student_adds_up_to_the_step_with_its_teacher(name: str) -> None:
    """On the same GPUs the teacher's turn comes first; on others the student waits for it."""
    simulation = simulate(load_scenario(f"scenarios/{name}.yaml"))
    result = simulation.outcome
    row, found = result.ranks[0], result.distillation
    assert found is not None
    parts = [row.compute_s, row.exposed_comm_s, *dict(idle_parts(result, row)).values(), teacher_s(result)]
    assert sum(parts) == pytest.approx(result.step_time_s)
    printed = io.StringIO()
    print_summary(result, Terminal(width=120, file=printed))
    assert f"{seconds(teacher_s(result))}   █" in printed.getvalue()
    said = {number.name: number for number in headline(result)}["Teacher"]
    assert said.value == seconds(found.teacher.own_s)
    part = simulation.result["time_by_part"][0]["parts"][0]
    assert part["share"] == pytest.approx(part["seconds"] / found.student_step_s)
    assert operators_whole(result) == "the student's step"
