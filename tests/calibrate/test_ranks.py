import os
import sys
import time

import pytest

from calibrate.launch import RankError
from calibrate.ranks import stream_ranks


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time; rank = int(os.environ['RANK']); " + code]


def test_lines_of_rank_0_arrive_while_ranks_run() -> None:
    start = time.monotonic()
    lines = stream_ranks(python("print(rank, flush=True); time.sleep(0.5)"), 2, 20.0)
    assert next(lines) == "0\n"
    assert list(lines) == []
    assert time.monotonic() - start >= 0.5


def test_a_rank_that_fails_takes_the_others_down_and_is_blamed() -> None:
    code = "rank == 1 and sys.exit('no such device'); time.sleep(60)"
    with pytest.raises(RankError, match="rank 1 ended with exit code 1: no such device"):
        list(stream_ranks(python(code), 3, 50.0))


def test_ranks_that_never_end_are_killed() -> None:
    with pytest.raises(RankError, match="ended with exit code -9"):
        list(stream_ranks(python("time.sleep(60)"), 2, 0.5))


def test_closing_the_stream_ends_the_ranks() -> None:
    lines = stream_ranks(python("print(os.getpid(), flush=True); time.sleep(60)"), 2, 50.0)
    pid = int(next(lines))
    lines.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
