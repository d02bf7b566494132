"""Configs of LLaMA-Factory that do not train by Transformers' Trainer, and files that they name from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.commands.convert import main
from tests.processes import invoked
from tests.sim.convert.converting import converted, refused

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
