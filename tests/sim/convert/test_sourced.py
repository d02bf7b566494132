"""Shell files that a launch script reads with `source` or `.`, or submits by sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused

SIZES = "MODEL_ARGS=(--num-layers 4 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 1024)\n"
COMMAND = """
torchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL_ARGS[@]} --seq-length 1024 --micro-batch-size 1 --bf16 \\
  --vocab-size 32000 --tensor-model-parallel-size $TP
"""


@pytest.mark.parametrize(
    "line",
    [
        'source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/models/sizes.sh"',
        ". `pwd`/models/sizes.sh",
        'source "${SCRIPT_DIR}/models/sizes.sh" 8B',
        "source ./models/sizes.sh  # the sizes",
    ],
)
def test_a_sourced_file_is_read_in_its_place(tmp_path: Path, line: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "sizes.sh").write_text(f"TP=4\n{SIZES}TP=2\n")
    scenario, text = converted(tmp_path, "train.sh", f"TP=1\n{line}\n{COMMAND}", "--cluster", "dgx-h100")
    assert scenario["model"]["layers"] == 4
    assert scenario["parallelism"]["tp"] == 2
    assert "beside it" not in text


def test_a_submitted_script_has_the_variables_of_the_one_that_submits_it(tmp_path: Path) -> None:
    (tmp_path / "job.slurm").write_text(f"#SBATCH --nodes=2\n{SIZES}{COMMAND}")
    text = "export TP=2\nsbatch -p main \\\n  --export=ALL job.slurm\n"
    scenario, _ = converted(tmp_path, "submit.sh", text, "--cluster", "dgx-h100", "--from", "megatron")
    assert scenario["parallelism"]["tp"] == 2


def test_a_file_that_is_not_there_is_named_and_one_of_the_environment_is_not(tmp_path: Path) -> None:
    lines = "source ~/miniconda3/bin/activate base\nsource $HOME/args.sh\n"
    problem = refused(tmp_path, "train.sh", f"{lines}TP=1\n{COMMAND}", "--cluster", "dgx-h100")
    assert "the script reads $HOME/args.sh, not found beside it" in problem
    _, text = converted(tmp_path, "train.sh", f"{lines}TP=1\n{SIZES}{COMMAND}", "--cluster", "dgx-h100")
    assert "# the script reads $HOME/args.sh, not found beside it: put it there" in text


def test_a_file_that_reads_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("source a.sh\n")
    assert "which reads itself" in refused(tmp_path, "train.sh", "source a.sh\n" + COMMAND, "--cluster", "dgx-h100")


def test_options_of_sbatch_go_before_those_of_the_script(tmp_path: Path) -> None:
    """sbatch's manual, "Options"; the number of nodes may be a variable of the script that submits."""
    (tmp_path / "job.sh").write_text(
        f"#SBATCH --nodes=2 --ntasks-per-node=8\n{SIZES}{COMMAND.replace('torchrun --nproc-per-node 8', 'srun python')}"
    )
    text = "NNODES=4\nexport TP=2\nsbatch -p main \\\n  --nodes=$NNODES job.sh\n"
    scenario, _ = converted(tmp_path, "submit.sh", text, "--cluster", "dgx-h100", "--from", "megatron")
    assert scenario["parallelism"]["dp"] == 4 * 8 // 2
