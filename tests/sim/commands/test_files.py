"""Files are written whole or not at all: a full disk, a limit, a kill, two writers, odd targets."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import pytest

from sim.commands.compare import main as compare
from sim.commands.regress import main as regress
from sim.commands.replay import main as replay
from sim.commands.run import main as run
from sim.commands.search import main as search
from sim.core.errors import InputError
from sim.core.files import read_text, write_bytes, write_json, write_text
from sim.core.outputs import to_write
from tests.processes import exit_code

ROOT = Path(__file__).parents[3]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def limited(bytes_per_file: int) -> None:
    """What a process may write; more fails as on a full disk, once SIGXFSZ is ignored (as Python does)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_per_file, bytes_per_file))


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_file_that_is_overwritten_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    target.chmod(mode)
    write_text(target, "new")
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", mode)


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_full_disk_is_one_message_and_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "result.json"
    target.write_text("before")
    monkeypatch.setattr(os, call, full)
    for write in (lambda: write_text(target, "after"), lambda: write_json(target, {"a": 1})):
        with pytest.raises(InputError, match=r"result\.json: cannot be written: No space left on device"):
            write()
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--html", "--trace", "--topology", "--chakra"])
def test_commands_say_what_could_not_be_written(option: str, tmp_path: Path) -> None:
    """A real limit: no file of this process may grow beyond 500 bytes. With -B this cuts no module's bytecode off."""
    command = [sys.executable, "-B", "-m", "sim.run", "scenarios/dp8.yaml", option, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=lambda: limited(500))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("cannot be written: File too large")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@LINUX
@pytest.mark.parametrize("options", [("--json", "-"), (), ("--help",)], ids=str)
def test_a_full_standard_output_is_one_message(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "sim.run", "scenarios/dp8.yaml", *options]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: cannot be written: No space left on device\n"


@LINUX
def test_a_closed_standard_output_drops_what_is_written() -> None:
    command = f"{sys.executable} -m sim.run scenarios/dp8.yaml >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@LINUX
def test_a_pipe_is_written_in_place() -> None:
    command = [sys.executable, "-m", "sim.run", "scenarios/dp8.yaml", "--json", "/dev/stdout"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.JSONDecoder().raw_decode(done.stdout)[0]["format"].startswith("sim-")


def test_a_command_inside_another_program_ends_that_program_s_way() -> None:
    """What the program registered to be done at its end is done, and its exit code is its own."""
    program = """
import atexit, runpy, sys
atexit.register(print, "the end")
sys.argv = ["sim.run", "--explain", "model"]
try:
    runpy.run_module("sim.run", run_name="__main__")
except SystemExit:
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.endswith("the end\n")


def test_odd_targets(tmp_path: Path) -> None:
    """A link's file is replaced, not the link; a device stays a device; a folder or a missing one is refused."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("before")
    link.symlink_to(real)
    write_text(link, "after")
    assert link.is_symlink()
    assert real.read_text() == "after"
    write_text(os.devnull, "gone")
    assert not Path(os.devnull).is_file()
    for target in (tmp_path, tmp_path / "no" / "file", tmp_path / ("x" * 300), f"{tmp_path}/a\0b"):
        with pytest.raises(InputError, match="cannot be written"):
            write_text(target, "x")
    write_text(real, "\ud800")
    assert real.read_text() == "?"
    assert sorted(tmp_path.iterdir()) == [link, real]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--json", "a", "--html", "./a"), "--json: is a file of --html too"),
        (("--trace", "a", "--html", "link"), "--html: is a file of --trace too"),
        (("--chakra", "cc", "--json", "cc.0.et"), "--json: is a file of --chakra too"),
        (("--html", "a", "--json", "dp8.yaml"), "--json: dp8.yaml is read; it would be overwritten"),
        (("--json", "config.json", "--set", "model=config.json"), "--json: config.json is read; it would be"),
        (("--json", "config.json", "--set", "calibration=config.json"), "--json: config.json is read; it would be"),
        (("--json", "config.json", "--set", "cluster={topology: config.json}"), "config.json is read; it would be"),
        (("--html", "-"), "--html': found '-'; only --json writes to standard output"),
        (("--json", "-", "--trace", "-"), "--trace': found '-'"),
        (("--chakra", ""), "--chakra': found ''; must be the name of a file"),
        (("--price", "nan"), "--price': found nan; must be a finite number"),
        (("--html", "x" * 5000), "File name too long"),
    ],
)
def test_no_file_is_written_over_another_that_is_named(
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = (ROOT / "scenarios" / "dp8.yaml").read_text()
    (tmp_path / "dp8.yaml").write_text(scenario)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "config.json").write_text("{}")
    assert exit_code(run, "dp8.yaml", *options) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "dp8.yaml").read_text() == scenario
    assert (tmp_path / "config.json").read_text() == "{}"
    assert {p.name for p in tmp_path.iterdir()} == {"dp8.yaml", "link", "config.json"}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (compare, ("dp2.yaml", "dp2.json", "--json", "dp2.json")),
        (compare, ("dp2.yaml", "dp2.json", "--calibration", "other.json", "--html", "other.json")),
        (regress, (".", "--json", "dp2.json")),
        (regress, (".", "--benchmarks", "other.json", "--json", "other.json")),
        (search, ("7.yaml", "--save", ".")),
        (replay, ("dp2.json", "--json", "dp2.json")),
    ],
)
def test_no_file_is_written_over_one_that_is_read(
    command: click.Command,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    cpu, measured = ROOT / "scenarios" / "cpu" / "dp2.yaml", ROOT / "scenarios" / "measured" / "dp2.json"
    for source, name in ((cpu, "dp2.yaml"), (cpu, "7.yaml"), (measured, "dp2.json"), (measured, "other.json")):
        shutil.copy(source, name)
    assert exit_code(command, *arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.endswith(
        f"{arguments[-1] if command is not search else '7.yaml'} is read; it would be overwritten\n"
    )
    for source, name in ((cpu, "dp2.yaml"), (cpu, "7.yaml"), (measured, "dp2.json"), (measured, "other.json")):
        assert source.read_bytes() == Path(name).read_bytes()


def test_what_a_command_wrote_it_may_read(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with to_write([("--out", re.compile(re.escape(str(target.resolve()))))]):
        with pytest.raises(InputError, match=r"--out: .+ is read; it would be overwritten"):
            read_text(target, 100)
        write_text(target, "mine")
        assert read_text(target, 100) == "mine"


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """Whoever reads meets one of the whole files, at any moment."""
    target, done = tmp_path / "file", threading.Event()
    wholes = {bytes([65 + i]) * 300_000 for i in range(4)}
    write_bytes(target, min(wholes))

    def write(data: bytes) -> None:
        while not done.is_set():
            write_bytes(target, data)

    writers = [threading.Thread(target=write, args=(data,)) for data in wholes]
    for w in writers:
        w.start()
    seen = {target.read_bytes() for _ in range(200)}
    done.set()
    for w in writers:
        w.join()
    assert seen <= wholes
    assert list(tmp_path.iterdir()) == [target]


WRITER = """
import sys
from pathlib import Path
from sim.core.files import write_json
for i in range(10**9):
    write_json(Path(sys.argv[1]), {"number": i, "filling": "x" * 200_000})
"""


def test_killed_writers_leave_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    for number in range(4):
        two = [subprocess.Popen([sys.executable, "-c", WRITER, str(target)], cwd=ROOT) for _ in range(2)]
        while not target.exists() or json.loads(target.read_text())["number"] < 3:
            time.sleep(0.005)
        time.sleep(0.013 * number)
        for writer in two:
            writer.send_signal(signal.SIGKILL)
        for writer in two:
            writer.wait()
        assert len(json.loads(target.read_text())["filling"]) == 200_000
    write_json(target, {})
    assert json.loads(target.read_text()) == {}
