"""DeepSpeed's JSON and Transformers' TrainingArguments as scenarios."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import FACTORY

DEEPSPEED = """{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "offload_optimizer": {"device": "cpu"},
                        "offload_param": {"device": "nvme"}},
  "wall_clock_breakdown": false}"""
ARGUMENTS = """
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
bf16: true
fsdp: full_shard auto_wrap
torch_compile: true
learning_rate: 2.0e-5
"""


def test_deepspeed_and_training_arguments_need_model_length_and_gpus(tmp_path: Path) -> None:
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--seq-len", "4096", "--gpus", "16")
    data, text = converted(tmp_path, "ds.json", DEEPSPEED, *options)
    assert (data["parallelism"]["zero"], data["parallelism"]["dp"]) == (3, 16)
    assert data["training"]["global_batch_size"] == 2 * 4 * 16
    assert data["training"]["framework"] == "deepspeed"
    assert data["training"]["optimizer_offload"] == "cpu"
    assert "zero_optimization.offload_param: offloading to nvme is not simulated" in text
    assert "not expressed" not in text
    data, text = converted(tmp_path, "args.yaml", ARGUMENTS, *options)
    assert (data["parallelism"]["zero"], data["training"]["recompute"]) == (3, "full")
    assert (data["training"]["framework"], data["training"]["param_dtype"]) == ("transformers_compiled", "fp32")
    assert "training.master_weights=false" in text
    assert "--model NAME" in refused(tmp_path, "ds.json", DEEPSPEED, *options[:2])
    assert "--gpus N" in refused(tmp_path, "ds.json", DEEPSPEED, *options[:6])


LLAMA_FACTORY_ZERO_3 = """{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_allow_untested_optimizer": true,
  "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "overlap_comm": false, "contiguous_gradients": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 2e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true}}"""


def test_training_arguments_name_deepspeed_s_file(tmp_path: Path) -> None:
    """What the file leaves to Transformers is taken from TrainingArguments, and from the model's hidden size."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8")
    arguments = """{per_device_train_batch_size: 2, gradient_accumulation_steps: 4, bf16: true, optim: adamw_bnb_8bit,
      deepspeed: ds_z3.json, cutoff_len: 2048, learning_rate: 1.0e-5, neftune_noise_alpha: 5}"""
    assert "there is no such file" in refused(tmp_path, "args.yaml", arguments, *options)
    (tmp_path / "ds_z3.json").write_text(LLAMA_FACTORY_ZERO_3)
    data, text = converted(tmp_path, "args.yaml", arguments, *options)
    t, p = data["training"], data["parallelism"]
    assert (t["micro_batch_size"], t["global_batch_size"], t["seq_len"]) == (2, 64, 2048)
    assert (t["precision"], t["framework"], t["optimizer_dtype"]) == ("bf16", "deepspeed", "int8")
    assert (p["zero"], p["dp_sync"]) == (3, "after_backward")
    assert (p["bucket_bytes"], p["gather_bucket_bytes"]) == (2 * 4096**2, 2 * int(0.9 * 4096**2))
    assert "stage3_max_live_parameters: the default of 1,000,000,000 is simulated" in text
    assert "not expressed here: neftune_noise_alpha\n" in text
    assert "sub_group_size" not in text
    (tmp_path / "ds_z3.json").write_text(
        LLAMA_FACTORY_ZERO_3.replace('"sub_group_size": 1e9', '"sub_group_size": 1e12')
    )
    assert "sub_group_size: the default of 1,000,000,000 is" in converted(tmp_path, "args.yaml", arguments, *options)[1]
    assert "auto" not in text
    alone = converted(tmp_path, "ds_z3.json", LLAMA_FACTORY_ZERO_3, *options, "--seq-len", "2048")[1]
    assert "# auto: train_batch_size, train_micro_batch_size_per_gpu, " in alone
    assert "fp16, bf16: here Transformers' defaults; convert the TrainingArguments" in alone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{deepspeed: [1]}", "deepspeed: found a list of 1; must be a mapping or the name of a JSON file"),
        ("{gradient_accumulation_steps: 0}", "gradient_accumulation_steps: found 0; must be at least 1"),
        ("{max_seq_length: 2k}", "max_seq_length: found '2k'; must be a whole number"),
        ("{deepspeed: {zero_optimization: {stage: two}}}", "zero_optimization.stage: found 'two'"),
        ("{deepspeed: {zero_optimization: {stage: 2, reduce_bucket_size: x}}}", "reduce_bucket_size: found 'x'"),
    ],
)
def test_a_wrong_deepspeed_section_is_one_message(tmp_path: Path, arguments: str, said: str) -> None:
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    assert re.search(said, refused(tmp_path, "args.yaml", arguments, *options))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("optim: sgd", {"optimizer": "sgd"}),
        ("optim: adamw_8bit\noptimizer: {type: SGD}", {"optimizer": "sgd"}),
        ("optim: paged_adamw_8bit", {"optimizer": "adamw", "optimizer_dtype": "int8"}),
        ("optim: adamw_torch_fused", {"adamw_kernels": "fused", "framework": "transformers"}),
        ("optim: adamw_torch", {"adamw_kernels": "foreach", "framework": "transformers"}),
        ("use_liger_kernel: true", {"cross_entropy": "chunked"}),
        ("activation_offloading: true", {"activation_offload": True}),  # TRL's
        ("activation_checkpointing: true", {"recompute": "full"}),
        ("attn_implementation: eager", {"attention": "unfused", "param_dtype": "bf16"}),
        ("torch_dtype: bfloat16", {"param_dtype": "bf16", "master_weights": False}),
        ("torch_dtype: bfloat16", {"grad_dtype": "bf16", "optimizer_dtype": "bf16"}),
        ("torch_dtype: bfloat16\noptim: adamw_bnb_8bit", {"grad_dtype": "bf16", "optimizer_dtype": "int8"}),
        ("fsdp: true\nfsdp_config: {activation_checkpointing: true}", {"recompute": "full"}),
        ("torch_dtype: bfloat16\nfsdp: full_shard auto_wrap", {"param_dtype": "fp32"}),
        ("torch_dtype: bfloat16\nfsdp: no_shard", {"param_dtype": "bf16", "master_weights": False}),
    ],
)
def test_training_arguments_of_one_key(tmp_path: Path, keys: str, expected: dict[str, str]) -> None:
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    data, text = converted(tmp_path, "args.yaml", f"bf16: true\n{keys}\n", *options)
    assert expected.items() <= data["training"].items()
    assert ("whatever torch_dtype says" in text) == ("fsdp" in keys and "no_shard" not in keys)
    assert "not expressed" not in text
    named = f"bf16: true\n{keys}\nmodel_name_or_path: openai-community/gpt2\n"
    assert (
        converted(tmp_path, "args.yaml", named, *options[:2], *options[4:])[0]["model"] == "hf://openai-community/gpt2"
    )
    assert "no micro-batch: 8, Transformers' default" in text


@pytest.mark.parametrize(("limit", "noted"), [("0.0", True), ("0.3", False)])
def test_the_trainer_takes_the_norm_that_it_logs(tmp_path: Path, limit: str, noted: bool) -> None:
    """A captured step of Transformers 5.24 with `max_grad_norm: 0` has the same norm and the same scaling."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    data, text = converted(tmp_path, "args.yaml", f"bf16: true\nmax_grad_norm: {limit}\n", *options)
    assert data["training"]["gradient_clipping"] is True
    assert ("does not save the norm" in text) == noted


FIRST_FSDP = {"zero": 3, "fsdp_version": 1, "backward_prefetch": False}
EACH = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("fsdp: full_shard auto_wrap", {"zero": 3}),
        ("fsdp: [shard_grad_op]", {"zero": 3, "reshard_after_forward": False}),
        ("fsdp: true\nfsdp_config: {fsdp_version: 2, reshard_after_forward: false}", {"reshard_after_forward": False}),
        ("fsdp: true\nfsdp_config: {version: 1, reshard_after_forward: hybrid_shard}", FIRST_FSDP | {"shard_size": 8}),
        ("fsdp: no_shard", {"zero": 0}),
        ("fsdp: full_shard\ngradient_accumulation_steps: 4", {"accumulate_unsharded": True}),
        (f"fsdp: full_shard\ngradient_accumulation_steps: 4\n{EACH}", {"accumulate_unsharded": None}),
    ],
)
def test_words_of_transformers_fsdp(tmp_path: Path, keys: str, expected: dict[str, object]) -> None:
    """training_args.py: _apply_legacy_fsdp_to_config; gradients are reduced with the last micro-batch (trainer.py)."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "16", "--seq-len", "512")
    data, text = converted(tmp_path, "args.yaml", f"bf16: true\n{keys}\n", *options)
    layout = data["parallelism"]
    assert {key: layout.get(key) for key in expected} == expected
    assert layout.keys() <= {"dp", "zero", *expected}
    assert "not expressed" not in text
    assert "accelerator_config" not in text


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('"train_batch_size": 64, "gradient_accumulation_steps": 2', {"micro_batch_size": 4, "global_batch_size": 64}),
        ('"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2', {"micro_batch_size": 2}),
        ('"train_batch_size": 64, "bf16": {}', {"precision": "fp32"}),
        ('"train_batch_size": 64, "gradient_clipping": 0', {"gradient_clipping": False}),
        (
            '"train_batch_size": 64, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}',
            {"precision": "bf16", "grad_dtype": "fp32"},
        ),
    ],
)
def test_what_deepspeed_s_json_says_and_leaves_out(tmp_path: Path, keys: str, expected: dict[str, object]) -> None:
    """runtime/config.py: _set_batch_related_parameters; precision_config.py: a section alone switches nothing on."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    data, text = converted(
        tmp_path, "ds.json", "{" + keys + ', "activation_checkpointing": {"profile": false}}', *options
    )
    assert {key: data["training"].get(key) for key in expected} == expected
    assert "no micro-batch" not in text
    assert "activation_checkpointing: taken for full recomputation" in text


@pytest.mark.parametrize(
    ("keys", "lora"),
    [
        ("use_peft: true", {"rank": 16, "dropout": 0.05, "targets": ["qkv"]}),  # PEFT's default: q_proj, v_proj
        ("use_peft: false\nlora_r: 8", None),
        ("use_peft: true\nlora_r: 32\nlora_target_modules: [q_proj, v_proj]\nload_in_4bit: true",
         {"rank": 32, "dropout": 0.05, "targets": ["qkv"], "weights": "nf4"}),
        ("finetuning_type: lora\nlora_target: all", {"rank": 8}),
        ("finetuning_type: full", None),
    ],
)  # fmt: skip
def test_adapters_of_trl_and_llama_factory(tmp_path: Path, keys: str, lora: dict[str, object] | None) -> None:
    text = f"model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 512\nbf16: true\n{keys}\n"
    data, _ = converted(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"].get("lora") == lora
    of_factory_or_four_bits = lora is not None and (lora["rank"] == 8 or "weights" in lora)
    assert data["training"].get("param_dtype") == (None if of_factory_or_four_bits else "fp32")


@pytest.mark.parametrize(
    ("keys", "loss", "said"),
    [
        ("use_peft: true", "tiled", "loss_type: nll, the default: TRL 1.16 computes the loss in tiles"),
        ("use_peft: true\nloss_type: chunked_nll", "tiled", "loss_type: chunked_nll"),
        ("use_peft: true\nloss_type: nll", "tiled", "in earlier releases nll had all logits at once"),
        ("fsdp: full_shard\nper_device_train_batch_size: 10", "tiled", "4,096 tokens and 32,768 entries"),
        ("", "tiled", "4,096 tokens and 32,768 entries"),
        ("use_liger_kernel: true", "chunked", "use_liger_kernel: its loss is simulated"),
    ],
)
def test_trl_s_loss_in_tiles(tmp_path: Path, keys: str, loss: str, said: str) -> None:
    """trl/kernels/chunked_logprob.py, whichever loss is named; not with Liger's."""
    batch = "" if "per_device" in keys else "per_device_train_batch_size: 4\n"
    text = f"model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 512\n{batch}"
    data, notes = converted(tmp_path, "sft.yaml", f"{text}{keys}\n", "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["cross_entropy"] == loss
    assert said in notes


def test_axolotl_s_names(tmp_path: Path) -> None:
    text = """{base_model: meta-llama/Llama-3.1-8B, adapter: qlora, lora_r: 32, lora_target_linear: true,
      sequence_len: 4096, micro_batch_size: 2, gradient_accumulation_steps: 4, bf16: auto}"""
    data, notes = converted(tmp_path, "axolotl.yaml", text, "--cluster", "dgx-h100", "--gpus", "2")
    t = data["training"]
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"], t["precision"]) == (4096, 2, 16, "bf16")
    assert t["lora"] == {"rank": 32, "weights": "nf4"}
    assert "micro-batch" not in notes
    assert "not expressed" not in notes


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fp32_on_tensor_cores_is_named(tmp_path: Path, dtype: str) -> None:
    """transformers/training_args.py: `tf32` is of matmuls in fp32."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    text = f"tf32: true\nbf16: {str(dtype == 'bf16').lower()}\noutput_dir: x\n"
    data, said = converted(tmp_path, "args.yaml", text, *options)
    assert data["training"]["precision"] == dtype
    assert ("tf32: matmuls of fp32 are simulated without it" in said) == (dtype == "fp32")


def test_defaults_of_trl(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\nper_device_train_batch_size: 1\n"
    data, said = converted(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert (data["training"]["recompute"], data["training"]["precision"]) == ("full", "bf16")
    assert "gradient_checkpointing: on, as TRL has it by default" in said
    for older in (f"{text}gradient_checkpointing: false\n", text.replace("max_length", "max_seq_length")):
        data, _ = converted(tmp_path, "sft.yaml", older, "--cluster", "dgx-h100", "--gpus", "8")
        assert data["training"]["recompute"] == "none"


def test_the_former_name_of_an_optimizer_on_the_host(tmp_path: Path) -> None:
    zero = '"zero_optimization": {"stage": 2, "cpu_offload": true}'
    text = f'{{"fp16": {{"enabled": true}}, "train_micro_batch_size_per_gpu": 1, {zero}}}'
    options = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "llama2-7b", "--seq-len", "2048")
    data, said = converted(tmp_path, "ds.json", text, *options)
    assert data["training"]["optimizer_offload"] == "cpu"
    assert "not expressed" not in said


def test_batch_sizes_that_contradict_each_other_are_refused_as_deepspeed_does(tmp_path: Path) -> None:
    """deepspeed/runtime/config.py: _batch_assertion."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--seq-len", "4096", "--gpus", "16")
    text = DEEPSPEED.replace("{", '{"train_batch_size": 64, ', 1)
    said = refused(tmp_path, "ds.json", text, *options)
    assert "train_batch_size: found 64; must be" in said
    assert "2 · 4 · 16 = 128" in said
    data, _ = converted(tmp_path, "ds.json", text.replace("64", "128"), *options)
    assert data["training"]["global_batch_size"] == 128


@pytest.mark.parametrize(
    ("config", "version", "prefetches", "told"),
    [
        ("{version: 1}", 1, False, False),
        ("{version: 1, backward_prefetch: backward_pre}", 1, None, False),
        ("{fsdp_backward_prefetch: NO_PREFETCH}", 1, False, True),
        ("{version: 2, backward_prefetch: no_prefetch}", None, None, False),
        ("{}", None, None, False),
    ],
)
def test_torchs_first_fsdp(
    tmp_path: Path, config: str, version: int | None, prefetches: bool | None, told: bool
) -> None:
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    text = f"bf16: true\nfsdp: full_shard auto_wrap\nfsdp_config: {config}\n"
    data, said = converted(tmp_path, "args.yaml", text, *options)
    layout = data["parallelism"]
    assert (layout.get("fsdp_version"), layout.get("backward_prefetch")) == (version, prefetches)
    assert ("torch's first FSDP alone has it" in said) == told
    assert "not expressed" not in said


def test_what_two_files_say_differently_is_named(tmp_path: Path) -> None:
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    own = "deepspeed: {zero_optimization: {stage: 2}, gradient_accumulation_steps: 16}\nbf16: true\n"
    data, said = converted(tmp_path, "args.yaml", f"{own}gradient_accumulation_steps: 4\n", *options)
    assert "gradient_accumulation_steps: DeepSpeed's 16 is simulated, not 4 of the arguments'" in said
    assert data["training"]["global_batch_size"] == 8 * 8 * 16
    for same in ("gradient_accumulation_steps: 16\n", ""):
        assert "DeepSpeed's 16" not in converted(tmp_path, "args.yaml", own + same, *options)[1]


def test_inner_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    """deepspeed/runtime/precision_config.py; runtime/zero/offload_config.py."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    inner = "{enabled: true, bf16_optimizer_states: true, bf16_master_weights_and_grads: false}"
    text = f"bf16: {inner}\nzero_optimization: {{stage: 3, offload_optimizer: {{device: cpu, super_offload: true}}}}\n"
    said = converted(tmp_path, "ds.json", text, *options)[1]
    assert "not expressed here: bf16.bf16_optimizer_states\n" in said
    assert "not expressed here: zero_optimization.offload_optimizer.super_offload\n" in said


def test_deepspeeds_own_tensor_parallelism_and_dtype_of_messages(tmp_path: Path) -> None:
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "512")
    text = "bf16: {enabled: true}\ncommunication_data_type: fp32\ntensor_parallel: {autotp_size: 4}\n"
    data, said = converted(tmp_path, "ds.json", f"{text}zero_optimization: {{stage: 1}}\n", *options)
    assert (data["parallelism"]["tp"], data["parallelism"]["dp"]) == (4, 2)
    assert data["training"]["grad_reduce_dtype"] == "fp32"
    assert "not expressed" not in said


def test_an_auto_of_the_arguments_is_a_word_of_theirs(tmp_path: Path) -> None:
    """LLaMA-Factory's `flash_attn: auto` (hparams/model_args.py) is nothing that Transformers fills in."""
    (tmp_path / "ds.json").write_text(LLAMA_FACTORY_ZERO_3)
    text = f"{FACTORY}deepspeed: ds.json\nflash_attn: auto\n"
    here = ("--cluster", "dgx-h100", "--gpus", "8")
    _, said = converted(tmp_path, "sft.yaml", text, *here)
    assert "flash_attn" not in said
    _, said = converted(tmp_path, "ds.json", LLAMA_FACTORY_ZERO_3, *here, "--model", "llama3-8b", "--seq-len", "4096")
    assert "auto: train_batch_size, train_micro_batch_size_per_gpu" in said


def test_gathers_without_a_limit_are_named(tmp_path: Path) -> None:
    arguments = """{per_device_train_batch_size: 1, bf16: true, fsdp: full_shard auto_wrap,
      fsdp_config: {version: 1, limit_all_gathers: LIMIT}}"""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "2048")
    for limit in ("true", "false"):
        said = converted(tmp_path, "args.yaml", arguments.replace("LIMIT", limit), *options)[1]
        assert ("limit_all_gathers: false is not simulated" in said) is (limit == "false")


@pytest.mark.parametrize(
    ("keys", "recompute", "offload"),
    [
        ("activation_checkpointing: true", "full", None),
        ("activation_checkpointing: false", "none", None),
        ("activation_checkpointing: false\ngradient_checkpointing: true", "none", None),
        (
            "activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 4}",
            {"mode": "full", "every": 4},
            None,
        ),
        ("activation_checkpointing: true\nactivation_checkpointing_kwargs: {offload: true}", "full", True),
        (
            "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: true}",
            {"mode": "full", "early_stop": False},
            None,
        ),
    ],
)
def test_checkpoints_by_their_names_of_transformers_5_24(
    tmp_path: Path, keys: str, recompute: Any, offload: bool | None
) -> None:
    text = f"model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\nper_device_train_batch_size: 1\n{keys}\n"
    data, said = converted(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert (data["training"]["recompute"], data["training"].get("activation_offload")) == (recompute, offload)
    assert "not expressed here" not in said


@pytest.mark.parametrize(("stage", "lora", "reentrant"), [(3, True, True), (2, True, False), (3, False, False)])
def test_trl_forces_the_reentrant_checkpoint_of_adapters_under_zero_3(
    tmp_path: Path, stage: int, lora: bool, reentrant: bool
) -> None:
    adapters = "use_peft: true\nlora_r: 16\nlora_target_modules: all-linear\n" if lora else ""
    text = f"model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\nper_device_train_batch_size: 1\n{adapters}"
    text += f"deepspeed: {{zero_optimization: {{stage: {stage}}}, bf16: {{enabled: true}}}}\n"
    data, _ = converted(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["recompute"] == ({"mode": "full", "early_stop": False} if reentrant else "full")


def test_a_part_of_an_offloaded_optimizer_is_named(tmp_path: Path) -> None:
    """`ratio` of offload_optimizer: deepspeed/runtime/zero/offload_config.py."""
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--seq-len", "4096", "--gpus", "16")
    text = DEEPSPEED.replace('"device": "cpu"', '"device": "cpu", "ratio": 0.3')
    assert "offload_optimizer: ratio 0.3 is not simulated" in converted(tmp_path, "ds.json", text, *options)[1]
    assert "ratio" not in converted(tmp_path, "ds.json", text.replace("0.3", "1.0"), *options)[1]
