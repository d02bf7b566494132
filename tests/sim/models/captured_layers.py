"""Small models of Transformers, captured, and the scenarios that describe them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedProgram, read_program

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 1024,
    },
    "qwen3_moe": {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 3,
        "vocab_size": 1024,
        "norm_topk_prob": True,
    },
    "gpt2": {"n_embd": 512, "n_head": 8, "n_layer": 3, "n_inner": 2048, "vocab_size": 1024, "n_positions": 128}
    | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "bloom": {"hidden_size": 512, "n_head": 8, "n_layer": 3, "vocab_size": 1024},
    "gpt_neo": {"hidden_size": 512, "num_heads": 8, "num_layers": 3, "vocab_size": 1024, "max_position_embeddings": 128}
    | {"attention_types": [[["global"], 3]]},
    "mpt": {"d_model": 512, "n_heads": 8, "n_layers": 3, "vocab_size": 1024, "max_seq_len": 128},
    "opt": {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3, "ffn_dim": 2048, "vocab_size": 1024}
    | {"max_position_embeddings": 128, "dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 512},
    "xglm": {"d_model": 512, "attention_heads": 8, "num_layers": 3, "ffn_dim": 2048, "vocab_size": 1024}
    | {"max_position_embeddings": 128, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}
CONFIGS["gpt_neox"] = CONFIGS["llama"] | {"intermediate_size": 2048}
CONFIGS["persimmon"] = CONFIGS["llama"] | {"intermediate_size": 2048, "hidden_dropout": 0.0, "attention_dropout": 0.0}
CONFIGS["apertus"] = CONFIGS["llama"]
CONFIGS["arcee"] = CONFIGS["llama"]
CONFIGS["cohere"] = CONFIGS["llama"] | {"tie_word_embeddings": True}
CONFIGS["ernie4_5"] = CONFIGS["llama"] | {"head_dim": 64}
CONFIGS["olmo2"] = CONFIGS["llama"]
CONFIGS["mistral"] = CONFIGS["llama"] | {"sliding_window": 32}
CONFIGS["phi3"] = CONFIGS["llama"] | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
OF_EXPERTS = CONFIGS["llama"] | {"moe_intermediate_size": 256, "num_key_value_heads": 8}
CONFIGS["qwen2_moe"] = OF_EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 512}
CONFIGS["ernie4_5_moe"] = OF_EXPERTS | {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1}
CONFIGS["deepseek_v2"] = OF_EXPERTS | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
CONFIGS["deepseek_v2"] |= {"q_lora_rank": 192, "kv_lora_rank": 128, "first_k_dense_replace": 0, "n_group": 1}
CONFIGS["deepseek_v3"] = CONFIGS["deepseek_v2"] | {"topk_group": 1}
CONFIGS["minicpm3"] = CONFIGS["llama"] | {"q_lora_rank": 192, "kv_lora_rank": 128, "num_key_value_heads": 8}
CONFIGS["gpt_oss"] = CONFIGS["llama"] | {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
CONFIGS["gpt_oss"] |= {"layer_types": ["full_attention"] * 3}
CONFIGS["flint"] = CONFIGS["gpt_oss"] | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
CONFIGS["flint"] |= {"num_experts": 8, "mlp_only_layers": []}
CONFIGS["falcon"] = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 1024}
CONFIGS["falcon_rw"] = CONFIGS["falcon"] | {"model_type": "falcon", "multi_query": False, "parallel_attn": False}
CONFIGS["falcon_rw"] |= {"bias": True, "alibi": True}
CONFIGS["gptj"] = CONFIGS["codegen"] = CONFIGS["gpt2"] | {"rotary_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"layers": 3, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 1408, "vocab": 1024, "bias": False}
    | {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope"},
    "gpt2": {"layers": 3, "hidden": 512, "heads": 8, "vocab": 1024, "mlp": "gelu_new", "positions": "learned"}
    | {"code": "gpt2"},
}
MODELS["qwen3_moe"] = MODELS["llama"] | {"head_dim": 64, "qk_norm": True, "moe": {"experts": 8, "top_k": 2, "ffn": 256}}
MODELS["qwen3_moe"] |= {"code": "qwen2_moe"}
MODELS["arcee"] = MODELS["llama"] | {"mlp": "relu2", "separate_qkv": True}
MODELS["apertus"] = MODELS["llama"] | {"mlp": "xielu", "separate_qkv": True, "qk_norm": True}
MODELS["cohere"] = MODELS["llama"] | {
    "norm": "layernorm",
    "parallel_block": True,
    "norm_in_fp32": True,
    "code": "cohere",
}
MODELS["ernie4_5"] = MODELS["llama"] | {"code": "ernie4_5"}
MODELS["olmo2"] = MODELS["llama"] | {"qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post"}
MODELS["olmo2"] |= {"norm_in_fp32": True, "code": "olmo"}
MODELS["mistral"] = MODELS["llama"] | {"window": 32}
MODELS["phi3"] = MODELS["llama"] | {"merged_projections": True, "code": "phi3"}
EXPERTS: dict[str, Any] = {"experts": 8, "top_k": 2, "ffn": 256}
MODELS["gpt_oss"] = MODELS["llama"] | {"head_dim": 64, "bias": True, "sinks": True, "moe": EXPERTS | {"ffn": 1408}}
MODELS["gpt_oss"] |= {"code": "gpt_oss"}
MODELS["flint"] = MODELS["llama"] | {"head_dim": 64, "qk_norm": True, "norm_in_fp32": True, "sinks": True}
MODELS["flint"] |= {"moe": EXPERTS | {"shared_ffn": 256, "router_fp32": True}, "code": "flint"}
WHOLE_HEADS = MODELS["llama"] | {"kv_heads": 8}
MODELS["qwen2_moe"] = WHOLE_HEADS | {"qkv_bias": True, "moe": EXPERTS | {"shared_ffn": 512, "shared_gate": True}}
MODELS["qwen2_moe"] |= {"code": "qwen2_moe"}
OF_FP32 = EXPERTS | {"shared_experts": 1, "router_fp32": True}
MODELS["ernie4_5_moe"] = WHOLE_HEADS | {"moe": OF_FP32, "code": "ernie4_5_moe"}
MLA = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS["deepseek_v2"] = WHOLE_HEADS | {"mla": MLA, "moe": OF_FP32, "code": "deepseek_v2"}
MODELS["deepseek_v3"] = MODELS["deepseek_v2"] | {"code": "deepseek_v3"}
MODELS["minicpm3"] = WHOLE_HEADS | {"mla": MLA | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}}
MODELS["minicpm3"] |= {"code": "granite"}
CONFIGS["olmoe"] = OF_EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}
MODELS["olmoe"] = WHOLE_HEADS | {"qk_norm": True, "qk_norm_over": "all_heads", "moe": EXPERTS, "code": "olmoe"}
CONFIGS["phimoe"] = OF_EXPERTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}
MODELS["phimoe"] = WHOLE_HEADS | {"norm": "layernorm", "norm_bias": True, "moe": EXPERTS, "code": "phimoe"}
CONFIGS["hunyuan_v1_moe"] = OF_EXPERTS | {"num_experts": 8, "moe_topk": 2, "intermediate_size": 256, "head_dim": 64}
MODELS["hunyuan_v1_moe"] = WHOLE_HEADS | {"qk_norm": True, "moe": OF_FP32, "code": "hunyuan_v1_moe"}
CONFIGS["lfm2_moe"] = OF_EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 0}
CONFIGS["lfm2_moe"] |= {"layer_types": ["full_attention"] * 3}
MODELS["lfm2_moe"] = WHOLE_HEADS | {"qk_norm": True, "moe": EXPERTS, "code": "lfm2_moe"}
CONFIGS["dbrx"] = {"d_model": 512, "n_heads": 8, "n_layers": 3, "vocab_size": 1024, "resid_pdrop": 0.0}
CONFIGS["dbrx"] |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}, "emb_pdrop": 0.0}
CONFIGS["dbrx"] |= {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 256}}
MODELS["dbrx"] = MODELS["llama"] | {"norm": "layernorm", "moe": EXPERTS, "code": "dbrx"}
OF_GPT = {"layers": 3, "hidden": 512, "heads": 8, "vocab": 1024}
MODELS |= {
    "gpt_neox": OF_GPT
    | {"mlp": "gelu", "positions": "rope", "rope_share": 0.25, "parallel_block": "two_norms", "code": "gpt_neox"},
    "persimmon": OF_GPT
    | {"mlp": "relu2", "positions": "rope", "rope_share": 0.5, "qk_norm": "layernorm", "code": "persimmon"},
    "bloom": OF_GPT | {"mlp": "gelu_bloom", "embedding_norm": True, "code": "bloom"},
    "gpt_neo": MODELS["gpt2"]
    | {"attention_bias": False, "attention_out_bias": True, "separate_qkv": True}
    | {"code": "gpt_neo"},
    "gptj": MODELS["gpt2"]
    | {"attention_bias": False, "separate_qkv": True, "positions": "rope", "rope_share": 0.5}
    | {"parallel_block": True, "code": "gptj"},
    "codegen": MODELS["gpt2"]
    | {"attention_bias": False, "positions": "rope", "rope_share": 0.5}
    | {"parallel_block": True, "code": "codegen"},
    "mpt": OF_GPT | {"bias": False, "code": "mpt"},
    "opt": OF_GPT | {"mlp": "relu", "separate_qkv": True, "code": "opt"},
    "xglm": OF_GPT | {"mlp": "gelu", "separate_qkv": True, "code": "xglm"},
    "falcon_rw": OF_GPT | {"code": "falcon_rw"},
    "falcon": OF_GPT
    | {"kv_heads": 1, "bias": False, "norm_bias": True, "positions": "rope", "parallel_block": True, "code": "falcon"},
}
LAYER = dict.fromkeys(("gpt2", "gptj", "codegen", "gpt_neo", "bloom", "falcon", "falcon_rw"), "h.1")
LAYER |= {"mpt": "blocks.1", "dbrx": "blocks.1"}
LAYER |= dict.fromkeys((*MODELS.keys() - LAYER.keys(),), "layers.1")
for activation in ("gelu_fast", "quick_gelu"):  # of GPT-2's layers, by the activation's name
    CONFIGS[activation] = CONFIGS["gpt2"] | {"model_type": "gpt2", "activation_function": activation}
    MODELS[activation], LAYER[activation] = MODELS["gpt2"] | {"mlp": activation}, LAYER["gpt2"]
SEQ, BATCH = 128, 2


def capture(folder: Path, name: str, attention: str, balanced: bool = False, **options: Any) -> CapturedProgram:
    """The program of the model's step; `balanced`: routers choose all experts equally.

    `options`: those of `calibrate.capture`.
    """
    pytest.importorskip("torch", reason="capturing runs torch's own code")
    pytest.importorskip("transformers", reason="the models are Transformers'")
    from calibrate.capture.huggingface.step import huggingface_maker
    from calibrate.capture.options import Options
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    given = Options(SEQ, BATCH, attention=attention, **options)
    step, recorder = record(huggingface_maker({"model_type": name, **CONFIGS[name]}, given), balanced=balanced)
    file = folder / f"{attention}.json.gz"
    write_program(file, step, recorder)
    return read_program(file)
