"""The pictures in docs/figures are what `python -m docs.figures` draws, and show what the text beside them says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.figures import PICTURES  # noqa: E402
from docs.figures.schemes import data_sync, schedules  # noqa: E402
from docs.figures.sources import FIGURES, loss, run  # noqa: E402
from docs.figures.svg import Chart  # noqa: E402

NUMBER = re.compile(r"\d[\d,]*\.?\d*")
WORDS = re.compile(r">([^<>\n]+)</text>")
CHARTS: dict[str, Chart] = {}


def chart(name: str) -> Chart:
    if name not in CHARTS:
        CHARTS[name] = FIGURES[name]()
    return CHARTS[name]


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_picture_is_what_the_command_draws(name: str) -> None:
    committed = WORDS.findall((ROOT / "docs" / "figures" / f"{name}.svg").read_text("utf-8"))
    drawn = WORDS.findall(PICTURES[name]())
    hint = "costs have changed: python -m docs.figures"
    assert [NUMBER.sub("#", w) for w in committed] == [NUMBER.sub("#", w) for w in drawn], hint
    for old, new in zip(committed, drawn, strict=True):
        assert numbers(new) == pytest.approx(numbers(old), rel=0.03, abs=1.0), hint


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_it(name: str) -> None:
    assert any(f"(figures/{name}.svg)" in page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))


def test_tensor_parallelism_over_two_nodes_loses_throughput_in_part_to_the_network() -> None:
    real, fast = (loss(s.values) for s in chart("tp_throughput").series)
    assert real > 0.3
    assert real > fast + 0.02  # a few points, says the page


def test_pipelines_lose_little_with_equal_stages_and_more_with_a_large_output_layer() -> None:
    equal, fast, head = (loss(s.values) for s in chart("pp_throughput").series)
    assert 0.10 < equal < 0.20
    assert fast == pytest.approx(equal, abs=0.01)
    assert 0.25 < head < 0.40


def test_memory_falls_by_what_each_scheme_divides() -> None:
    tp, cp, zero = ({s.name: s.values for s in chart(f"memory_{k}").series} for k in ("tp", "cp", "zero"))
    assert tp["Parameters"][4] == pytest.approx(tp["Parameters"][0] / 16, rel=0.03)  # 8 key-value heads: two copies
    assert cp["Parameters"][4] == cp["Parameters"][0]
    assert cp["Activations"][4] == pytest.approx(cp["Activations"][0] / 16, rel=0.05)
    assert zero["Optimizer state"][1] == pytest.approx(zero["Optimizer state"][0] / 8, rel=0.01)
    assert zero["Gradients"][1] == zero["Gradients"][0]
    assert zero["Parameters"][3] == pytest.approx(zero["Parameters"][0] / 8, rel=0.01)


def test_timelines_hold_what_ran() -> None:
    picture = schedules()
    for strip in picture.strips:
        assert [label for label, _ in strip.rows] == [f"rank {n}" for n in range(4)]
        forwards = [sum(kind == "F" for *_, kind in bars) for _, bars in strip.rows]
        stages = 2 if strip.title.startswith(("interleaved", "zb_v", "dualpipe_v")) else 1
        assert forwards == [8 * stages] * 4, strip.title
        assert all(0 <= a < b <= picture.length_s for _, bars in strip.rows for a, b, _ in bars)
    after, *overlapped = ([b for label, bars in s.rows if label == "dp" for b in bars] for s in data_sync().strips)
    assert len(after) == 1
    assert all(len(bars) > 10 for bars in overlapped)


def test_activations_take_over_as_sequences_grow() -> None:
    for name in ("memory_seq_1b", "memory_seq_8b", "memory_seq_70b"):
        columns = {s.name: s.values for s in chart(name).series}
        share = [columns["Activations"][i] / sum(v[i] for v in columns.values()) for i in range(5)]
        assert share == sorted(share)
        assert share[0] < 0.2
        assert share[-1] > 0.7
        assert 3.4 < columns["Activations"][-1] / columns["Activations"][-2] < 4.0, "nearly the square of the length"


def test_data_parallelism_stops_scaling() -> None:
    _, calm, jitter = (s.values for s in chart("dp_scaling").series)
    assert list(calm) == sorted(calm, reverse=True)
    assert 0.02 < loss(calm[:2]) + 0.02 < loss((calm[0], calm[-1])) < 0.5
    assert all(a > b for a, b in zip(calm, jitter, strict=True))
    assert loss((jitter[0], jitter[-1])) > loss((calm[0], calm[-1]))


def test_buckets_beat_a_message_for_each_tensor() -> None:
    by_tensor, after, bucketed = (
        run("dp_buckets_gpt2", f"parallelism.dp_sync={s}").step_time_s
        for s in ("per_parameter", "after_backward", "bucketed")
    )
    assert bucketed < after < by_tensor


def test_more_micro_batches_shrink_the_bubble() -> None:
    few, many = (s.values for s in chart("pp_micro_batches").series)
    assert all(a < b for a, b in zip(few, many, strict=True))
    assert max(few) < 1.2 * min(few), "half of the step is bubble at every depth, but for the optimizer"


def test_batches_trade_steps_for_tokens() -> None:
    steps, tokens, time = (s.values for s in chart("batch_ends").series)
    assert list(steps) == sorted(steps, reverse=True)
    assert list(tokens) == sorted(tokens)
    assert steps[3] == tokens[3] == 2.0
    assert time[-1] > 10
