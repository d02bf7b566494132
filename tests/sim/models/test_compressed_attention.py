"""DeepSeek V4: published counts, keys that a query sees, cache and flops by hand, streams, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.program import Comm, Compute
from sim.inputs.model_input import load_model
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import dims
from sim.models.flops import model_flops_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.layers.compressed import CompressedAttention
from sim.models.parameters import count_parameters
from sim.models.source import source_of
from sim.models.streams.sizes import Streams
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from tests.sim.cases import llama_like
from tests.sim.inputs.test_model_families import written

FLASH = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
    "expert_dtype": "fp4",
}
SMALL = llama_like(3, 256, 8, 1024) | {
    "kv_heads": 1,
    "head_dim": 64,
    "ffn": 512,
    "window": 64,
    "attention_pattern": ["sliding", "compressed_sparse", "compressed"],
    "compressed_attention": {
        "q_lora_rank": 128,
        "rope_head_dim": 32,
        "output_groups": 4,
        "output_rank": 64,
        "rate": 128,
        "sparse_rate": 4,
    },
    "indexer": {"heads": 4, "head_dim": 32, "top_k": 64},
    "hyper_connections": 4,
}


def training(model: Any = None, parallelism: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    keys = {"seq_len": 1024, "global_batch_size": 8, "framework": "megatron"} | keys
    layout = parallelism or {}
    return parse_scenario({"model": model or SMALL, "training": keys, "parallelism": layout, "cluster": "dgx-h200"})


def attention_of(model: str, layer: int) -> CompressedAttention:
    found = layer_specs(load_model(model))[layer].attention
    assert isinstance(found, CompressedAttention)
    return found


@pytest.mark.parametrize(
    ("name", "total", "active"), [("deepseek-v4-flash", 284e9, 13e9), ("deepseek-v4-pro", 1.6e12, 49e9)]
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    counts = count_parameters(load_model(name))
    assert counts.total == pytest.approx(total, rel=0.02)
    assert counts.active == pytest.approx(active, rel=0.07)


def test_the_preset_is_the_released_config(tmp_path: Path) -> None:
    found = training(model=written(tmp_path, FLASH)).model
    assert found.model_copy(update={"max_positions": 0}) == load_model("deepseek-v4-flash")


@pytest.mark.parametrize("length", [1, 3, 4, 100, 128, 129, 511, 3000, 8192])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_query_sees_its_window_and_what_is_compressed_before_it(layer: int, length: int) -> None:
    a = attention_of("deepseek-v4-flash", layer)
    most = 10**9 if a.indexer is None else a.indexer.top_k
    seen = [min(t, 128) + (0 if a.rate is None else min(t // a.rate, most)) for t in range(1, length + 1)]
    assert a.seen_keys(length) == pytest.approx(sum(seen) / length, rel=1e-12)


def test_model_flops_are_matmuls_keys_seen_and_scores() -> None:
    m, n = load_model("deepseek-v4-flash"), 8192
    flops = 0.0
    for layer in range(m.layers):
        a = attention_of("deepseek-v4-flash", layer)
        flops += 12 * 64 * 512 * a.seen_keys(n)
        if a.indexer is not None:
            vectors, queried = n // 4, 64 * 128
            flops += 2 * queried * vectors / 2 + 4 * queried * a.indexer.selected(vectors)
            flops -= 2 * sum(x.elements for x in a.indexer.matrices(a.hidden, a.query_rank))
    without = m.model_copy(update={"mtp_layers": 0})
    counts = count_parameters(without)
    assert model_flops_per_token(without, n) == pytest.approx(6 * (counts.active - counts.embedding) + flops, rel=1e-3)


def test_cache_of_a_vector_is_584_bytes_in_fp8_and_old_tokens_cost_little() -> None:
    keys = {"engine": "vllm-v1", "requests": {"prompt_len": 8, "output_len": 8}, "kv_cache": {"dtype": "fp8"}}
    d = serving_dims(parse_scenario({"model": "deepseek-v4-flash", "inference": keys, "cluster": "dgx-h200"}))
    sliding, sparse, dense = (attention_of("deepseek-v4-flash", layer) for layer in (0, 2, 3))
    assert sliding.entry_bytes(d) == 584
    assert sliding.sequence_bytes(d, 100_000) == 128 * 584
    more = 128_000
    assert sparse.sequence_bytes(d, 2 * more) - sparse.sequence_bytes(d, more) == (584 + 132) * more / 4
    assert dense.sequence_bytes(d, 2 * more) - dense.sequence_bytes(d, more) == 584 * more / 128
    # kv_state and score_state of DeepSeek's inference code: [ratio, head_dim], where windows overlap twice both
    assert dense.state_bytes() == 2 * 128 * 512 * 4
    assert sparse.state_bytes() == 2 * 8 * 1024 * 4 + 2 * 8 * 256 * 4


def test_a_decoded_token_reads_what_it_sees() -> None:
    keys = {"requests": {"prompt_len": 8, "output_len": 8}}
    d = serving_dims(parse_scenario({"model": "deepseek-v4-flash", "inference": keys, "cluster": "dgx-h200"}))
    (*_, core) = attention_of("deepseek-v4-flash", 3).decode(d, 4, 100_000)
    assert isinstance(core, Compute)
    assert core.bytes == 4 * ((128 + 100_000 // 128) * 1024 + 2 * 64 * 512 * 2)
    (scored, chosen, core) = attention_of("deepseek-v4-flash", 2).decode(d, 4, 100_000)
    assert (scored.name, chosen.name) == ("index_scores", "index_select")
    assert isinstance(core, Compute)
    assert core.bytes == 4 * ((128 + 512) * 1024 + 2 * 64 * 512 * 2)


def test_streams_are_sent_between_stages_and_kept() -> None:
    one = SMALL | {"hyper_connections": 1}
    layout = {"pp": 2, "schedule": "1f1b"}
    four, plain = (source_of(training(model, layout)) for model in (SMALL, one))
    assert four.input_bytes(1) == 4 * plain.input_bytes(1)
    recompute = {"recompute": "full"}
    kept = [sum(s.bytes for s in layer_block(training(m, **recompute), 1).saved) for m in (SMALL, one)]
    assert kept[0] == 4 * kept[1] == 4 * 1024 * 256 * 2


def test_hyper_connections_learn_what_transformers_does() -> None:
    s = Streams(4, 256)
    counts = count_parameters(training().model)
    assert counts.connections == 6 * (24 * (4 * 256 + 1) + 3) + 4 * (4 * 256 + 1) + 1
    assert (s.branch_parameters, s.head_parameters) == (24 * 1025 + 3, 4 * 1025 + 1)
    block = layer_block(training(), 0)
    spec = layer_specs(training().model)[0]
    assert block.params == spec.parameters


def test_fused_hyper_connections_take_four_kernels_and_separate_operators_move_more() -> None:
    def items(framework: str) -> list[Compute]:
        block = layer_block(training(framework=framework), 0)
        return [i for i in block.forward if isinstance(i, Compute) and ("streams" in i.name or "residual" in i.name)]

    fused, apart = items("megatron"), items("transformers")
    assert sum(i.kernels for i in fused) == 2 * 4
    assert sum(i.kernels for i in apart) > 2 * 100
    assert sum(i.bytes for i in apart) > 3 * sum(i.bytes for i in fused)


def test_an_indexer_costs_and_top_k_saves() -> None:
    def layer_s(top_k: int) -> float:
        model = SMALL | {"indexer": {"heads": 4, "head_dim": 32, "top_k": top_k}}
        return simulate(training(model, seq_len=16384, global_batch_size=1)).step_time_s

    assert layer_s(64) < layer_s(2048)
    frozen = simulate(training(seq_len=16384, global_batch_size=1, indexer="frozen"))
    assert frozen.step_time_s < simulate(training(seq_len=16384, global_batch_size=1)).step_time_s


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 4, "sp": True}, {"dp": 4, "zero": 3}, {"pp": 3}])
def test_layouts_run_and_tp_sums_gradients_of_what_all_heads_read(layout: dict[str, Any]) -> None:
    s = training(parallelism=layout)
    assert simulate(s).step_time_s > 0
    shared = [i for i in layer_block(s, 2).backward if isinstance(i, Comm) and "latent_tp_grad" in i.name]
    assert len(shared) == (1 if s.parallelism.tp > 1 else 0)
    if shared:
        vectors = 1024 + 1024 // 128
        assert shared[0].bytes == pytest.approx(vectors * 64 * dims(s).act_bytes, rel=0.02)


def test_serving_with_a_prediction_module_and_long_prompts() -> None:
    keys = {"requests": {"prompt_len": 4096, "output_len": 64, "count": 8}}
    run = {"model": "deepseek-v4-flash", "parallelism": {"tp": 8, "ep": 8}, "cluster": "dgx-h200"}
    plain = simulate_serving(parse_scenario(run | {"inference": keys}))
    drafted = simulate_serving(parse_scenario(run | {"inference": keys | {"speculative": {"tokens": 1}}}))
    assert plain.result["time_per_output_token_s"]["p50"] > drafted.result["time_per_output_token_s"]["p50"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"compressed_attention": None}, "indexer"),
        ({"compressed_attention": None, "indexer": None}, "compressed_attention"),
        ({"indexer": None}, "attention_pattern"),
        ({"kv_heads": 8}, "kv_heads"),
        ({"attention_pattern": ["full"]}, "attention_pattern"),
        ({"attention_gate": True}, "attention_gate"),
        ({"qk_norm": True}, "qk_norm"),
        ({"rope_share": 0.5}, "rope_share"),
        ({"attention_bias": True}, "attention_bias"),
        ({"parallel_block": True}, "hyper_connections"),
        ({"compressed_attention": SMALL["compressed_attention"] | {"output_groups": 3}}, "output_groups"),
        ({"compressed_attention": SMALL["compressed_attention"] | {"rope_head_dim": 66}}, "rope_head_dim"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        training(SMALL | change)


@pytest.mark.parametrize(
    ("layout", "keys", "word"),
    [({"tp": 8}, {}, "output_groups"), ({"cp": 2}, {}, "whole sequences"), ({}, {"indexer": "warm_up"}, "warm_up")],
)
def test_layouts_that_are_not_simulated_are_refused(layout: dict[str, Any], keys: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        training(parallelism=layout, **keys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress_ratios", [4, 7]),
        ("layer_types", ["full_attention"] * 43),
        ("hc_sinkhorn_iters", 5),
        ("attention_bias", True),
    ],
)
def test_a_config_with_other_layers_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=key):
        load_model(written(tmp_path, {k: v for k, v in FLASH.items() if k != "compress_ratios"} | {key: value}))


def test_a_window_alone_is_a_layer_without_compression() -> None:
    a = attention_of("deepseek-v4-flash", 0)
    assert replace(a, rate=128).other_parameters() - a.other_parameters() == 128 * 512 + 512
    assert a.state_bytes() == 0
