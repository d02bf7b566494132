"""Diagnosis: the slow rank of a step whose truth is known, its operators, its repair; a slow group; nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.traces import diagnosis
from sim.traces.chakra_out import write_chakra
from sim.traces.diagnosis import diagnose, verdict
from sim.traces.kineto import read_kineto
from sim.traces.matching import join
from sim.traces.reading import load
from sim.traces.recording import Recording
from sim.traces.replay import RankTimes, Replay, rank_times
from sim.views.diagnosis import tables
from tests.modules import run_module

DP8 = Path(__file__).parents[3] / "scenarios" / "dp8.yaml"
SMALL = ["model.layers=2", "training.seq_len=1024", "training.global_batch_size=16"]


@pytest.fixture
def traced(tmp_path: Path) -> list[Path]:
    slow = [*SMALL, "faults.stragglers.0={rank: 3, compute_scale: 1.4}"]
    write_chakra(simulate(load_scenario(DP8, slow), expand=True), tmp_path / "step")
    return [tmp_path / f"step.{rank}.et" for rank in range(8)]


def test_the_slow_rank_is_found_and_its_repair_gives_the_step_without_it(traced: list[Path]) -> None:
    words = [*map(str, traced), "--groups", str(traced[0].parent / "step.groups.json")]
    done = run_module("sim.diagnose", *words, "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["format"] == "sim-diagnosis/1"
    assert found["verdict"] == "rank 3 is slow"
    (rank,) = found["slow_ranks"]
    healthy_s = simulate(load_scenario(DP8, SMALL)).step_time_s
    assert rank["repaired_step_s"] == pytest.approx(healthy_s, rel=1e-6)
    assert rank["gain_s"] == pytest.approx(found["replayed_step_s"] - healthy_s, rel=1e-6)
    assert 1.1 * rank["peers_s"] < rank["compute_s"] <= 1.4 * rank["peers_s"]  # what the host takes is as before
    assert all(row["seconds"] > row["peers_s"] for row in rank["operators"])
    assert {row["for_rank"] for row in found["waits"]} == {3}
    assert {row["rank"] for row in found["waits"]} == {0, 1, 2, 4, 5, 6, 7}
    assert rank["waited_for_s"] == pytest.approx(sum(row["seconds"] for row in found["waits"]))
    page = traced[0].parent / "slow.html"
    said = run_module("sim.diagnose", *words, "--html", str(page)).stdout
    shown = unescape(page.read_text("utf-8"))
    assert all("rank 3 is slow" in text for text in (said, shown))
    assert all(table.title in shown for table in tables(diagnose(load(traced, groups=Path(words[-1])))))
    assert re.search(r"waited for .*\n.*\nrank 3 ", said)


def kernels(
    rank: int,
    world: int,
    scale: float,
    transfer: float,
    group: Sequence[int],
    *,
    second: float = 0.0,
) -> dict[str, Any]:
    """Two kernels on a device, an all-reduce that the last member of `group` holds up, another kernel.

    `second`: microseconds of a smaller all-reduce after it.
    """

    def nccl(elements: int, number: int) -> dict[str, Any]:
        return {
            "Collective name": "allreduce",
            "In msg nelems": elements,
            "dtype": "Float",
            "Group size": len(group),
            "Process Group Name": str(group[0]),
            "Process Group Ranks": str(list(group)),
            "Seq": number,
        }

    gemm, norm = 100.0 * scale, 20.0
    meet = 20.0 + 100.0 * 2  # where the slowest of scale 2 arrives
    rows = [
        ("gemm", 0.0, gemm, {}),
        ("norm", gemm, norm, {}),
        ("ncclDevKernel_AllReduce", gemm + norm, meet + transfer - gemm - norm, nccl(1 << 20, 1)),
        *([("ncclDevKernel_AllReduce", meet + transfer, second, nccl(1 << 10, 2))] if second else []),
        ("gemm_2", meet + transfer + second, 50.0, {}),
    ]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}
        for name, ts, dur, args in rows
    ]
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_count": 2}
    return {"distributedInfo": info, "host_name": "h", "traceEvents": events}


def joined(traces: Sequence[Any]) -> Recording:
    return join([read_kineto(f"rank{i}.json", i, json.dumps(t).encode()) for i, t in enumerate(traces)], None)


def test_kernels_of_profiler_traces() -> None:
    scales = (1.0, 1.0, 2.0, 1.0)
    found = diagnose(joined([kernels(r, 4, s, 30.0, range(4)) for r, s in enumerate(scales)]))
    assert verdict(found) == "rank 2 is slow"
    (rank,) = found.slow_ranks
    assert rank.gain_s == pytest.approx(100e-6)
    assert [(row.operator, row.count) for row in rank.operators] == [("gemm", 1)]
    assert {(w.rank, w.for_rank) for w in found.waits} == {(0, 2), (1, 2), (3, 2)}
    assert found.waits[0].seconds == pytest.approx(100e-6)
    assert (found.step_s, found.replayed_step_s) == (pytest.approx(300e-6), pytest.approx(300e-6))


def test_a_slow_group_of_like_ones() -> None:
    groups, transfers = ((0, 1), (2, 3), (4, 5)), (30.0, 90.0, 30.0)
    traces = [kernels(r, 6, 2.0, t, g) for g, t in zip(groups, transfers, strict=True) for r in g]
    found = diagnose(joined(traces))
    assert verdict(found) == "transfers of ranks 2, 3 are slow"
    (group,) = found.slow_groups
    assert (group.ranks, group.seconds, group.peers_s) == ((2, 3), pytest.approx(90e-6), pytest.approx(30e-6))
    assert group.gain_s == pytest.approx(60e-6)


def test_a_group_is_shown_by_the_transfers_that_lose_most() -> None:
    groups, times = ((0, 1), (2, 3), (4, 5)), ((30.0, 100.0), (60.0, 110.0), (30.0, 100.0))
    traces = [kernels(r, 6, 2.0, a, g, second=b) for g, (a, b) in zip(groups, times, strict=True) for r in g]
    (group,) = diagnose(joined(traces)).slow_groups
    assert (group.ranks, group.bytes, group.kind) == ((2, 3), 4 << 20, "all_reduce")  # 30 us lost; 10 by the other
    assert (group.seconds, group.peers_s) == (pytest.approx(60e-6), pytest.approx(30e-6))
    assert group.gain_s == pytest.approx(40e-6)


def test_of_two_ranks_each_is_the_others_peer() -> None:
    (rank,) = diagnose(joined([kernels(r, 2, s, 30.0, (0, 1)) for r, s in enumerate((1.0, 2.0))])).slow_ranks
    assert (rank.rank, rank.operators[0].peers_s) == (1, pytest.approx(100e-6))


def test_ranks_of_another_host_get_the_median_offset_of_their_collectives() -> None:
    first, second = (kernels(rank, 2, 2.0, 30.0, (0, 1), second=20.0) for rank in (0, 1))
    for event in second["traceEvents"]:
        event["ts"] += 1000.0
    second["traceEvents"][3]["dur"] += 50.0  # its second collective ends later
    recording = joined([first, second | {"host_name": "other"}])
    assert recording.warnings == [
        "rank 1: its clock differs; its times were moved by -1.025 ms by its 2 common collectives"
    ]


def test_a_busy_host_is_beside_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(times: Replay) -> list[RankTimes]:
        return [replace(row, host_s={2: 90e-6, 1: 14e-6}.get(row.rank, 10e-6)) for row in rank_times(times)]

    monkeypatch.setattr(diagnosis, "rank_times", rows)
    (host,) = diagnose(joined([kernels(r, 4, 2.0, 30.0, range(4)) for r in range(4)])).busy_hosts
    assert (host.rank, host.host_s, host.peers_s) == (2, 90e-6, 10e-6)


def with_more(trace: dict[str, Any], name: str, ts: float, dur: float) -> dict[str, Any]:
    """A kernel of `dur` microseconds that runs once more, before the all-reduce, which ends when it ended."""
    reduce = trace["traceEvents"][2]
    late = ts + dur - reduce["ts"]
    reduce["ts"], reduce["dur"] = reduce["ts"] + late, reduce["dur"] - late
    trace["traceEvents"].append(trace["traceEvents"][0] | {"name": name, "ts": ts, "dur": dur})
    return trace


@pytest.mark.parametrize(("name", "often"), [("gemm", (2, 1)), ("checksum", (1, 0))])
def test_a_rank_that_runs_operators_more_often_is_slow(name: str, often: tuple[int, int]) -> None:
    traces = [kernels(r, 4, 1.0, 30.0, range(4)) for r in range(4)]
    found = diagnose(joined([*traces[:2], with_more(traces[2], name, 120.0, 100.0), traces[3]]))
    assert verdict(found) == "rank 2 is slow: it runs operators more often than its peers"
    (rank,) = found.slow_ranks
    assert rank.gain_s == pytest.approx(100e-6)
    (row,) = rank.operators
    assert (row.operator, row.count, row.peers_count) == (name, *often)
    assert row.lost_s == pytest.approx(100e-6)


def test_another_kernel_for_the_same_work_is_no_further_work() -> None:
    traces = [kernels(r, 4, 2.0, 30.0, range(4)) for r in range(4)]
    traces[2]["traceEvents"][0]["name"] = "gemm_of_another_tile"
    assert verdict(diagnose(joined(traces))).startswith("no rank is slow")


def test_ranks_of_other_collectives_are_no_replicas() -> None:
    """Two stages, of which the second also computes the head of the model, and sends another gradient."""
    first = [kernels(r, 4, 1.0, 30.0, (0, 1)) for r in (0, 1)]
    last = [kernels(r, 4, 1.0, 30.0, (2, 3), second=10.0) for r in (2, 3)]
    traces = [*first, *(with_more(trace, "head", 120.0, 100.0) for trace in last)]
    assert diagnose(joined(traces)).slow_ranks == ()


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_of_a_pipeline_are_no_replicas(pp: int, tmp_path: Path) -> None:
    """First and last send and receive as often; the last has the head of the model besides."""
    keys = [f"parallelism={{pp: {pp}}}", "training.global_batch_size=4", "training.seq_len=1024", "model.layers=4"]
    write_chakra(simulate(load_scenario(DP8, keys), expand=True), tmp_path / "step")
    found = diagnose(load([tmp_path / f"step.{rank}.et" for rank in range(pp)], groups=tmp_path / "step.groups.json"))
    assert not [row.operator for rank in found.slow_ranks for row in rank.operators if row.count != row.peers_count]


def test_ranks_that_send_to_nobody_knows_whom_are_no_replicas() -> None:
    traces = [kernels(r, 4, 1.0, 30.0, range(4)) for r in range(4)]
    traces[2] = with_more(traces[2], "checksum", 120.0, 100.0)
    for trace in traces:
        sent = trace["traceEvents"][0] | {"name": "ncclDevKernel_SendRecv", "ts": 400.0, "dur": 5.0}
        trace["traceEvents"].append(sent)
    assert diagnose(joined(traces)).slow_ranks == ()


def test_nobody_is_slow_and_one_rank_has_no_peers(traced: list[Path]) -> None:
    found = diagnose(joined([kernels(r, 2, 2.0, 30.0, (0, 1)) for r in range(2)]))
    assert (found.slow_ranks, found.slow_groups, found.waits) == ((), (), ())
    assert verdict(found).startswith("no rank is slow")
    with pytest.raises(InputError, match="give the traces of several ranks"):
        diagnose(load(traced[:1]))
