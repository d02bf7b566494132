"""Parameters in 8 bits (`training.fp8_param_gather`): bytes kept, gathered and cast, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Item
from sim.inputs.scenario import Scenario
from sim.programs.data_parallel import make_data_parallel
from sim.programs.stages import stage_blocks
from sim.programs.updated_parameters import gather_after_optimizer, gather_units
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from tests.sim.cases import case

MATRICES = 8 * 12 * 1024 * 1024  # elements of the layers of `cases.GPT`, four matrices in each
RECIPES = ("delayed", "tensorwise", "blockwise")


def scenario(recipe: str, on: bool = True, gpu: str = "h100", **layout: Any) -> Scenario:
    training: dict[str, Any] = {"precision": "mxfp8" if recipe == "mxfp8" else "fp8", "framework": "megatron"}
    training |= {"fp8_recipe": recipe, "fp8_param_gather": on, "global_batch_size": 16}
    return case({"dp": 8, "zero": 1, **layout}, training, cluster=f"dgx-{gpu}")


@pytest.mark.parametrize(("recipe", "share"), [*((r, 0.5) for r in RECIPES), ("mxfp8", 1.0)])
@pytest.mark.parametrize("overlap", [True, False])
def test_matrices_are_gathered_in_8_bits(recipe: str, share: float, overlap: bool) -> None:
    """All else in 16; what is scaled by 32 numbers is gathered in 16 bits, too."""

    def gathered(on: bool) -> float:
        plan = make_plan(scenario(recipe, on, gpu="b200", param_gather_overlap=overlap))
        blocks, dp = stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)
        if overlap:
            return sum(dense for dense, _, _ in gather_units(blocks, dp)) * dp.gathered_bytes
        return sum(i.bytes for i in gather_after_optimizer(blocks, dp) if isinstance(i, Comm))

    assert gathered(False) - gathered(True) == pytest.approx(2.0 * MATRICES * (1 - share))


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_no_16_bit_parameter_is_kept_beside_one_of_8_bits(recipe: str) -> None:
    """Two bytes less of each element of a layer's matrices. The 8-bit numbers are there either way: parameters where
    there are no others, else copies of parameters."""
    without, beside = (simulate(scenario(recipe, on, gpu="b200")).result["memory"][0] for on in (True, False))
    eight_bit = beside["buffers"] - without["buffers"]
    assert beside["peak"] - without["peak"] == 2 * MATRICES
    assert beside["parameters"] - (without["parameters"] - eight_bit) == 2 * MATRICES
    assert MATRICES <= eight_bit <= 2.1 * MATRICES  # one order or two, with their scales


@pytest.mark.parametrize("zero", [0, 1])
def test_frozen_matrices_in_8_bits_are_parameters(zero: int) -> None:
    """One order of each: a byte an element, which is what loading the model without training takes."""
    training = {"precision": "fp8", "framework": "megatron", "fp8_param_gather": True, "lora": {"rank": 8}}
    s = case({"dp": 8, "zero": zero}, {**training, "global_batch_size": 8}, cluster="dgx-h100")
    memory = simulate(s).result["memory"][0]
    assert MATRICES <= memory["parameters"] < 2 * MATRICES + memory["gradients"] + memory["optimizer"]


def update_of(s: Scenario) -> list[Item]:
    plan = make_plan(s)
    dp, blocks = make_data_parallel(plan), stage_blocks(plan, plan.parts[0], 0)
    return dp.eight_bit.casts(blocks, dp.shard, dp.expert_shard)


def weights_of(s: Scenario) -> list[Compute]:
    plan = make_plan(s)
    block = stage_blocks(plan, plan.parts[0], 0)[1]
    return [i for i in block.forward if isinstance(i, Compute) and "_weight_" in i.name]


@pytest.mark.parametrize(("recipe", "bytes_"), [("delayed", 3), ("tensorwise", 5), ("blockwise", 5)])
def test_a_shard_is_cast_after_the_update(recipe: str, bytes_: int) -> None:
    """Each rank an eighth: read in 16 bits, twice where the largest value is the step's own, and written in 8."""
    cast, _ = update_of(scenario(recipe))
    assert isinstance(cast, Compute)
    assert cast.bytes == bytes_ * MATRICES / 8
    assert cast.kernels == (bytes_ // 2) * (4 * 8 // 8 + 1)
    assert update_of(scenario("mxfp8", gpu="b200")) == []
    assert update_of(scenario(recipe, on=False)) == []


def test_the_first_micro_batch_makes_the_other_order_alone() -> None:
    """A matrix of 1,024 x 3,072 for two micro-batches: read and written in 8 bits; Blackwell needs no transpose."""
    made = {i.name: i.bytes for i in weights_of(scenario("tensorwise"))}
    assert made["qkv_weight_transpose"] == 2 * 3072 * 1024 / 2
    assert not weights_of(scenario("tensorwise", gpu="b200"))
    usual = {i.name: i.bytes for i in weights_of(scenario("tensorwise", on=False))}
    assert usual["qkv_weight_cast"] == 6 * 3072 * 1024 / 2
    assert weights_of(scenario("mxfp8", gpu="b200")) == weights_of(scenario("mxfp8", False, gpu="b200"))


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_what_is_frozen_is_neither_cast_nor_gathered(recipe: str) -> None:
    keys = {"precision": "mxfp8" if recipe == "mxfp8" else "fp8", "fp8_recipe": recipe, "framework": "megatron"}
    keys |= {"lora": {"rank": 8}, "global_batch_size": 8}
    kept, usual = (
        case({"dp": 8, "zero": 1}, {**keys, "fp8_param_gather": on}, cluster="dgx-b200") for on in (True, False)
    )
    assert update_of(kept) == []
    assert not weights_of(kept)
    assert weights_of(usual)
    sent = [
        list(gather_after_optimizer(stage_blocks(plan, plan.parts[0], 0), make_data_parallel(plan)))
        for plan in map(make_plan, (kept, usual))
    ]
    assert sent[0] == sent[1]


def test_ranks_agree_on_the_largest_values() -> None:
    """Four bytes for each of 32 matrices, or for each block of 128 x 128 numbers."""
    sent = {r: next(i for i in update_of(scenario(r)) if isinstance(i, Comm)).bytes for r in RECIPES}
    assert sent == {"delayed": 4 * 32, "tensorwise": 4 * 32, "blockwise": 4 * MATRICES / 128**2}


@pytest.mark.parametrize(
    ("layout", "training", "what"),
    [
        ({"zero": 0}, {}, "parallelism.zero 1"),
        ({}, {"framework": "compiled"}, "Transformer Engine's fp8 or mxfp8"),
        ({}, {"precision": "bf16", "fp8_recipe": None}, "Transformer Engine's fp8 or mxfp8"),
        ({"zero": 3}, {"lora": {"rank": 8}}, "parallelism.zero 0 or 1"),
        ({}, {"optimizer_offload": True}, "training without optimizer_offload"),
    ],
)
def test_what_it_needs(layout: dict[str, Any], training: dict[str, Any], what: str) -> None:
    keys = {"precision": "fp8", "framework": "megatron", "fp8_param_gather": True, **training}
    with pytest.raises(InputError, match=rf"training\.fp8_param_gather: found true; needs {what}"):
        case({"dp": 8, "zero": 1, **layout}, keys)
