"""Distillation simulated: what the teacher adds, on the student's GPUs and on its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.errors import InputError
from sim.model_config import count_parameters
from sim.scenario import load_scenario
from sim.simulation import simulate

SCENARIOS = Path(__file__).parents[2] / "scenarios"


@cache
def result(name: str, *overrides: str) -> dict[str, Any]:
    return simulate(load_scenario(SCENARIOS / f"{name}.yaml", list(overrides))).result


def test_on_the_same_gpus_times_add_up() -> None:
    r = result("distill_logits")
    t = r["distillation"]
    alone = simulate(load_scenario(SCENARIOS / "distill_logits.yaml").model_copy(update={"distillation": None})).result
    assert t["student_step_s"] == alone["step_time_s"]
    assert r["step_time_s"] == pytest.approx(alone["step_time_s"] + t["forward_s"] + t["loss_s"])
    assert r["mfu"] / alone["mfu"] == pytest.approx(alone["step_time_s"] / r["step_time_s"])


def test_teachers_weights_are_held_once_per_replica() -> None:
    r = result("distill_logits")
    teacher = load_scenario(SCENARIOS / "distill_logits.yaml").distillation
    assert teacher is not None
    eighth = 2 * count_parameters(teacher.teacher).total / 8
    assert r["distillation"]["parameter_bytes"] == pytest.approx(eighth, rel=0.01)
    student = result("distill_logits_apart")
    more = r["peak_memory_bytes"] - student["peak_memory_bytes"]
    assert more >= r["distillation"]["parameter_bytes"]
    assert student["memory"][0].get("teacher") is None


def test_forward_is_at_least_its_flops() -> None:
    """2 flops a weight and token, on all eight GPUs."""
    scenario = load_scenario(SCENARIOS / "distill_logits.yaml")
    assert scenario.distillation is not None
    weights = count_parameters(scenario.distillation.teacher).total - 128256 * 8192
    least = 2 * weights * 32 * 4096 / 8 / scenario.cluster.gpu.peak_flops_per_s["bf16"]
    assert least < result("distill_logits")["distillation"]["forward_s"] < 4 * least


def test_apart_the_longer_decides() -> None:
    r = result("distill_logits_apart")
    t = r["distillation"]
    own = t["forward_s"] + t["send_s"]
    assert t["send_s"] > 0
    assert r["step_time_s"] == max(own, t["student_step_s"] + t["loss_s"])
    assert r["tokens_per_s_per_gpu"] == pytest.approx(r["tokens_per_s"] / 16)


def test_sequences_are_written_first() -> None:
    r = result("distill_sequence")
    t = r["distillation"]
    assert t["generated_tokens"] == 32 * 2048
    assert r["step_time_s"] == pytest.approx(t["generate_s"] + t["student_step_s"])
    longer = result("distill_sequence", "distillation.prompt_len=1024")
    assert longer["distillation"]["generate_s"] > 1.3 * t["generate_s"]


def test_a_prompt_leaves_room_to_write() -> None:
    with pytest.raises(InputError, match="prompt_len: found 4096"):
        result("distill_sequence", "distillation.prompt_len=4096")
