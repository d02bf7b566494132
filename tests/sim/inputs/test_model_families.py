"""Today's families: parameters against published counts, keys of a config, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import BlockKind, Compute
from sim.inputs.model_input import load_model
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.programs.stages import stage_blocks
from sim.ranks.plan import make_plan
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import scenario_with

GEMMA2_9B = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
PHI3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
}
OLMO2_7B = {
    "model_type": "olmo2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GLM45_AIR = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 151552,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
KIMI_K2 = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
LLAMA4_SCOUT = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "vocab_size": 202048,
    "attention_chunk_size": 8192,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN2_57B = {
    "model_type": "qwen2_moe",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

# Exact counts, and where they are published.
EXACT = {
    "gemma2_9b": (GEMMA2_9B, 9_241_705_984),  # huggingface.co/google/gemma-2-9b, safetensors
    "gemma3_1b": (GEMMA3_1B, 999_885_952),  # huggingface.co/google/gemma-3-1b-pt, safetensors
    "gpt_oss_120b": (GPT_OSS_120B, 116_829_156_672),  # gpt-oss model card (arXiv 2508.10925), table 1: 116.83 B
    "phi3_mini": (PHI3_MINI, 3_821_079_552),  # huggingface.co/microsoft/Phi-3-mini-4k-instruct, safetensors
    "olmo2_7b": (OLMO2_7B, 7_298_617_344),  # huggingface.co/allenai/OLMo-2-1124-7B, safetensors
}
# Rounded: billions in all and for one token.
ROUNDED = {
    # 106 B, 12 B active with the embedding left out: GLM-4.5 technical report (arXiv 2508.06471), table 1
    "glm45_air": (GLM45_AIR, 106.9, 0.01, 12.0, 0.15),
    # 1.04 T, 32.6 B active: Kimi K2 technical report (arXiv 2507.20534), table 2
    "kimi_k2": (KIMI_K2, 1026.4, 0.002, 32.6, 0.02),
    # 109 B with the vision tower, 17 B active: Llama 4 model card
    "llama4_scout": (LLAMA4_SCOUT, 107.8, 0.01, 17.0, 0.02),
    # 57 B, 14 B active: Qwen2 technical report (arXiv 2407.10671), table 1
    "qwen2_moe_57b": (QWEN2_57B, 57.4, 0.005, 14.0, 0.03),
}


def written(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return str(file)


@pytest.mark.parametrize("name", EXACT)
def test_counts_are_the_published_ones(tmp_path: Path, name: str) -> None:
    config, total = EXACT[name]
    assert count_parameters(load_model(written(tmp_path, config))).total == total


@pytest.mark.parametrize("name", ROUNDED)
def test_counts_round_to_the_published_ones(tmp_path: Path, name: str) -> None:
    config, total, error, active, active_error = ROUNDED[name]
    count = count_parameters(load_model(written(tmp_path, config)))
    assert count.total / 1e9 == pytest.approx(total, rel=error)
    assert count.active / 1e9 == pytest.approx(active, rel=active_error)


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_a_step_holds_the_parameters_that_are_counted(tmp_path: Path, name: str) -> None:
    """Two small layers, trained: what the ranks keep is what the closed form counts."""
    config = (EXACT.get(name) or ROUNDED[name])[0]
    small = {**config, "num_hidden_layers": 2, "vocab_size": 1024}
    small |= {"layer_types": config["layer_types"][:2]} if "layer_types" in config else {}
    training = {"seq_len": 1024, "global_batch_size": 1, "precision": "bf16", "grad_dtype": "bf16"}
    scenario = scenario_with(training, model=written(tmp_path, small), cluster="dgx-h200", calibration="roofline")
    result = simulate(scenario).result
    assert result["memory"][0]["parameters"] == 2 * count_parameters(scenario.model).total
    assert result["step_time_s"] > 0


@pytest.mark.parametrize("name", ["gemma3_1b", "gpt_oss_120b", "qwen2_moe_57b", "olmo2_7b"])
def test_families_are_served(tmp_path: Path, name: str) -> None:
    config = (EXACT.get(name) or ROUNDED[name])[0]
    small = {**config, "num_hidden_layers": 2, "vocab_size": 1024}
    small |= {"layer_types": config["layer_types"][:2]} if "layer_types" in config else {}
    inference = {"requests": {"count": 4, "prompt_len": 64, "output_len": 8}}
    model = {"model": written(tmp_path, small), "inference": inference, "cluster": "dgx-h200"}
    sim = simulate_serving(parse_scenario(model))
    assert sim.capacity.weight_bytes[0] == 2 * count_parameters(sim.costs.dims.model).total


def test_gpt_oss_is_served_in_its_own_mxfp4(tmp_path: Path) -> None:
    """Published checkpoint: 60.8 GiB for the 120b (gpt-oss model card, arXiv 2508.10925, table 1)."""
    inference = {"requests": {"count": 1, "prompt_len": 64, "output_len": 8}}
    gpu = {"gpu": {"preset": "h200-sxm", "memory_bytes": 4e12}}
    model = {"model": written(tmp_path, GPT_OSS_120B), "cluster": gpu}

    def served(quantization: str) -> Any:
        return simulate_serving(parse_scenario({**model, "inference": {**inference, "quantization": quantization}}))

    own, plain = served("mxfp4_experts"), served("none")
    assert own.capacity.weight_bytes[0] / 2**30 == pytest.approx(60.8, rel=0.01)
    assert plain.capacity.weight_bytes[0] == 2 * count_parameters(plain.costs.dims.model).total
    assert own.end_s < plain.end_s  # decode is bound by reading experts


def test_windows_stand_where_the_family_has_them(tmp_path: Path) -> None:
    windows = [spec.attention.window for spec in layer_specs(load_model(written(tmp_path, GEMMA3_1B)))]
    assert [w is None for w in windows] == [(i + 1) % 6 == 0 for i in range(26)]
    gpt_oss = [spec.attention.window for spec in layer_specs(load_model(written(tmp_path, GPT_OSS_120B)))]
    assert [w is None for w in gpt_oss] == [False, True] * 18
    scout = layer_specs(load_model(written(tmp_path, LLAMA4_SCOUT)))
    assert [s.attention.rope for s in scout[:5]] == [True, True, True, False, True]
    assert scout[0].attention.window.chunked
    assert scout[3].attention.window is None


def test_experts_in_every_second_layer(tmp_path: Path) -> None:
    """Llama 4 Maverick: 128 experts in each second layer, 400 B with the vision tower (model card)."""
    maverick = {**LLAMA4_SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2}
    model = load_model(written(tmp_path, maverick))
    assert [model.is_moe_layer(i) for i in range(4)] == [False, True, False, True]
    assert sum(map(model.is_moe_layer, range(model.layers))) == 24
    assert count_parameters(model).total / 1e9 == pytest.approx(400, rel=0.01)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "brand_new", "wkv_heads": 3},
            r"wkv_heads; any other model can be captured .*calibrate\.capture",
        ),
        ({"model_type": "rwkv"}, r"found .rwkv., a model whose layers are recurrences of a kind of their own"),
        (
            {"model_type": "new_vl", "hidden_size": 3584, "vision_config": {"depth": 32}},
            r"found 'new_vl', a model of several kinds of input \(vision_config\).*; found 'new_vl'",
        ),
        (
            {"model_type": "new_vl", "text_config": {"model_type": "new"}, "vision_config": {}, "projector_config": {}},
            r"\(vision_config, projector_config\).* if its text_config's model_type .*; found 'new'; for the whole",
        ),
        (
            {"model_type": "bert", "hidden_size": 768},
            r"found 'bert', an encoder.*calibrate\.capture config\.json --out",
        ),
        ({"model_type": "t5", "d_model": 512}, r"found 't5', an encoder with a decoder.*calibrate\.capture"),
        ({"model_type": "clip"}, r"found 'clip', a model of pictures.*module:function"),
        ({**GPT_OSS_120B, "layer_types": ["linear_attention"] * 36}, "layer_types: found 'linear_attention'"),
        ({**LLAMA4_SCOUT, "no_rope_layers": [1, 0] * 24}, "no_rope_layers"),
        ({**QWEN2_57B, "mlp_only_layers": [3]}, "mlp_only_layers"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(written(tmp_path, config))


def test_the_decoder_of_a_model_of_several_inputs_is_simulated_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "text_config": GEMMA3_1B, "vision_config": {}, "tie_word_embeddings": True}
    beside = {**GPT_OSS_120B, "audio_config": {"layers": 8}}
    for config, decoder, left_out in ((nested, GEMMA3_1B, "vision_config"), (beside, GPT_OSS_120B, "audio_config")):
        model = load_model(written(tmp_path, config))
        assert model.left_out == (left_out,)
        assert model.model_copy(update={"left_out": ()}) == load_model(written(tmp_path, decoder))
        training = {"seq_len": 1024, "global_batch_size": 1}
        scenario = parse_scenario({"model": written(tmp_path, config), "training": training, "cluster": "dgx-h200"})
        assert f"model: simulated without the config's {left_out}" in scenario.warnings


@pytest.mark.parametrize(("framework", "kernels"), [("eager", 0), ("megatron", 1)])
def test_a_norm_over_all_heads_sums_over_tp(tmp_path: Path, framework: str, kernels: int) -> None:
    """Two fp32 sums of a token each way; a norm of one kernel needs another before it, which reads queries and keys."""

    def scenario(tp: int) -> Scenario:
        return scenario_with(
            {"seq_len": 512, "global_batch_size": 1, "framework": framework},
            {"tp": tp},
            model=written(tmp_path, OLMO2_7B),
            cluster="dgx-h200",
        )

    (forward, backward), (alone, _) = (programs(scenario(tp)) for tp in (2, 1))
    assert not [item for item in alone if item.name.startswith("head_sums")]
    for program, end, reads in ((forward, "", 1), (backward, "_backward", 2)):
        items = {item.name: item for item in program if item.name.startswith("head_sums")}
        total = items.pop(f"head_sums{end}_total")
        assert (total.kind, total.group, total.bytes) == ("all_reduce", "tp", 2 * 4 * 512)
        assert len(items) == kernels
        for kernel in items.values():
            assert kernel.bytes == reads * 2 * 512 * (32 + 32) // 2 * 128


def programs(scenario: Scenario) -> tuple[list[Any], list[Any]]:
    """Forward and backward of the first layer."""
    plan = make_plan(scenario)
    layer = next(b for b in stage_blocks(plan, plan.parts[0], 0) if b.kind is BlockKind.LAYER)
    forward, backward = ([i for i in items if hasattr(i, "name")] for items in (layer.forward, layer.backward))
    return forward, backward


def test_served_norms_over_all_heads_are_summed_over_tp(tmp_path: Path) -> None:
    """One small all-reduce a layer and iteration more than the norms of single heads need, and nothing at tp 1."""

    def iteration_s(tp: int, over: str) -> float:
        config = {"preset": written(tmp_path, OLMO2_7B), "qk_norm_over": over}
        inference = {"requests": {"count": 4, "prompt_len": 64, "output_len": 8}}
        scenario = {"model": config, "inference": inference, "parallelism": {"tp": tp}, "cluster": "dgx-h200"}
        return simulate_serving(parse_scenario(scenario)).result["duration_s"]

    assert iteration_s(1, "all_heads") == iteration_s(1, "head")
    assert iteration_s(2, "all_heads") > iteration_s(2, "head")


def test_layer_norms_of_queries_and_keys_have_biases_and_keep_statistics() -> None:
    """Persimmon: two vectors each; kept are what they read, and mean and deviation of every head in fp32."""
    gpt = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024, "positions": "rope"}
    training = {"seq_len": 512, "global_batch_size": 1, "framework": "eager"}

    def scenario(**keys: Any) -> Scenario:
        return parse_scenario({"model": gpt | keys, "training": training, "cluster": "dgx-h100"})

    plain, normed = scenario(), scenario(qk_norm="layernorm")
    assert count_parameters(normed.model).total - count_parameters(plain.model).total == 2 * 2 * 2 * 32
    kept = [sum(s.bytes for s in layer_block(s, 0).saved) for s in (plain, normed)]
    assert kept[1] - kept[0] == 512 * (2 * 256 * 2 + 2 * 8 * 8)
    assert normed.model.variations == {"qk_norm": "layernorm"}
    for wrong in ({"norm": "rmsnorm", "bias": False}, {"qk_norm_over": "all_heads"}):
        with pytest.raises(InputError, match="qk_norm: found 'layernorm'; needs norm: layernorm"):
            scenario(qk_norm="layernorm", **wrong)


def test_gpt_neo_has_windows_in_each_second_layer_and_one_bias_in_attention(tmp_path: Path) -> None:
    config = {"model_type": "gpt_neo", "hidden_size": 256, "num_layers": 4, "num_heads": 8, "vocab_size": 1000}
    config |= {"max_position_embeddings": 512, "window_size": 64, "attention_types": [[["global", "local"], 2]]}
    model = load_model(written(tmp_path, config))
    assert (model.window, model.attention_pattern) == (64, ("full", "sliding"))
    attention = layer_specs(model)[0].attention
    assert attention is not None
    assert [(m.name, m.bias) for m in attention.matrices()] == [("qkv", False), ("attention_out", True)]
    whole = load_model(written(tmp_path, config | {"attention_types": [[["global"], 4]]}))
    assert (whole.window, whole.attention_pattern) == (None, ("full",))


def test_a_bias_of_attention_s_output_is_added_behind_the_sum_over_ranks() -> None:
    def added(**keys: Any) -> float:
        model = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024, "attention_bias": False} | keys
        training = {"seq_len": 512, "global_batch_size": 1, "framework": "eager"}
        data = {"model": model, "training": training, "cluster": "dgx-h100", "parallelism": {"tp": 2}}
        forward = layer_block(parse_scenario(data), 0).forward
        return sum(i.kernels for i in forward if isinstance(i, Compute) and i.name == "attention_residual")

    assert added(attention_out_bias=True) - added() == 1
