"""What ranks say reaches the terminal while they run, once, and a failed rank's standard error only where it failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from calibrate.launch import RankError, run_ranks
from calibrate.rank_messages import Listener
from tests.processes import HANGS_AFTER_S

SAYING = """
import os, sys
from calibrate.rank_messages import hear_warnings, say, warn, warned
import warnings
hear_warnings()
say("both say this")
say(f"rank {os.environ['RANK']} alone")
warnings.warn("python's own")
warn("two\\nlines")
print("torch's chatter", file=sys.stderr)
assert warned() == ["python's own", "two\\nlines"], warned()
sys.exit(int(os.environ["RANK"]) if "--fail" in sys.argv else 0)
"""


def test_words_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks([sys.executable, "-c", SAYING], 2, HANGS_AFTER_S)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(
        ["both say this", "rank 0 alone", "rank 1 alone", "warning: python's own", "warning: two lines"]
    )


def test_last_words_before_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="torch's chatter"):
        run_ranks([sys.executable, "-c", SAYING, "--fail"], 2, HANGS_AFTER_S)
    assert "rank 1 alone" in capfd.readouterr().err


def test_half_a_line_waits_for_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "words"
    listener = Listener([path])
    listener.pass_on()
    path.write_text("one\nhal")
    listener.pass_on()
    assert capfd.readouterr().err == "one\n"
    with path.open("a") as file:
        file.write("f\none\n")
    listener.pass_on()
    assert capfd.readouterr().err == "half\n"
