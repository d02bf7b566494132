"""What weights and the cache take on a rank that serves."""

from __future__ import annotations

import pytest

from sim.inputs.scenario import Scenario
from sim.models.layers import attention_spec
from sim.models.parameters import count_parameters
from sim.prices.profiles import load_profile
from sim.serve.cache.layer_groups import CacheGroups
from sim.serve.memory import weight_bytes
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import serving


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b", "qwen2.5-7b", "llama2-7b"])
def test_weights_are_the_models_parameters(preset: str) -> None:
    scenario = serving(model=preset)
    costs = iteration_costs(scenario, load_profile("roofline"))
    assert scenario.model.padded_vocab(1) == scenario.model.vocab
    assert weight_bytes(costs.dims, costs.specs, costs.stages[0]) == 2 * count_parameters(scenario.model).total


def test_latents_up_projections_are_kept_twice_beside_weights_of_8_bits() -> None:
    """DeepSeek-V3's 61 layers expand 512 numbers to 256 in each of 128 heads; single tokens absorb that in 16 bits."""
    found = []
    for quantization in ("none", "fp8"):
        scenario = serving({"quantization": quantization}, model="deepseek-v3")
        costs = iteration_costs(scenario, load_profile("roofline"))
        found.append(weight_bytes(costs.dims, costs.specs, costs.stages[0]))
    whole, halved = found
    (stage,) = costs.stages
    kinds = [(spec.served_elements(costs.dims), n) for spec, n in zip(costs.specs, stage.layers, strict=True)]
    in_8_bits = sum(n * (own.linear + own.experts) for own, n in kinds)
    assert halved == whole - in_8_bits + 2 * 61 * 512 * 256 * 128


def test_split_weights_add_up() -> None:
    whole = serving(model="llama3-8b")
    split = serving(model="llama3-8b", parallelism={"tp": 4, "pp": 2})
    one, many = (iteration_costs(s, load_profile("roofline")) for s in (whole, split))
    per_rank = [weight_bytes(many.dims, many.specs, stage) for stage in many.stages]
    norms = 2 * 65 * 4096 * 3  # held by every rank of a tensor-parallel group
    padding = 2 * 256 * 4096 * 2  # 128,256 entries to a multiple of 512, in two tables
    assert 4 * sum(per_rank) == weight_bytes(one.dims, one.specs, one.stages[0]) + norms + padding


@pytest.mark.parametrize(
    ("engine", "of_windows"),
    [("bundled", 128 / 1000), ("vllm-0.28", 128 / 1000), ("vllm-0.8", 1.0), ("sglang", 1.0), ("sglang-0.5", 0.8)],
)
def test_layers_with_windows_have_the_room_that_the_engine_gives_them(engine: str, of_windows: float) -> None:
    """Of gpt-oss 20B's 24 layers every second has a window of 128; a token takes 2·8·64 numbers in each."""
    requests = {"prompt_len": 900, "output_len": 100}
    scenario = serving({"engine": engine, "requests": requests}, model="gpt-oss-20b", gpu={"memory_bytes": 80e9})
    (token,) = simulate_serving(scenario).capacity.token_bytes
    assert token == pytest.approx(12 * 2 * 2 * 8 * 64 * (1 + of_windows))


def test_a_model_of_windows_alone_keeps_what_they_see() -> None:
    requests = {"prompt_len": 900, "output_len": 100}
    model = {"preset": "llama3.2-1b", "window": 100}
    scenario = serving({"engine": "vllm-0.8", "requests": requests}, model=model, gpu={"memory_bytes": 80e9})
    (token,) = simulate_serving(scenario).capacity.token_bytes
    assert token == pytest.approx(16 * 2 * 2 * 8 * 64 * 0.1)


def test_cache_of_a_token() -> None:
    """DeepSeek-V3 keeps 512 + 64 numbers a layer (arXiv 2412.19437), Llama 3 8B 2·8·128."""

    def of_a_layer(scenario: Scenario) -> float:
        return CacheGroups().sequence_bytes(serving_dims(scenario), (attention_spec(scenario.model),), (1,), 1.0)

    assert of_a_layer(serving(model="deepseek-v3")) == 2 * 576
    assert of_a_layer(serving(model="llama3-8b")) == 2 * 2 * 8 * 128
    assert of_a_layer(serving({"kv_cache": {"dtype": "fp8"}}, model="llama3-8b")) == 2 * 8 * 128
