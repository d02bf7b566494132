"""A request to end that Python drops is still obeyed."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOST = """
import os, signal, time
from sim.commands import command
command.END_WITHIN_S = 0.2
command._end_on_sigterm()
class Dropped:
    def __del__(self):  # what is raised here Python prints and drops
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
d = Dropped()
del d
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no timers by signal")
def test_a_dropped_request_to_end_ends_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=50)
    assert "Exception ignored" in done.stderr
    assert done.returncode == 143
