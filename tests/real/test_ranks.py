"""A crash of torch's own code is tried once more, nothing else is."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from calibrate.launch import RankError
from tests.real import ranks


def _fails(times: int, killed_by: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the first `times` starts of ranks fail, and later ones find an answer; the list counts the starts."""
    starts: list[int] = []

    def run(command: list[str], count: int, timeout_s: float, start: object) -> None:
        starts.append(count)
        if len(starts) <= times:
            raise RankError("rank 0 failed", killed_by=killed_by)
        Path(command[-1]).write_text('{"case": 1}')

    monkeypatch.setattr(ranks, "run_ranks", run)
    return starts


def test_a_crash_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _fails(1, signal.SIGABRT, monkeypatch)
    with pytest.warns(UserWarning, match="worker: rank 0 failed"):
        assert ranks.on_ranks("worker", {"case": {}}, tmp_path, 2) == {"case": 1}
    assert starts == [2, 2]


@pytest.mark.parametrize(("times", "killed_by", "started"), [(2, signal.SIGABRT, 2), (1, signal.SIGKILL, 1), (1, 0, 1)])
@pytest.mark.filterwarnings("ignore:worker")
def test_a_second_crash_and_any_other_end_fail(
    times: int, killed_by: int, started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = _fails(times, killed_by, monkeypatch)
    with pytest.raises(RankError, match="rank 0 failed"):
        ranks.on_ranks("worker", {"case": {}}, tmp_path, 2)
    assert len(starts) == started
