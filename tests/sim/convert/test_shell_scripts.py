"""What is read of launch scripts is what bash passes to the trainer, or it is refused with a reason.

Bash is the oracle: it runs each script of `shell_scripts` with launchers that only write down their arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from sim.convert.scripts.command_line import words_of
from sim.convert.scripts.script import Given, followed
from sim.core.errors import InputError
from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON

SCRIPTS = Path(__file__).with_name("shell_scripts")
LAUNCHERS = ("accelerate", "deepspeed", "mpirun", "python", "srun", "torchrun", "vllm")
# Scripts that ask what no text says, or that the grammar does not know, and what the refusal says.
REFUSED = {
    "10_nvsmi": "give --gpus N",
    "13_abbrev": "--micro-batch-size: is required and missing",
    "23_source": "not found beside it",
    "60_file_test": "does not decide",
    "83_if_cmd_subst": "does not decide",
    "a17_errexit2": "cannot be told",  # it ends before it trains
    "a40_select": "does not decide",
    "a43_xargs": "an argument of the script",
    "a50_condsub": "cannot be read as bash",
    "b05_nproc": "does not decide",
    "b11_heredoc_two": "cannot be read as bash",
    "b30_stdin_seq": "cannot be read as bash",
    "c13_awk": "--var TP=VALUE",
    "c14_pyc": "--var TP=VALUE",
    "c23_sed": "--var TP=VALUE",
    "c27_comment_mid": "begins a command: the line before it is not continued",
    "d17_unset_arr_elem": "cannot be read as bash",
    "e01_fd3": "does not decide",
}
# Scripts with a test that is open, or a folder that is not known, neither of which changes the step.
OPEN = ("c08_retry", "c09_ckpt", "d02_slurm_nodes", "d03_logdir", "d10_python_version")
SEVERAL = ("17_seq_loop_last",)  # trainings, of which the reader of arguments asks for one
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.sh"))


def of_bash(name: str, folder: Path) -> list[list[str]]:
    """The launchers' commands when bash runs the script, those in quotes by their words."""
    here, programs, out = folder / "here", folder / "bin", folder / "out"
    shutil.copytree(SCRIPTS, here)
    programs.mkdir()
    shutil.copy(SCRIPTS / "bin" / "stub", programs / "stub")
    for launcher in LAUNCHERS:
        (programs / launcher).symlink_to("stub")
    out.touch()
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "STUB_OUT": str(out), "HOME": str(folder)}
    command = ["bash", f"{name}.sh"]
    subprocess.run(command, env=environment, cwd=here, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    return [run[: run.index("sh") + 1] + run[run.index("sh") + 2].split() if "sh" in run else run for run in runs]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REFUSED, *OPEN)])
def test_the_words_are_those_that_bash_passes(name: str, tmp_path: Path) -> None:
    file = SCRIPTS / f"{name}.sh"
    script = followed(file, file.read_text(), Given())
    commands = [list(command.words) for command in script.commands]
    commands = [words[2:] if words[0] in ("env", "timeout") else words for words in commands]
    read = [word for words in commands if words[0] in LAUNCHERS for word in words if not word.startswith("$")]
    assert not any(command.sites or command.loose for command in script.commands if "torchrun" in command.words)
    assert [word for word in read if word != "-c"] == [word for words in of_bash(name, tmp_path) for word in words]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_read_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    text, on = (SCRIPTS / f"{name}.sh").read_text(), ("--cluster", "dgx-h100")
    if name in REFUSED:
        assert REFUSED[name] in refused(tmp_path, "train.sh", text, *on)
    elif name in SEVERAL:
        assert "commands have --num-layers" in refused(tmp_path, "train.sh", text, *on)
    else:
        assert converted(tmp_path, "train.sh", text, *on)[0]["model"]["hidden"] in (4096, 5120)


@pytest.mark.parametrize(
    ("lines", "at"),
    [
        ("A=0123456789\n" + 'A="$A$A$A"\n' * 18, 10),
        ("A=(x)\n" + 'A=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 18, 11),
        ("N=0; while true; do N=$((N + 1)); A=x$N; done\n", 1),
        ("for ((i = 0; i < 100000000; i++)); do :; done\n", 1),
        ("f() { f; }\nf\n", 1),
        ("f() { A=$(f); }\nf\n", 1),
        ("A={1..99}{1..99}{1..99}\necho {1..99}{1..99}{1..99}\n", 2),
        ("A=x\nfor i in {1..9999}; do A+=xxxxxxxxxxxxxxxxxxxxxxx; done\n", 2),
    ],
)
def test_what_grows_without_end_is_refused_while_it_grows(lines: str, at: int, tmp_path: Path) -> None:
    file, begun = tmp_path / "a.sh", time.monotonic()
    with pytest.raises(InputError, match=rf"a\.sh:{at}: "):
        followed(file, lines, Given())
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ('eval "$(cat options.sh)"', "--var TP=VALUE"),
        ("source options.sh", "the script reads options.sh, not found beside it"),
        ("read TP", "--var TP=VALUE"),
        ("if grep -q H100 gpus.txt; then TP=8; fi", "does not decide `grep -q H100 gpus.txt`"),
        ("for f in *.json; do TP=${#f}; done", "does not decide `for f in *.json; do TP=${#f}; done`"),
        ("MORE=$(python options.py); EXTRA=$MORE", "may hold further options"),
        ("readonly TP; TP=8", "TP: is read-only, and is assigned"),
        ("shopt -s lastpipe", "shopt -s lastpipe: is not read"),
        ("while ! nc -z host 1; do TP=$((TP * 2)); done", "does not decide `! nc -z host 1`"),
        ("TP=$(nvidia-smi -L | wc -l)", "--var TP=VALUE"),
    ],
)
def test_a_value_is_not_kept_past_what_may_change_it(before: str, reason: str, tmp_path: Path) -> None:
    text = MEGATRON.replace("torchrun ", f"{before}\ntorchrun ").replace("    --sequence-parallel", "    --lr 1 $EXTRA")
    assert reason in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    "before",
    [
        "source ~/.bashrc\nmkdir -p logs && cd logs\nHOST=$(hostname); RANK=$SLURM_PROCID",
        "if [ -d /data ]; then DATA=/data/a; else DATA=/data/b; fi",
        "[ -z \"$WANDB\" ] || EXTRA='--wandb-project x'",
        "trap 'kill 0' EXIT INT; set -euo pipefail; ulimit -n 65535",
        "if ! command -v nvcc; then echo none; fi",
        "until curl -s localhost; do sleep 1; done",
        "python tools/preprocess_data.py --seq-length 128 --workers 4 || exit 1",
    ],
)
def test_what_is_not_known_does_no_harm_where_it_does_not_matter(before: str, tmp_path: Path) -> None:
    paths = "--master_addr $HOST --node_rank $RANK --data-path $DATA $EXTRA"
    text = MEGATRON.replace("torchrun ", f"{before}\ntorchrun ").replace("pretrain_gpt.py", f"pretrain_gpt.py {paths}")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["tp"], data["training"]["seq_len"]) == (4, 8192)


def test_a_child_shell_sees_what_is_exported_alone(tmp_path: Path) -> None:
    (tmp_path / "b.sh").write_text("python c.py --tp ${TP:-1} --pp ${PP:-1} --args $1$2\n")
    script = followed(tmp_path / "a.sh", "TP=2; export PP=4\nbash b.sh x y\n", Given())
    assert words_of(script) == ["bash", "b.sh", ";", *["python", "c.py", "--tp", "1", "--pp", "4", "--args", "xy"], ";"]
