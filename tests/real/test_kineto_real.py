"""Real torch.profiler traces of two gloo ranks, replayed within 2 % of their own step."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sim.traces.changes import Change, dp_change
from sim.traces.kineto import read_kineto
from sim.traces.matching import join
from sim.traces.replay import rank_times, replay
from tests.processes import HANGS_AFTER_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of both ranks."""
    path = tmp_path_factory.mktemp("kineto")
    worker = Path(__file__).with_name("kineto_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(path)], capture_output=True, text=True, timeout=HANGS_AFTER_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def test_a_real_step_is_replayed_unchanged(folder: Path) -> None:
    traces = [read_kineto(folder / f"rank{r}.json.gz") for r in range(2)]
    for step in sorted(traces[0].steps):
        recording = join(traces, step)
        span = max(t.steps[step].end_ns for t in traces) - min(t.steps[step].start_ns for t in traces)
        assert recording.step_ns == span  # the steps' own annotations, from the first start to the last end
        assert replay(recording).step_time_s == pytest.approx(span * 1e-9, rel=0.02)


def test_collectives_of_both_ranks_are_matched(folder: Path) -> None:
    recording = join([read_kineto(folder / f"rank{r}.json.gz") for r in range(2)])
    members = recording.members()
    assert all(len(m) == 2 for m in members.values())
    kinds = Counter(recording.nodes[m[0]].message.kind for m in members.values())  # type: ignore[union-attr]
    assert kinds["all_reduce"] >= 1
    assert kinds["all_gather"] == 1
    assert kinds["send"] + kinds["recv"] == 1
    sizes = {recording.nodes[m[0]].message.bytes for m in members.values()}  # type: ignore[union-attr]
    assert 2 * 1000 * 4 in sizes  # the all-gather's whole output
    reduced = sum(
        n.message.bytes for n in recording.nodes if n.rank == 0 and n.message and n.message.kind == "all_reduce"
    )
    assert reduced == 4 * (128 * 512 + 512 + 512 * 128 + 128)
    assert not recording.warnings


def test_what_ifs_move_in_the_right_direction(folder: Path) -> None:
    recording = join([read_kineto(folder / f"rank{r}.json.gz") for r in range(2)])
    base = replay(recording)
    slow = replay(recording, Change(stragglers={1: 2.0}))
    extra = rank_times(slow)[1].compute_s - rank_times(base)[1].compute_s
    assert base.step_time_s < slow.step_time_s <= base.step_time_s + extra + 1e-9
    more = replay(recording, Change(dp=dp_change(recording, 8, None)))
    assert more.step_time_s >= base.step_time_s
    instant = replay(recording, Change(network_scale=1e9))
    assert max(r.compute_s for r in rank_times(base)) <= instant.step_time_s + 1e-9
    assert instant.step_time_s <= base.step_time_s + 1e-9
