"""Small configs of Hugging Face families: sizes that all share, and what each family needs beside them."""

from __future__ import annotations

from typing import Any

LAYERS, EXPERTS = 8, 16
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GPT2 = {"n_layer": LAYERS, "n_embd": 512, "n_head": 8, "n_inner": 768, "vocab_size": 1000}
LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128, "num_key_value_heads": 8}
ROUTED = {"n_routed_experts": EXPERTS, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"] * 2
WINDOWS = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SHARED = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# What a family's config needs beside or in place of `SIZES`.
OWN: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "num_dense_layers": 2},
    "axk1": LATENT | ROUTED,
    "axk2": LATENT | ROUTED | {"n_shared_experts": 1, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64},
    "bailing_hybrid": LATENT | {"num_local_experts": EXPERTS, "moe_intermediate_size": 128},
    "bamba": {"mamba_n_heads": 16, "mamba_d_head": 64, "attn_layer_indices": [2, 6]},
    "beam": {"head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "bloom": {"n_layer": LAYERS, "n_head": 8},
    "cohere2_moe": {"num_experts": EXPERTS, "num_shared_experts": 2},
    "deepseek_v2": LATENT | ROUTED | {"first_k_dense_replace": 1, "n_group": 1},
    "deepseek_v3": LATENT | ROUTED,
    "deepseek_v32": LATENT | ROUTED,
    "deepseek_v4": ROUTED
    | {"num_key_value_heads": 1, "q_lora_rank": 256, "o_lora_rank": 128, "n_shared_experts": 1, "num_hash_layers": 0},
    "dots1": ROUTED | {"first_k_dense_replace": 2},
    "dbrx": {
        "d_model": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"moe_num_experts": EXPERTS, "moe_top_k": 4, "ffn_hidden_size": 768},
    },
    "cohere_compass_text": {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * (LAYERS // 4),
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": None},
    },
    "exaone_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 128},
    "flex_olmo": {"num_experts": EXPERTS},
    "flint": {key: SHARED[key] for key in SHARED if not key.startswith("linear")},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": 4, "moe_intermediate_size": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "num_layers": LAYERS, "num_heads": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": LATENT | ROUTED,
    "glm_moe_dsa": LATENT | ROUTED | {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "granitemoe": {"num_local_experts": EXPERTS},
    "helium": {"head_dim": 64},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "num_experts": EXPERTS, "moe_topk": 2},
    "hy_v4": LATENT
    | ROUTED
    | {"n_shared_experts": 1, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64},
    "kimi_linear": LATENT | {"num_experts": EXPERTS},
    "kolibri1": {"num_experts": EXPERTS, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "laguna": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
    },
    "lara_mini": SHARED,
    "lfm2": {"layer_types": CONVOLUTIONS},
    "lfm2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 128, "layer_types": CONVOLUTIONS},
    "llama4_text": {"num_local_experts": EXPERTS},
    "longcat_flash": LATENT | {"n_routed_experts": EXPERTS, "expert_ffn_hidden_size": 128, "zero_expert_num": 0},
    "mamba2": {"num_heads": 16, "head_dim": 64},
    "mimo_v2_flash": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 128, "head_dim": 96, "v_head_dim": 64}
    | {"num_experts_per_tok": 4},
    "minimax_m2": {"num_local_experts": EXPERTS, "num_experts_per_tok": 4},
    "minimax_m3_vl_text": {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "index_n_heads": 2,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * (LAYERS - 1)],
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
    },
    "ministral": {"head_dim": 64},
    "mistral": {"sliding_window": 128},
    "mixtral": {"sliding_window": 128},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": 4},
    "opt": {"ffn_dim": 768, "word_embed_proj_dim": 512},
    "qwen2": WINDOWS,
    "qwen2_moe": {"num_experts": EXPERTS},
    "qwen3": WINDOWS,
    "qwen3_5_moe_text": {"num_experts": EXPERTS, "moe_intermediate_size": 128},
    "qwen3_moe": {"num_experts": EXPERTS},
    "qwen3_next": {"num_experts": EXPERTS},
    "qwen4_exp_text": SHARED
    | {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "hc_lowrank": 32,
        "ple_layer_ids": [1, 6],
        "ngram_vocab_size_base": 1000,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 64,
        "indexer_compress_ratio": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "sarvam_mla": LATENT | ROUTED,
    "sarvam_moe": ROUTED,
    "solar_open": ROUTED,
    "starcoder2": {"sliding_window": 128},
}
LAGUNA = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * (LAYERS // 4),
    "num_attention_heads_per_layer": [4, 8, 8, 8] * (LAYERS // 4),
}
GEMMA_4_SMALL = {
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * (LAYERS // 4),
}
GEMMA_4_EXPERTS = {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 4, "moe_intermediate_size": 128}
