"""Exports of Nsight Systems: the same step as the profiler's trace of the same events, and what is no whole export."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from sim.commands.diagnose import main as diagnose
from sim.commands.replay import main as replay_command
from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.traces.changes import Change, doubts, kernel_scales, network_of
from sim.traces.reading import load
from sim.traces.recording import Recording
from sim.traces.replay import rank_times, replay
from tests.processes import invoked
from tests.sim.traces import nsys_files as n
from tests.sim.traces import programs as p

ITEMS: list[list[p.Item]] = [
    [
        p.Kernel(1000, 1000, work, 7),
        p.Wait(100, 7, 20),
        p.Kernel(100, 900, 40_000, 20, True),
        p.Kernel(500, 900, 20_000, 7),
        p.Kernel(500, 900, 30_000, 13),
        p.Wait(100, 20, 7),
        p.Wait(100, 13, 7),
        p.Kernel(100, 900, 9_000, 7),
        p.Kernel(100, 900, 10_000, 20, True),
        p.Sync(200, 300),
    ]
    for work in (50_000, 90_000)
]
CHANGES = (
    None,
    Change(kernels=kernel_scales(["gemm=2"])),
    Change(network_scale=0.25),
    Change(stragglers={0: 3.0}),
)


def as_kineto(folder: Path) -> tuple[list[dict[str, object]], list[Path]]:
    _, traces = p.run(ITEMS)
    paths = [folder / f"rank{i}.json" for i in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text(json.dumps(trace))
    return traces, paths


def assert_equal_replays(one: Recording, other: Recording) -> None:
    assert one.step_ns == other.step_ns
    for change in CHANGES:
        first, second = replay(one, change), replay(other, change)
        assert first.step_time_s == pytest.approx(second.step_time_s, abs=1e-12)
        assert rank_times(first) == rank_times(second)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return n.write(tmp_path, p.run(ITEMS)[1])


def test_a_file_a_rank_replays_as_the_profilers_traces_of_the_same_events(tmp_path: Path) -> None:
    traces, kineto = as_kineto(tmp_path)
    one, other = load(kineto), load(n.write(tmp_path, traces))
    assert (other.ranks, other.world_size, other.step, other.gpu_name) == ((0, 1), 2, 3, one.gpu_name)
    assert len(one.members()) == len(other.members()) == 2
    assert {k[2:4] for k in other.members()} == {((0, 1), "all_reduce")}
    assert_equal_replays(one, other)
    # not by chance: the wait of rank 0 for rank 1 is found, and goes where rank 0 is as late
    assert replay(other, CHANGES[3]).step_time_s > replay(other).step_time_s


def test_one_file_of_all_processes_of_a_node(tmp_path: Path) -> None:
    traces, kineto = as_kineto(tmp_path)
    export = n.Export(tmp_path / "node.sqlite")
    for trace in traces:
        export.trace(trace)
    one, other = load(kineto), load([export.close()])
    assert other.ranks == (0, 1)
    assert_equal_replays(one, other)
    assert any("the files hold 2 processes" in w for w in other.warnings)


@pytest.mark.parametrize("name", ["step {}", "iteration{}", "Train_Step: {}", "iter_{}", "ProfilerStep#{}, op_id = 12"])
def test_names_of_steps(tmp_path: Path, name: str) -> None:
    recording = load(n.write(tmp_path, p.run(ITEMS)[1], name))
    assert recording.step == 3
    with pytest.raises(InputError, match="--step: found 4; every trace has 3"):
        load([tmp_path / "rank0.sqlite"], 4)


def test_other_names_are_no_steps_and_the_whole_file_is_one(tmp_path: Path) -> None:
    recording = load(n.write(tmp_path, p.run(ITEMS)[1], "stepping stone {}"))
    assert recording.step is None
    bare = [n.change(path, "DROP TABLE NVTX_EVENTS") for path in sorted(tmp_path.glob("*.sqlite"))]
    assert any("nsys profile --trace=cuda,nvtx" in w for w in load(bare).warnings)
    counted = load(n.write(_folder(tmp_path), p.run(ITEMS)[1], "train_step"))
    assert counted.step == 0  # without a number: counted


def _folder(parent: Path) -> Path:
    (parent / "more").mkdir()
    return parent / "more"


def test_copies_fills_and_waits_for_a_stream(paths: list[Path]) -> None:
    process = n.global_id(1000)
    on = "0, 1, 7"
    n.change(
        paths[0],
        f"CREATE TABLE {n.MEMCPY} ({n.SCHEMA[n.MEMCPY]})",
        f"CREATE TABLE {n.MEMSET} ({n.SCHEMA[n.MEMSET]})",
        f"INSERT INTO {n.MEMCPY} VALUES (200000, 210000, {on}, 101, {process}, 4096, 1, 1, 2)",
        f"INSERT INTO {n.MEMSET} VALUES (220000, 221000, {on}, 101, {process}, 0, 64, 2)",
    )
    copies = {node.name: node for node in load(paths[:1]).nodes if node.kind == "COPY"}
    assert {k: v.end_ns - v.start_ns for k, v in copies.items()} == {
        "Memcpy HtoD (Pinned -> Device)": 10_000,
        "Memset (Device)": 1_000,
    }


def test_without_recorded_events_streams_waits_are_a_guess(paths: list[Path]) -> None:
    bare = [n.change(path, f"DROP TABLE {n.CUDA_EVENT}") for path in paths]
    recording = load(bare)
    assert replay(recording).step_time_s == pytest.approx(recording.step_ns * 1e-9, abs=2e-9)


def test_ranks_whose_collectives_differ_are_not_taken_for_one_group(paths: list[Path]) -> None:
    n.change(
        paths[1], "UPDATE StringIds SET value = 'ncclDevKernel_AllGather_RING_LL' WHERE value LIKE 'nccl%(Params)'"
    )
    recording = load(paths)
    assert all(len(members) == 1 for members in recording.members().values())
    assert any("differ in them" in w for w in recording.warnings)
    assert replay(recording).step_time_s == pytest.approx(recording.step_ns * 1e-9, abs=2e-9)


def test_sizes_that_no_file_has_are_said(paths: list[Path]) -> None:
    recording = load(paths)
    change = Change(network=network_of("dgx-h100", 2))
    assert replay(recording, change).step_time_s == replay(recording).step_time_s
    assert "do not say the bytes of 4 transfers" in doubts(recording, change)[0]


def test_commands(paths: list[Path]) -> None:
    names = [str(path) for path in paths]
    done = invoked(replay_command, *names, "--json", "-", "--gpu", "b200-sxm")
    result = json.loads(done.output)
    assert (result["profiler_step"], abs(result["error"]) < 1e-6) == (3, True)
    assert CliRunner().invoke(diagnose, names).exit_code == 0


# --- what is no whole export


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"DROP TABLE {n.KERNEL}", f"{n.KERNEL}: the table is missing; record with `nsys profile --trace=cuda,nvtx`"),
        (f"DROP TABLE {n.RUNTIME}", f"{n.RUNTIME}: the table is missing"),
        ("DROP TABLE StringIds", "StringIds: the table is missing"),
        (f"DELETE FROM {n.KERNEL}", f"{n.KERNEL}: holds no kernels"),
        (f"ALTER TABLE {n.KERNEL} DROP COLUMN streamId", f"{n.KERNEL}.streamId: the column is missing"),
        ("ALTER TABLE NVTX_EVENTS DROP COLUMN eventType", "NVTX_EVENTS.eventType: the column is missing"),
        (f"UPDATE {n.KERNEL} SET start = 'soon'", f"{n.KERNEL}.start: found 'soon'; must be a whole number"),
        ("UPDATE NVTX_EVENTS SET globalTid = x'00ff'", "NVTX_EVENTS.globalTid: found b'"),
        (f"UPDATE {n.RUNTIME} SET correlationId = 1.5", f"{n.RUNTIME}.correlationId: found 1.5"),
        (f"UPDATE {n.KERNEL} SET end = {2**62}", f"{n.KERNEL}.end: found {2**62}; must be nanoseconds below 2^62"),
    ],
)
def test_tables_and_columns_that_are_missing(paths: list[Path], command: str, said: str) -> None:
    n.change(paths[0], command)
    with pytest.raises(InputError) as error:
        load(paths)
    assert str(error.value).startswith(f"{paths[0]}: ")
    assert said in str(error.value)


def test_names_that_are_no_text_are_names_of_nothing(paths: list[Path]) -> None:
    n.change(paths[0], "UPDATE StringIds SET value = x'ff00ff'")
    recording = load(paths[:1])
    assert {node.name for node in recording.nodes if node.compute} == {"kernel"}


def test_nothing_of_the_file_is_carried_out(paths: list[Path]) -> None:
    """A view that would never end, in place of a table, is no table."""
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS id, 'a' AS value FROM c"
    n.change(paths[0], "DROP TABLE StringIds", f"CREATE VIEW StringIds AS {endless}")
    with pytest.raises(InputError, match="StringIds: the table is missing"):
        load(paths[:1])


def test_reading_leaves_the_file_and_its_folder_as_they_are(paths: list[Path]) -> None:
    before = {path: path.read_bytes() for path in paths[0].parent.iterdir()}
    load(paths)
    assert {path: path.read_bytes() for path in paths[0].parent.iterdir()} == before


def test_files_that_are_cut_short_or_another_thing(paths: list[Path], tmp_path: Path) -> None:
    whole = paths[0].read_bytes()
    short = tmp_path / "short.sqlite"
    for length in (16, 100, 5000, len(whole) // 2):
        short.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"short\.sqlite: "):
            load([short])
    _, kineto = as_kineto(tmp_path)
    with pytest.raises(InputError, match=r"is not a SQLite file, but .* is; give traces of one kind"):
        load([paths[0], kineto[1]])
    with pytest.raises(InputError, match="--groups: is for Chakra"):
        load(paths, groups=tmp_path / "groups.json")
    packed = tmp_path / "rank0.sqlite.gz"
    packed.write_bytes(gzip.compress(whole))
    with pytest.raises(InputError, match="is a packed SQLite file; unpack it with gunzip"):
        load([packed])
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"anything")
    with pytest.raises(InputError, match="export it with `nsys export --type sqlite`"):
        load([report])
    with pytest.raises(InputError, match="is an SQLite file, such as Nsight Systems exports; a scenario is wanted"):
        load_scenario(paths[0])


def test_damaged_bytes_are_replayed_or_refused(paths: list[Path], tmp_path: Path) -> None:
    dice = random.Random(5)
    whole = paths[0].read_bytes()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 20)):
            data[dice.randrange(16, len(data))] = dice.randrange(256)
        path = tmp_path / "damaged.sqlite"
        path.write_bytes(data)
        try:
            replay(load([path]))
        except InputError:
            continue
