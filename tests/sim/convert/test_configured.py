"""Commands that name a configuration and override keys of it: the command's keys hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import FACTORY, TITAN

TUNE = """
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
batch_size: 2
gradient_accumulation_steps: 8
dtype: bf16
"""
AXOLOTL = (
    "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
)
FILES = {"titan.toml": TITAN, "tune.yaml": TUNE, "factory.yaml": FACTORY, "axolotl.yaml": AXOLOTL}


@pytest.mark.parametrize(
    ("command", "micro_batch", "seq_len"),
    [
        ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file titan.toml", 2, 8192),
        (
            "torchrun --nproc-per-node 8 train.py --job.config_file titan.toml --training.local_batch_size 4",
            4,
            8192,
        ),
        (
            "torchrun --nproc-per-node=8 -m torchtitan.train --job.config-file=titan.toml --training.seq-len=4096",
            2,
            4096,
        ),
        ("NGPU=8 CONFIG_FILE=./titan.toml ./run_train.sh --training.seq_len 4096", 2, 4096),
        ("export CONFIG_FILE=titan.toml NGPU=8\nLEN=1024\n./run_train.sh --training.seq_len $((LEN * 2))", 2, 2048),
        ("tune run --nproc_per_node 8 full_finetune_distributed --config tune.yaml batch_size=4", 4, 2048),
        ("tune run --nproc_per_node 8 full_finetune_distributed --config tune.yaml tokenizer.max_seq_len=512", 2, 512),
        ("NPROC_PER_NODE=8 llamafactory-cli train factory.yaml per_device_train_batch_size=4 cutoff_len=512", 4, 512),
        ("trl sft --config factory.yaml --per_device_train_batch_size 4 --max_length 512 --num_processes 8", 4, 512),
        ("accelerate launch --num_processes 8 sft.py --config factory.yaml --per_device_train_batch_size 4", 4, 2048),
        ("torchrun --nproc_per_node 8 sft.py --config factory.yaml --max_length 512", 1, 512),
        ("axolotl train axolotl.yaml --micro-batch-size 4 --num-processes 8", 4, 2048),
        ("accelerate launch --num_processes 8 -m axolotl.cli.train axolotl.yaml --sequence_len 512", 1, 512),
    ],
)
def test_the_commands_keys_hold(command: str, micro_batch: int, seq_len: int, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    training = converted(tmp_path, "run.sh", command, "--cluster", "dgx-h100")[0]["training"]
    assert (training["micro_batch_size"], training["seq_len"]) == (micro_batch, seq_len)


def test_a_switch_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(TITAN)
    command = "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file titan.toml"
    layers = [
        converted(tmp_path, "run.sh", f"{command}{switch}", "--cluster", "dgx-h100")[0]["training"]["framework"]
        for switch in ("", " --compile.no-enable", " --compile.no-enable --compile.enable")
    ]
    assert layers[0] == layers[2] != layers[1]


def test_an_override_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(TITAN)
    command = "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file titan.toml --training.seq_len $LEN"
    assert "training.seq_len: found '$LEN', in which a variable" in refused(
        tmp_path, "a.sh", command, "--cluster", "dgx-h100"
    )
