"""`python -m MODULE …` in a process of its own that starts in milliseconds.

A server process has imported what commands import, and every run is a fork of it: a fresh process with its own folder,
environment, output and exit code, less the time of imports: half a second, of torch several. Commands of calibrate have
a server of their own, so that torch is in no process of a simulator's command. Tests of a process's very start, of
signals and of terminals start Python itself (`tests.processes`, `subprocess`).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from calibrate.launch import PARENT
from sim.commands.command import UNUSED
from tests.processes import HANGS_AFTER_S

ROOT = Path(__file__).parents[1]
COMMANDS = [f"sim.commands.{name}" for name in ("run", "stepsim", "search", "sweep", "diff", "compare", "validate")]
COMMANDS += ["sim.simulation", "sim.serve.simulation", "sim.views.timeline_page", "sim.engine.on_simpy", "rich.table"]
ON_TORCH = ["sim.simulation", "calibrate.capture.run_step", "calibrate.capture.program_out", "calibrate.measure"]
ON_TORCH += [
    "torch._dynamo",
    "calibrate.parallel.proof",
    "calibrate.capture.script.run",
]  # the former is imported by the first optimizer


def run_module(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = HANGS_AFTER_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m` with these arguments, waited for; its exit code, standard output and standard error.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds; the process is ended.
    """
    words = [str(word) for word in arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = forked(words, out, errors, cwd, environment)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        assert process.exitcode is not None
        said = [path.read_text("utf-8") if path.exists() else "" for path in (out, errors)]
        return subprocess.CompletedProcess(words, process.exitcode, *said)


def forked(
    words: Sequence[str], out: Path, errors: Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """`python -m` with these words, which runs; its standard output and standard error go to the two files."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_be, args=(list(words), str(cwd), variables, str(out), str(errors)))
    preloaded = ON_TORCH if words[0].startswith(("calibrate.", "tests.real.")) else COMMANDS
    with patch.object(forkserver, "connect_to_new_process", _forks_of(*preloaded)):  # Python itself has one server
        process.start()
    return process


class Fork:
    """`python -m` with these words as `calibrate.launch` asks for a process; its standard error goes to the file."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        self._process = forked(words, Path(os.devnull), errors, environment=environment)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it."""
        self._process.kill()


@functools.cache
def _forks_of(*preloaded: str) -> Callable[..., Any]:
    """How to fork a server that has these modules, of the checkout, where they are installed."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(preloaded))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        for name, value in {**UNUSED, "PYTHONPATH": str(ROOT)}.items():
            patched.setenv(name, value)
        server.ensure_running()
    return server.connect_to_new_process


def _be(words: Sequence[str], folder: str, variables: Mapping[str, str], out: str, errors: str) -> None:
    """Become the command."""
    for path, stream in ((os.devnull, 0), (out, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), stream)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(variables)
    if PARENT in variables:
        os.environ[PARENT] = str(os.getppid())  # a rank ends with who started it, here with the server
    os.chdir(folder)
    sys.path[:] = [folder, str(ROOT), *(entry for entry in sys.path if entry not in ("", folder, str(ROOT)))]
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
