"""Low-rank adapters: parameters, flops and memory against their closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_programs import flops

from sim.core.errors import InputError
from sim.core.program import Comm
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.models.parameters import count_parameters
from sim.simulation import simulate
from tests.sim.cases import llama_like, scenario_with, shipped_result

SCENARIOS = Path(__file__).parents[3] / "scenarios"
HIDDEN, FFN, RANK = 256, 768, 8
SMALL = llama_like(layers=3, hidden=HIDDEN, heads=8, kv_heads=4, ffn=FFN, vocab=512)
MATRICES = [(256, 256), (128, 256), (128, 256), (256, 256), (768, 256), (768, 256), (256, 768)]
BASE, ADAPTERS = sum(n * k for n, k in MATRICES), RANK * sum(n + k for n, k in MATRICES)


def scenario(lora: dict[str, Any] | None = None, **training: Any) -> Scenario:
    return scenario_with(
        {"seq_len": 128, "global_batch_size": 1, "lora": lora, **training}, model=SMALL, calibration="roofline"
    )


def test_trained_and_frozen_parameters() -> None:
    block, whole = layer_block(scenario({"rank": RANK}), 1), layer_block(scenario(), 1)
    assert block.params == ADAPTERS
    assert block.frozen_params == whole.params == BASE + 2 * HIDDEN
    only = layer_block(scenario({"rank": RANK, "targets": ["attention_out"]}), 1)
    assert only.params == RANK * (256 + 256)


def test_a_token_costs_four_flops_a_frozen_weight_and_six_an_adapters() -> None:
    block, whole = layer_block(scenario({"rank": RANK}), 1), layer_block(scenario(), 1)
    assert flops(whole.forward) + flops(whole.backward) == 128 * 6 * BASE
    assert flops(block.forward) == 128 * 2 * (BASE + ADAPTERS)
    assert flops(block.backward) == 128 * (2 * BASE + 4 * ADAPTERS)


def test_backward_ends_at_the_first_adapter() -> None:
    """Of the first layer's query, key and value matrices only the adapters' own gradients are computed."""
    first, second = (layer_block(scenario({"rank": RANK}), i) for i in (0, 1))
    qkv = sum(n * k for n, k in MATRICES[:3])
    to_input = 2 * qkv + 2 * 3 * RANK * HIDDEN  # through W, and from A x to x
    assert flops(second.backward) - flops(first.backward) == 128 * to_input
    late = layer_block(scenario({"rank": RANK, "targets": ["mlp_down"]}), 0)
    assert flops(late.backward) == 128 * 4 * RANK * (256 + 768) - 128 * 2 * RANK * 768


@pytest.mark.parametrize(
    ("framework", "recompute", "whole"),
    [
        ("transformers", "full", True),
        ("deepspeed", {"mode": "full", "early_stop": True}, True),
        ("transformers", "none", False),
        ("eager", "full", False),
    ],
)
def test_transformers_checkpoint_makes_the_first_layer_s_backward_whole(
    framework: str, recompute: Any, whole: bool
) -> None:
    """It asks for the gradient of the embedding's result (`enable_input_require_grads`)."""
    own = scenario({"rank": RANK}, framework=framework, recompute=recompute)
    first, second = (layer_block(own, i) for i in (0, 1))
    assert (flops(first.backward) == flops(second.backward)) == whole


def test_what_is_kept() -> None:
    """In place of nothing for a frozen matrix: its input where it has an adapter, and A x."""
    block, whole = layer_block(scenario({"rank": RANK}), 1), layer_block(scenario(), 1)
    kept, all_ = (sum(s.bytes for s in b.saved) for b in (block, whole))
    assert kept - all_ == 2 * 128 * 7 * RANK
    none = layer_block(scenario({"rank": RANK, "targets": ["attention_out"]}), 1)
    inputs = 2 * 128 * (HIDDEN + HIDDEN + FFN)  # of query-key-value, up and down
    assert sum(s.bytes for s in none.saved) == all_ - inputs + 2 * 128 * RANK


@pytest.mark.parametrize("style", ["eager", "compiled"])
def test_what_input_gradients_need_is_kept_without_an_adapter_there(style: str) -> None:
    """Fused attention's backward reads its output; a norm's its input, the final one's too; A's gradient its input,
    which compiled code makes of what it keeps again but for the first adapter's. By hand, bytes of 16 bits."""
    tokens, training = 128, {"framework": style, "attention": "fused"}

    def kept(layer: int, targets: list[str]) -> dict[str, float]:
        made = scenario({"rank": RANK, "targets": targets}, **training)
        return {s.name: s.bytes for s in (layer_block(made, layer) if layer >= 0 else head_block(made)).saved}

    assert kept(1, ["qkv"])["output"] == 2 * tokens * HIDDEN
    assert "output" not in kept(1, ["attention_out"])
    assert kept(-1, ["qkv"])["final_norm input"] == 2 * tokens * HIDDEN
    assert kept(0, ["qkv"])["qkv input"] == 2 * tokens * HIDDEN
    assert kept(0, ["mlp_down"]) == {"mlp_down input": 2 * tokens * FFN, "mlp_down A x": 2 * tokens * RANK}


def test_memory_of_a_fine_tuned_llama() -> None:
    """Two bytes a frozen parameter; 2 + 8 + 12 an adapter's: 41,943,040 of rank 16 on all matrices of Llama 3 8B."""
    model = load_scenario(SCENARIOS / "sft_lora_llama8b.yaml").model
    row = shipped_result("sft_lora_llama8b")["memory"][0]
    adapters = 41_943_040
    assert row["parameters"] == 2 * (count_parameters(model).total + adapters)
    assert row["gradients"] == 2 * 4 * adapters  # and DDP's buckets
    assert row["optimizer"] == 12 * adapters
    full = shipped_result("sft_full_llama8b", "parallelism.zero=0")["memory"][0]
    assert full["parameters"] + full["gradients"] + full["optimizer"] == (16 + 4) * count_parameters(model).total


def test_sharded_frozen_weights_are_gathered_and_never_reduced() -> None:
    sharded, whole = shipped_result("sft_lora_llama8b", "parallelism.zero=3"), shipped_result("sft_lora_llama8b")
    assert sharded["memory"][0]["parameters"] == pytest.approx(whole["memory"][0]["parameters"] / 8)
    traffic = {(c["kind"], c["group"]): c["bytes"] for c in sharded["communication"]}
    full = {(c["kind"], c["group"]): c["bytes"] for c in shipped_result("sft_full_llama8b")["communication"]}
    assert traffic["all_gather", "shard"] == pytest.approx(full["all_gather", "shard"], rel=0.01)
    assert traffic["reduce_scatter", "shard"] < 0.01 * full["reduce_scatter", "shard"]


def test_adapters_are_faster_than_all_parameters() -> None:
    """Between the share of flops (6 of 8 with recomputation) and no gain."""
    ratio = shipped_result("sft_lora_llama8b")["step_time_s"] / shipped_result("sft_full_llama8b")["step_time_s"]
    assert 0.75 < ratio < 1.0
    assert shipped_result("sft_lora_llama8b")["mfu"] < 0.5


def test_tensor_parallel_ranks_share_an_adapter() -> None:
    """A column layer's A by rank, a row layer's by its inputs; both layers' B by outputs: all parameters once."""
    whole = scenario({"rank": RANK, "targets": ["qkv", "attention_out"]})
    data = {"model": SMALL, "cluster": "dgx-h100", "calibration": "roofline", "parallelism": {"tp": 2, "sp": True}}
    lora = {"rank": RANK, "targets": ["qkv", "attention_out"]}
    split = parse_scenario({**data, "training": {"seq_len": 128, "global_batch_size": 1, "lora": lora}})
    assert 2 * layer_block(split, 1).params == layer_block(whole, 1).params
    sent = {i.name: i.kind for i in layer_block(split, 1).forward if isinstance(i, Comm) and "lora" in i.name}
    assert sent == {
        "qkv_0_lora_a_gather": "all_gather",
        "qkv_1_lora_a_gather": "all_gather",
        "qkv_2_lora_a_gather": "all_gather",
        "attention_out_lora_a_reduce_scatter": "reduce_scatter",
        "attention_out_lora_a_gather": "all_gather",
        "attention_out_lora_b_exchange": "all_to_all",
    }


@pytest.mark.parametrize(("overlap", "again"), [("wgrad", False), ("full", True)])
def test_an_adapter_gathers_anew_what_is_gathered_beside_a_matmul(overlap: str, again: bool) -> None:
    """NeMo's ParallelLinearAdapter: Transformer Engine returns a gathered norm's output only without overlap."""
    layout = {"tp": 2, "sp": True, "tp_overlap": overlap}
    training = {"seq_len": 128, "global_batch_size": 1, "lora": {"rank": RANK}, "framework": "megatron"}
    data = {"model": SMALL, "cluster": "dgx-h100", "parallelism": layout, "training": training}
    block = layer_block(parse_scenario(data), 1)
    names = {
        i.name: i for i in (*block.forward, *block.backward) if isinstance(i, Comm) and i.bytes == 128 * HIDDEN * 2
    }
    own = {"qkv_lora_gather", "qkv_lora_a_dgrad_reduce_scatter"}
    assert own <= names.keys() if again else not own & names.keys()
    assert all(names[x].blocking for x in own & names.keys())


@pytest.mark.parametrize("alone", [True, False])
def test_frozen_weights_of_8_bits_are_never_quantized_again(alone: bool) -> None:
    """Those of 16 bits are quantized as trained ones: Transformer Engine does not ask which are frozen."""
    names = [i.name for i in layer_block(frozen_in(alone), 1).forward]
    assert "mlp_down_cast" in names
    assert any("weight_cast" in name for name in names) is not alone


@pytest.mark.parametrize(("alone", "more"), [(True, -1), (False, 2)])
def test_frozen_weights_in_8_bits_alone_take_a_byte(alone: bool, more: int) -> None:
    """One order, of which each backward makes the other; or both orders beside 16 bits (Hopper)."""
    kept, usual = (
        simulate(s).result["memory"][0] for s in (frozen_in(alone), scenario({"rank": RANK}, framework="megatron"))
    )
    grown = sum(kept[what] - usual[what] for what in ("parameters", "buffers"))
    assert grown == pytest.approx(more * 3 * BASE)


def frozen_in(eight_bits_alone: bool) -> Scenario:
    """Adapters beside frozen weights in fp8, one micro-batch on an H100."""
    te = {"precision": "fp8", "fp8_recipe": "delayed", "framework": "megatron"}
    return scenario({"rank": RANK}, **te, fp8_param_gather=eight_bits_alone)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.recompute", "selective_op"),
        ("model", "mixtral-8x7b"),
        ("training.lora.targets", "[qkv, qkv]"),
    ],
)
def test_what_is_not_simulated_is_refused(key: str, value: str) -> None:
    with pytest.raises(InputError, match=r"training\.lora"):
        load_scenario(SCENARIOS / "sft_lora_llama8b.yaml", ["parallelism.dp=4", f"{key}={value}"])
