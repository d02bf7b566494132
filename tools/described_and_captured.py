"""Steps of Hugging Face models simulated twice: as `framework: transformers` describes them, and from their operators.

    python tools/described_and_captured.py [--only FAMILY …] [--folder FOLDER] [--compile | --way WAY]

Each model has 8 layers of width 2,048 and is captured (`calibrate.capture`, no GPU needed) with 16-bit weights and 2
sequences of 2,048 tokens. Both ways have the prices of an H200. docs/models.md has the table without its last two
columns: how far the described saved bytes and peak of memory are from the captured ones. FOLDER keeps the captured
programs.
`--compile`: both under torch.compile (`framework: transformers_compiled`). WAY: with fp32 weights under torch.autocast,
with layers that run again, with adapters, with eager attention, or some of these under torch.compile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sim.convert.settings import ALL_IN_BF16  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.simulation import simulate  # noqa: E402

SEQ_LEN, SEQUENCES = 2048, 2
BYTES = "activations", "peak"  # of memory, whose differences are columns
SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
    "num_hidden_layers": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = {"n_embd": 2048, "n_layer": 8, "n_head": 16, **NO_DROPOUT}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
NO_DROPOUT_OF_BART = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
LATENT = {"q_lora_rank": 768, "kv_lora_rank": 512, "num_key_value_heads": 16, "head_dim": None}
DEEPSEEK = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
# attention in separate operators
EAGER = ("bloom", "deepseek_v4", "flint", "gemma2", "granite_swa", "gpt_neo", "gpt_oss", "gptj", "mpt", "xglm")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "cohere": {},
    "glm4": {},
    "gemma2": {"sliding_window": 1024},
    "gemma3_text": {"sliding_window": 1024, "query_pre_attn_scalar": 128},
    "granite": {},
    "granite_swa": {"sliding_window": 1024},
    "olmo": {},
    "olmo2": {},
    "hyperclovax": {},
    "stablelm": {},
    "nemotron": {},
    "apertus": {},
    "nanochat": {},
    "starcoder2": {},
    "gpt2": GPT2 | {"n_inner": 8192},
    "gpt_neox": {},
    "opt": {"ffn_dim": 8192, "word_embed_proj_dim": 2048, "dropout": 0.0},
    "phi": {"num_key_value_heads": 16},
    "falcon": {"head_dim": None},
    "persimmon": {"num_key_value_heads": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gptj": GPT2 | {"rotary_dim": 64},
    "codegen": GPT2 | {"rotary_dim": 64},
    "bloom": {"n_layer": 8, "n_head": 16},
    "mpt": {"d_model": 2048, "n_heads": 16, "n_layers": 8},
    "mixtral": {"num_local_experts": 8},
    "dbrx": {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 8,
        "max_seq_len": SEQ_LEN,
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 1024},
    },
    "granitemoeshared": {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size": 1024,
        "intermediate_size_mlp": 4096,
        "interleave_moe_layer_step": 2,
    },
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
    },
    "minicpm3": LATENT,
    "ministral3": {},
    "mistral4": {
        **LATENT,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 0,
    },
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 1024,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},  # as released models have it
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "afmoe": {**EXPERTS, "num_shared_experts": 1, "num_dense_layers": 0},
    "hy_v3": {**EXPERTS, "mlp_layer_types": ["sparse"] * 8},
    "smollm3": {},
    "exaone4": {"sliding_window": 1024, "sliding_window_pattern": 4},
    "seed_oss": {},
    "ernie4_5": {},
    "cohere2": {"sliding_window": 1024},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,  # as released
        "n_group": 1,
        "topk_group": 1,
    },
    "lfm2_moe": {**EXPERTS, "num_dense_layers": 0, "layer_types": ["full_attention"] * 8},
    "flint": {
        **EXPERTS,
        "shared_expert_intermediate_size": 1024,
        "sliding_window": 1024,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 1],
    },
    "gpt_neo": {"num_layers": 8, "num_heads": 16, "attention_types": [[["global", "local"], 4]], "resid_dropout": 0.0},
    "lara_mini": {
        **EXPERTS,
        "shared_expert_intermediate_size": 1024,
        "sliding_window": 1024,
        "intermediate_size": None,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "intermediate_size": 1024},
    "deepseek_v2": {
        **LATENT,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 0,
        "n_group": 1,
    },
    "xglm": {"d_model": 2048, "num_layers": 8, "attention_heads": 16, "ffn_dim": 8192, **NO_DROPOUT_OF_BART},
    "beam": {
        **EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 1024,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
    },
    "laguna": {
        **EXPERTS,
        "shared_expert_intermediate_size": 1024,
        "sliding_window": 1024,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
        "num_attention_heads_per_layer": [12, 16, 16, 16] * 2,
        "gating": "per-head",
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm3": {"sliding_window": 256},
    "kolibri1": {**EXPERTS, "shared_expert_intermediate_size": 1024, "sliding_window": 1024, "norm_topk_prob": True},
    "axk1": {**LATENT, **DEEPSEEK},
    "deepseek_v32": {**LATENT, **DEEPSEEK, "index_n_heads": 16, "index_topk": 512},
    "glm_moe_dsa": {
        **LATENT,
        **DEEPSEEK,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 16,
        "index_topk": 512,
        "n_group": 1,
        "topk_group": 1,
        "indexer_types": ["full", "full", "full", "shared"] * 2,
    },
    "deepseek_v4": {
        **LATENT,
        **DEEPSEEK,
        "num_key_value_heads": 1,
        "o_lora_rank": 512,
        "n_shared_experts": 1,
        "num_hash_layers": 0,
        "index_n_heads": 16,
        "sliding_window": 128,
    },
    "minimax_m3_vl_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 1024,
        "index_n_heads": 4,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 7],
        "mlp_layer_types": ["dense", *["sparse"] * 7],
    },
}


ADAPTERS = {  # which have fp32 beside 16-bit weights
    "param_dtype": "bf16",
    "grad_dtype": "fp32",
    "master_weights": False,
    "optimizer_dtype": "fp32",
    "lora": {"rank": 16},
    "autocast": False,
}
COMPILED = {**ALL_IN_BF16, "framework": "transformers_compiled"}
WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {  # options of the capture, and the keys that say them
    "plain": (["--weights", "bf16"], ALL_IN_BF16),
    "autocast": (["--autocast", "bf16"], {"param_dtype": "fp32"}),
    "checkpointing": (["--weights", "bf16", "--gradient-checkpointing"], {**ALL_IN_BF16, "recompute": "full"}),
    "adapters": (["--weights", "bf16", "--lora", "16"], ADAPTERS),
    "adapters_checkpointing": (
        ["--weights", "bf16", "--lora", "16", "--gradient-checkpointing"],
        {**ADAPTERS, "recompute": "full"},
    ),
    "eager": (["--weights", "bf16", "--attention", "eager"], {**ALL_IN_BF16, "attention": "unfused"}),
    "fp32": (["--weights", "fp32"], {"param_dtype": "fp32", "precision": "fp32"}),
    "compiled": (["--weights", "bf16", "--compile"], COMPILED),
    "compiled_autocast": (
        ["--autocast", "bf16", "--compile"],
        {"framework": "transformers_compiled", "param_dtype": "fp32"},
    ),
    "compiled_checkpointing": (
        ["--weights", "bf16", "--compile", "--gradient-checkpointing"],
        {**COMPILED, "recompute": "full"},
    ),
}


def captured(family: str, folder: Path, way: str) -> tuple[Path, Path]:
    """The config and the program of one family; captured if the folder has none."""
    import transformers

    config = folder / family / "config.json"
    program = folder / family / f"{way}.json.gz"
    if not program.exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        keys = {key: value for key, value in (SIZES | FAMILIES[family]).items() if value is not None}
        built = transformers.AutoConfig.for_model(family, **keys)
        config.write_text(built.to_json_string(use_diff=False), encoding="utf-8")
        words = [*WAYS[way][0], "--seq-len", SEQ_LEN, "--micro-batch-size", SEQUENCES]
        words += ["--attention", "eager"] if family in EAGER and way != "eager" else []
        words += ["--routing", "balanced"] if "--compile" not in words else []
        command = [sys.executable, "-m", "calibrate.capture", config, "--out", program, *words]
        subprocess.run([str(word) for word in command], check=True, capture_output=True, cwd=ROOT, env=os.environ)
    return config, program


def results(family: str, folder: Path, way: str) -> tuple[Any, Any]:
    """Results of a step as described and as captured."""
    config, program = captured(family, folder, way)
    described = {
        "seq_len": SEQ_LEN,
        "micro_batch_size": SEQUENCES,
        "global_batch_size": SEQUENCES,
        "framework": "transformers",
        "attention": "unfused" if family in EAGER else "fused",
        **WAYS[way][1],
    }
    gpu = {"gpu": "h200-sxm"}
    own = {"global_batch_size": SEQUENCES}
    return (
        simulate(parse_scenario({"model": str(config), "training": described, "cluster": gpu})),
        simulate(parse_scenario({"model": {"program": str(program)}, "training": own, "cluster": gpu})),
    )


def compared(one: float, other: float) -> str:
    """How far the first is from the second."""
    return f"{one / other - 1:+.1%}".replace("-", "−").replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--compile", action="store_const", const="compiled", default="plain", dest="way")
    parser.add_argument("--way", choices=WAYS, default="plain")
    options = parser.parse_args()
    print(
        "| family | attention | captured | described | difference | saved | peak |\n|---|---|---:|---:|---:|---:|---:|"
    )
    with tempfile.TemporaryDirectory() as temporary:
        for family in options.only:
            one, other = results(family, options.folder or Path(temporary), options.way)
            attention = "unfused" if family in EAGER or options.way == "eager" else "fused"
            steps = f"{other.step_time_s * 1e3:.1f} ms | {one.step_time_s * 1e3:.1f} ms"
            memory = one.outcome.memory[0], other.outcome.memory[0]
            pairs = [(one.step_time_s, other.step_time_s), *(tuple(getattr(m, x) for m in memory) for x in BYTES)]
            print(f"| {family} | {attention} | {steps} | {' | '.join(compared(*x) for x in pairs)} |", flush=True)


if __name__ == "__main__":
    main()
