"""The printed summary: short, plain when piped, complete."""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.commands.run import main
from sim.inputs.scenario import load_scenario
from sim.results.fit import Fit
from sim.results.result import StepResult
from sim.serve.results.records import Percentiles, ServingResult
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.views.scenario_words import layout_line
from sim.views.summary import print_summary
from sim.views.terminal import Column, Span, Terminal, TextRow, TextTable, standard_output
from tests.processes import invoked
from tests.sim.cases import case


def printed(result: StepResult | ServingResult, width: int = 100, styled: bool = False) -> str:
    out = io.StringIO()
    print_summary(result, Terminal(width, styled, out))
    return out.getvalue()


def table(width: int, columns: tuple[Column, ...], *rows: tuple[str | tuple[Span, ...], ...]) -> list[str]:
    out = io.StringIO()
    Terminal(width, file=out).print_table(TextTable(columns, [TextRow(row) for row in rows]))
    return out.getvalue().splitlines()


@pytest.fixture
def result() -> StepResult:
    timeline = synthetic.one_f_one_b()
    return synthetic.result_of(timeline, synthetic.memory_curves(timeline))


def test_it_fits_on_a_screen_and_says_what_matters(result: StepResult) -> None:
    text = printed(result)
    assert len(text.splitlines()) <= 43
    for words in (
        "815.8 ms",
        "90 % interval 775.0 ms – 864.7 ms",
        "45.0 %",
        "34.8 %",
        "26.30 GiB",
        "✓ fits",
        "ranks 56–63",
        "70.0 % from measured points",
        "warning: vocabulary padded",
        "static engine",
    ):
        assert words in text


def test_lines_keep_to_the_width(result: StepResult) -> None:
    for width in (80, 100, 160):
        assert max(map(len, printed(result, width).splitlines())) <= width


def test_a_rank_s_times_add_up_to_the_step(result: StepResult) -> None:
    """Waiting outside the pipeline has a column where it is long, and none where it is not."""
    rows = [replace(row, waiting_s=0.0) for row in result.ranks]
    assert "waiting  " not in printed(replace(result, ranks=rows))
    rows[0] = replace(rows[0], waiting_s=0.1234)
    text = printed(replace(result, ranks=rows), 80)
    assert "123.4 ms" in text
    assert max(map(len, text.splitlines())) <= 80


def test_no_escape_codes_when_piped(result: StepResult) -> None:
    assert "\x1b[" not in printed(result)
    assert "\x1b[1m" in printed(result, styled=True)


@pytest.mark.parametrize(
    ("environment", "styled"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False),
    ],
)
def test_styles_are_for_those_who_want_them(
    environment: dict[str, str], styled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "57", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert standard_output() == Terminal(57, styled)


def test_columns_are_as_wide_as_their_cells_and_no_space_ends_a_line() -> None:
    columns = Column("name"), Column("time", right=True), Column("bar")
    bar = Span("##", "blue"), Span("..")
    assert table(80, columns, ("first", "1 s", bar), ("b", "10.5 s", "")) == [
        "name      time   bar",
        "─────────────────────",
        "first      1 s   ##..",
        "b       10.5 s",
    ]


def test_where_there_is_no_room_columns_of_words_wrap() -> None:
    columns = Column(wraps=True), Column(right=True)
    assert table(20, columns, ("two words here", "12.345 s")) == ["two words   12.345 s", "here"]
    indented = Column(wraps=True, indents=True), Column(right=True)
    assert table(20, indented, ("two words more", "1.345 s"), ("two", "2 s")) == [
        "two words    1.345 s",
        "  more",
        "two              2 s",
    ]
    columns = Column(most=5), Column()
    assert table(80, columns, ("long name", "x")) == ["long…   x"]


def test_a_row_without_room_stands_by_itself_with_the_names_of_its_columns() -> None:
    columns = Column("step"), Column("time", right=True), Column("", wraps=True), Column("█ busy")
    assert table(24, columns, ("forward", "12.345 s", "90 % interval 12 s", (Span("████"),))) == [
        "step",
        "█ busy",
        "─" * 24,
        "forward  time 12.345 s",
        "  90 % interval 12 s",
        "  ████",
    ]


WORDS = st.lists(st.sampled_from(["step", "90", "%", "1.234", "GiB", "interval", "–"]), min_size=1, max_size=9)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4), st.integers(16, 90), st.booleans())
def test_every_word_of_a_table_stands_whole_at_every_width(
    rows: list[tuple[list[str], ...]], width: int, wraps: bool
) -> None:
    columns = Column("head", wraps=True), Column(right=True), Column("more", wraps=wraps)
    lines = table(width, columns, *(tuple(map(" ".join, row)) for row in rows))
    assert max(map(len, lines)) <= width
    shown = Counter(word for line in lines for word in line.split())
    assert Counter(word for row in rows for cell in row for word in cell) <= shown


def test_names_are_not_markup(result: StepResult) -> None:
    scenario = result.scenario.unchecked_copy(update={"name": "[bold red]x[/]"})
    text = printed(replace(result, scenario=scenario, warnings=("a [link=x] warning",)))
    assert "[bold red]x[/]" in text
    assert "a [link=x] warning" in text


def test_many_ranks_are_cut_in_the_middle() -> None:
    timeline = synthetic.one_f_one_b(p=64, m=64)
    text = printed(synthetic.result_of(timeline, synthetic.memory_curves(timeline)))
    assert len(text.splitlines()) <= 48
    assert "… 52 more" in text
    assert "ranks 504–511" in text


def test_what_does_not_fit_is_told(result: StepResult) -> None:
    assert "✗ does not fit" in printed(replace(result, fits_in_memory=False, fit=Fit("does not fit", 0.0)))


def test_serving_results_show_their_latencies() -> None:
    served = simulate_serving(load_scenario("scenarios/serve_preemption.yaml")).outcome
    text = printed(replace(served, request_latency_s=Percentiles(1.0, 2.0, 2.5, 3.0, 1.5), output_tokens_per_s=1234.0))
    assert "median; p90 2.000 s, p99 3.000 s" in text
    assert "1,234" in text


@pytest.mark.parametrize("cell", ["模型的步骤", (Span("模型", "bold"), Span("的步骤"))])
def test_a_wide_character_takes_two_columns(cell: str | tuple[Span, ...]) -> None:
    columns = (Column(), Column(right=True))
    assert table(40, columns, (cell, "12"), ("step", "3")) == ["模型的步骤   12", "step          3"]
    assert table(40, (Column(most=7), Column()), ("模型的步骤", "12"))[0] == "模型的…   12"
    assert table(8, (Column(wraps=True),), ("模型的步骤",)) == ["模型的步", "骤"]
    assert table(40, columns, ("e\u0301te\u0301", "1"), ("step", "2")) == ["e\u0301te\u0301    1", "step   2"]


@given(st.lists(st.text("abc-", min_size=1, max_size=12), max_size=12), st.integers(2, 20))
def test_lines_break_where_textwrap_breaks_them(words: list[str], width: int) -> None:
    out = io.StringIO()
    Terminal(width, file=out).print(" ".join(words))
    lines = textwrap.wrap(" ".join(words), width, break_on_hyphens=False) or [""]
    assert out.getvalue().splitlines() == [line.rstrip() for line in lines]


def test_the_peak_behind_mfu_is_named_where_it_is_not_that_of_16_bits() -> None:
    """MFU of fp8 divides by twice the peak of bf16, so that a faster step has a lower one."""
    bf16, fp8 = (simulate(load_scenario("scenarios/dp8.yaml", [f"training.precision={p}"])) for p in ("bf16", "fp8"))
    assert re.search(r"MFU .* TFLOP/s per GPU; HFU", printed(bf16.outcome))
    assert re.search(r"MFU .* TFLOP/s per GPU, of 1\.979 PFLOP/s in fp8; HFU", printed(fp8.outcome))
    assert fp8.step_time_s < bf16.step_time_s


def test_failures_that_nobody_simulates_are_said_to_change_nothing() -> None:
    failing = simulate(load_scenario("scenarios/dp8.yaml", ["faults.failures.mtbf_s_per_gpu=1e8"]))
    assert "slows no single step; --days 30" in printed(failing.outcome)
    assert "--days" not in printed(simulate(load_scenario("scenarios/dp8.yaml")).outcome)


def test_the_slowest_rank_is_among_those_shown_of_many() -> None:
    """Twelve classes of ranks are shown of a step with more; rank 101's has neither a low nor a high number."""
    layout = ["parallelism.pp=4", "parallelism.dp=8", "parallelism.tp=8", "parallelism.zero=1"]
    slow = ["faults.stragglers.0.rank=101", "faults.stragglers.0.compute_scale=3"]
    found = simulate(load_scenario("scenarios/dp8.yaml", [*layout, *slow, "training.global_batch_size=32"])).outcome
    lines = printed(found).splitlines()
    cut = [i for i, line in enumerate(lines) if re.match(r"… \d+ more", line)]
    assert len(cut) == 2
    assert lines[cut[0] + 1].startswith("rank 101 ")
    shown = cut[1] - cut[0] - 1 + 12
    assert shown + sum(int(lines[i].split()[1]) for i in cut) == len(found.ranks)


def test_a_served_model_has_no_zero_stage() -> None:
    served, trained = load_scenario("scenarios/serve_llama8b.yaml"), load_scenario("scenarios/zero3_llama8b_dp64.yaml")
    with_stage = replace(served, parallelism=served.parallelism.model_copy(update={"zero": 3}))
    assert "ZeRO" not in layout_line(with_stage)
    assert "ZeRO-3" in layout_line(trained)


def test_the_line_of_the_scenario_says_what_is_recomputed() -> None:
    assert "recompute" not in layout_line(case({"dp": 2}, {}))
    assert "· recompute full ·" in layout_line(case({"dp": 2}, {"recompute": "full"}))
    assert "· recompute full (one layer in 2) ·" in layout_line(case({}, {"recompute": {"mode": "full", "every": 2}}))


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("dp8", "beside CUDA and NCCL (nominal 141.0 GiB)"),
        ("serve_batch1", "139.3 GiB beside CUDA and NCCL (nominal 141.0 GiB)"),
    ],
)
def test_a_limit_of_memory_says_whose_it_is(workload: str, words: str) -> None:
    ran = invoked(main, f"scenarios/{workload}.yaml", "--set", "cluster=dgx-h200")
    assert words in " ".join(ran.output.split())


def test_the_limit_of_a_step_of_reinforcement_learning_says_whose_it_is() -> None:
    ran = invoked(main, "scenarios/rl_grpo_llama8b.yaml", "--set", "cluster=dgx-h200")
    assert "beside CUDA and NCCL (nominal 141.0 GiB), colocated GPUs" in " ".join(ran.output.split())
