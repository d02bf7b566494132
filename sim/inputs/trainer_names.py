"""Words of other trainers for the values of a scenario's keys: `sim.emit` writes them, `sim.convert` reads them."""

from __future__ import annotations

from typing import Any

# torchtitan's schedules, by the scenario's; the names are torch.distributed.pipelining's. Megatron-LM has two, and a
# number of virtual stages.
TITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
MEGATRON_SCHEDULES = ("1f1b", "interleaved_1f1b")
# Flavors of torchtitan/models, and the shipped models that they are, or the nearest of these with their own sizes.
LLAMA3_FLAVORS = {"8B": "llama3.1-8b", "70B": "llama3.1-70b", "405B": "llama3.1-405b"}
TITAN_MODELS: dict[str, str | dict[str, Any]] = {
    **{f"llama3 {flavor}".lower(): name for flavor, name in LLAMA3_FLAVORS.items()},
    "llama4 17bx16e": "llama4-scout",
    "llama4 17bx128e": "llama4-maverick",
    "deepseek_v3 671b": "deepseek-v3",
    "deepseek_v3 236b": "deepseek-v2",
    "deepseek_v3 16b": {
        "preset": "deepseek-v2",
        "layers": 27,
        "hidden": 2048,
        "heads": 16,
        "ffn": 10944,
        "mla": {"q_lora_rank": None},
        "moe": {"experts": 64, "ffn": 1408, "max_nodes_per_token": None},
    },
    "gpt_oss 20b": "gpt-oss-20b",
    "gpt_oss 120b": "gpt-oss-120b",
    "qwen3 0.6b": {"preset": "qwen3-4b", "layers": 28, "hidden": 1024, "heads": 16, "ffn": 3072},
    "qwen3 1.7b": {"preset": "qwen3-4b", "layers": 28, "hidden": 2048, "heads": 16, "ffn": 6144},
    **{f"qwen3 {size}": f"qwen3-{size}" for size in ("4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")},
}
# Classes of Python configs, and what activation_checkpoint.mode of TOML configs says for each.
TITAN_POLICIES = {"SelectiveAC": "selective", "FullAC": "full"}
TITAN_DDP_BUCKET = "100MiB"  # models/llama3/infra/parallelize.py: apply_ddp, `bucket_cap_mb`
TITAN_GATHERS_8_BITS = "enable_fsdp_float8_all_gather"  # false by default; refused beside `recipe_name`
# --cp-comm-type by parallelism.cp_method.
MEGATRON_CP = {"ring": "p2p", "all_gather": "allgather", "all_to_all": "a2a", "all_to_all_ring": "a2a+p2p"}
# --optimizer by training.optimizer; sgd without --sgd-momentum.
MEGATRON_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "sgd_momentum": "sgd", "lion": "lion"}
# --attention-backend by training.attention_kernel. It makes Transformer Engine try nothing else (NVTE_FLASH_ATTN,
# NVTE_FUSED_ATTN, NVTE_UNFUSED_ATTN in core/transformer): flash is FlashAttention alone, fused is cuDNN alone.
MEGATRON_BACKENDS = {"cudnn": "fused", "flash2": "flash", "flash3": "flash"}
# Its FSDP's strategies of sharding, by parallelism.zero.
MEGATRON_FSDP = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
MEGATRON_FUSIONS = {  # --no-…-fusion, and the fact of a framework's record that each switches off
    "bias-gelu": "fuses_activation",
    "bias-swiglu": "fuses_activation",
    "bias-dropout": "fuses_residual",
    "masked-softmax": "skips_masked_scores",
    "rope": "fuses_rope",
}
