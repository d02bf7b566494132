"""Scripts of Megatron-DeepSpeed: what the engine's file says goes before the flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted, refused

SIZES = """deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 \\
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \\
    --micro-batch-size 4 --global-batch-size 256 --deepspeed --deepspeed_config ${CONFIG}"""
WRITES = """STAGE=2
CONFIG=./out/ds.$SLURM_JOBID.json
cat <<EOT > $CONFIG
{"train_batch_size": 256, "steps_per_print": 10,
 "zero_optimization": {"stage": $STAGE, "overlap_comm": true, "reduce_bucket_size": 2e8,
                       "offload_optimizer": {"device": "cpu", "pin_memory": true}},
 "bf16": {"enabled": true}, "gradient_clipping": 0.0}
EOT
"""
HERE = ("--cluster", "dgx-a100")


def of(tmp_path: Path, script: str, config: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    if config is not None:
        (tmp_path / "ds.json").write_text(json.dumps(config))
    found, said = converted(tmp_path, "train.sh", script.replace("${CONFIG}", "ds.json"), *HERE)
    parse_scenario(found, "found")
    return found, said


def test_the_file_that_a_script_writes(tmp_path: Path) -> None:
    found, said = converted(tmp_path, "train.sh", f"{WRITES}{SIZES} --bf16 --clip-grad 1.0", *HERE)
    layout, training = found["parallelism"], found["training"]
    assert (layout["zero"], layout["dp_sync"], layout["bucket_bytes"]) == (2, "bucketed", 2 * 200_000_000)
    assert layout["param_gather_overlap"] is False
    assert (training["gradient_clipping"], training["optimizer_offload"]) == (False, "cpu")
    assert (training["precision"], training["grad_dtype"]) == ("bf16", "bf16")
    assert "not expressed" not in said
    assert "is simulated, not" not in said


@pytest.mark.parametrize(
    ("stage", "flags", "sync"),
    [
        (0, "--no-pipeline-parallel", "after_backward"),
        (1, "--no-pipeline-parallel", "bucketed"),
        (1, "", "after_backward"),
        (2, "--no-pipeline-parallel", "bucketed"),
    ],
)
def test_the_engine_reduces_beside_the_backward_without_a_pipeline_module(
    tmp_path: Path, stage: int, flags: str, sync: str
) -> None:
    """runtime/engine.py, `_configure_zero_optimizer`; pretrain_gpt.py: GPTModelPipe unless --no-pipeline-parallel."""
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": stage, "overlap_comm": True}}
    found, _ = of(tmp_path, f"{SIZES} --fp16 {flags}", config)
    assert found["parallelism"]["dp_sync"] == sync


@pytest.mark.parametrize(
    ("config", "flags", "zero", "grad_dtype"),
    [
        ({"bf16": {"enabled": True}}, "--bf16", 1, "fp32"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "--bf16", 1, "bf16"),
        (
            {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            "--bf16",
            1,
            "fp32",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 0}, "zero_optimization": {"stage": 3}}, "--fp16", 3, "fp16"),
    ],
)
def test_what_gradients_are_summed_up_in(
    tmp_path: Path, config: dict[str, Any], flags: str, zero: int, grad_dtype: str
) -> None:
    found, said = of(tmp_path, f"{SIZES} {flags}", config)
    assert (found["parallelism"]["zero"], found["training"]["grad_dtype"]) == (zero, grad_dtype)
    assert found["parallelism"]["dp_sync"] == ("bucketed" if zero == 3 else "after_backward")
    assert "not expressed" not in said


def test_what_the_engine_s_file_says_goes_first_and_is_told(tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}}
    found, said = of(tmp_path, f"{SIZES} --fp16 --zero-stage 1", config)
    assert (found["training"]["precision"], found["parallelism"]["zero"]) == ("bf16", 2)
    assert "ds.json: zero_optimization.stage 2 is simulated, not --zero-stage 1" in said
    assert "ds.json: bf16: is simulated, because DeepSpeed's engine casts, not --fp16" in said
    assert "zero_optimization.offload_param: offloading to nvme is not simulated" in said
    _, said = of(tmp_path, f"{SIZES} --bf16", {"bf16": {"enabled": True}, "amp": {"enabled": True}})
    assert "not expressed here: ds.json: amp\n" in said


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            '{"train_batch_size": 512}',
            "train_batch_size: found 512, where --global-batch-size is 256; must be the same",
        ),
        (
            '{"fp16": {"enabled": true, "x": 1}, "train_batch_size": 2.5}',
            "train_batch_size: found 2.5; must be a whole",
        ),
        ("{}", "ds.json: bf16: is off, where --bf16 is given; must be {enabled: true}"),
        ("[]", "ds.json: found an empty list; must be a mapping of options"),
    ],
)
def test_a_file_that_does_not_go_with_the_flags(tmp_path: Path, config: str, problem: str) -> None:
    (tmp_path / "ds.json").write_text(config)
    assert problem in refused(tmp_path, "train.sh", f"{SIZES} --bf16".replace("${CONFIG}", "ds.json"), *HERE)


def test_a_file_that_is_nowhere(tmp_path: Path) -> None:
    found, said = of(tmp_path, f"{SIZES} --fp16 --zero-stage 2 --cpu-optimizer")
    assert (found["parallelism"]["zero"], found["training"]["optimizer_offload"]) == (2, "cpu")
    assert "its file ds.json is neither in the script nor beside it" in said


def test_sequences_that_ulysses_splits(tmp_path: Path) -> None:
    """`data_parallel_size` is what the other degrees, this one among them, leave (megatron/arguments.py)."""
    found, _ = of(tmp_path, f"{SIZES} --fp16 --ds-sequence-parallel-size 4 --use-flash-attn-v2")
    layout = found["parallelism"]
    assert (layout["dp"], layout["cp"], layout["cp_method"]) == (4, 4, "all_to_all")


def test_its_linear_layers_have_no_fused_sum_and_its_all_reduces_wait(tmp_path: Path) -> None:
    """megatron/core/tensor_parallel/layers.py: `backward`; megatron/arguments.py: `validate_args`."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    script = f"{SIZES} --bf16 --tensor-model-parallel-size 2"
    found, said = of(tmp_path, script, config)
    assert found["training"]["gradient_accumulation_fusion"] is False
    assert found["parallelism"]["tp_overlap"] == "none"
    assert "not expressed here" not in said
    found, _ = of(tmp_path, f"{script} --sequence-parallel", config)
    assert found["parallelism"]["tp_overlap"] == "wgrad"
