"""Commands on a terminal, in a pipe, and interrupted."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sim.commands.map import _progress
from sim.commands.search_tables import progress
from tests.modules import run_module
from tests.processes import HANGS_AFTER_S, ROOT, start, wait_until

pytestmark = pytest.mark.slow

RUN = ("sim.run", "scenarios/1f1b_pp8.yaml")
COMPARE = ("sim.compare", "scenarios/cpu/tp2.yaml", "scenarios/measured/tp2.json")
SEARCH = (
    "sim.search",
    "scenarios/search_llama3_8b.yaml",
    "--only",
    "tp=8",
    "--only",
    "schedule=1f1b",
    "--workers",
    "1",
)
GOODPUT = ("sim.run", "scenarios/goodput_llama3_405b.yaml", "--days", "3", "--runs", "4")
VALIDATE = ("sim.validate", "scenarios/published/korthikanti2022.json")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


@pytest.mark.parametrize(
    "command",
    [
        RUN,
        (*RUN, "--json", "-"),
        ("sim.run", "--schema"),
        ("sim.run", "--explain", "training"),
        COMPARE,
        (*COMPARE, "--json", "-"),
        (*SEARCH, "--json", "-"),
        VALIDATE,
        ("sim.regress",),
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_changes_nothing(command: tuple[str, ...]) -> None:
    writing = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    assert writing.stderr is not None
    writing.stdout.close()
    errors = writing.stderr.read()
    assert (writing.wait(timeout=HANGS_AFTER_S), errors) == (0, "")


def test_a_check_that_fails_says_so_though_nobody_reads() -> None:
    command = [sys.executable, "-m", *COMPARE, "--tolerance", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writing:
        assert writing.stdout is not None
        writing.stdout.close()
    assert writing.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["nowhere.yaml"], ["--nosuch"], ["scenarios/dp8.yaml", "--json"]], ids=" ".join)
def test_bad_input_is_exit_code_2_though_its_message_cannot_be_written(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sim.run", *arguments], cwd=ROOT, stderr=full, timeout=HANGS_AFTER_S
        )
    assert done.returncode == 2


@pytest.mark.parametrize("command", [RUN, SEARCH, VALIDATE, GOODPUT, COMPARE], ids=lambda c: c[0])
def test_json_on_standard_output_is_json_alone(command: tuple[str, ...]) -> None:
    done = run_module(*command, "--json", "-")
    assert json.loads(done.stdout)["format"].startswith("sim-")
    assert done.stderr == ""


def on_terminal(command: tuple[str, ...], *, which: str, **environment: str) -> tuple[str, str]:
    """What a command writes to a terminal as `which` stream, and to a pipe as the other one."""
    mine, its = pty.openpty()
    other = "stdout" if which == "stderr" else "stderr"
    streams = {which: its, other: subprocess.PIPE}
    running = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, "TERM": "xterm", **environment}, **streams
    )
    os.close(its)
    pipe, read = getattr(running, other), []
    reader = threading.Thread(target=lambda: read.append(pipe.read()))  # a full pipe would stop the command
    reader.start()
    shown = b""
    while True:
        ready, _, _ = select.select([mine], [], [], HANGS_AFTER_S)
        try:
            piece = os.read(mine, 1 << 16) if ready else b""
        except OSError:  # the other end is closed
            piece = b""
        if not piece:
            break
        shown += piece
    reader.join(HANGS_AFTER_S)
    pipe.close()
    os.close(mine)
    assert running.wait(timeout=HANGS_AFTER_S) == 0, shown
    return shown.decode(), read[0].decode()


@pytest.mark.parametrize("command", [SEARCH, VALIDATE], ids=lambda c: c[0])
def test_progress_is_shown_on_a_terminal_and_on_standard_error(command: tuple[str, ...]) -> None:
    shown, text = on_terminal((*command, "--json", "-"), which="stderr")
    assert "\x1b[" in shown
    assert re.search(r"\d", shown)
    json.loads(text)


def test_a_wrong_file_of_a_gpu_is_one_message_also_while_a_command_of_calibrate_loads() -> None:
    load = "import calibrate, topology.errors; raise topology.errors.PresetError('x.json: name: is wrong')"
    ran = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (2, "error: x.json: name: is wrong\n")


def test_colours_are_for_terminals_that_want_them() -> None:
    assert COLOUR.search(on_terminal(RUN, which="stdout", NO_COLOR="")[0])
    assert not COLOUR.search(on_terminal(RUN, which="stdout", NO_COLOR="1")[0])


LONG = """
version: 1
model: llama3-8b
training: {seq_len: 1024, global_batch_size: 8192}
parallelism: {pp: 32, schedule: zb_h2}
cluster: dgx-h100
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("command", ["sim.run", "sim.validate"])
def test_ctrl_c_ends_with_one_word(command: str, tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(LONG)
    tables = sorted(str(p) for p in (ROOT / "scenarios" / "published").glob("*.json") if "nccl" not in p.name)
    arguments = {
        "sim.run": (str(tmp_path / "long.yaml"), "--html", str(tmp_path / "out.html")),
        "sim.validate": tuple(tables),
    }[command]
    running = start(command, *arguments)
    maps = Path("/proc", str(running.process.pid), "maps")
    wait_until(lambda: "_multiarray_umath" in maps.read_text())  # numpy is there: most modules are loaded
    time.sleep(1.0)
    assert running.process.poll() is None
    code, errors = running.end(signal.SIGINT)
    assert (errors.splitlines() or ["interrupted"])[-1] == "interrupted"  # none while modules load
    assert "/sim/" not in errors  # no trace of where it stood
    assert code in (130, -signal.SIGINT)  # the latter while modules load; a shell says 130 to both
    running.check_gone()
    assert not (tmp_path / "out.html").exists()


def test_a_search_in_a_pipe_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sim.core.long_runs.FIRST_S", 0.01)
    for shown, said in ((progress(), "note: searching for 0 s: starting; --only"), (_progress(4), "searches: 0 of 4")):
        with shown:
            time.sleep(0.1)
        assert said in capsys.readouterr().err
