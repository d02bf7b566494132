"""Scripts of older Megatron-LM, Megatron-DeepSpeed, MegaBlocks and the zero-bubble fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON

SIZES = """deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 \\
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \\
    --micro-batch-size 4 --global-batch-size 256 --fp16"""
HERE = ("--cluster", "dgx-a100")


def of(tmp_path: Path, flags: str, sizes: str = SIZES) -> tuple[dict[str, Any], str]:
    found, said = converted(tmp_path, "train.sh", f"{sizes} {flags}", *HERE)
    parse_scenario(found, "found")
    return found, said


def test_megatron_deepspeed(tmp_path: Path) -> None:
    flags = "--deepspeed --deepspeed_config ds.json --zero-stage 1 --checkpoint-activations --data-impl mmap"
    found, said = of(tmp_path, f"{flags} --deepspeed-activation-checkpointing --num-key-value-heads 4 --tee 3")
    assert (found["parallelism"]["zero"], found["parallelism"]["dp"]) == (1, 16)
    assert (found["training"]["recompute"], found["training"]["attention"]) == ("full", "unfused")
    assert found["model"]["kv_heads"] == 4
    assert "not expressed" not in said


def test_bloom(tmp_path: Path) -> None:
    flags = "--deepspeed --zero-stage 0 --position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 250880"
    sizes = SIZES.replace("--fp16", "--bf16").replace("--vocab-size 50257", "")
    found, said = of(tmp_path, flags, sizes)
    assert (found["model"]["positions"], found["model"]["embedding_norm"]) == ("none", True)
    assert found["model"]["vocab"] == 250_880
    assert found["parallelism"]["zero"] == 1
    assert "DeepSpeed's bf16 optimizer shards its states also with ZeRO stage 0" in said


def test_experts_of_megatron_deepspeed(tmp_path: Path) -> None:
    """1.3B+MoE-128 has 52 billion parameters (Rajbhandari et al. 2022, arXiv 2201.05596, table 1)."""
    flags = "--deepspeed --num-experts 128 --moe-expert-parallel-size 16 --moe-train-capacity-factor 1.0"
    found, _ = of(tmp_path, flags)
    assert count_parameters(load_model(found["model"])).total / 1e9 == pytest.approx(52, abs=0.6)
    assert (found["model"]["moe"]["top_k"], found["model"]["moe"]["capacity_factor"]) == (1, 1.0)
    assert found["parallelism"]["ep"] == 16
    dropless, _ = of(tmp_path, f"{flags} --disable-moe-token-dropping --topk 2 --expert-interval 1")
    assert dropless["model"]["moe"] == {"experts": 128, "top_k": 2, "ffn": 8192}
    dense, _ = of(tmp_path, "--deepspeed --num-experts 1")
    assert "moe" not in dense["model"]
    several = f"{SIZES} --deepspeed --num-experts 64 128"
    assert "--num-experts: found '64 128'" in refused(tmp_path, "train.sh", several, *HERE)


def test_megablocks(tmp_path: Path) -> None:
    flags = "--moe-num-experts=64 --moe-loss-weight=0.1 --moe-top-k=1 --moe-expert-model-parallelism --use-flash-attn"
    found, said = of(tmp_path, f"{flags} --optimizer adafactor")
    assert found["model"]["moe"] == {"experts": 64, "top_k": 1, "ffn": 8192}
    assert (found["parallelism"]["ep"], found["training"]["attention"]) == (16, "fused")
    assert "--optimizer adafactor: AdamW is simulated in its place" in said


@pytest.mark.parametrize(
    ("flags", "recompute", "attention"),
    [
        ("--activations-checkpoint-method uniform", "full", "unfused"),
        ("--recompute-activations --recompute-granularity selective", "selective", "fused"),
        ("--data-impl mmap --use-flash-attn", None, "fused"),
        ("--transformer-impl local", None, "unfused"),
        ("--DDP-impl local --transformer-impl transformer_engine", None, "fused"),
    ],
)
def test_recomputation_and_attention_by_age(tmp_path: Path, flags: str, recompute: str | None, attention: str) -> None:
    found, said = of(tmp_path, flags)
    assert (found["training"].get("recompute"), found["training"]["attention"]) == (recompute, attention)
    assert ("not expressed" in said) == ("--transformer-impl local" in flags)  # of its other kernels nothing is said


def test_the_first_megatron(tmp_path: Path) -> None:
    sizes = SIZES.replace("--micro-batch-size 4 --global-batch-size 256", "--batch-size 8")
    found, _ = of(tmp_path, "--model-parallel-size 2 --position-embedding-type rotary", sizes)
    assert (found["training"]["micro_batch_size"], found["training"]["global_batch_size"]) == (8, 64)
    assert (found["parallelism"]["tp"], found["model"]["positions"]) == (2, "rope")


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", {"schedule": "zb_h1"}),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 8", {"schedule": "zb_h2"}),
        ("--enable-zero-bubble", {"schedule": "zb_h2"}),
        (
            "--enable-zero-bubble --zero-bubble-max-pending-backward 6",
            {"schedule": "zb_search", "schedule_memory": 1.5},
        ),
        ("--zero-bubble-v-schedule --enable-optimizer-post-validation", {"schedule": "zb_v"}),
        ("--no-overlap-p2p-communication", {}),
    ],
)
def test_zero_bubble_schedules(tmp_path: Path, flags: str, schedule: dict[str, Any]) -> None:
    found, said = of(tmp_path, f"--pipeline-model-parallel-size 4 {flags}")
    kept = {key: value for key, value in found["parallelism"].items() if key.startswith("schedule")}
    assert kept == schedule
    assert found["training"].get("optimizer_post_validation", False) == ("post-validation" in flags)
    assert "not expressed" not in said


def test_arguments_as_megatrons_own_tests_have_them(tmp_path: Path) -> None:
    arguments = """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 1024
  --num-attention-heads: 16
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-size: 32000
  --micro-batch-size: 1
  --global-batch-size: 32
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: false
  --recompute-granularity: selective
  --recompute-modules: [core_attn, mlp]
  --bf16: true
"""
    found, _ = converted(tmp_path, "model_config.yaml", arguments, *HERE, "--gpus", "8")
    assert (found["parallelism"]["dp"], found["parallelism"]["sp"], found["parallelism"]["zero"]) == (4, True, 0)
    assert found["training"]["recompute"] == {"mode": "selective", "modules": ["core_attn", "mlp"]}


def test_two_models_of_one_script_are_not_mixed(tmp_path: Path) -> None:
    """The command's own array is read, whatever other arrays the script has; two commands are refused."""
    arrays = f"SMALL=(--num-layers 24 --hidden-size 2048)\nLARGE=(--num-layers 40 --hidden-size 5120)\n{SIZES}"
    text = arrays.replace("--num-layers 24 --hidden-size 2048 \\", "${LARGE[@]} \\")
    data, _ = converted(tmp_path, "train.sh", text, *HERE)
    assert (data["model"]["layers"], data["model"]["hidden"]) == (40, 5120)
    said = refused(tmp_path, "both.sh", f"{text}\npython pretrain_gpt.py ${{SMALL[@]}}\n", *HERE)
    assert "commands have --num-layers (40, 24" in said


def test_several_values_of_a_flag_in_a_file_of_its_tests(tmp_path: Path) -> None:
    """tests/functional_tests/shell_test_utils/_run_training.sh: a text in brackets is several values."""
    sizes = (
        "--num-layers: 2\n  --hidden-size: 256\n  --num-attention-heads: 4\n  --seq-length: 512\n  --vocab-size: 1000"
    )
    sizes += "\n  --micro-batch-size: 1\n  --num-experts: 4\n  --moe-ffn-hidden-size: 128\n  --moe-grouped-gemm: true"
    more = "--recompute-granularity: selective\n  --recompute-modules: '[moe_act layernorm]'"
    text = f"MODEL_ARGS:\n  {sizes}\n  {more}\n  --moe-layer-freq: ([0]*1+[1]*1)\n"
    data, _ = converted(tmp_path, "model_config.yaml", text, "--cluster", "dgx-h100", "--gpus", "4")
    assert data["training"]["recompute"]["modules"] == ["moe_act", "layernorm"]
    assert data["model"]["moe"]["dense_layers"] == 1


@pytest.mark.parametrize("switch", ["--enable-cuda-graph", "--external-cuda-graph"])
def test_former_switches_of_cuda_graphs(tmp_path: Path, switch: str) -> None:
    """training/arguments.py, `validate_args`: --cuda-graph-impl local, and transformer_engine."""
    text = MEGATRON.replace("--cuda-graph-scope full", switch)
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"]["cuda_graphs"] == "layers"
    assert "not expressed" not in said


@pytest.mark.parametrize(
    ("flags", "waits"),
    [
        ("--checkpoint-activations", True),
        ("--deepspeed --zero-stage 1 --pad-vocab-size-to 128256", True),
        ("--activations-checkpoint-method uniform", False),
    ],
)
def test_the_backward_of_plain_linear_layers(tmp_path: Path, flags: str, waits: bool) -> None:
    """megatron/mpu/layers.py of bigscience-workshop/Megatron-DeepSpeed: `ColumnParallelLinear` calls `F.linear`."""
    text = MEGATRON.replace("--recompute-activations", flags)
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-a100")
    assert data["parallelism"]["tp_overlap"] == ("none" if waits else "wgrad")
    assert (data["training"].get("gradient_accumulation_fusion") is False) is waits
    assert ("all-reduces in the backward wait" in said) is waits
