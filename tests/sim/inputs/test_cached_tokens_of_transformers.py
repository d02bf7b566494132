"""Keys and values that a sequence's cache holds are those that Transformers' models have in theirs, run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from sim.models.layers import layer_specs
from sim.serve.prices.dims import serving_dims
from tests.sim.transformers_configs import GPT2, OWN, SIZES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS, WIDTH_BYTES = 32, 2.0  # fewer than any window
FAMILIES = ("gpt_bigcode", "biogpt", "falcon", "gemma2", "gemma4_text", "cohere2", "glm4_moe", "llama4_text")
FAMILIES += ("minimax_m2", "gpt_oss", "granite_swa", "qwen3_moe", "exaone4", "hunyuan_v1_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_caches_as_many_numbers(tmp_path: Path, family: str) -> None:
    sizes = GPT2 if family == "gpt_bigcode" else SIZES
    config = transformers.CONFIG_MAPPING[family](**sizes | OWN.get(family, {}))
    file = tmp_path / "config.json"
    file.write_text(config.to_json_string(use_diff=False))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.arange(TOKENS)[None], use_cache=True).past_key_values
    numbers = sum(kept.numel() for layer in cache.layers for kept in (layer.keys, layer.values))
    requests = {"prompt_len": TOKENS - 4, "output_len": 4, "count": 1}
    inference = {"requests": requests}
    scenario = parse_scenario({"model": str(file), "inference": inference, "cluster": {"gpu": "h200-sxm"}})
    d, specs = serving_dims(scenario), layer_specs(scenario.model)
    cached = sum(spec.attention.sequence_bytes(d, float(TOKENS)) for spec in specs if spec.attention is not None)
    assert cached == WIDTH_BYTES * numbers
