"""Time by operator: nothing is lost, nothing counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.program import Compute, ModelPart
from sim.inputs.faults_config import Faults, JitterFault
from sim.inputs.scenario import load_scenario
from sim.inputs.shipped import scenarios_folder
from sim.models.layer import layer_block
from sim.results.operator_times import time_by_part
from sim.simulation import simulate
from tests.modules import run_module
from tests.sim.cases import case


def operators(result: dict[str, Any], rank: int = 0) -> dict[tuple[str, str], float]:
    rows = next(of["operators"] for of in result["time_by_operator"] if of["rank"] == rank)
    found = {(row["operator"], row["phase"]): row["seconds"] for row in rows}
    assert len(found) == len(rows)
    assert all(row["share"] == row["seconds"] / result["step_time_s"] for row in rows)
    return found


@pytest.mark.parametrize("calibration", ["roofline", "h100-sxm"])
def test_on_one_rank_the_operators_fill_the_step(calibration: str) -> None:
    r = simulate(case({}, {"global_batch_size": 4, "micro_batch_size": 2}, calibration=calibration)).result
    assert sum(operators(r).values()) == pytest.approx(r["step_time_s"])


def test_each_class_of_ranks_has_what_it_computes() -> None:
    """Collectives apart, the operators of a rank are its computing time; a stage without a head has no loss."""
    r = simulate(case({"pp": 2, "dp": 2, "tp": 2}, {"global_batch_size": 16})).result
    assert [of["ranks"] for of in r["time_by_operator"]] == [row["ranks"] for row in r["ranks"]]
    for row in r["ranks"]:
        own = operators(r, row["rank"])
        computed = sum(s for (name, _), s in own.items() if " " not in name)
        assert computed == pytest.approx(row["compute_s"])
        assert any(name.startswith("tp ") for name, _ in own)
    last = max(r["ranks"], key=lambda row: row["pipeline_rank"])["rank"]
    assert [any("cross_entropy" in n for n, _ in operators(r, i)) for i in (0, last)] == [False, True]


def parts(result: dict[str, Any], rank: int = 0) -> dict[tuple[str, str], float]:
    rows = next(of["parts"] for of in result["time_by_part"] if of["rank"] == rank)
    assert all(row["share"] == row["seconds"] / result["step_time_s"] for row in rows)
    return {(row["part"], row["group"]): row["seconds"] for row in rows}


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (case({"tp": 2, "dp": 2, "zero": 3}, {"global_batch_size": 4}), "attention embedding head mlp norm optimizer"),
        (
            case({"tp": 2}, {"global_batch_size": 4, "recompute": "full"}, "mixtral-8x7b"),
            "attention embedding experts head norm optimizer",
        ),
        (
            case({"ep": 2, "dp": 2}, {"global_batch_size": 4}, "deepseek-v3"),
            "attention embedding experts head layer mlp norm optimizer",
        ),
        (case({}, {"global_batch_size": 4, "lora": {"rank": 8}}), "attention embedding head mlp norm optimizer"),
    ],
)
def test_every_operator_is_of_a_part(scenario: Any, expected: str) -> None:
    """Parts and operators sum up the same seconds, and nothing is left over."""
    r = simulate(scenario).result
    own = parts(r)
    assert sum(own.values()) == pytest.approx(sum(operators(r).values()))
    computed = {part for part, group in own if not group} - {"host", "parameter copies"}
    assert computed == set(expected.split())
    sent = {f"{group} " for part, group in own if part == "communication"}
    assert sent == {f"{name.split()[0]} " for name, _ in operators(r) if " " in name}


def test_matmuls_of_a_layer_by_part() -> None:
    """Of a token: SwiGLU's three matrices of h·f, attention's of h·h·(2 + 2·kv/heads), forward and twice backward."""
    s = case({}, {"global_batch_size": 2, "micro_batch_size": 2}, "llama3-8b")
    block, h, f, tokens = layer_block(s, 0), 4096, 14336, 2 * 512
    matmuls = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.kind == "gemm"]
    flops = {part: sum(i.flops for i in matmuls if i.part is part) for part in {i.part for i in matmuls}}
    assert flops == {
        ModelPart.MLP: 3 * 2 * tokens * 3 * h * f,
        ModelPart.ATTENTION: 3 * 2 * tokens * h * h * (2 + 2 / 4),
    }


def test_a_state_space_layer_is_a_part_of_its_own() -> None:
    states = {"heads": 8, "head_dim": 64, "state": 64}
    model = {"state_space": states, "attention_pattern": ["state_space", "full"]}
    own = parts(simulate(case({}, {"global_batch_size": 4}, model)).result)
    assert own["state space", ""] > 0 < own["attention", ""]


def test_unfused_attention_shows_its_softmax() -> None:
    """The chart of GPT-2's attention: matmuls, softmax and dropout of the unfused one, a single kernel fused."""
    training = {"seq_len": 1024, "global_batch_size": 8, "micro_batch_size": 8}
    unfused, fused = (
        operators(simulate(case({}, {**training, "attention": a}, "gpt2-medium", calibration="h100-sxm")).result)
        for a in ("unfused", "fused")
    )
    parts = {name for name, phase in unfused if name.startswith("attention_") and phase == "forward"}
    assert {"attention_scores", "attention_softmax", "attention_context"} <= parts
    assert not any("softmax" in name for name, _ in fused)
    own = sum(s for (name, phase), s in unfused.items() if name in parts - {"attention_out"} and phase == "forward")
    assert own > 2 * sum(s for (name, phase), s in fused.items() if name == "attention" and phase == "forward")


def test_recomputed_operators_count_in_the_phase_that_reruns_them() -> None:
    plain, again = (
        operators(simulate(case({}, {"global_batch_size": 4, "recompute": mode})).result) for mode in ("none", "full")
    )
    more = {key for key in again if again[key] > plain.get(key, 0.0) * (1 + 1e-9)}
    assert more
    assert {phase for _, phase in more} == {"input_grad"}


def test_ranks_that_jitter_tells_apart_run_the_same() -> None:
    scenario = case({"dp": 4}).unchecked_copy(update={"faults": Faults(jitter=JitterFault(sigma=0.1))})
    r = simulate(scenario).result
    assert len(r["ranks"]) == 4
    assert [of["ranks"] for of in r["time_by_operator"]] == ["0-3"]


def test_sums_in_another_order_make_no_class_of_their_own() -> None:
    """Stages of a DualPipe run the same programs in another order, which changes sums in their last bits."""
    found = time_by_part(simulate(load_scenario(scenarios_folder() / "dualpipe_deepseek_v3.yaml"), engine="static"))
    rows = [frozenset((p.part, p.group, round(p.seconds, 9)) for p in of.parts) for of in found]
    assert len(set(rows)) == len(rows) > 1


def test_the_page_lists_the_longest_operators(tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    assert run_module("sim.run", "attention_unfused_gpt2", "--html", page).returncode == 0
    text = page.read_text("utf-8")
    assert "Time by part of the model" in text
    assert "Time by operator" in text
    assert "attention_softmax" in text.partition("Time by operator")[2]
