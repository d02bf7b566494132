"""TRL's and ms-swift's GKD of given texts as scenarios with a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.sim.convert.converting import converted, of, refused

SWIFT = """
export teacher_model='Qwen/Qwen3-14B'
NPROC_PER_NODE=4 swift infer --model $teacher_model --infer_backend vllm --max_model_len 8192 --result_path a.jsonl
NPROC_PER_NODE=4 \\
swift rlhf --rlhf_type gkd --model Qwen/Qwen3-8B --teacher_model $teacher_model --train_type full \\
    --torch_dtype bfloat16 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_length 2048 \\
    --deepspeed zero3 --attn_impl flash_attn --lmbda 0
"""
TRL = """
model_name_or_path: Qwen/Qwen3-4B
teacher_model_name_or_path: Qwen/Qwen3-14B
max_length: 1024
per_device_train_batch_size: 2
beta: 0.5
lmbda: 0.0
"""
HERE = ("--cluster", "dgx-h100")
ON_8 = (*HERE, "--gpus", "8")


def test_of_ms_swift_beside_the_command_that_wrote_its_answers(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "a.sh", SWIFT, *HERE)
    assert data["distillation"] == {"teacher": "hf://Qwen/Qwen3-14B", "teacher_parallelism": {"tp": 4}}
    assert of(data, "parallelism", "dp", "zero") == [4, 3]
    assert of(data, "training", "micro_batch_size", "global_batch_size", "preference") == [2, 8, None]
    assert "the trainer shards it over 4 ranks" in said
    assert "not expressed" not in said
    taught = simulate(parse_scenario(data)).outcome
    plain = {key: value for key, value in data.items() if key != "distillation"}
    assert taught.step_time_s > 1.2 * simulate(parse_scenario(plain)).outcome.step_time_s


def test_of_trl_a_teacher_is_whole_without_shards(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "a.yaml", TRL, *ON_8)
    assert data["distillation"] == {"teacher": "hf://Qwen/Qwen3-14B"}
    assert data["training"]["seq_len"] == 1024
    assert "shards" not in said
    assert "in tiles" not in said
    assert "not expressed" not in said
    parse_scenario(data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lmbda: 0.0", "lmbda: 0.3", "lmbda: found 0.3; the student writes answers in this share of the batches"),
        ("lmbda: 0.0\n", "", "lmbda: found 0.5; the student writes answers"),
        ("beta: 0.5", "seq_kd: true", "seq_kd: found true; the teacher writes each batch by Transformers' generate"),
        ("beta: 0.5", "gkd_logits_topk: 64", "gkd_logits_topk: found 64; a teacher is simulated with all"),
        ("teacher_model_name_or_path: Qwen/Qwen3-14B", "", "a student that is its own teacher is not simulated"),
        ("Qwen/Qwen3-14B", "ours/teacher", "teacher_model_name_or_path: found 'ours/teacher'"),
    ],
)
def test_what_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in refused(tmp_path, "a.yaml", TRL.replace(old, new), *ON_8)
