"""Variables of a script's environment that change a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted
from tests.sim.convert.launch_files import MEGATRON

ON = ("--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("export NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=1"),
        ('export NCCL_ALGO="Ring"', "NCCL_ALGO=Ring"),
        ("export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"),
        ("export NCCL_P2P_DISABLE=0", ""),
        ("# export NCCL_P2P_DISABLE=1", ""),
        ("export NCCL_ALGO=${NCCL_ALGO:-}", ""),
        ("export NCCL_DEBUG=INFO CUDA_DEVICE_MAX_CONNECTIONS=1", ""),
    ],
)
def test_what_no_key_says_is_named(tmp_path: Path, line: str, named: str) -> None:
    _, notes = converted(tmp_path, "train.sh", f"{line}\n{MEGATRON}", *ON)
    assert notes.partition("environment, not expressed here: ")[2].partition("\n")[0] == named


def test_variables_of_megatrons_own_tests(tmp_path: Path) -> None:
    text = "ENV_VARS:\n  NCCL_ALGO: Ring\n  NVTE_FLASH_ATTN: 0\nMODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 512\n"
    text += "  --num-attention-heads: 8\n  --seq-length: 1024\n  --micro-batch-size: 1\n  --vocab-size: 1000\n"
    text += "  --bf16: true\n"
    data, notes = converted(tmp_path, "model_config.yaml", text, *ON, "--gpus", "8")
    assert "environment, not expressed here: NCCL_ALGO=Ring\n" in notes
    assert data["training"]["attention_kernel"] == "cudnn"


@pytest.mark.parametrize(
    ("line", "attention", "kernel"),
    [
        ("export NVTE_FLASH_ATTN=0", "fused", "cudnn"),
        ("export NVTE_FUSED_ATTN=0", "fused", "flash2"),
        ("export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "unfused", None),
        ("export NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=1", "fused", None),
    ],
)
def test_transformer_engines_kernels_of_attention(
    tmp_path: Path, line: str, attention: str, kernel: str | None
) -> None:
    """docs/envvars.rst of Transformer Engine; a backend that the command names goes before."""
    text = MEGATRON.replace("--attention-backend", "--x-backend")
    data, _ = converted(tmp_path, "train.sh", f"{line}\n{text}", *ON)
    assert (data["training"]["attention"], data["training"].get("attention_kernel")) == (attention, kernel)
    data, _ = converted(tmp_path, "train.sh", f"{line}\n{text.rstrip()} --attention-backend auto\n", *ON)
    assert "attention_kernel" not in data["training"]
