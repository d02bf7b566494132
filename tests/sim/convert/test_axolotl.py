"""Axolotl's YAML: keys of src/axolotl (release 0.19) that Transformers does not have, or that mean something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, refused

TEXT = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\n"


def read(tmp_path: Path, more: str) -> tuple[dict[str, Any], str]:
    return converted(tmp_path, "axolotl.yaml", TEXT + more, "--cluster", "dgx-h100", "--gpus", "8")


@pytest.mark.parametrize(
    ("more", "zero"),
    [
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", 3),  # core/builders/base.py
        ("fsdp_config:\n", 0),
        ("", 0),
    ],
)
def test_fsdp_is_on_where_it_has_a_section(tmp_path: Path, more: str, zero: int) -> None:
    data, _ = read(tmp_path, more)
    assert data["parallelism"]["zero"] == zero


@pytest.mark.parametrize(
    ("more", "version"),
    [
        ("fsdp: [full_shard, auto_wrap]\n", 1),
        ("fsdp_config: {sharding_strategy: FULL_SHARD}\n", 1),
        ("fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n", 1),
        ("fsdp_version: 1\nfsdp_config: {reshard_after_forward: true}\n", 1),
        ("fsdp_config: {fsdp_version: 2}\n", None),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", None),
    ],
)
def test_which_fsdp_an_axolotl_file_means(tmp_path: Path, more: str, version: int | None) -> None:
    """utils/schemas/validation.py: check_fsdp_version; what it refuses, releases before 0.20 read."""
    data, said = read(tmp_path, more)
    assert data["parallelism"].get("fsdp_version") == version
    assert "fsdp_version" not in said.replace("fsdp_version: 1", "")


def test_the_second_fsdp_is_axolotls_default_since_release_0_20(tmp_path: Path) -> None:
    data, said = read(tmp_path, "fsdp_config: {reshard_after_forward: true}\n")
    assert data["parallelism"].get("fsdp_version") is None
    assert "fsdp_version: 2, as Axolotl has it since release 0.20" in " ".join(said.split())


@pytest.mark.parametrize(
    ("written", "precision"), [("", "bf16"), ("bf16: auto\n", "bf16"), ("bf16:\n", "fp32"), ("fp16: true\n", "fp16")]
)
def test_bf16_is_the_default(tmp_path: Path, written: str, precision: str) -> None:
    """utils/schemas/config.py: `bf16` is `auto` where a file does not have it; an empty one is off."""
    text = TEXT.replace("bf16: true\n", written)
    data, _ = converted(tmp_path, "axolotl.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["precision"] == precision
    data, _ = converted(tmp_path, "axolotl.yaml", f"{text}fp8: true\n", "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["precision"] == ("fp8" if precision == "bf16" else precision)


def test_parameters_are_loaded_in_16_bits(tmp_path: Path) -> None:
    """utils/config (`resolve_dtype`); adapters are PEFT's, and Accelerate casts what the first FSDP trains to fp32,
    where Axolotl's own FSDP2 (monkeypatch/accelerate/fsdp2.py: `fsdp2_prepare_model`) leaves it as it is."""
    data, _ = read(tmp_path, "")
    assert (data["training"]["param_dtype"], data["training"]["master_weights"]) == ("bf16", False)
    for version, dtype in ((1, "fp32"), (2, "bf16")):
        data, said = read(tmp_path, f"fsdp_config: {{reshard_after_forward: true, fsdp_version: {version}}}\n")
        assert data["training"]["param_dtype"] == dtype
        assert ("as Accelerate casts what FSDP trains" in said) == (version == 1)
    data, _ = read(tmp_path, "adapter: lora\nlora_r: 8\n")
    assert "param_dtype" not in data["training"]


def test_tensor_and_context_parallelism_divide_the_gpus_and_the_batch(tmp_path: Path) -> None:
    """utils/config (`normalize_config`: effective_world_size)."""
    fsdp = "fsdp_config: {reshard_after_forward: true}\n"
    data, said = read(tmp_path, f"{fsdp}tensor_parallel_size: 2\ncontext_parallel_size: 2\nsample_packing: true\n")
    p = data["parallelism"]
    assert (p["dp"], p["tp"], p["cp"], p["cp_method"], data["training"]["global_batch_size"]) == (
        *(2, 2, 2, "all_gather"),
        2,
    )
    assert "not expressed" not in said
    data, _ = read(tmp_path, "sequence_parallel_degree: 4\n")
    assert (data["parallelism"]["cp"], data["parallelism"]["cp_method"]) == (4, "ring")
    data, _ = read(tmp_path, f"{fsdp}dp_shard_size: 4\ndp_replicate_size: 2\n")
    assert (data["parallelism"]["dp"], data["parallelism"]["shard_size"]) == (8, 4)


@pytest.mark.parametrize(
    ("more", "chunked"),
    [
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_fused_linear_cross_entropy: true\n", True),
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n", True),
        ("plugins: [a.CutCrossEntropyPlugin]\ncut_cross_entropy: false\n", False),
        ("plugins: [a.CutCrossEntropyPlugin]\ntensor_parallel_size: 2\n", False),
        ("liger_fused_linear_cross_entropy: false\n", False),
    ],
)
def test_plugins_whose_loss_never_has_all_logits(tmp_path: Path, more: str, chunked: bool) -> None:
    data, said = read(tmp_path, more)
    assert ("cross_entropy" in data["training"]) == chunked
    assert not chunked or ("Cut Cross-Entropy computes the logits once more" in said) == ("CutCross" in more)


def test_what_is_empty_or_off_is_not_listed(tmp_path: Path) -> None:
    _, said = read(tmp_path, "wandb_watch:\nadapter:\nlora_r: 32\nload_in_8bit: false\nlora_dropout: 0.05\n")
    assert "not expressed" not in said
    _, said = read(tmp_path, "load_in_4bit: true\n")
    assert "not expressed here: load_in_4bit" in said


def test_parameters_lie_on_the_host(tmp_path: Path) -> None:
    data, said = read(tmp_path, "fsdp_config: {offload_params: true}\n")
    assert (data["training"]["optimizer_offload"], data["training"]["parameter_offload"]) == ("cpu", True)
    assert "on the host" not in said


WHOLE = {"mode": "full", "early_stop": False}  # torch's reentrant checkpoint


@pytest.mark.parametrize(
    ("more", "found", "offload"),
    [
        ("", WHOLE, None),  # utils/config: `normalize_config`
        ("rl: dpo\n", "full", None),
        ("activation_offloading: hidden_states\n", "full", True),
        ("activation_offloading: true\n", "full", True),  # core/trainers/mixins/activation_checkpointing.py
        ("activation_offloading: true\nadapter: lora\nlora_r: 8\n", "none", True),
        ("activation_offloading: false\nadapter: lora\nlora_r: 8\n", WHOLE, None),
    ],
)
def test_which_checkpoint_axolotl_takes(tmp_path: Path, more: str, found: Any, offload: bool | None) -> None:
    data, said = read(tmp_path, f"gradient_checkpointing: true\n{more}")
    assert (data["training"]["recompute"], data["training"].get("activation_offload")) == (found, offload)
    assert "not expressed" not in said


@pytest.mark.parametrize(("reentrant", "found"), [("true", WHOLE), ("false", "full")])
def test_a_reentrant_checkpoint_runs_the_whole_forward_again(tmp_path: Path, reentrant: str, found: Any) -> None:
    kwargs = f"gradient_checkpointing_kwargs: {{use_reentrant: {reentrant}}}\n"
    data, said = read(tmp_path, f"gradient_checkpointing: true\n{kwargs}")
    assert data["training"]["recompute"] == found
    assert "gradient_checkpointing_kwargs" not in said


EXPERTS = """
base_model: qwen3-30b-a3b
plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]
sequence_len: 2048
micro_batch_size: 1
expert_parallel_size: 2
expert_parallel_backend: deep_ep
dp_shard_size: 4
fsdp_config: {fsdp_version: 2, state_dict_type: FULL_STATE_DICT}
"""


def test_expert_parallelism_is_within_the_replicas(tmp_path: Path) -> None:
    """integrations/expert_parallel: each of its ranks reads a batch of its own, and other parameters are split over
    all ranks."""
    data, said = converted(tmp_path, "a.yaml", EXPERTS, "--cluster", "dgx-h100", "--gpus", "8")
    layout = data["parallelism"]
    assert (layout["dp"], layout["ep"], layout["zero"], layout["ep_dispatcher"]) == (8, 2, 3, "deepep")
    assert "shard_size" not in layout
    assert "not expressed here" not in said
    _, said = converted(tmp_path, "b.yaml", EXPERTS.replace("deep_ep", "auto"), "--cluster", "dgx-h100", "--gpus", "8")
    assert "expert_parallel_backend auto: simulated as torch's all-to-all" in said


def test_experts_over_other_ranks_are_refused(tmp_path: Path) -> None:
    problem = refused(tmp_path, "a.yaml", EXPERTS, "--cluster", "dgx-h100", "--gpus", "16")
    assert "expert_parallel_size: found 2; its product with the other degrees of data parallelism, 8, must" in problem


def test_degrees_that_do_not_make_the_gpus_are_refused(tmp_path: Path) -> None:
    more = (
        "dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\nfsdp_config: {reshard_after_forward: true}\n"
    )
    data, _ = converted(tmp_path, "a.yaml", TEXT + more, "--cluster", "dgx-h100", "--gpus", "16")
    assert (data["parallelism"]["dp"], data["parallelism"]["shard_size"]) == (8, 4)
    problem = refused(tmp_path, "a.yaml", TEXT + more, "--cluster", "dgx-h100", "--gpus", "64")
    assert (
        "dp_shard_size: found 4; its product with the other degrees of data parallelism, 8, must be the 32" in problem
    )


def test_what_changes_no_step_is_not_reported(tmp_path: Path) -> None:
    more = "model_type: AutoModelForCausalLM\ntokenizer_type: AutoTokenizer\nchat_template: llama3\neot_tokens: [x]\n"
    data, said = read(tmp_path, f"{more}fsdp_version: 2\nfsdp_config: {{sharding_strategy: FULL_SHARD}}\n")
    assert data["parallelism"]["zero"] == 3
    assert "not expressed" not in said


def test_training_of_some_parameters_is_refused(tmp_path: Path) -> None:
    """utils/freeze.py: `freeze_layers_except`."""
    text = f"{TEXT}unfrozen_parameters: ['model.layers.4[4-9]+']\n"
    said = refused(tmp_path, "axolotl.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert "unfrozen_parameters: trains some of the parameters; can be converted: full training, and LoRA" in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("adapter: lora\nload_in_8bit: true\n", {"weights": "int8"}),
        ("adapter: qlora\nload_in_4bit: true\n", {"weights": "nf4"}),
        ("adapter: lora\nload_in_8bit: false\n", {}),
    ],
)
def test_frozen_weights_are_kept_as_they_are_loaded(tmp_path: Path, more: str, expected: dict[str, str]) -> None:
    """loaders/model.py: `_set_quantization_config`; the rank is peft's default."""
    data, _ = read(tmp_path, more)
    assert data["training"]["lora"] == {"rank": 8} | expected


FROZEN_EXPERTS = (
    "base_model: zai-org/GLM-4.5-Air\nsequence_len: 2048\nmicro_batch_size: 1\nadapter: qlora\nload_in_4bit: true\n"
)


def test_experts_are_quantized_where_the_file_says_so_and_get_no_adapters(tmp_path: Path) -> None:
    """Experts are parameters, not linear layers (Transformers 5); `quantize_moe_experts` is Axolotl's
    (monkeypatch/moe_quant.py). The checkpoint's prediction module is not loaded."""
    options = ("--cluster", "dgx-h100", "--gpus", "1")
    data, said = converted(tmp_path, "moe.yaml", FROZEN_EXPERTS + "quantize_moe_experts: true\n", *options)
    expected = {"rank": 8, "weights": "nf4", "quantized_experts": True, "targets": ["qkv", "attention_out"]}
    assert data["training"]["lora"] == expected
    assert data["model"]["mtp_layers"] == 0
    assert "without adapters of experts" in " ".join(said.split())
    assert "not expressed" not in said


@pytest.mark.parametrize("key", ["sharding_strategy", "fsdp_sharding_strategy"])
def test_full_sharding_is_what_is_simulated(tmp_path: Path, key: str) -> None:
    data, said = read(tmp_path, f"fsdp: [full_shard, auto_wrap]\nfsdp_config: {{{key}: FULL_SHARD}}\n")
    assert data["parallelism"]["zero"] == 3
    assert "not expressed" not in said


def test_experts_that_are_linear_layers_are_quantized_like_others(tmp_path: Path) -> None:
    options = ("--cluster", "dgx-h100", "--gpus", "1", "--model", "llama4-scout")
    data, said = converted(tmp_path, "moe.yaml", FROZEN_EXPERTS + "llama4_linearized_experts: true\n", *options)
    assert data["training"]["lora"]["quantized_experts"]
    assert "not expressed" not in said


def test_latent_attention_gets_adapters_of_its_output(tmp_path: Path) -> None:
    text = FROZEN_EXPERTS.replace("GLM-4.5-Air", "GLM-4.7-Flash")
    options = ("--cluster", "dgx-h100", "--gpus", "1")
    data, said = converted(tmp_path, "mla.yaml", text + "lora_target_modules: [q_proj, o_proj]\n", *options)
    assert data["training"]["lora"]["targets"] == ["attention_out"]
    assert "without adapters of latent attention" in " ".join(said.split())
    said = refused(tmp_path, "mla.yaml", text + "lora_target_modules: [q_proj, v_proj]\n", *options)
    assert "lora_target_modules" in said


def test_paged_states_are_said_to_leave_the_gpu(tmp_path: Path) -> None:
    _, said = read(tmp_path, "optimizer: paged_adamw_8bit\n")
    assert "managed memory" in " ".join(said.split())


@pytest.mark.parametrize(("version", "said_so"), [(2, True), (1, False)])
def test_which_accelerate_sums_whole_gradients_is_said(tmp_path: Path, version: int, said_so: bool) -> None:
    """accelerate/accelerator.py, `no_sync`: of FSDP2 modules since release 1.11, of FSDP1's always."""
    more = f"gradient_accumulation_steps: 4\nfsdp_version: {version}\nfsdp_config: {{reshard_after_forward: true}}\n"
    data, said = read(tmp_path, more)
    assert data["parallelism"]["accumulate_unsharded"]
    assert ("since Accelerate 1.11" in " ".join(said.replace("#", "").split())) == said_so
