"""Experts' kernels: routers, groups, padding, and what the host launches."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import MOE, TOKENS, comm_bytes, comms, make, named

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.model_config import MoeConfig
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from sim.models.moe.routing import expert_load
from sim.prices.coefficients import PriceOptions
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS


def test_a_fused_router_launches_less_and_a_capacity_more():
    def kernels(framework: str, **moe: Any) -> int:
        block = layer_block(make(MOE | {"moe": MOE["moe"] | moe}, {"framework": framework}), 0)
        return sum(int(i.kernels) for n in ("router_scores", "router_top_k") for i in named(block.forward, n))

    assert kernels("eager") < kernels("megatron_bridge") < kernels("megatron")
    assert kernels("megatron", capacity_factor=1.0) - kernels("megatron") == 6
    assert kernels("eager", capacity_factor=1.0) == kernels("eager")


def test_experts_padded_to_their_capacity_take_as_many_rows_each_and_no_count():
    """Megatron-Core's `drop_and_pad`: whatever was chosen, sizes are known beforehand."""
    uneven = {"capacity_factor": 1.5, "imbalance": {"seed": 1, "zipf": 1.0}}
    loads = [
        expert_load(MoeConfig(experts=8, top_k=2, ffn=64, **uneven, **pad), 512, 0)
        for pad in ({}, {"pad_to_capacity": True})
    ]
    assert max(loads[0]) == max(loads[1]) == min(loads[1]) > min(loads[0])

    def gathers(pad: bool) -> int:
        moe = MOE["moe"] | {"capacity_factor": 1.0, "pad_to_capacity": pad}
        block = layer_block(make(MOE | {"moe": moe}, {"framework": "megatron"}, dp=4, ep=4), 0)
        assert bool(named(block.forward, "count_copies")) is not pad
        return comms(block.forward, "ep")["all_gather"]

    assert (gathers(False), gathers(True)) == (1, 0)
    with pytest.raises(InputError, match="pad_to_capacity: found true without capacity_factor"):
        make(MOE | {"moe": MOE["moe"] | {"pad_to_capacity": True}})


@pytest.mark.parametrize(
    ("precision", "framework", "capacity", "copied"),
    [
        ("fp8", "megatron", None, True),  # random counts
        ("fp8", "megatron", 1.0, False),  # 128 rows an expert
        ("fp8", "megatron", 0.9, True),  # 116, which 16 does not divide
        ("bf16", "megatron", None, False),
        ("fp8", "compiled", None, False),
    ],
)
def test_rows_of_8_bit_experts_are_copied_to_fill_tiles(precision, framework, capacity, copied):
    """Filled up before, with fp32 probabilities, and cut off after: all copies read in each pass and written with the
    rows that fill up tiles, which the matmuls compute, too. Of random counts an expert lacks 7.5 rows."""
    moe = MOE["moe"] | {"capacity_factor": capacity}
    block = layer_block(make(MOE | {"moe": moe}, {"framework": framework, "precision": precision}), 0)
    names = ("experts_padding", "experts_unpadding")
    found = [i for name in names for i in (*named(block.forward, name), *named(block.backward, f"{name}_backward"))]
    rows = TOKENS * 2 if capacity is None else -(-capacity * TOKENS * 2 // 16) * 16
    more = (16 * 7.5 if capacity is None else 16 * (128 - 116)) if copied else 0
    moved, weights = (2 * rows + more) * 1024 * 2, (2 * rows + more) * 4
    filled, cut = (moved + weights, 2), (moved, 1)
    assert [(i.bytes, i.kernels) for i in found] == ([filled, filled, cut, cut] if copied else [])
    (matmul,) = named(block.forward, "experts_down")
    assert matmul.flops == 2 * (rows + more) * 1024 * MOE["moe"]["ffn"]


@pytest.mark.parametrize(("framework", "accesses"), [("megatron", 1 + 2), ("eager", 1 + 2 * 2)])
def test_results_are_read_again_for_the_routers_gradient_where_they_are_weighted(framework, accesses):
    """Gradients of tokens read, of their two copies written; results of the copies read where weights multiply them."""
    block = layer_block(make(MOE, {"framework": framework}, dp=4, ep=4), 0)
    (found,) = named(block.backward, "unpermute_backward")
    assert found.bytes == accesses * TOKENS * 1024 * 2


@pytest.mark.parametrize(
    ("framework", "mlp", "forward", "backward"),
    [
        ("megatron_bridge", "relu2", [4], [4, 6]),  # fused: the weights' gradient reads gradient and input again
        ("megatron", "relu2", [4, 12], [6, 34]),  # torch's product in fp32, and what casts it
        ("megatron", "gelu", [4, 12], [6, 34]),
        ("megatron", "swiglu", [6], [6, 10]),
        ("eager", "relu2", [8], [20]),  # weighs results, not activations
    ],
)
def test_an_experts_activation_is_weighted(framework, mlp, forward, backward):
    """Bytes of an inner element between both matmuls, with 16-bit activations."""
    block = layer_block(make(MOE | {"mlp": mlp, "bias": False}, {"framework": framework}), 0)
    elements = TOKENS * 2 * MOE["moe"]["ffn"]

    parts = (mlp, f"{mlp}_backward", "expert_weighting", "expert_weighting_backward", "expert_weights_grad")

    def between(program: Any) -> list[float]:
        return sorted(i.bytes / elements for i in program if isinstance(i, Compute) and i.name in parts)

    assert (between(block.forward), between(block.backward)) == (forward, backward)


def test_megatron_adds_second_biases_expert_by_expert():
    """Product, sum and join: 1 + 3 + 2 accesses forward, 8 backward, of every copy's row (TEGroupedMLP._apply_bias)."""
    block = layer_block(make(MOE | {"bias": True}, {"framework": "megatron"}), 0)
    size = TOKENS * 2 * 1024 * 2
    (add,), (back,) = named(block.forward, "experts_down_bias"), named(block.backward, "experts_down_bias_backward")
    assert (add.bytes, add.kernels) == (6 * size, 2 * 16 + 1)
    assert (back.bytes, back.kernels) == (8 * size, 4 * 16 + 1)
    plain = layer_block(make(MOE | {"bias": True}, {"framework": "compiled"}), 0)
    assert plain.expert_params == block.expert_params


@pytest.mark.parametrize(("own", "found"), [({}, (10, 2)), ({"moe_grouped_gemm": False}, (6, 1))])
def test_biased_experts_leave_the_residual_sum_unfused(own, found):
    """TEGroupedMLP refuses `bias_dropout_fusion` with biases: attention's is added (4 bytes) before the sum (6)."""
    block = layer_block(make(MOE | {"bias": True}, {"framework": "megatron"} | own), 0)
    (summed,) = named(block.forward, "attention_residual")
    assert (summed.bytes / (TOKENS * MOE["hidden"]), summed.kernels) == found


def test_groups_cost_kernels_and_no_bytes_less():
    """`group_limited_topk` of Megatron-Core's moe_utils.py: 11 kernels, 2 backward; its all-to-all sends every copy."""

    def block(**moe: Any) -> Any:
        return layer_block(make(MOE | {"moe": MOE["moe"] | moe}, {"framework": "megatron"}, dp=4, ep=4), 0)

    def kernels(found: Any) -> tuple[int, int]:
        choices = ("router_scores", "best_of_groups", "top_groups", "router_top_k")
        backward = named(found.backward, "router_top_k_backward")
        return sum(i.kernels for n in choices for i in named(found.forward, n)), backward[0].kernels

    plain, grouped, nodes = block(), block(groups=4, top_groups=2), block(max_nodes_per_token=1)
    more = tuple(a - b for a, b in zip(kernels(grouped), kernels(plain), strict=True))
    assert more == (11, 2)
    assert kernels(grouped) == kernels(nodes)
    assert comm_bytes(grouped.forward, "ep") == comm_bytes(plain.forward, "ep")


def test_groups_are_checked():
    for moe, words in (
        ({"groups": 4}, "without top_groups"),
        ({"groups": 3, "top_groups": 2}, "must divide experts"),
        ({"groups": 4, "top_groups": 5}, "at most groups"),
        ({"experts": 8, "groups": 8, "top_groups": 1, "top_k": 2}, r"top_k \(2\) experts are chosen from that many"),
    ):
        with pytest.raises(InputError, match=words):
            make(MOE | {"moe": MOE["moe"] | moe}, {})


def test_megatrons_fp32_router_casts_backward_alone():
    """RouterGatingLinearFunction: 16-bit operands forward; backward a copy of the input, fp32 products, a cast back."""

    def block(**moe: Any) -> Any:
        return layer_block(make(MOE | {"moe": MOE["moe"] | moe}, {"framework": "megatron"}), 0)

    plain, fp32 = block(), block(router_fp32=True)
    assert len(fp32.forward) == len(plain.forward)
    casts = [i for i in fp32.backward if isinstance(i, Compute) and i.kind == "cast"]
    assert [i.bytes for i in casts] == [TOKENS * MOE["hidden"] * 6.0] * 2
    assert [i.dtype for n in ("router_dgrad", "router_wgrad") for i in named(fp32.backward, n)] == ["tf32", "tf32"]


@pytest.mark.parametrize("framework", ["eager", "transformers", "compiled"])
def test_a_plain_fp32_router_multiplies_a_copy_of_its_input(framework):
    """The copy is saved, as a matmul of the backward reads it."""
    moe = MOE["moe"] | {"router_fp32": True}
    block = layer_block(make(MOE | {"moe": moe}, {"framework": framework}), 0)
    assert [i.dtype for i in named(block.forward, "router")] == ["fp32"]
    size = TOKENS * MOE["hidden"]
    assert [i.bytes for i in named(block.forward, "router_cast")] == [6 * size]
    assert [i.bytes for i in named(block.backward, "router_recast")] == []
    assert [s.bytes for s in block.saved if s.name == "router input in fp32"] == [4 * size]


def test_transformer_engine_launches_for_each_expert():
    """A matmul each and, but for delayed scaling, kernels each that quantize (multi_tensor_quantize_impl)."""

    def launched(framework: str, name: str, **training: Any) -> tuple[int, bool]:
        block = layer_block(make(MOE, {"framework": framework, **training}, dp=4, ep=4), 0)
        found = named(block.forward, name)[0]
        return found.kernels, found.looped

    assert launched("megatron", "experts_up") == (4, True)
    assert launched("eager", "experts_up") == (1, False)
    fp8 = {"precision": "fp8"}
    assert launched("megatron", "experts_up_cast", **fp8, fp8_recipe="tensorwise") == (4 * (2 + 2), True)
    assert launched("megatron", "experts_up_cast", **fp8, fp8_recipe="delayed") == (1, False)


@pytest.mark.parametrize(("date", "kernels"), [("2026-01", 4 * 3), ("2026-03", 2), (None, 2)])
def test_four_bits_of_all_experts_are_quantized_at_once_and_weights_one_by_one(date, kernels):
    """Transformer Engine's split_quantize_nvfp4_impl, since 2.12: largest values, then rows and columns in one kernel
    of all groups (nvte_group_hadamard_transform_cast_fusion). Before, three kernels for each group's own rows; a layer
    that is not grouped had them until 2.14."""
    training = {"framework": "megatron", "precision": "nvfp4", "seq_len": 512, "global_batch_size": 4}
    training["software_date"] = date
    layout = {"dp": 4, "ep": 4}
    scenario = parse_scenario({"model": MOE, "training": training, "parallelism": layout, "cluster": "dgx-b200"})
    found = layer_block(scenario, 0).forward
    assert [(i.kernels, i.looped) for i in named(found, "experts_up_cast")] == [(kernels, kernels > 2)]
    assert {i.kernels for i in named(found, "qkv_cast")} == {2 if date is None else 3}
    assert [i.kernels for i in named(found, "experts_up_weight_cast")] == [4 * 2]


def test_a_loop_over_groups_costs_the_host_a_launch_each():
    costs = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
    once = named(layer_block(make(MOE, {"framework": "megatron"}, dp=4, ep=4), 0).forward, "experts_up")[0]
    c = costs.coefficients
    assert costs.host_s(once) == pytest.approx(c.host_operator_s + 4 * c.group_launch_s)
    assert Costs(load_profile("h100-sxm"), GPUS["h100-sxm"], PriceOptions(host=False)).host_s(once) == 0


def test_a_choice_among_fp32_logits_reads_four_bytes_of_each():
    """A plain router reads each logit once and its gradient once, beside 8 bytes of scores each way."""
    found = {}
    for fp32 in (False, True):
        moe = MOE["moe"] | {"router_fp32": fp32}
        block = layer_block(make(MOE | {"moe": moe}, dp=4, ep=4), 0)
        for item in (*block.forward, *block.backward):
            if getattr(item, "name", "") in ("router_scores", "router_top_k_backward"):
                found[item.name, fp32] = item.bytes / (TOKENS * 16)
    assert found["router_scores", False] == found["router_top_k_backward", False] == 2 + 8
    assert found["router_scores", True] == found["router_top_k_backward", True] == 4 + 8
