"""What must hold between training steps that differ in an option: CUDA graphs, offload, adapters, experts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from tests.sim.metamorphic.laws import run, vary
from tests.sim.metamorphic.test_training import scenarios

FEW = settings(max_examples=8, deadline=None)
SAME = 1.003  # what ends earlier may meet another message on a link that it missed before


@pytest.mark.slow
@FEW
@given(scenario=scenarios())
def test_options_cost_what_they_save_elsewhere(scenario: dict[str, Any]) -> None:
    base = vary(scenario, training__recompute="none")
    graphs = [vary(scenario, training={"recompute": "none", "cuda_graphs": part}) for part in ("layers", "step")]
    assert graphs[1]["step_time_s"] <= graphs[0]["step_time_s"] * SAME
    assert graphs[0]["step_time_s"] <= base["step_time_s"] * SAME
    slow = vary(scenario, training__recompute="none", faults={"stragglers": [{"rank": 0, "compute_scale": 1.3}]})
    assert slow["step_time_s"] > base["step_time_s"]
    for option in ("activation_offload", "optimizer_offload"):
        moved = vary(scenario, training={"recompute": "none", option: True})
        assert moved["step_time_s"] >= base["step_time_s"] / SAME, option
        # The copies' own buffers may exceed what a small stage saves.
        assert moved["peak_memory_bytes"] <= base["peak_memory_bytes"] * 1.02, option
    adapters = vary(scenario, training={"recompute": "none", "lora": {"rank": 16, "targets": ["qkv", "attention_out"]}})
    assert adapters["peak_memory_bytes"] < base["peak_memory_bytes"]


@pytest.mark.slow
@FEW
@given(scenario=scenarios(), more=st.sampled_from([64, 128]))
def test_a_little_more_of_a_size_takes_a_little_longer(scenario: dict[str, Any], more: int) -> None:
    tp = scenario["parallelism"]["tp"]
    base = run(**scenario)
    sizes = base["scenario"]["model"]
    experts = sizes["moe"]
    wider = {"moe": {"ffn": experts["ffn"] + more}} if experts else {"ffn": sizes["ffn"] + more * tp}
    longer = {"training": {"seq_len": scenario["training"]["seq_len"] + more * tp}}
    for change in ({"model": wider}, {"model": {"vocab": sizes["vocab"] + 128 * tp}}, longer):
        # Tiles and waves of matmuls make steps of up to a tenth.
        assert 0.95 < vary(scenario, **change)["step_time_s"] / base["step_time_s"] < 1.3, change


@pytest.mark.slow
@FEW
@given(scenario=scenarios())
def test_uneven_experts_are_never_faster(scenario: dict[str, Any]) -> None:
    step_s = [
        vary(scenario, model={"preset": "qwen3-30b-a3b", "moe": {"imbalance": imbalance}})["step_time_s"]
        for imbalance in ("balanced", {"seed": 0, "zipf": 0.0}, {"seed": 0, "zipf": 0.8})
    ]
    assert step_s[1] == pytest.approx(step_s[0], rel=0.003)
    assert step_s[2] >= step_s[0] / SAME


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("pp", [1, 4])
def test_shards_of_all_ranks_are_the_model(model: str, tp: int, pp: int) -> None:
    """ZeRO-3's parameters, gradients and states add up to one model over tensor, pipeline and data parallelism."""
    result = run(
        model={"preset": model, "layers": 8},
        cluster="dgx-h100",
        training={"seq_len": 1024, "global_batch_size": 16},
        parallelism={"dp": 4, "tp": tp, "pp": pp, "zero": 3},
    )
    elements = count_parameters(parse_scenario(result["scenario"]).model).total
    for name, size in (("parameters", 2), ("gradients", 4), ("optimizer", 12)):
        held = sum(row[name] * row["count"] for row in result["memory"])
        assert held == pytest.approx(size * elements, rel=0.01), name  # the vocabulary is padded, norms are repeated
