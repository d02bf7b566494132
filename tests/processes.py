"""Commands under test that get killed: started with a mark by which everything they started can be found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).parents[1]
MARK = "STEPSIM_TEST_MARK"
HANGS_AFTER_S = 600.0  # of whatever a test waits for: a busy machine takes many times what a quiet one does
ALL_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}


def exit_code(command: click.Command, *arguments: str) -> int:
    """The exit code of a command that runs in this process."""
    with pytest.raises(SystemExit) as end:
        command(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


def invoked(command: click.Command, *arguments: str, code: int = 0) -> Result:
    """What a command wrote that ran in this process and ended with this exit code."""
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


@dataclass
class Marked:
    """A command in a session of its own, as if on a terminal of its own (Linux)."""

    process: subprocess.Popen[str]
    mark: str

    def alive(self) -> list[int]:
        """Itself and all that it started, whoever is their parent by now."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.mark.encode() in environment and state not in "ZX":
                found.append(int(folder.name))
        return found

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal, Ctrl-C to all of the session as a terminal does; its exit code and standard error."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        try:
            _, errors = self.process.communicate(timeout=HANGS_AFTER_S)
        finally:
            self.process.kill()
        return self.process.returncode, errors

    def check_gone(self, within_s: float = HANGS_AFTER_S) -> None:
        """Nothing of it runs any more, or soon."""
        try:
            wait_until(lambda: not self.alive(), within_s)
        finally:
            for pid in self.alive():
                os.kill(pid, signal.SIGKILL)


def start(*arguments: str, **environment: str) -> Marked:
    """`python -m` with these arguments."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment, MARK: mark},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return Marked(process, mark)


def wait_until(condition: Callable[[], bool], within_s: float = HANGS_AFTER_S) -> None:
    """Poll until it holds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
