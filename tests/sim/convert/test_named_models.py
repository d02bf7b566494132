"""Models that a file names by a path, or by the name of a shipped one in other hands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.convert.named_models import known_by_name
from tests.sim.convert.converting import converted, refused

AXOLOTL = "base_model: {}\nsequence_len: 2048\nmicro_batch_size: 1\n"
OPTIONS = ("--cluster", "dgx-h100", "--gpus", "8")
SERVED = ("--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("named", "model"),
    [
        ("/models/Meta-Llama-3-8B", "llama3-8b"),
        ("/data/Qwen/Qwen3-8B/", "hf://Qwen/Qwen3-8B"),
        ("/c/models--Qwen--Qwen3-8B/snapshots/1f2e", "hf://Qwen/Qwen3-8B"),
        ("NousResearch/Llama-3.2-1B", "llama3.2-1b"),
        ("Qwen/Qwen3.5-35B-A3B-Base", "qwen3.5-35b-a3b"),
        ("${HOME:-/models}/qwen3-8b", "qwen3-8b"),
        ("/tok/Llama-2-7b-hf/tokenizer.model", "llama2-7b"),
        ("/models/ours-8b", None),
        ("$MODEL", None),
        ("", None),
    ],
)
def test_the_last_part_names_a_model(named: str, model: str | None) -> None:
    assert known_by_name(named) == model


def test_a_folder_of_another_machine_is_read_by_its_name_with_a_note(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "a.yaml", AXOLOTL.format("/models/Meta-Llama-3-8B"), *OPTIONS)
    assert data["model"] == "llama3-8b"
    assert "model: /models/Meta-Llama-3-8B is read as llama3-8b, by its name; --model says otherwise" in said
    said = refused(tmp_path, "a.yaml", AXOLOTL.format("/models/ours"), *OPTIONS)
    assert "a.yaml: model: found '/models/ours'; is no model that is known here" in said
    assert "or give --model NAME or --model FOLDER/config.json" in said


def test_a_folder_that_is_there_is_read_itself(tmp_path: Path) -> None:
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1024}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, **sizes}))
    data, said = converted(tmp_path, "a.yaml", AXOLOTL.format(folder), *OPTIONS)
    assert data["model"] == str(folder)
    assert "by its name" not in said


def test_servers_and_trainers_read_paths_alike(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "serve.sh", "vllm serve $MODELS/Qwen3-32B --tensor-parallel-size 2\n", *SERVED)
    assert data["model"] == "qwen3-32b"
    assert "is read as qwen3-32b" in said
    said = refused(tmp_path, "serve.sh", "vllm serve $MODELS/$NAME\n", *SERVED)
    assert "--var MODELS=VALUE gives one" in said
    text = "megatron sft --model /m/Qwen3-8B --micro_batch_size 1 --global_batch_size 8 --max_length 2048\n"
    data, said = converted(tmp_path, "sft.sh", text, *OPTIONS)
    assert data["model"] == "qwen3-8b"
    assert "is read as qwen3-8b" in said
