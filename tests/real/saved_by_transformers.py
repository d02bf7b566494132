"""Bytes that Transformers' own layers keep for their backward: small models, random weights, one forward.

`python -m tests.real.saved_by_transformers` writes them to `tests/sim/data/saved_by_transformers.json`, with
the configs and the versions that they were measured with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

AS_FLASH = {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}  # as FlashAttention, which repeats no keys for a window
FILE = Path(__file__).parents[1] / "sim" / "data" / "saved_by_transformers.json"
BATCH, SEQ, VOCAB = 2, 128, 128
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
INDEXER = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 32}
GEMMA_4 = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
DEEPSEEK = {
    **EXPERTS,
    **LATENT,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
# Sizes of windows in which compressed layers have vectors; those of an indexer keep what no gradient needs.
DEEPSEEK_V4 = {
    **EXPERTS,
    "num_key_value_heads": 1,
    "n_routed_experts": 8,
    "q_lora_rank": 64,
    "partial_rotary_factor": 0.5,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 32,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "layer_types": ["sliding_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["moe", "moe"],
}
GPT2 = {"n_embd": 256, "n_layer": 1, "n_head": 8, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
TURNS = ["sliding_attention", "full_attention"]
LARGE_IN_FP32 = (
    "deepseek_v4",
    "hy_v4",
)  # families whose weights that stay in fp32 are large, so that a cast of them shows
# family: attention, layers after which its pattern repeats, its own keys. `eager` where Transformers has no other
# attention for the family (soft caps, sinks), or none on a CPU (values narrower than keys)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("sdpa", 1, {}),
    "qwen3": ("sdpa", 1, {}),
    "gemma2": ("eager", 2, {"sliding_window": 32, "layer_types": TURNS}),
    "gemma3_text": ("sdpa", 2, {"sliding_window": 32, "layer_types": TURNS}),
    "gemma4_text": ("sdpa", 2, {"sliding_window": 32, "layer_types": TURNS, **GEMMA_4}),
    "gpt_oss": (
        "eager",
        2,
        {"sliding_window": 32, "layer_types": TURNS, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "flint": (
        "eager",
        2,
        {
            **EXPERTS,
            "sliding_window": 32,
            "layer_types": TURNS,
            "num_experts": 8,
            "shared_expert_intermediate_size": 128,
            "mlp_only_layers": [],
        },
    ),
    "qwen3_moe": ("sdpa", 1, {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 1}),
    "qwen2_moe": (
        "sdpa",
        1,
        {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1},
    ),
    "glm4_moe": ("sdpa", 1, {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 0}),
    "phi3": ("sdpa", 1, {"sliding_window": 32}),
    "olmo2": ("sdpa", 1, {}),
    "cohere": ("sdpa", 1, {}),
    "cohere2": ("sdpa", 4, {"sliding_window": 32}),
    "deepseek_v3": ("eager", 1, DEEPSEEK),
    "deepseek_v32": ("eager", 1, {**DEEPSEEK, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32}),
    "deepseek_v4": ("eager", 2, DEEPSEEK_V4),
    "glm4_moe_lite": ("eager", 1, {**DEEPSEEK, "mlp_layer_types": ["sparse"]}),
    "glm_moe_dsa": ("eager", 1, {**DEEPSEEK, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32}),
    "mistral": ("sdpa", 1, {"sliding_window": 32}),
    "ministral3": ("sdpa", 1, {}),
    "helium": ("sdpa", 1, {}),
    "granite": ("sdpa", 1, {}),
    "seed_oss": ("sdpa", 1, {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ernie4_5": ("sdpa", 1, {}),
    "hunyuan_v1_dense": ("sdpa", 1, {}),
    "smollm3": ("sdpa", 4, {}),
    "arcee": ("sdpa", 1, {}),
    "cwm": ("sdpa", 4, {"sliding_window": 32}),
    "starcoder2": ("sdpa", 1, {}),
    "olmo3": ("sdpa", 4, {"sliding_window": 32}),
    "exaone4": ("sdpa", 4, {"sliding_window": 32}),
    "glm": ("sdpa", 1, {}),
    "glm4": ("sdpa", 1, {}),
    "gemma": ("sdpa", 1, {}),
    "opt": ("sdpa", 1, {"ffn_dim": 512, "word_embed_proj_dim": 256, "dropout": 0.0}),
    "dots1": ("sdpa", 1, {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}),
    "ernie4_5_moe": (
        "sdpa",
        1,
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 128, "moe_layer_start_index": 0},
    ),
    "hunyuan_v1_moe": ("sdpa", 1, {"num_experts": 8, "moe_topk": 2}),
    "granitemoe": ("sdpa", 1, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("sdpa", 1, {"num_experts": 8, "num_experts_per_tok": 2}),
    "solar_open": ("sdpa", 1, {**EXPERTS, "n_routed_experts": 8}),
    "afmoe": (
        "sdpa",
        4,
        {**EXPERTS, "num_experts": 8, "num_shared_experts": 1, "num_dense_layers": 0, "sliding_window": 32},
    ),
    "apertus": ("sdpa", 1, {}),
    "bloom": ("eager", 1, {"n_layer": 1, "n_head": 8}),
    "exaone_moe": ("sdpa", 4, {**EXPERTS, "num_experts": 8, "mlp_layer_types": ["sparse"] * 4, "sliding_window": 32}),
    "falcon": ("sdpa", 1, {}),
    "flex_olmo": ("sdpa", 1, {"num_experts": 8, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "sdpa",
        1,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 256},
    ),
    "cohere2_moe": (
        "sdpa",
        1,
        {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "layer_types": ["sliding_attention"]},
    ),
    "kolibri1": (
        "sdpa",
        1,
        {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 128, "layer_types": ["sliding_attention"]},
    ),
    "hy_v3": ("sdpa", 1, {**EXPERTS, "num_experts": 8, "mlp_layer_types": ["sparse"]}),
    "gpt2": ("sdpa", 1, GPT2),
    "gpt_bigcode": ("sdpa", 1, GPT2),
    "gpt_neox": ("sdpa", 1, {"use_parallel_residual": True}),
    "hyperclovax": ("sdpa", 1, {}),
    "jais2": ("sdpa", 1, {}),
    "mellum": ("sdpa", 1, {**EXPERTS, "num_local_experts": 8}),
    "minicpm3": ("eager", 1, {**LATENT, "num_key_value_heads": 8}),
    "mpt": ("eager", 1, {"d_model": 256, "n_heads": 8}),
    "nanochat": ("sdpa", 1, {}),
    "nemotron": ("sdpa", 1, {}),
    "olmo": ("sdpa", 1, {}),
    "phi": ("sdpa", 1, {"attention_dropout": 0.0}),
    "phimoe": ("sdpa", 1, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "stablelm": ("sdpa", 1, {}),
    "vaultgemma": ("eager", 2, {"sliding_window": 32, "layer_types": TURNS}),
    "youtu": ("eager", 1, {**LATENT, "num_key_value_heads": 8}),
    "lfm2": ("sdpa", 2, {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        "sdpa",
        2,
        {**EXPERTS, "num_experts": 8, "num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
    ),
    "exaone": ("sdpa", 1, {}),
    "persimmon": ("sdpa", 1, {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "sarvam_moe": ("sdpa", 1, {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 0}),
    "sarvam_mla": ("eager", 1, DEEPSEEK),
    "laguna": (
        "sdpa",
        2,
        {
            **EXPERTS,
            "num_experts": 8,
            "shared_expert_intermediate_size": 128,
            "sliding_window": 32,
            "layer_types": TURNS,
            "mlp_layer_types": ["sparse", "sparse"],
        },
    ),
    "olmo_hybrid": (
        "sdpa",
        1,
        {"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "bailing_hybrid": (
        "eager",
        1,
        {
            **EXPERTS,
            **LATENT,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": ["full_attention"],
            "mlp_layer_types": ["sparse"],
        },
    ),
    "lfm3": ("sdpa", 3, {"sliding_window": 32, "layer_types": ["conv", *TURNS]}),
    "minimax_m3_vl_text": (
        "eager",
        2,
        {
            "intermediate_size": 128,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "shared_intermediate_size": 128,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 16,
            "index_topk_blocks": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["sparse", "sparse"],
        },
    ),
    "axk2": (
        "eager",
        1,
        {
            **{key: value for key, value in DEEPSEEK.items() if key not in ("first_k_dense_replace", "head_dim")},
            "n_shared_experts": 1,
            **INDEXER,
            "mlp_layer_types": ["sparse"],
        },
    ),
    "hy_v4": (
        "eager",
        2,
        {
            **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
            "n_shared_experts": 1,
            **INDEXER,
            "mlp_layer_types": ["sparse", "sparse"],
            "indexer_types": ["full", "shared"],
        },
    ),
    "qwen4_exp_text": (
        "sdpa",
        1,
        {
            **EXPERTS,
            "num_experts": 8,
            "shared_expert_intermediate_size": 128,
            "hc_lowrank": 32,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 64,
            "indexer_compress_ratio": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "layer_types": ["indexed_attention"],
        },
    ),
}
# Layers with a state stand before those that are measured: on a CPU they are plain torch, but the model wants one.
BEFORE = {"olmo_hybrid": ["linear_attention"], "bailing_hybrid": ["linear_attention"]}


# dtype of the weights, and whether the forward runs under torch.autocast, on a CPU and in bf16
MADE_IN_FP32 = ("mlp.gate.wg.weight",)  # hunyuan_v1_moe's router, which `from_pretrained` leaves in its own dtype
WAYS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}
# What is measured under it. Left out: layers that are not simulated so, GPT-2 and Phi (a CPU casts no powers), Falcon
# (whose matmuls read transposed weights, which are cast each time).
AUTOCAST = """
bloom cohere cohere2 cwm ernie4_5 exaone exaone4 gemma gemma2 gemma3_text gemma4_text glm glm4 gpt_bigcode gpt_neox
granite helium hunyuan_v1_dense hyperclovax llama ministral3 mistral mpt olmo olmo2 olmo3 opt phi3 qwen3 seed_oss
smollm3 stablelm starcoder2 vaultgemma
"""
UNDER_AUTOCAST = frozenset(AUTOCAST.split())


def config_of(family: str, layers: int) -> Any:
    """Its config with so many layers behind those of `BEFORE`."""
    attention, period, own = CASES[family]
    before = BEFORE.get(family, [])
    keys = {**SIZES, **own, "num_hidden_layers": len(before) + layers}
    if "kv_lora_rank" in keys or family == "falcon":  # its head_dim is computed
        del keys["head_dim"]
    for each_layer in ("layer_types", "mlp_layer_types", "indexer_types"):
        if each_layer in keys:
            first = before if each_layer == "layer_types" else keys[each_layer][: len(before)]
            keys[each_layer] = [*first, *keys[each_layer] * (layers // period)]
    if "n_layer" in keys:
        keys["n_layer"] = layers
    config = transformers.AutoConfig.for_model(family, **keys)
    config._attn_implementation = attention
    return config


def kept_bytes(config: Any, dtype: torch.dtype, autocast: bool = False) -> int:
    """Bytes of all storages that one forward keeps, each counted once, without parameters, their casts and buffers, and
    without attention masks, [batch, 1, queries, keys], which kernels of windows do not need."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    if config.model_type in LARGE_IN_FP32:
        for name, parameter in model.named_parameters():
            if any(part in name for part in model._keep_in_fp32_modules_strict):
                parameter.data = parameter.data.float()
    for name, parameter in model.named_parameters():
        if name.endswith(MADE_IN_FP32):
            parameter.data = parameter.data.float()
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):  # it gives places alone, so that its graph is dropped at once
            module.forward = torch.no_grad()(module.forward)
    model.train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        mask = tensor.dim() == 4 and tuple(tensor.shape[1:]) == (1, SEQ, SEQ)
        if storage.data_ptr() not in own and not mask and not of_parameter(tensor):
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no other storage gets its place
        return tensor

    casts = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with mock.patch.dict(os.environ, AS_FLASH), hooks, casts:
        model(input_ids=torch.randint(0, VOCAB, (BATCH, SEQ)), use_cache=False)
    return sum(found.values())


def of_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is the cast of a parameter, or a view of it."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def measured(family: str) -> dict[str, Any]:
    """The config of twice its pattern's layers, and what the second half's layers keep in each dtype."""
    attention, period, _ = CASES[family]
    twice = config_of(family, 2 * period)
    sizes = {
        name: kept_bytes(config_of(family, 2 * period), *way) - kept_bytes(config_of(family, period), *way)
        for name, way in WAYS.items()
        if name != "autocast" or family in UNDER_AUTOCAST
    }
    keys = {k: v for k, v in json.loads(twice.to_json_string(use_diff=False)).items() if v is not None}
    row = {"config": keys, "attention": attention, "layers": period, "kept_bytes": sizes}
    return row | ({"before": len(BEFORE[family])} if family in BEFORE else {})


if __name__ == "__main__":
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    sizes = {"batch": BATCH, "seq_len": SEQ}
    rows = {family: measured(family) for family in CASES}
    FILE.write_text(json.dumps({"versions": versions, **sizes, "families": rows}, indent=1) + "\n", encoding="utf-8")
