"""LLM Foundry's configs as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted, refused

TEXT = """
variables: {max_seq_len: 2048, data_local: ./c4}
max_seq_len: ${variables.max_seq_len}
global_seed: 17
model: {name: mpt_causal_lm, init_device: meta, d_model: 4096, n_heads: 32, n_layers: 32, expansion_ratio: 4,
  max_seq_len: "${max_seq_len}", vocab_size: 50368, no_bias: true, attn_config: {attn_impl: flash}}
optimizer: {name: decoupled_adamw, lr: 1.2e-4, betas: [0.9, 0.95]}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
global_train_batch_size: 1024
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true,
  limit_all_gathers: true}
max_duration: 63900ba
"""
ON_8 = ("--cluster", "dgx-h100", "--gpus", "8")


def test_an_mpt(tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "mpt.yaml", TEXT, *ON_8)
    m, t, p = data["model"], data["training"], data["parallelism"]
    assert (m["layers"], m["hidden"], m["ffn"], m["positions"], m["max_positions"]) == (
        32,
        4096,
        16384,
        "learned",
        2048,
    )
    assert (m["bias"], m["tied_embeddings"], m["mlp"], m["norm"]) == (False, True, "gelu", "layernorm")
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"]) == (2048, 8, 1024)
    assert (t["precision"], t["param_dtype"], t["grad_reduce_dtype"]) == ("bf16", "fp32", "bf16")
    assert (t["framework"], t["gradient_clipping"]) == ("composer", True)
    assert t["recompute"] == {"mode": "full", "early_stop": False}  # torch's reentrant checkpoint, Composer's default
    assert p == {"dp": 8, "zero": 3}
    assert "not expressed" not in notes
    assert parse_scenario(data)


@pytest.mark.parametrize(
    ("old", "new", "section", "found"),
    [
        ("attn_impl: flash", "attn_impl: torch, alibi: true", "model", {"positions": "none"}),
        ("attn_impl: flash", "attn_type: grouped_query_attention, kv_n_heads: 8", "model", {"kv_heads": 8}),
        ("attn_impl: flash", "attn_impl: torch", "training", {"attention": "unfused"}),
        ("FULL_SHARD", "SHARD_GRAD_OP", "parallelism", {"zero": 3, "reshard_after_forward": False}),
        ("mixed_precision: PURE", "mixed_precision: DEFAULT", "training", {"micro_batch_size": 8}),
        (
            "device_train_microbatch_size: 8",
            "device_train_microbatch_size: auto",
            "training",
            {"micro_batch_size": 128},
        ),
        ("no_bias: true, ", "", "model", {"bias": True}),
        ("FULL_SHARD", "NO_SHARD", "parallelism", {"zero": 3, "shard_size": 1}),
        ("mixed_precision: PURE", "mixed_precision: FULL", "parallelism", {"param_gather_dtype": "fp32"}),
        ("checkpointing: true", "checkpointing_reentrant: true", "training", {"recompute": "none"}),
        (
            "checkpointing: true",
            "checkpointing: true, activation_checkpointing_reentrant: false",
            "training",
            {"recompute": "full"},
        ),
    ],
)
def test_keys(tmp_path: Path, old: str, new: str, section: str, found: dict[str, object]) -> None:
    data, _ = converted(tmp_path, "mpt.yaml", TEXT.replace(old, new), *ON_8)
    assert found.items() <= data[section].items()
    assert parse_scenario(data)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("limit_all_gathers: true", "limit_all_gathers: false", "limit_all_gathers: false is not simulated"),
        ("limit_all_gathers: true", "forward_prefetch: true", "fsdp_config.forward_prefetch: true is not simulated"),
        ("limit_all_gathers: true", "forward_prefetch: false, sync_module_states: true", ""),
        (
            "no_bias: true",
            "no_bias: true, use_train_metrics: false",
            "model.use_train_metrics: false is not simulated; the",
        ),
        ("no_bias: true", "no_bias: true, use_train_metrics: true", ""),
    ],
)
def test_what_is_simulated_otherwise_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    """composer/distributed/dist_strategy.py hands these to torch's FSDP; sync_module_states changes no step."""
    notes = converted(tmp_path, "mpt.yaml", TEXT.replace(old, new), *ON_8)[1]
    assert said in notes
    assert any(word in notes for word in ("gather", "sync_", "train_metrics", "prefetch")) is bool(said)
    assert "not expressed" not in notes


def test_without_fsdp_s_section_ddp_runs(tmp_path: Path) -> None:
    """llmfoundry/command_utils/train.py: `fsdp_config` None."""
    first, last = TEXT.index("fsdp_config:"), TEXT.index("max_duration:")
    data, notes = converted(tmp_path, "mpt.yaml", TEXT[:first] + TEXT[last:], *ON_8)
    assert data["parallelism"] == {"dp": 8, "zero": 0}
    assert parse_scenario(data).parallelism.dp_sync == "bucketed"
    assert "autocast" not in notes


def test_norms_in_fp32_are_named(tmp_path: Path) -> None:
    text = TEXT.replace("no_bias: true", "norm_type: layernorm, no_bias: true")
    data, notes = converted(tmp_path, "mpt.yaml", text, *ON_8)
    assert data["model"]["norm"] == "layernorm"
    assert "model.norm_type layernorm: runs in fp32 under autocast" in notes


def test_a_model_of_the_hub_with_adapters(tmp_path: Path) -> None:
    first, last = TEXT.index("model:"), TEXT.index("optimizer:")
    model = "model: {name: hf_causal_lm, pretrained: true, pretrained_model_name_or_path: meta-llama/Llama-3.1-8B,\n"
    model += "  peft_config: {r: 16, peft_type: LORA, target_modules: [q_proj, k_proj, v_proj]}}\n"
    data, _ = converted(tmp_path, "sft.yaml", TEXT[:first] + model + TEXT[last:], *ON_8)
    assert data["model"] == "hf://meta-llama/Llama-3.1-8B"
    assert data["training"]["lora"] == {"rank": 16, "targets": ["qkv"]}


def test_other_models_are_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, "t5.yaml", TEXT.replace("mpt_causal_lm", "hf_t5"), *ON_8)
    assert "is neither mpt_causal_lm nor a model of the Hub: give --model" in said


def test_gathers_that_nothing_prefetches_are_named(tmp_path: Path) -> None:
    """composer/utils/parallelism.py, FSDPConfig: BACKWARD_POST is the default."""
    for word, late in (("BACKWARD_POST", False), ("NO_PREFETCH", True)):
        text = TEXT.replace("fsdp_config: {", f"fsdp_config: {{backward_prefetch: {word}, ", 1)
        assert word in text
        layout = converted(tmp_path, "mpt.yaml", text, *ON_8)[0]["parallelism"]
        assert (layout.get("backward_prefetch") is False) == late


def test_a_run_of_the_platform_has_the_config_in_it(tmp_path: Path) -> None:
    indented = "".join(f"  {line}\n" for line in TEXT.splitlines())
    text = f"image: mosaicml/llm-foundry:latest\ncompute: {{gpus: 8}}\nparameters:\n{indented}"
    data, said = converted(tmp_path, "mcli.yaml", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["dp"], data["model"]["layers"], data["training"]["seq_len"]) == (8, 32, 2048)
    assert "not expressed here" not in said


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("sliding_window_size: 1023", {"window": 1024}),
        ("sliding_window_size: -1", {}),
        ("qk_ln: true", {"qk_norm": "layernorm"}),
        ("qk_ln: true}, norm_type: rmsnorm, x: {", {"qk_norm": True, "qk_norm_over": "all_heads"}),
        ("qk_gn: true", {"qk_norm": "layernorm"}),
        ("attn_logit_softcapping: 50.0", {"attention_softcap": 50.0}),
    ],
)
def test_what_an_attention_of_mpts_has(tmp_path: Path, keys: str, expected: dict[str, object]) -> None:
    plain = converted(tmp_path, "mpt.yaml", TEXT, *ON_8)[0]["model"]
    data, notes = converted(tmp_path, "mpt.yaml", TEXT.replace("attn_impl: flash", f"attn_impl: flash, {keys}"), *ON_8)
    assert {key: value for key, value in data["model"].items() if key not in plain} == expected
    assert "not expressed here: model.attn_config" not in notes
    parse_scenario(data)


def test_a_cap_of_logits(tmp_path: Path) -> None:
    text = TEXT.replace("no_bias: true", "no_bias: true, final_logit_softcapping: 30.0")
    assert converted(tmp_path, "mpt.yaml", text, *ON_8)[0]["model"]["logit_softcap"] == 30.0


def test_split_tensors_are_refused(tmp_path: Path) -> None:
    text = f"{TEXT}tp_config: {{tensor_parallel_degree: 2, strategy: ffn}}\n"
    assert "tp_config: splits a model's MLPs by its strategy" in refused(tmp_path, "mpt.yaml", text, *ON_8)
    whole = converted(tmp_path, "mpt.yaml", text.replace("degree: 2", "degree: 1"), *ON_8)[0]
    assert whole["parallelism"]["dp"] == 8
