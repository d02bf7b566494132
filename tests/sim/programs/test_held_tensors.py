"""Loops over a rank's tensors at the end of a step: how many there are, and what the host's part in them takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.program import BLOCK_END, Comm, Compute, Program
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.optimizers.loops import Loops
from sim.models.optimizers.step import optimizer_items
from sim.prices.profiles import load_profile
from sim.prices.shared_cores import costs_of
from sim.programs.data_parallel import make_data_parallel
from sim.programs.held_tensors import held_tensors, loops_at_the_end
from sim.programs.stages import stage_blocks
from sim.programs.step_end import epilogue
from sim.ranks.plan import make_plan
from sim.simulation import simulate

MPT = {"layers": 4, "hidden": 512, "heads": 4, "ffn": 2048, "vocab": 4096, "mlp": "gelu", "norm": "layernorm"}
MPT |= {"bias": True, "positions": "learned", "tied_embeddings": True}


def scenario(zero: int = 3, dp: int = 8, parallelism: dict[str, Any] | None = None, **training: Any) -> Scenario:
    given = {"seq_len": 128, "global_batch_size": dp, "param_dtype": "fp32", "framework": "composer", **training}
    layout = {"dp": dp, "zero": zero, **(parallelism or {})}
    return parse_scenario({"model": MPT, "training": given, "parallelism": layout, "cluster": "dgx-h100"})


def loops(own: Scenario) -> Loops:
    plan = make_plan(own)
    return loops_at_the_end(stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan))


def tensors(own: Scenario) -> int:
    plan = make_plan(own)
    return held_tensors(stage_blocks(plan, plan.parts[0], 0)[1:-1], make_data_parallel(plan))


def ends(own: Scenario) -> Program:
    step = simulate(own)
    return epilogue(tuple(step.stages[0].values()), step.plan, False)


def test_parts_of_a_layer_s_tensors() -> None:
    """A layer of width h has 12 h² + 13 h numbers: the third eighth of them begins in the bias of queries, keys and
    values, has the output projection, its bias and the second norm's two vectors, and ends in the MLP's first matrix.
    """
    assert tensors(scenario()) == 4 * 6
    assert tensors(scenario(dp=1, zero=0)) == tensors(scenario(zero=0)) == 4 * 12
    assert tensors(scenario(framework="eager", parallelism={"fsdp_version": 2})) == 4 * 12
    assert tensors(scenario(framework="eager", parallelism={"fsdp_version": 1})) == 4 * 6
    assert tensors(scenario(software_date="2023-04")) == 4  # torch 1.13: a vector for each layer


def test_composer_reads_each_tensor_s_steps_since_0_15() -> None:
    t = scenario().for_training
    counted, *rest = optimizer_items(1000, t, loops=Loops(4))
    assert isinstance(counted, Compute)
    assert counted.kernels == 4
    assert [item is BLOCK_END for item in rest] == [True, False] * 4
    updates = [item for item in rest if isinstance(item, Compute)]
    assert [u.kernels for u in updates] == [9] * 4
    assert sum(u.bytes for u in updates) == 1000 * 20 * 4  # without decay: `weight_decay: 0.0`

    (before,) = optimizer_items(1000, scenario(software_date="2023-05").for_training, loops=Loops(4))
    assert isinstance(before, Compute)
    assert (before.kernels, before.bytes) == (8 * 4, 1000 * 20 * 4)


@pytest.mark.parametrize(("optimizer", "kernels"), [("lion", 5), ("adafactor", 12)])
def test_other_loops(optimizer: str, kernels: int) -> None:
    framework = "composer" if optimizer == "lion" else "transformers"
    (item,) = optimizer_items(1000, scenario(optimizer=optimizer, framework=framework).for_training, loops=Loops(7))
    assert isinstance(item, Compute)
    assert item.kernels == 7 * kernels


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_host_s_time_of_a_loop_as_measured(gpu: str) -> None:
    """torch's AdamW over ten small tensors one by one, which is eight kernels for each, waits for the host. So long do
    ten tensors more take, beside what the first call takes."""
    table = json.loads((Path(__file__).parents[3] / "scenarios" / "cuda" / f"{gpu}.json").read_text(encoding="utf-8"))
    (measured_s,) = [p["seconds"][0] for p in table["points"] if p["op"] == "optimizer:adamw_single_tensor"]
    own = scenario(software_date="2023-05")
    costs, took_s = costs_of(own, load_profile(own.calibration)), []
    for tensors in (10, 20):
        (item,) = optimizer_items(1000, own.for_training, loops=Loops(tensors))
        assert isinstance(item, Compute)
        assert item.kernels == 8 * tensors
        took_s.append(costs.host_s(item, plain=True))
    assert took_s[1] - took_s[0] == pytest.approx(measured_s, rel=0.05)


def test_torch_s_first_fsdp_clips_tensor_by_tensor() -> None:
    clipped = {}
    for version in (1, 2):
        own = scenario(framework="eager", gradient_clipping=True, parallelism={"fsdp_version": version})
        found = {i.name: i.kernels for i in ends(own) if isinstance(i, Compute)}
        clipped[version] = (found["grad_norm"], found["grad_scale"])
        assert loops(own).clips is (version == 1)
    held = loops(scenario()).tensors
    assert clipped == {1: (held, held), 2: (1, 1)}


@pytest.mark.parametrize("zero", [0, 1])
def test_nanotron_clips_whole_gradients_tensor_by_tensor(zero: int) -> None:
    """optim/clip_grads.py: all fp32 gradients with ZeRO-1, too, whose norm is summed over the model's ranks alone."""
    program = ends(scenario(zero, framework="nanotron", param_dtype="bf16", parallelism={"tp": 1}))
    found = {i.name: i for i in program if isinstance(i, Compute)}
    plan = make_plan(scenario(zero, framework="nanotron", param_dtype="bf16"))
    blocks = stage_blocks(plan, plan.parts[0], 0)
    params, count = sum(b.params for b in blocks), sum(len(b.tensors) for b in blocks)
    assert (found["grad_norm"].bytes, found["grad_norm"].kernels) == (4 * params, count)
    assert (found["grad_scale"].bytes, found["grad_scale"].kernels) == (8 * params, count)
    assert not [i for i in program if isinstance(i, Comm) and i.name == "gradient norm"]


def test_nanotron_adds_gradients_up_in_a_loop() -> None:
    """optim/gradient_accumulator.py, `backward`: behind loss.backward(), so that no autograd function issues it."""
    own = scenario(0, dp=1, framework="nanotron", param_dtype="bf16", global_batch_size=4)
    costs, plan = costs_of(own, load_profile(own.calibration)), make_plan(own)
    layer = stage_blocks(plan, plan.parts[0], 0)[1]
    added = [i for i in layer.backward if isinstance(i, Compute) and i.name.endswith("wgrad_accumulate")]
    assert len(added) == 4
    assert [costs.host_s(i) for i in added] == [costs.coefficients.group_launch_s] * 4
