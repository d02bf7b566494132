"""Launch scripts of Megatron-LM as people write them: Slurm's directives, sums, appended values, commands in quotes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.model_input import load_model
from tests.sim.convert.converting import converted, of, refused
from tests.sim.convert.launch_files import MEGATRON

SLURM = """
#!/bin/bash
#SBATCH -N 32
#SBATCH --gres=gpu:h100:8
#SBATCH --ntasks-per-node=1
TP=2; PP=$((TP * 2))   # two assignments in a line
GBS=$((SLURM_NNODES * 8 * 4))
ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length $((4 * 1024)) --vocab-size 32000)
ARGS+=(--bf16 --micro-batch-size 1 --recompute-granularity selective --recompute-modules core_attn mlp)
OTHER="--num-layers 2 --hidden-size 64"
MORE="--global-batch-size $GBS"
MORE+=" --max-position-embeddings 4096"
"""
LAST = "$MORE --pipeline-model-parallel-size $PP"
QUOTED = f'{SLURM}srun bash -c "torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES p.py ${{ARGS[*]}} {LAST}"\n'
PLAIN = SLURM.replace("per-node=1", "per-node=8") + f"srun python p.py ${{ARGS[@]}} {LAST}\n"


@pytest.mark.parametrize("text", [QUOTED, PLAIN], ids=["a command in quotes", "a task for each GPU"])
def test_a_slurm_script_with_sums_and_appended_values(tmp_path: Path, text: str) -> None:
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["model"]["layers"], data["training"]["seq_len"]) == (32, 4096)
    assert data["training"]["global_batch_size"] == 32 * 8 * 4
    assert data["training"]["recompute"] == {"mode": "selective", "modules": ["core_attn", "mlp"]}
    assert (data["parallelism"]["pp"], data["parallelism"]["dp"]) == (4, 64)
    assert "not expressed" not in said


@pytest.mark.parametrize("value", ["$GBS", "$((A * 2))", "$((8 / 0))"])
def test_a_variable_without_a_value_is_named(tmp_path: Path, value: str) -> None:
    text = MEGATRON.replace("--global-batch-size 128", f"--global-batch-size {value}")
    assert "in which a variable has no value" in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TP=4\n", "TP=${TP:-4}\n"),
        ("TP=4\n", "TP=2\nTP=$((TP * 2))\n"),
        ("TP=4\n", 'export TP=${TP:-"4"}\n'),
        ("TP=4\n", "TP=${TP:-${TP_SIZE:=4}}\n"),
    ],
)
def test_a_variable_made_of_itself_has_its_earlier_value_or_its_default(tmp_path: Path, old: str, new: str) -> None:
    data, _ = converted(tmp_path, "train.sh", MEGATRON.replace(old, new), "--cluster", "dgx-h100")
    assert (data["parallelism"]["tp"], data["parallelism"]["dp"]) == (4, 4)


def test_flags_added_to_a_variable_keep_those_before(tmp_path: Path) -> None:
    more = 'MORE="--fp8-format hybrid"\nMORE="$MORE --grad-reduce-in-bf16"\n'
    data, _ = converted(tmp_path, "train.sh", f"{more}{MEGATRON.rstrip()} $MORE\n", "--cluster", "dgx-h100")
    assert (data["training"]["precision"], data["training"]["grad_dtype"]) == ("fp8", "bf16")


def test_a_flag_in_quotes_with_its_value_is_two_words(tmp_path: Path) -> None:
    array = 'DTYPE_ARGS=(\n    "--fp8-format hybrid"\n    "--fp8-recipe blockwise"\n)\n'
    data, said = converted(
        tmp_path, "a.sh", f"{array}{MEGATRON.rstrip()} ${{DTYPE_ARGS[@]}}\n", "--cluster", "dgx-h100"
    )
    assert (data["training"]["precision"], data["training"]["fp8_recipe"]) == ("fp8", "blockwise")
    assert "not expressed here: --fp8" not in said


def test_nodes_that_nobody_needs_are_not_asked_for(tmp_path: Path) -> None:
    text = MEGATRON.replace("${SLURM_NNODES:-4}", "$UNKNOWN")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--gpus", "16")
    assert data["parallelism"]["dp"] == 2
    assert "variable has no value" in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")


def test_a_tokenizer_of_a_shipped_model_says_the_vocabulary(tmp_path: Path) -> None:
    text = MEGATRON.replace("--vocab-size 128256", "--tokenizer-model Qwen/Qwen3-235B-A22B")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["model"]["vocab"] == load_model("qwen3-235b-a22b").vocab
    assert "--tokenizer-model names" in said


@pytest.mark.parametrize(
    ("flags", "graphs", "note"),
    [
        ("--cuda-graph-impl local", "layers", "whole layers"),
        ("--cuda-graph-impl local --cuda-graph-scope full", "layers", ""),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn norm", "layers", "of attn norm"),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "step", ""),
        ("--cuda-graph-impl full_iteration", "step", ""),
        ("--cuda-graph-impl none --cuda-graph-scope full", None, "not expressed here: --cuda-graph-scope"),
    ],
)
def test_cuda_graphs(tmp_path: Path, flags: str, graphs: str | None, note: str) -> None:
    text = MEGATRON.replace("    --cuda-graph-scope full\n", "").rstrip() + f" {flags}\n"
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"].get("cuda_graphs") == graphs
    if note == "whole layers":
        assert "CUDA graphs of" not in said
    else:
        assert note in said


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ("--num-experts 8 --moe-router-topk 2 --fp8-format e4m3 --fp8-recipe mxfp8", True),
        ("--num-experts 8 --moe-router-topk 2", None),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", None),
    ],
)
def test_fused_experts(tmp_path: Path, flags: str, fused: bool | None) -> None:
    own = "--use-transformer-engine-op-fuser --moe-mlp-glu-interleave-size 32 --bf16"
    text = f"{MEGATRON.rstrip()} \\\n    {flags} {own}\n"
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "gb200-nvl72")
    assert data["training"].get("fused_experts") is fused
    assert ("--moe-mlp-glu-interleave-size, --use-transformer-engine-op-fuser" in said) is (fused is None)


@pytest.mark.parametrize("given", ["TP=2", "readonly TP=2", "declare -r TP=2", "typeset -i TP=2", ': "${TP:=2}"'])
def test_ways_to_give_a_variable_its_value(tmp_path: Path, given: str) -> None:
    data, _ = converted(tmp_path, "train.sh", MEGATRON.replace("TP=4", given), "--cluster", "dgx-h100")
    assert data["parallelism"]["tp"] == 2


def test_a_default_gives_way_to_a_value(tmp_path: Path) -> None:
    text = MEGATRON.replace("TP=4", 'TP=8\n: "${TP:=2}" "${OTHER:=1}"')
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["tp"] == 8
    text = MEGATRON.replace("TP=4", ': "${TP:=2}"')
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--var", "TP=1")
    assert data["parallelism"]["tp"] == 1


@pytest.mark.parametrize("options", ["-N 2 --ntasks-per-node=8", "-N2 -n16", "-n 16"])
def test_sruns_flags_of_one_letter(tmp_path: Path, options: str) -> None:
    text = MEGATRON.replace("torchrun ${DISTRIBUTED_ARGS[@]}", f"srun -N 1 -n 1 nvidia-smi\nsrun {options} python")
    text = text.replace("    --nproc_per_node $GPUS_PER_NODE\n    --nnodes $NNODES\n", "")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["tp"], data["parallelism"]["dp"]) == (4, 2)


def test_the_end_of_a_launchers_flags_is_no_flag(tmp_path: Path) -> None:
    launched = "ray job submit --no-wait -- python3 train.py --nproc_per_node 8 --nnodes 4"
    text = MEGATRON.replace("torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py", launched)
    _, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "not expressed here: --cuda-graph-scope, --no-wait\n" in said


def test_a_list_that_a_variable_leaves_open_names_it(tmp_path: Path) -> None:
    flags = '--sequence-parallel --num-experts 8 --moe-layer-freq "$FREQ"'
    said = refused(tmp_path, "train.sh", MEGATRON.replace("--sequence-parallel", flags), "--cluster", "dgx-h100")
    assert "--moe-layer-freq: found '$FREQ', in which a variable has no value: --var FREQ=VALUE gives one" in said


@pytest.mark.parametrize("value", ["$(expr 32 \\* $TP)", "`expr 256 / 2`", "$((32 * TP))"])
def test_a_sum_that_expr_computes(tmp_path: Path, value: str) -> None:
    text = MEGATRON.replace("--global-batch-size 128", f"--global-batch-size {value}")
    assert converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["training"]["global_batch_size"] == 128


@pytest.mark.parametrize("value", ["${OTHERS[1]}", "${SIZES[$MODEL]}"])
def test_an_element_of_an_array_is_told_from_a_variable(tmp_path: Path, value: str) -> None:
    text = "SIZES=(64 128)\n" + MEGATRON.replace("--global-batch-size 128", f"--global-batch-size {value}")
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "an element of an array that the file does not give: write its value into the file" in said


@pytest.mark.parametrize("value", ["$(cat gbs.txt)", "`nproc`"])
def test_the_output_of_a_command_is_told_from_a_variable(tmp_path: Path, value: str) -> None:
    text = MEGATRON.replace("--global-batch-size 128", f"--global-batch-size {value}")
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "the output of a command, which is not run: write its value into the file" in said


@pytest.mark.parametrize(("multiple", "vocab"), [(128, 100000), (3232, 103424), (1, 100000)])
def test_a_vocabulary_is_padded_as_the_flag_says(tmp_path: Path, multiple: int, vocab: int) -> None:
    """training/tokenizer/tokenizer.py, `_vocab_size_with_padding`: to a multiple of this times tp (4), 12,928; that of
    128 is the simulator's own."""
    text = MEGATRON.replace("--vocab-size 128256", f"--vocab-size 100000 --make-vocab-size-divisible-by {multiple}")
    assert converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["vocab"] == vocab


@pytest.mark.parametrize("comment", ["# --log-interval 1 \\", "#--load $CHECKPOINT \\", "  # a word", "#"])
@pytest.mark.parametrize("before", ["", " \\"])
def test_a_comment_in_an_array_ends_with_its_line(tmp_path: Path, comment: str, before: str) -> None:
    """Bash's manual, 3.1.3 "Comments": a backslash at a comment's end continues nothing."""
    text = MEGATRON.replace("    --bf16\n", f"    --bf16{before}\n    {comment}\n    --grad-reduce-in-bf16\n")
    found = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["training"]
    assert (found["precision"], found["grad_dtype"]) == ("bf16", "bf16")


def test_a_branch_behind_such_a_comment_is_still_one(tmp_path: Path) -> None:
    text = "X=1\n# echo a \\\nif [ $X = 2 ]; then\n  MORE=--swiglu\nfi\n" + MEGATRON.rstrip() + " $MORE\n"
    assert converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["layers"] == 32


SIZES = """torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 \\
    --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --micro-batch-size 1 \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP"""


@pytest.mark.parametrize(
    "before",
    [
        "export TP=4 PP=2 NODES=2\n",
        "TP=4 PP=2; NODES=$((TP / PP))  # nodes\n",
        "declare -i TP=4 PP=2\ntypeset NODES='2'\n",
    ],
)
def test_several_assignments_of_a_line(tmp_path: Path, before: str) -> None:
    data, _ = converted(tmp_path, "train.sh", before + SIZES, "--cluster", "dgx-h100")
    assert [data["parallelism"][key] for key in ("dp", "tp", "pp")] == [2, 4, 2]


@pytest.mark.parametrize(("before", "sp"), [("SP=1", True), ("SP=", False), ("", False)])
def test_text_in_place_of_a_variable_that_is_set(tmp_path: Path, before: str, sp: bool) -> None:
    text = f"{before}\nTP=4; PP=2; NODES=2\n{SIZES} ${{SP:+--sequence-parallel}}\n"
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["sp"] is sp


@pytest.mark.parametrize(
    ("directives", "gpus"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --ntasks=32", 32),
        ("#SBATCH -n 16", 16),
        ("#SBATCH --gpus=h100:64 --ntasks=1", 64),
        ("#SBATCH -G 64 -N 8", 64),
    ],
)
def test_slurms_numbers_of_all_nodes(tmp_path: Path, directives: str, gpus: int) -> None:
    launched = SIZES.replace("torchrun --nproc_per_node 8 --nnodes $NODES", "srun docker run --gpus all python")
    text = f"#!/bin/bash\n{directives}\nTP=4 PP=2\n{launched}\n"
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["dp"] == gpus // 8


def test_a_variable_of_a_value_ends_where_the_value_does(tmp_path: Path) -> None:
    """Of `${LOAD_TP}_x` with LOAD_TP=$TP, not of a variable TP_x: what `echo` prints is the command that runs."""
    sizes = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
    text = f"""
TP=${{TP:-2}}
LOAD_TP=$TP
LOAD=ckpt/tp${{LOAD_TP}}_x
ARGS="{sizes} --micro-batch-size 1 --vocab-size 32000 --tensor-model-parallel-size $TP --load $LOAD"
RUN="torchrun --nproc-per-node 8 pretrain_gpt.py $ARGS"
echo $ARGS
eval $RUN
"""
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["model"]["layers"], data["parallelism"]["tp"]) == (4, 2)


def test_a_variable_made_of_one_of_the_environment_does_not_grow(tmp_path: Path) -> None:
    text = "export PATH_A=$PATH_B:$PATH_A\nexport PATH_B=$PATH_A:$PATH_B\n"
    assert converted(tmp_path, "train.sh", f"{text}{MEGATRON}", "--cluster", "dgx-h100")[0]["model"]["layers"]


def test_flags_added_to_those_of_the_environment_count(tmp_path: Path) -> None:
    data, _ = converted(
        tmp_path, "train.sh", f'MORE="$MORE --swiglu"\n{MEGATRON.rstrip()} $MORE\n', "--cluster", "dgx-h100"
    )
    assert data["model"]["mlp"] == "swiglu"


def test_a_value_of_several_texts_in_quotes_is_one(tmp_path: Path) -> None:
    """`" --a "b=1" --c "`, as people nest quotes: bash's manual, "Quoting"."""
    text = """
export CMD=" run_clm.py --model_name_or_path gpt2 --config_overrides "n_embd=512,n_layer=4" \\
  --per_device_train_batch_size 4 --block_size 1024 --fp16 "
echo $CMD
srun bash -c 'torchrun --nproc_per_node 8 $CMD'
"""
    data, _ = converted(tmp_path, "clm.sh", text, "--cluster", "dgx-h100")
    assert (data["training"]["micro_batch_size"], data["training"]["precision"]) == (4, "fp16")


def test_a_flag_in_no_command_is_not_taken_for_its_default(tmp_path: Path) -> None:
    text = "# torchrun train.py --per_device_train_batch_size 4\ntorchrun --nproc_per_node 8 train.py --fp16\n"
    said = refused(tmp_path, "clm.sh", text, "--cluster", "dgx-h100", "--from", "deepspeed")
    assert "--per_device_train_batch_size stands in the file, but in no command that could be read" in said


def test_a_sum_of_unknown_numbers_is_shown_as_written(tmp_path: Path) -> None:
    text = MEGATRON.replace("--global-batch-size 128", "--global-batch-size $((BATCH * (NODES + 1)))")
    assert "found '$((BATCH * (NODES + 1)))', in which" in refused(tmp_path, "a.sh", text, "--cluster", "dgx-h100")


def test_a_loop_that_counts_and_appends(tmp_path: Path) -> None:
    command = (
        "torchrun --nproc_per_node 8 pretrain_mamba.py --hybrid-layer-pattern $P --hidden-size 512 --bf16 "
        "--num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --vocab-size 32000 $MORE\n"
    )
    for loop in (
        "for ((i=1; i<N; i++)); do\n    P+='*-'  # a block\ndone",
        "for ((i = 1; i <= 7; ++i)); do P+='*-'; done",
        "for i in $(seq 7); do\n  P+='*-'\ndone",
        "for i in $(seq 2 ${N}); do P+='*-'; done",
        "for i in {1..7}\ndo\n  P+='*-'\ndone",
        "for i in {7..1}; do P+='*-'; done",
    ):
        data, _ = converted(tmp_path, "a.sh", f"N=${{N:-8}}\nP='*-'\n{loop}\n{command}", "--cluster", "dgx-h100")
        assert data["model"]["layers"] == 16
    said = refused(tmp_path, "a.sh", f"P='*-'\nfor i in 1 2; do P+='X'; done\n{command}", "--cluster", "dgx-h100")
    assert "a.sh:3: --hybrid-layer-pattern: found '*-XX'" in said


def test_a_command_that_is_shown_before_it_runs_is_one_command(tmp_path: Path) -> None:
    """`printf` takes the end of a line from the last word."""
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    command = f'cmd="torchrun --nproc_per_node 8 pretrain_gpt.py {flags} --bf16 --vocab-size 50257"'
    text = f'{command}\nprintf "Executing...\\n${{cmd}}\\n"\neval $cmd 2>&1 | tee logs.txt\n'
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert of(data, "model", "layers", "vocab") == [4, 50257]
    twice = text.replace("printf", "torchrun other.py")
    assert "2 commands have --num-layers (4): keep" in refused(tmp_path, "train.sh", twice, "--cluster", "dgx-h100")
