"""Configs of LLaMA-Factory: what its defaults and names mean, files that they name, and other ways of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.commands.convert import main
from sim.inputs.scenario import parse_scenario
from tests.processes import invoked
from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import FACTORY

SFT = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: full
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""
WHOLE = {"mode": "full", "early_stop": False}  # torch's reentrant checkpoint
EIGHT = FACTORY + "fp8: true\nfp8_backend: torchao\n"
ON_8 = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3.1-8b", "--seq-len", "2048")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SFT}tensor_model_parallel_size: 4\n", "tensor_model_parallel_size: is a setting of Megatron-LM"),
        (f"{SFT}use_distributed_optimizer: true\n", "use_distributed_optimizer: is a setting of Megatron-LM"),
        (
            "model: Qwen/Qwen3-4B\ntrain_dataset: d.yaml\ncutoff_len: 2048\nmicro_batch_size: 4\noutput_dir: o\n",
            "USE_V1=1",
        ),
        (
            "model_name_or_path: a/b\ntemplate: llama3\nexport_dir: out\n",
            "export_dir: exports a model, and trains nothing",
        ),
        (
            "model_name_or_path: a/b\ntemplate: llama3\ninfer_backend: vllm\n",
            "infer_backend: generates text, and trains",
        ),
        (SFT.replace("do_train", "do_predict"), "do_predict without do_train trains nothing"),
    ],
)
def test_what_does_not_train_by_transformers_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, "sft.yaml", text, *ON_8)


def test_a_config_that_trains_may_name_what_is_done_afterwards(tmp_path: Path) -> None:
    assert converted(tmp_path, "sft.yaml", f"{SFT}do_predict: true\ninfer_backend: huggingface\n", *ON_8)[0]


def test_a_file_is_found_from_the_folder_that_the_trainer_starts_in(tmp_path: Path) -> None:
    """`llamafactory-cli train examples/train_full/sft.yaml`, which names `examples/deepspeed/z3.json`."""
    for folder in ("deepspeed", "train_full"):
        (tmp_path / "examples" / folder).mkdir(parents=True)
    (tmp_path / "examples" / "deepspeed" / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    file = tmp_path / "examples" / "train_full" / "sft.yaml"
    file.write_text(f"{SFT}deepspeed: examples/deepspeed/z3.json\n")
    assert "zero: 3" in invoked(main, str(file), *ON_8).output


@pytest.mark.parametrize(
    ("more", "recompute", "attention"),
    [
        ("flash_attn: fa2", WHOLE, "fused"),
        ("flash_attn: disabled", WHOLE, "unfused"),
        ("use_reentrant_gc: false", "full", "fused"),
        # model/model_utils/checkpointing.py: `prepare_model_for_training`
        ("fsdp: full_shard\nfsdp_config: {version: 2}", "full", "fused"),
        ("fsdp: full_shard\nfsdp_config: {version: 1}", WHOLE, "fused"),
        ("disable_gradient_checkpointing: true", "none", "fused"),
    ],
)
def test_defaults_of_llama_factory(tmp_path: Path, more: str, recompute: object, attention: str) -> None:
    data, said = converted(tmp_path, "sft.yaml", FACTORY + more, "--cluster", "dgx-h100", "--gpus", "8")
    assert (data["training"]["recompute"], data["training"]["attention"]) == (recompute, attention)
    assert data["training"]["cross_entropy"] == "chunked"
    assert "not expressed" not in said


@pytest.mark.parametrize("kind", ["freeze", "oft"])
def test_training_of_some_layers_alone_is_refused(tmp_path: Path, kind: str) -> None:
    """llamafactory/hparams/finetuning_args.py; `freeze` trains two layers by default."""
    text = FACTORY.replace("finetuning_type: full", f"finetuning_type: {kind}")
    said = refused(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert f"finetuning_type: found '{kind}'; can be converted: full training, and LoRA" in said


def test_llama_factorys_pure_bf16(tmp_path: Path) -> None:
    text = FACTORY.replace("bf16: true", "pure_bf16: true")
    data, said = converted(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    t = data["training"]
    assert (t["precision"], t["param_dtype"], t["master_weights"]) == ("bf16", "bf16", False)
    assert "not expressed" not in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", ("fp8", "tensorwise", None)),
        ("fsdp: full_shard", ("fp8", "tensorwise", "bf16")),
        ("fsdp: full_shard\nfp8_enable_fsdp_float8_all_gather: true", ("fp8", "tensorwise", None)),
    ],
)
def test_matmuls_in_8_bits_of_llama_factory(tmp_path: Path, more: str, expected: tuple[object, ...]) -> None:
    data, notes = converted(tmp_path, "sft.yaml", f"{EIGHT}{more}\n", "--cluster", "dgx-h100", "--gpus", "8")
    t, p = data["training"], data["parallelism"]
    assert (t["precision"], t.get("fp8_recipe"), p.get("param_gather_dtype")) == expected
    assert "not expressed" not in notes
    assert parse_scenario(data)


@pytest.mark.parametrize(
    ("key", "optimizer", "said"),
    [
        ("use_muon: true", "muon", ""),
        ("optim: galore_adamw", "adamw", "of a low rank"),
        ("optim: adamw_torch_4bit", "adamw", "4 bits"),
        ("optim: schedule_free_adamw", "adamw", "one moment"),
    ],
)
def test_optimizers_whose_states_are_others(tmp_path: Path, key: str, optimizer: str, said: str) -> None:
    data, notes = converted(tmp_path, "sft.yaml", f"{FACTORY}{key}\n", "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["optimizer"] == optimizer
    assert said in notes


def test_torch_compile_takes_one_kind_of_checkpoint(tmp_path: Path) -> None:
    """Its default is the reentrant one, which the framework of torch.compile refuses; the file was refused, too."""
    data, output = converted(tmp_path, "a.yaml", f"{SFT}torch_compile: true\n", *ON_8)
    assert (data["training"]["framework"], data["training"]["recompute"]) == ("transformers_compiled", "full")
    assert "use_reentrant: with torch_compile simulated as torch's other checkpoint" in " ".join(output.split())


def test_adapters_are_the_default(tmp_path: Path) -> None:
    """hparams/finetuning_args.py: `finetuning_type` is lora where a config does not have it."""
    text = "model_name_or_path: llama3-8b\nstage: sft\ntemplate: llama3\ncutoff_len: 2048\nbf16: true\n"
    data, said = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["lora"] == {"rank": 8}
    assert "finetuning_type: lora, LLaMA-Factory's default" in said
    command = "llamafactory-cli train --model_name_or_path llama3-8b --per_device_train_batch_size 2 --cutoff_len 512\n"
    data, _ = converted(tmp_path, "a.sh", command, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["lora"] == {"rank": 8}
