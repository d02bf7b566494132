"""The modules that have adapters, as fine-tuning configs name them or leave them to PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused

TRL = "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 512\nbf16: true\nuse_peft: true\n"
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 512\nmicro_batch_size: 1\nadapter: lora\nlora_r: 8\n"
ON_8 = ("--cluster", "dgx-h100", "--gpus", "8")
EVERY = ["qkv", "attention_out", "mlp_up", "mlp_down"]


@pytest.mark.parametrize(
    ("key", "targets"),
    [
        ("", ["qkv"]),  # peft/utils/constants.py: q_proj and v_proj
        ("lora_target_modules: all-linear", None),
        ("lora_target_modules: [query_key_value, dense_4h_to_h]", ["qkv", "mlp_down"]),
        ("lora_target_modules: [c_attn, c_proj, lm_head]", ["qkv", "attention_out", "mlp_down"]),
        ("lora_target_modules: [Wqkv, out_proj]", ["qkv", "attention_out"]),
        ("lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'", EVERY),
        ("lora_target_modules: '.*language_model.*[.](q_proj|v_proj)'", ["qkv"]),
        ("lora_target_modules: [self_attn.q_proj, shared_expert.up_proj]", ["qkv"]),
        ("lora_target_modules: '.*[.]layers[.](3|7|11)[.]self_attn[.]o_proj'", ["attention_out"]),
        ("lora_target_modules: '.*(c_fc|c_proj)$'", ["attention_out", "mlp_up", "mlp_down"]),
    ],
)
def test_modules_by_name_pattern_and_default(tmp_path: Path, key: str, targets: list[str] | None) -> None:
    data, said = converted(tmp_path, "sft.yaml", f"{TRL}{key}\n", *ON_8)
    assert data["training"]["lora"].get("targets") == targets
    assert ("PEFT's default" in said) == (not key)
    assert ("without the modules lm_head" in said) == ("lm_head" in key)


@pytest.mark.parametrize("given", ["[router]", "'.*vision_tower.*'", "'((('"])
def test_modules_of_which_none_is_known_are_refused(tmp_path: Path, given: str) -> None:
    said = refused(tmp_path, "sft.yaml", f"{TRL}lora_target_modules: {given}\n", *ON_8)
    assert "none of them is known: all-linear, q_proj" in said


def test_axolotls_switch_adds_all_linear_layers(tmp_path: Path) -> None:
    """loaders/adapter.py: `_build_peft_lora_config`."""
    text = f"{AXOLOTL}lora_target_modules: [q_proj]\n"
    assert converted(tmp_path, "a.yaml", text, *ON_8)[0]["training"]["lora"]["targets"] == ["qkv"]
    assert (
        "targets"
        not in converted(tmp_path, "a.yaml", f"{text}lora_target_linear: true\n", *ON_8)[0]["training"]["lora"]
    )


@pytest.mark.parametrize(
    ("modules", "targets"),
    [("", ["qkv"]), (", target_modules: [Wqkv]", ["qkv"]), (", target_modules: all-linear", None)],
)
def test_modules_of_llm_foundry(tmp_path: Path, modules: str, targets: list[str] | None) -> None:
    """models/hf/hf_base.py hands the section on to PEFT."""
    text = f"""
max_seq_len: 2048
model: {{name: hf_causal_lm, pretrained_model_name_or_path: meta-llama/Llama-3.1-8B, peft_config: {{r: 16{modules}}}}}
optimizer: {{name: decoupled_adamw}}
global_train_batch_size: 16
device_train_microbatch_size: 1
precision: amp_bf16
fsdp_config: {{sharding_strategy: FULL_SHARD}}
"""
    data, _ = converted(tmp_path, "sft.yaml", text, *ON_8)
    assert data["training"]["lora"].get("targets") == targets
    said = (
        refused(tmp_path, "sft.yaml", text.replace("r: 16", "r: 16, target_modules: [x]"), *ON_8) if not modules else ""
    )
    assert modules or "target_modules: found a list of 1; none of them is known" in said
