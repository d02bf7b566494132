"""A request to end, or Ctrl-C, that Python drops is still obeyed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import HANGS_AFTER_S

pytestmark = pytest.mark.slow

DROPPED = """
import os, signal, time
import click
from sim.commands.command import Command, run_command
class Dropped:
    def __del__(self):  # what is raised here Python drops
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
@click.command(cls=Command)
def main():
    d = Dropped()
    del d
    time.sleep(60)
run_command(main)
"""
INTERRUPTED = """
import os, signal, time
import click
from sim.commands.command import run_command
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
@click.command()
def main():
    d = Dropped()
    del d
    time.sleep(60)
run_command(main)
"""
CAUGHT = """
import os, signal, time
from sim.commands import command
command.END_WITHIN_S = 0.2
command._end_when_asked().__enter__()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except BaseException:
    pass
time.sleep(60)
"""
REPLACED = """
import os, signal, time
import click
from sim.commands.command import run_command
@click.command()
def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except BaseException:
        raise ValueError("what a library makes of it") from None
run_command(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no timers by signal")
@pytest.mark.parametrize("program", [DROPPED, CAUGHT, REPLACED])
def test_a_request_to_end_that_gets_lost_ends_the_command_without_a_word(program: str) -> None:
    assert ended(program) == (143, "")


@pytest.mark.skipif(sys.platform == "win32", reason="no timers by signal")
def test_ctrl_c_that_gets_lost_interrupts() -> None:
    assert ended(INTERRUPTED) == (130, "\ninterrupted\n")  # the newline is after the terminal's ^C


def ended(program: str) -> tuple[int, str]:
    """The exit code of a program, and what it wrote to standard error."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_AFTER_S)
    return done.returncode, done.stderr
