"""What a launch script leaves open: its user gives it, or a test that decides nothing is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused

SIZED = """
ENGINE=$1
MODEL_SIZE=$2
TP=${3:?degree}
case $MODEL_SIZE in
    7B) LAYERS=32; HIDDEN=4096 ;;
    13B) LAYERS=40; HIDDEN=5120 ;;
    *) echo "no such size"; exit 1 ;;
esac
if [ -d /data/$ENGINE ]; then LOAD="--load /data/$ENGINE"; else LOAD="--no-load-optim"; fi
SPLIT=$(( ($TP > 1) ? 1 : 0 ))
if [ $SPLIT -eq 1 ]; then MORE="--sequence-parallel"; fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads 32 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --vocab-size 32000 --bf16 $LOAD $MORE \\
    --tensor-model-parallel-size $TP --global-batch-size $(( 8 / (TP * 2) * 16 ))
"""
HERE = ("--cluster", "dgx-h100")


def test_a_size_that_the_file_does_not_decide_is_asked_for(tmp_path: Path) -> None:
    said = refused(tmp_path, "train.sh", SIZED, *HERE, "--var", "TP=2")
    assert "train.sh:5: the file does not decide `case $MODEL_SIZE in 7B`, and" in said
    assert "model.hidden, model.layers depend on it: give --var MODEL_SIZE=VALUE or --args 'FIRST SECOND …'" in said


@pytest.mark.parametrize("given", [("--args", "any 13B 2"), ("--var", "MODEL_SIZE=13B", "--var", "TP=2")])
def test_given_values_decide(tmp_path: Path, given: tuple[str, ...]) -> None:
    data, said = converted(tmp_path, "train.sh", SIZED, *HERE, *given)
    assert (data["model"]["layers"], data["parallelism"]["tp"], data["parallelism"]["sp"]) == (40, 2, True)
    assert data["training"]["global_batch_size"] == 32
    assert "not decide" not in said  # whether a folder is there changes nothing


def test_a_branch_without_a_scenario_is_not_the_one_that_runs(tmp_path: Path) -> None:
    text = SIZED.replace("MODEL_SIZE=$2", "MODEL_SIZE=7B").replace("TP=${3:?degree}", "TP=2")
    scaling = 'if echo "$MORE" | grep -q scaling; then TP=3; fi\ntorchrun'
    data, _ = converted(tmp_path, "train.sh", text.replace("torchrun", scaling), *HERE)
    assert data["parallelism"]["tp"] == 2


def test_a_test_of_a_file_asks_for_the_branch(tmp_path: Path) -> None:
    sizes = "MODEL_SIZE=7B\n[ -f big ] && MODEL_SIZE=13B"
    text = SIZED.replace("MODEL_SIZE=$2", sizes).replace("TP=${3:?degree}", "TP=2")
    said = refused(tmp_path, "train.sh", text, *HERE)
    assert "`[ -f big ] &&`" in said
    assert "keep only the branch that runs in the file" in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "--tensor-model-parallel-size: found '${3:?degree}', an argument of the script: --args"),
        (("--args", "any 13B two"), "--tensor-model-parallel-size: found 'two'; must be a whole number"),
        (("--args", "'open"), "--args: found ''open': No closing quotation"),
        (("--var", "MODEL_SIZE"), "--var: found 'MODEL_SIZE'; must be NAME=VALUE, such as MODEL_SIZE=7B"),
        (("--var", "SIZE=7B"), "--var: the file has no variable SIZE"),
    ],
)
def test_what_cannot_be_given_is_said(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    assert problem in refused(tmp_path, "train.sh", SIZED, *HERE, *options)


@pytest.mark.parametrize(
    ("loop", "given"),
    [
        (
            "while [ $# -gt 0 ]; do case $1 in --size) S=$2; shift 2 ;; -t|--tp) T=$2; shift 2 ;; esac; done",
            "--size 13B -t 2",
        ),
        ("while getopts 's:t:v' o; do case $o in s) S=$OPTARG ;; t) T=$OPTARG ;; esac; done", "-v -s13B -t 2"),
    ],
)
def test_arguments_that_the_script_takes_one_by_one(tmp_path: Path, loop: str, given: str) -> None:
    text = SIZED.replace("ENGINE=$1", loop).replace("MODEL_SIZE=$2", "MODEL_SIZE=$S").replace("${3:?degree}", "$T")
    data, _ = converted(tmp_path, "train.sh", text, *HERE, "--args", given)
    assert (data["model"]["layers"], data["parallelism"]["tp"]) == (40, 2)


def test_a_loop_variable_of_a_benchmark_is_given(tmp_path: Path) -> None:
    text = """vllm serve meta-llama/Llama-3.1-8B-Instruct &
for c in 1 16; do
  vllm bench serve --model meta-llama/Llama-3.1-8B-Instruct --max-concurrency $c --num-prompts $((c * 10))
done"""
    assert "commands of the benchmark differ (--max-concurrency 1 " in refused(tmp_path, "serve.sh", text, *HERE)
    data, _ = converted(tmp_path, "serve.sh", text, *HERE, "--var", "c=16")
    requests = data["inference"]["requests"]
    assert (requests["count"], requests["max_concurrency"]) == (160, 16)


def test_a_model_that_is_an_argument_is_asked_for(tmp_path: Path) -> None:
    text = "MODEL=$1\nvllm serve $MODEL --tensor-parallel-size 2"
    assert "found '$1', an argument of the script: --args" in refused(tmp_path, "serve.sh", text, *HERE)
    data, _ = converted(tmp_path, "serve.sh", text, *HERE, "--args", "meta-llama/Llama-3.1-8B-Instruct")
    assert data["model"] == "hf://meta-llama/Llama-3.1-8B-Instruct"


def test_more_open_tests_than_are_tried(tmp_path: Path) -> None:
    tests = "".join(f'[ -d /data/{number} ] && LOAD="--load /data/{number}"\n' for number in range(51))
    text = SIZED.replace("SPLIT=", f"{tests}SPLIT=")
    said = refused(tmp_path, "train.sh", text, *HERE, "--args", "any 7B 2")
    assert "leaves too many tests open" in said
