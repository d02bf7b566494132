"""Of a launch script's branches those are read that its variables take."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.convert.scripts.branches import decided, taken_branches
from tests.sim.convert.converting import converted
from tests.sim.convert.launch_files import MEGATRON

VARIABLES = {"TP": "8", "SIZE": "7B", "NO": ""}
SIZES = """
MODEL_SIZE=7B; PR=bf16; AC=none
if [ $MODEL_SIZE = 7B ]; then
    NUM_LAYERS=32
    gqa=""
elif [ $MODEL_SIZE = 70B ]; then
    NUM_LAYERS=80
    gqa=" \\
        --group-query-attention \\
        --num-query-groups 4"
fi
case "$PR" in
    fp16) precision="--fp16" ;;
    bf16|bfloat16) precision="--bf16" ;;
    *) precision="--bf16
        --fp8-format hybrid" ;;
esac
if [[ "$AC" == full ]]; then
    recompute="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
else
    recompute=""
fi
[ "$PR" == fp8 ] && MORE=(--fp8-format hybrid)
torchrun --nproc_per_node 8 --nnodes 1 p.py --num-layers $NUM_LAYERS --hidden-size 4096 --num-attention-heads 32 \\
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 \\
    $gqa $precision $recompute ${MORE[@]}
"""


def test_the_sizes_of_the_chosen_model_are_taken(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "train.sh", SIZES, "--cluster", "dgx-h100")
    assert (data["model"]["layers"], data["model"].get("kv_heads")) == (32, None)
    assert data["training"]["precision"] == "bf16"
    assert data["training"].get("recompute", "none") == "none"
    assert "does not decide" not in said
    other = SIZES.replace("MODEL_SIZE=7B; PR=bf16; AC=none", "MODEL_SIZE=70B; PR=fp8; AC=full")
    data, _ = converted(tmp_path, "train.sh", other, "--cluster", "dgx-h100")
    assert (data["model"]["layers"], data["model"]["kv_heads"]) == (80, 4)
    assert (data["training"]["precision"], data["training"]["recompute"]) == ("fp8", "full")


def test_arguments_of_the_script_are_not_read(tmp_path: Path) -> None:
    loop = "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --tp) TP=$2; shift 2 ;;\n    *) shift ;;\n  esac\ndone\n"
    text = MEGATRON.replace("PP=2   # pipeline\n", f"PP=2   # pipeline\n{loop}")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["tp"] == 4
    assert "does not decide" not in said


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("[ $TP -gt 1 ]", True),
        ("[[ $TP -gt 1 && $SIZE != 7B ]]", False),
        ("[ $TP = 1 ] || [ ${SIZE} == 7B ]", True),
        ("(( TP >= 16 ))", False),
        ("[[ $SIZE == 7* ]]", True),
        ("! [ $SIZE = 7B ]", False),
        ('[ -z "$WANDB_KEY" ]', True),
        ('[ -n "${NO}" ]', False),
        ("[ ${OTHER:-3} -eq 3 ]", True),
        ('[ -n "${6}" ]', False),
        ('[ "$((TP % 2))" -ne "0" ]', False),
        ("[ $(((TP + 2) / 5)) -eq 2 ]", True),
        ("true", True),
        ("[ $OTHER = 3 ]", None),
        ("[ -f config.yaml ]", None),
        ("command -v nvidia-smi", None),
        ("[ $(nproc) -gt 3 ]", None),
        ("[ $OTHER = 3 ] && [ $TP = 1 ]", False),
        ('[ "unclosed ]', None),
    ],
)
def test_conditions(condition: str, holds: bool | None) -> None:
    assert decided(condition, VARIABLES) is holds


@pytest.mark.parametrize(
    ("script", "rest"),
    [
        ("A=1\nif [ $A = 1 ]; then B=2; else B=3; fi", "A=1 B=2;"),
        ("if [ $X = 1 ]; then B=2\nelif true; then B=3\nelse B=4\nfi", "B=2 ; B=3"),
        ("A=1\nif [ $A = 2 ]\nthen\n  if [ $A = 1 ]; then B=2; fi\nfi\nC=3", "A=1 C=3"),
        (
            "A=8\nB=$(( ($A > 1) ? 1 : 0 ))\nif [ $B -eq 1 ]; then C=2; else C=3; fi",
            "A=8 B=$(( ($A > 1) ? 1 : 0 )) C=2;",
        ),
        ("A=1\n[ $A = 1 ] || A=2\n[ $A = 1 ] && C=3", "A=1 C=3"),
        ("A=1\n[ $A = 1 ] && B=2 || B=3", "A=1 B=2"),
        ('A=1\n[ "$A" -gt 1 ] && B="a || b" || B=3', "A=1 B=3"),
        ("A=1\n[ $A = 1 ] && [ $A = 2 ] && B=2", "A=1"),
        ("A=1\n[[ $A = 2 || $A = 1 ]] && B='x && y'", "A=1 B='x && y'"),
        ("A=1\n[ $A = 2 ] && { B=2; C=3; }\nD=4", "A=1 D=4"),
        ("A=1\n[ $A = 1 ] && {\n B=2\n C=3\n}\nD=4", "A=1 B=2 C=3 D=4"),
        ("A=1\n[ $A = 1 ] && { B=2; } || { B=3; }\nD=4", "A=1 B=2; D=4"),
        ("A=1\n[ $A = 2 ] && { B=2; } || { B=3; }\nD=4", "A=1 B=3; D=4"),
        ("A=1\n[ $A = 2 ] || {\n B=2\n} && C=3\nD=4", "A=1 B=2 C=3 D=4"),
        ("A=2\n[ $A = 1 ] && {\n [ $A = 2 ] && { B=1; }\n C=3\n}\nD=4", "A=2 D=4"),
        ("A=1\n[ $A = 1 ] && {\n { B=2; }\n C=3\n} || D=3\nE=4", "A=1 B=2; C=3 E=4"),
        ("for A in 1 2; do if [ $A = 1 ]; then B=2; fi; done", "B=2;"),
        ("A='if x; then'\nB=2", "A='if x; then' B=2"),
        ("fi\nA=1", "fi A=1"),
        ("if [ 1 = 2 ]; then\nA=1", "if [ 1 = 2 ]; then A=1"),
    ],
)
def test_what_is_left_of_a_script(script: str, rest: str) -> None:
    left, _ = taken_branches(script)
    assert left.count("\n") == script.count("\n")
    assert [word for word in left.split() if word != ";"] == [word for word in rest.split() if word != ";"]
