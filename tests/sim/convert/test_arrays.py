"""Arrays of a launch script as bash reads them (its manual, "Arrays")."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON

BATCHES = "SIZES=(64 256 512)\nI=1\n"
BY_NAME = 'declare -A SIZES=([7B]=256 ["70B, long"]=512)\nSIZES[1B]=64\nMODEL=7B\n'


@pytest.mark.parametrize(
    ("before", "value"),
    [
        (BATCHES, "${SIZES[1]}"),
        (BATCHES, '"${SIZES[$I]}"'),
        (BATCHES, "${SIZES[I]}"),
        (BATCHES, "${SIZES[$((I * 2 - 1))]}"),
        (BATCHES, "${SIZES[-2]}"),
        (BATCHES, "${SIZES[@]:1:1}"),
        (BATCHES, "$((${SIZES[0]} * 4))"),
        (f"{BATCHES}OWN=${{SIZES[1]}}\n", "$OWN"),
        ("SIZES=(256 512)\n", "$SIZES"),
        ("SIZES[0]=64\nSIZES[1]=256\n", "${SIZES[1]}"),
        ("SIZES=(64)\nSIZES+=(256)\n", "${SIZES[1]}"),
        ("SIZES=(128)\n", "${SIZES[3]:-256}"),
        ("SIZES=(64 128)\nSIZES=256\n", "$SIZES"),
        ('SIZES=(6 25)\nexport SIZES="${SIZES[1]}"\nSIZES+=6\n', "$SIZES"),
        ("HOSTS=(a b c d)\n", "$((64 * ${#HOSTS[@]}))"),
        (BY_NAME, "${SIZES[$MODEL]}"),
        (BY_NAME, '${SIZES["7B"]}'),
        (
            BY_NAME.replace("70B, long", "8B,batch").replace("512", "256").replace("=7B", "=8B"),
            "${SIZES[$MODEL,batch]}",
        ),
        ("case 7B in\n7B) SIZES=(256 4096) ;;\n70B) SIZES=(512 8192) ;;\nesac\n", "${SIZES[0]}"),
    ],
)
def test_an_element(tmp_path: Path, before: str, value: str) -> None:
    text = before + MEGATRON.replace("--global-batch-size 128", f"--global-batch-size {value}")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"]["global_batch_size"] == 256


@pytest.mark.parametrize(
    ("arrays", "used", "bias", "loss"),
    [
        ("A=(--add-qkv-bias)\nB=(--cross-entropy-loss-fusion)", "${A[@]}", True, "unfused"),
        ("A=(--add-qkv-bias --cross-entropy-loss-fusion)", '"${A[@]:1}"', False, "native"),
        ("A=(--add-qkv-bias)\nA=(--cross-entropy-loss-fusion)", "${A[*]}", False, "native"),
        ('A=(--add-qkv-bias)\nA=("${A[@]}" --cross-entropy-loss-fusion)', '"${A[@]}"', True, "native"),
        ("A=(--add-qkv-bias)\nB=(\n  ${A[@]}\n  --cross-entropy-loss-fusion\n)", '"${B[@]}"', True, "native"),
    ],
)
def test_the_words_of_the_arrays_that_a_command_names(
    tmp_path: Path, arrays: str, used: str, bias: bool, loss: str
) -> None:
    text = f"{arrays}\n{MEGATRON.rstrip()} {used}\n"
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["model"]["qkv_bias"] is bias
    assert data["training"]["cross_entropy"] == loss


def test_arrays_that_another_script_uses(tmp_path: Path) -> None:
    """A file that refers to none of its arrays, as one that others source."""
    text = MEGATRON[: MEGATRON.index("\n)", MEGATRON.index("GPT_MODEL_ARGS=(")) + 2]
    data, _ = converted(
        tmp_path, "sizes.sh", f"{text}\nB=(--micro-batch-size 1)\n", "--cluster", "dgx-h100", "--gpus", "8"
    )
    assert data["model"]["layers"] == 32


def test_an_array_that_grows_without_end(tmp_path: Path) -> None:
    grown = "A=(x)\n" + 'A=("${A[@]}" "${A[@]}" "${A[@]}" "${A[@]}")\n' * 20
    text = grown + MEGATRON.replace("--global-batch-size 128", "--global-batch-size ${A[7]}")
    assert "a value becomes longer than" in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")


def test_an_array_that_becomes_one_text_of_its_words(tmp_path: Path) -> None:
    """Bash sets the first element, which the array's bare name stands for."""
    text = """
        DATA=(--seq-length 4096 --split 99,1,0)
        MOCK=true
        if [ "$MOCK" = true ]; then
          DATA="${DATA[@]} --mock-data"
        fi
        RUN="torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
          --vocab-size 32000 --micro-batch-size 1 --bf16 $DATA"
        srun bash -c "$RUN"
    """
    data, notes = converted(tmp_path, "run.sh", text, "--cluster", "dgx-h100")
    assert data["training"]["seq_len"] == 4096
    assert "--split" not in notes
