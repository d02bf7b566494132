"""What `stepsim convert` says about settings that no key of a scenario has, or that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.commands.convert import main
from tests.processes import invoked
from tests.sim.convert.converting import converted
from tests.sim.convert.launch_files import MEGATRON, TITAN

HERE = ("--cluster", "dgx-h100", "--gpus", "32")
BRIDGE = "model: {tensor_model_parallel_size: 2, pipeline_model_paralel_size: 2}\ntrain: {global_batch_size: 64}"


@pytest.mark.parametrize(
    ("name", "text", "options", "hint"),
    [
        (
            "train.sh",
            MEGATRON.replace("--tensor-model-parallel-size", "--tensor-model-paralel-size").replace(
                "    --sequence-parallel\n", "    --bf16\n"
            ),
            (),
            "--tensor-model-paralel-size is not read: did you mean --tensor-model-parallel-size?",
        ),
        (
            "a.toml",
            TITAN.replace("seq_len", "seqlen"),
            (),
            "training.seqlen is not read: did you mean training.seq_len?",
        ),
        (
            "ds.json",
            '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "overlap_com": true}}',
            ("--model", "llama3-8b", "--seq-len", "4096"),
            "zero_optimization.overlap_com is not read: did you mean zero_optimization.overlap_comm?",
        ),
        (
            "a.yaml",
            BRIDGE.replace("train: {", "train: {micro_batch_size: 1, ").replace("2, pipe", "2, seq_length: 4096, pipe"),
            ("--model", "llama3-8b"),
            "model.pipeline_model_paralel_size is not read: did you mean model.pipeline_model_parallel_size?",
        ),
    ],
)
def test_a_mistyped_setting_is_told_from_one_without_a_key(
    tmp_path: Path, name: str, text: str, options: tuple[str, ...], hint: str
) -> None:
    _, said = converted(tmp_path, name, text, *HERE, *options)
    assert f"# {hint}\n" in said
    assert hint.split()[0] not in said.replace(hint, "")  # not among what no key expresses, too


def test_real_settings_that_are_much_alike_are_not_taken_for_mistyped(tmp_path: Path) -> None:
    text = MEGATRON.replace("    --bf16\n", "    --bf16 --fp4-recipe nvfp4 --exp-avg-dtype bf16\n")
    assert "is not read" not in converted(tmp_path, "train.sh", text, *HERE)[1]


def test_notes_of_a_file_that_is_written_go_to_standard_error(tmp_path: Path) -> None:
    file, out = tmp_path / "train.sh", tmp_path / "mine.yaml"
    file.write_text(MEGATRON)
    done = invoked(main, str(file), *HERE, "--out", str(out))
    assert done.stdout == ""
    assert done.stderr == "note: not expressed here: --cuda-graph-scope\n"
    assert "# not expressed here: --cuda-graph-scope\n" in out.read_text()


@pytest.mark.parametrize(("strategy", "shard"), [("optim_grads_params", 2), ("no_shard", None)])
def test_hybrid_fsdp_of_megatron_shards_within_an_instance(tmp_path: Path, strategy: str, shard: int | None) -> None:
    """dp 4 in two instances: megatron/training/arguments.py, `num_distributed_optimizer_instances`."""
    fsdp = f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy} --num-distributed-optimizer-instances 2"
    data, _ = converted(tmp_path, "train.sh", MEGATRON.replace("    --bf16\n", f"    --bf16 {fsdp}\n"), *HERE)
    assert data["parallelism"].get("shard_size") == shard


@pytest.mark.parametrize("parallel", [True, False])
def test_a_flag_that_megatron_ignores_today_is_explained(tmp_path: Path, parallel: bool) -> None:
    """It matters without sequence parallelism, which has messages of its own."""
    flag = "--no-async-tensor-model-parallel-allreduce"
    text = MEGATRON.replace("    --sequence-parallel\n", f"    {flag} {'--sequence-parallel' * parallel}\n")
    scenario, said = converted(tmp_path, "train.sh", text, *HERE)
    assert scenario["parallelism"]["tp_overlap"] == "wgrad"
    assert ("set parallelism.tp_overlap: none" in said) != parallel
    assert f"not expressed here: {flag}" not in said


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        (
            "a.yaml",
            "model_name_or_path: llama3-8b\nper_device_train_batch_size: 1\nmax_length: 64\n",
            "full_determinism",
        ),
        ("a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n', "debug.deterministic"),
        ("a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n', "training.deterministic"),
    ],
)
def test_deterministic_kernels_are_named_where_they_are_on(tmp_path: Path, name: str, text: str, key: str) -> None:
    table, _, last = key.rpartition(".")
    for word, said in (("true", True), ("false", False)):
        line = f"[{table}]\n{last} = {word}\n" if table else f"{last}: {word}\n"
        _, output = converted(tmp_path, name, text + line, "--cluster", "dgx-h100", "--gpus", "8")
        assert (f"not expressed here: {key}\n" in output) is said


def test_what_is_off_as_by_default_needs_no_note(tmp_path: Path) -> None:
    """accelerate/utils/dataclasses.py: `forward_prefetch`; transformers/training_args.py: `group_by_length`."""
    text = """
model_name_or_path: llama3-8b
per_device_train_batch_size: 1
max_seq_length: 2048
bf16: true
group_by_length: false
fsdp: full_shard auto_wrap
fsdp_config: {forward_prefetch: false}
"""
    _, said = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert "not expressed" not in said
    on = text.replace("group_by_length: false", "group_by_length: true").replace("prefetch: false", "prefetch: true")
    _, said = converted(tmp_path, "b.yaml", on, "--cluster", "dgx-h100", "--gpus", "8")
    assert "not expressed here: fsdp_config.forward_prefetch, group_by_length" in said


def test_an_argument_of_megatrons_own_is_no_mistyped_one(tmp_path: Path) -> None:
    """core/transformer/transformer_config.py of 2026: `moe_expert_rank_capacity_factor` is a size of paged stashes."""
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --seq-length 512 --bf16"
    experts = "--num-experts 8 --vocab-size 1000 --moe-paged-stash --moe-expert-rank-capacity-factor 2.0"
    _, said = converted(
        tmp_path, "a.sh", f"torchrun pretrain_gpt.py {flags} {experts}", "--cluster", "dgx-h100", "--gpus", "8"
    )
    assert "did you mean" not in said
    assert "not expressed here: --moe-expert-rank-capacity-factor, --moe-paged-stash" in said
