"""Hunyuan 4: latent attention to keys that an earlier layer selected, sinks, streams that are not mixed."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.flops import indexer_gradient_flops_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import llama_like

MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
MODEL = llama_like(4, 256, 8, 1024) | {
    "ffn": 512,
    "mla": MLA,
    "indexer": {"heads": 4, "head_dim": 32, "top_k": 128},
    "attention_gate": True,
    "sinks": True,
    "attention_pattern": ["full", "reused"],
    "hyper_connections": 4,
    "hyper_connection_kind": "independent",
}


def training(change: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    run = {"seq_len": 1024, "global_batch_size": 8} | keys
    model = MODEL | (change or {})
    return parse_scenario({"model": model, "training": run, "parallelism": layout or {}, "cluster": "dgx-h200"})


def test_a_layer_without_an_indexer_has_no_weights_of_one() -> None:
    full, reused = layer_specs(training().model)[:2]
    assert full.parameters - reused.parameters == 64 * 4 * 32 + 256 * 32 + 256 * 4 + 2 * 32
    for i, spec in ((0, full), (1, reused)):
        block = layer_block(training(), i)
        assert block.params + block.frozen_params == spec.parameters
    latent = 256 * 64 + 64 + 64 * 8 * 64 + 256 * (64 + 16) + 64 + 64 * 8 * (48 + 32) + 8 * 32 * 256
    gate_and_sinks, streams = 256 * 8 * 32 + 8, 2 * (8 * (4 * 256 + 1) + 2)
    assert reused.parameters == latent + gate_and_sinks + 3 * 256 * 512 + 2 * 256 + streams


@pytest.mark.parametrize("framework", ["megatron", "transformers"])
def test_it_attends_to_as_few_keys_and_scores_none(framework: str) -> None:
    def computed(layer: int) -> list[Compute]:
        forward = layer_block(training(framework=framework), layer).forward
        return [i for i in forward if isinstance(i, Compute)]

    def attended(items: list[Compute]) -> list[tuple[int, ...]]:
        return [i.shape for i in items if i.kind == "attention_forward" and i.name != "index_scores"]

    full, reused = computed(0), computed(1)
    assert [i.name for i in full if i.name == "index_scores"] == ["index_scores"]
    # Transformers makes each layer's mask of what is selected (glm_moe_dsa/modeling_glm_moe_dsa.py: `index_mask`).
    masks = ["index_attention_mask"] if framework == "transformers" else []
    assert [i.name for i in reused if i.name.startswith("index")] == masks
    assert attended(reused) == attended(full) != []
    one = MODEL | {"attention_pattern": ["full"]}
    both = [indexer_gradient_flops_per_token(training(m).model, 1024) for m in (MODEL, one)]
    assert both[1] == 2 * both[0] > 0


def test_the_cache_of_such_a_layer_has_no_index_keys() -> None:
    requests = {"count": 2, "prompt_len": 2048, "output_len": 4}
    s = parse_scenario({"model": MODEL, "inference": {"requests": requests}, "cluster": "dgx-h200"})
    full, reused = (spec.attention for spec in layer_specs(s.model)[:2])
    assert full is not None
    assert reused is not None
    d = serving_dims(s)
    assert full.sequence_bytes(d, 100) - reused.sequence_bytes(d, 100) == 100 * (32 + 4)
    decode = [i.name for i in reused.decode(d, 2, 4096)]
    assert not [name for name in decode if name.startswith("index")]
    assert simulate_serving(s).end_s > 0


def test_streams_that_are_not_mixed_take_fewer_kernels_and_weights() -> None:
    own, mixed = (
        training(framework="transformers"),
        training({"hyper_connection_kind": "mixed"}, framework="transformers"),
    )

    def kernels(s: Scenario) -> int:
        forward = layer_block(s, 1).forward
        return sum(i.kernels for i in forward if isinstance(i, Compute) and "streams" in i.name)

    assert kernels(own) < kernels(mixed) / 4
    more = count_parameters(mixed.model).connections - count_parameters(own.model).connections
    assert more == 8 * (16 * (4 * 256 + 1) + 1)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 4, "sp": True}, {"dp": 4, "zero": 3}])
def test_layouts_run(layout: dict[str, Any]) -> None:
    assert simulate(training(layout=layout)).step_time_s > 0


@pytest.mark.parametrize(
    ("change", "layout", "keys", "word"),
    [
        ({"indexer": None}, {}, {}, "needs model.mla and model.indexer"),
        ({"attention_pattern": ["reused", "full"]}, {}, {}, "no earlier one"),
        ({"mtp_layers": 1}, {}, {}, "mtp_layers"),
        ({"indexer": None, "attention_pattern": ["full"]}, {}, {}, "sinks"),
        ({}, {"pp": 2}, {}, "not sent between stages"),
        ({}, {}, {"indexer": "warm_up"}, "layers of kind reused"),
    ],
)
def test_what_is_not_simulated_is_refused(
    change: dict[str, Any], layout: dict[str, Any], keys: dict[str, Any], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        training(change, layout, **keys)
