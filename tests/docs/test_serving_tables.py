"""The tables of serving and of distillation say what the simulator says, within a twentieth."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import load_scenario
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.variants.engines import ENGINES

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.engines import engine_table

ROOT = Path(__file__).parents[2]
SERVED = ("serve_llama8b", "serve_contiguous", "serve_prefix_gpu", "serve_prefix_cpu")
TEACHERS = ("distill_logits", "distill_logits_apart", "distill_sequence")
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def cells(page: str, scenario: str) -> list[list[float]]:
    """Numbers of the first row that begins with the scenario's name, by cell."""
    lines = (ROOT / "docs" / page).read_text("utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| `{scenario}`"))
    return [[float(n.replace(",", "")) for n in NUMBER.findall(cell)] for cell in row.strip("|").split("|")[1:]]


def close(shown: list[float], found: list[float]) -> None:
    assert shown == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("name", SERVED)
def test_latencies_and_waste(name: str) -> None:
    first, token, rate, waste = cells("serving_cache.md", name)
    result = simulate_serving(load_scenario(ROOT / "scenarios" / f"{name}.yaml")).result
    times: dict[str, Any] = result["time_to_first_token_s"]
    close(first, [1e3 * times["p50"], 1e3 * times["p99"]])
    close(token, [1e3 * result["time_per_output_token_s"]["p50"]])
    close(rate, [result["output_tokens_per_s"]])
    assert waste == pytest.approx([100 * result["kv_cache"]["waste"]], abs=0.1)


@pytest.mark.parametrize("name", TEACHERS)
def test_teachers(name: str) -> None:
    teacher, student, step, peak = cells("distillation.md", name)
    result = simulate(load_scenario(ROOT / "scenarios" / f"{name}.yaml")).result
    found = result["distillation"]
    close(teacher[:1], [found["generate_s"] or found["forward_s"]])
    close(student, [found["student_step_s"]])
    close(step, [result["step_time_s"]])
    close(peak, [result["peak_memory_bytes"] / 2**30])


def test_the_documented_speed_of_experts_is_the_records() -> None:
    page = (ROOT / "docs" / "serving_engines.md").read_text("utf-8")
    assert f"reach {ENGINES['trtllm'].experts_speed:.2f} of the speed" in page


def test_the_table_of_engines_is_that_of_their_records() -> None:
    assert engine_table() in (ROOT / "docs" / "serving_engines.md").read_text("utf-8"), "python -m docs.engines"
