"""Muon's states and matmuls, and moments in 8 bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from model_programs import GPT, LLAMA, flops, make
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.optimizers.muon import ITERATIONS, dealt_out, muon_items
from sim.models.optimizers.step import optimizer_items
from sim.models.parameters import count_parameters
from sim.simulation import simulate
from sim.variants.optimizers import OPTIMIZERS, Optimizer

PURE = {"param_dtype": "fp32", "precision": "bf16"}


def optimizer_bytes(model: Any = LLAMA, training: dict[str, Any] | None = None, **parallelism: Any) -> float:
    scenario = make(model, {**PURE, **(training or {})}, **parallelism)
    return float(simulate(scenario).result["memory"][0]["optimizer"])


def matrix_elements() -> int:
    """Of Llama's layers: all but two norms of each."""
    return sum(spec.parameters - 2 * 1024 for spec in layer_specs(make(LLAMA).model))


def test_matrices_have_one_momentum_and_the_rest_two_moments() -> None:
    total = count_parameters(make(LLAMA).model).total
    assert optimizer_bytes() == 8 * total
    assert optimizer_bytes(training={"optimizer": "muon"}) == 8 * total - 4 * matrix_elements()


def test_moments_in_eight_bits_have_scales() -> None:
    total = count_parameters(make(LLAMA).model).total
    assert optimizer_bytes(training={"optimizer_dtype": "int8"}) == 2 * (1 + 4 / 256) * total


def test_an_optimizer_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD with momentum keeps one number of each parameter, where AdamW keeps two."""
    monkeypatch.setitem(OPTIMIZERS, "momentum", Optimizer("momentum", moments=1, matrix_moments=1))
    adamw, momentum, sgd = (optimizer_bytes(training={"optimizer": name}) for name in ("adamw", "momentum", "sgd"))
    assert momentum - sgd == (adamw - sgd) / 2 > 0
    times = [simulate(make(LLAMA, {"optimizer": name})).result["step_time_s"] for name in ("sgd", "momentum", "adamw")]
    assert times == sorted(times)
    with pytest.raises(InputError, match=r"must be 'adamw', 'sgd', 'muon', .* or 'momentum'"):
        make(LLAMA, {"optimizer": "adagrad"})


@pytest.mark.parametrize(("framework", "kernels"), [("eager", "foreach"), ("composer", None), ("eager", "fused")])
def test_adams_kernels_follow_from_the_record_not_its_name(
    monkeypatch: pytest.MonkeyPatch, framework: str, kernels: str | None
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "twin", replace(OPTIMIZERS["adamw"], name="twin"))
    keys = {"framework": framework, "adamw_kernels": kernels}
    adamw, twin = (optimizer_items(1000, make(LLAMA, {"optimizer": o, **keys}).for_training) for o in ("adamw", "twin"))
    of_adamw, of_twin = ([(i.kernels, i.bytes) for i in items if isinstance(i, Compute)] for items in (adamw, twin))
    assert of_adamw == of_twin
    assert (sum(number for number, _ in of_adamw) > 1) == (kernels != "fused")


def test_experts_matrices_are_muons_too() -> None:
    moe = LLAMA | {"moe": {"experts": 8, "top_k": 2, "ffn": 512}}
    gained = optimizer_bytes(moe) - optimizer_bytes(moe, {"optimizer": "muon"})
    norms_and_router = 2 * 1024 + 8 * 1024
    assert gained == 4 * sum(spec.parameters - norms_and_router for spec in layer_specs(make(moe).model))


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 4)])
def test_flops_are_those_of_the_iterations(zero: int, share: int) -> None:
    """A GPT layer's matrices: [3h, h], [h, h], [4h, h], [h, 4h]: the smaller side is h. ZeRO-1 deals layers out."""
    h, layers = 1024, 4
    block = layer_block(make(GPT, {"optimizer": "muon"}), 0)
    shapes = dealt_out((block,) * layers, 4, 4, zero).matrices
    expected = layers / share * ITERATIONS * sum(4 * h * h * n + 2 * h**3 for n in (3 * h, h, 4 * h, 4 * h))
    items = muon_items(shapes, 4.0, 4.0, 4.0, 2.0)
    assert flops(items) == expected


def test_the_largest_matrices_are_dealt_first_to_the_emptiest_rank() -> None:
    """Two layers of 4, 4, 3 and 1 h² over three ranks: 4 + 4, 4 + 3 + 1 and 4 + 3 + 1. The last have most flops:
    4·(4 + 3 + 1) + 3·2 h³ for 4·(4 + 4) + 2·2."""
    h = 1024
    block = layer_block(make(GPT, {"optimizer": "muon"}), 0)
    dealt = dealt_out((block,) * 2, 3, 3, 1).matrices
    assert sum(shape.elements for shape in dealt) == 8 * h * h
    assert sorted(shape.elements // h**2 for shape in dealt) == [1, 3, 4]
    alone = dealt_out((block,), 64, 64, 1).matrices
    assert [(s.number, s.elements) for s in alone] == [(1, 4 * h * h)]


@pytest.mark.parametrize("dp", [1, 3, 8, 64])
def test_a_rank_with_more_matrices_than_its_even_share_has_the_rest_too(dp: int) -> None:
    """Few layers over many ranks: the rest is updated by AdamW all the same, and states move there and back."""
    layout = {"dp": dp, "zero": 1}
    scenario = make(GPT, {"optimizer": "muon", "optimizer_offload": True, "global_batch_size": 6 * dp}, **layout)
    step = simulate(scenario)
    blocks = [b for s in step.stages[0].values() for b in s.blocks]
    whole, dealt = dealt_out(blocks, 1, 1, 0), dealt_out(blocks, dp, dp, 1)
    assert whole.rest + sum(s.elements for s in whole.matrices) == sum(b.params for b in blocks)
    assert dealt.rest == -(-whole.rest // dp)
    moved = {c["kind"]: c["bytes"] for c in step.result["communication"] if c["group"] == "host"}
    assert moved["reload"] == moved["offload"] >= dealt.rest * 12


def test_muon_takes_longer_than_adam_and_needs_whole_gradients() -> None:
    times = {name: simulate(make(LLAMA, {"optimizer": name})).result["step_time_s"] for name in ("adamw", "muon")}
    assert times["muon"] > times["adamw"]
    with pytest.raises(InputError, match=r"parallelism\.zero: found 3; Muon needs"):
        make(LLAMA, {"optimizer": "muon"}, dp=2, zero=3)
    scenario = {"model": LLAMA, "cluster": "dgx-v100", "training": {"seq_len": 64, "global_batch_size": 1}}
    with pytest.raises(
        InputError, match=r"training\.optimizer: found 'muon', which multiplies in bf16; GPU v100 has no"
    ):
        parse_scenario(merge(scenario, {"training": {"precision": "fp32", "optimizer": "muon"}}))


@pytest.mark.parametrize(("framework", "up"), [("eager", 2), ("megatron", 1)])
def test_merged_queries_keys_and_values_are_taken_apart(framework: str, up: int) -> None:
    """Megatron-Core's `muon_split_qkv` is true by default; gate and up stay one matrix, as they are there."""
    block = layer_block(make(LLAMA | {"kv_heads": 4}, {"optimizer": "muon", "framework": framework}), 0)
    model = make(LLAMA | {"kv_heads": 4}).model
    h, kv, ffn = model.hidden, model.kv_heads * model.head_dim, model.ffn
    expected = Counter({(h, h): 2, (kv, h): 2, (2 * ffn // up, h): up, (h, ffn): 1})
    assert Counter({(rows, columns): number for number, rows, columns in block.matrices}) == expected
