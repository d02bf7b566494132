"""What nccl-tests and rccl-tests print becomes tables of collectives: ranks, nodes, operation, times; bad lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibrate.imports.nccl_tests import read
from sim.core.errors import InputError
from topology.presets import GPUS

LAUNCH_S = GPUS["h100-sxm"].launch_overhead_s
HEADER = """# nThread 1 nGpus {gpus} minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
"""
COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROW = "  {size}  {size}  float  {redop}  -1  {us}  {alg}  {bus}  0  999.0  1.0  1.0  0\n"
RANK = "#  Rank  {i} Group  0 Pid  {i} on  {host} device  {i} [0000:10:00] NVIDIA H100 80GB HBM3\n"
CSV = "gpu,nodes,ranks,op,dtype,bytes,us,software\n"


def printed(hosts: list[str], factor: float, redop: str = "sum") -> str:
    """Return a program's output with rows of 64 KiB and 128 MiB."""
    ranks = "".join(RANK.format(i=i, host=host) for i, host in enumerate(hosts))
    rows = "".join(
        ROW.format(size=size, redop=redop, us=us, alg=size / us / 1e3, bus=factor * size / us / 1e3)
        for size, us in ((65536, 20.0), (134217728, 800.0))
    )
    return HEADER.format(gpus=1) + ranks + COLUMNS + rows + "# Out of bounds values : 0 OK\n"


@pytest.mark.parametrize(
    ("name", "text", "op"),
    [
        ("log.txt", printed(["a"] * 8, 1.75), "all_reduce"),  # by the ratio of bandwidths
        ("log.txt", printed(["a"] * 8, 0.875), "reduce_scatter"),
        ("log.txt", "$ ./build/all_gather_perf -b 8\n" + printed(["a"] * 8, 0.875, "none"), "all_gather"),
        ("alltoall_perf.log", printed(["a"] * 8, 0.875, "none"), "all_to_all"),
    ],
)
def test_the_operation_is_found(tmp_path: Path, name: str, text: str, op: str) -> None:
    (tmp_path / name).write_text(text)
    found = read([tmp_path / name])
    (table,) = found.collectives
    assert (table.op, table.ranks, table.bytes.tolist()) == (op, 8, [65536, 134217728])
    assert found.gpu == "h100-sxm"


def test_a_launch_is_taken_from_each_time_and_doubted(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf.txt").write_text(printed(["a"] * 8, 1.75))
    (table,) = read([tmp_path]).collectives
    assert table.seconds == pytest.approx([20e-6 - LAUNCH_S, 800e-6 - LAUNCH_S])
    assert table.spread[0] == pytest.approx(LAUNCH_S / 40e-6)
    assert table.spread[1] == 0.02


def test_no_more_than_half_of_a_time_is_a_launch(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(CSV + f"h100-sxm,1,8,all_reduce,float32,8,{LAUNCH_S * 1e6},x\n")
    (table,) = read([tmp_path / "t.csv"]).collectives
    assert table.seconds == pytest.approx([LAUNCH_S / 2])


def test_ranks_without_their_lines_are_those_of_threads_and_gpus(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf.txt").write_text(printed([], 1.75).replace("nGpus 1", "nGpus 4"))
    (table,) = read([tmp_path]).collectives
    assert table.ranks == 4


def test_several_nodes_are_recognised_and_said(tmp_path: Path) -> None:
    one, two = printed(["a"] * 8, 1.75), printed(["a"] * 8 + ["b"] * 8, 1.875)
    (tmp_path / "all_reduce_perf.txt").write_text(two + one)  # two outputs in one file
    found = read([tmp_path])
    assert [table.ranks for table in found.collectives] == [8]
    assert any("16 ranks on 2 nodes" in said for said in found.skipped)


def test_files_are_joined_by_medians(tmp_path: Path) -> None:
    for i, us in enumerate((20.0, 30.0, 90.0)):
        (tmp_path / f"all_reduce_perf{i}.txt").write_text(printed(["a"] * 8, 1.75).replace("20.0", str(us)))
    (table,) = read([tmp_path]).collectives
    assert np.isclose(table.seconds[0], 30e-6 - LAUNCH_S)


def test_text_and_csv_give_the_same_table(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf.txt").write_text(printed(["a"] * 8, 1.75))
    rows = [f"h100-sxm,1,8,all_reduce,float,{size},{us},x\n" for size, us in ((65536, 20.0), (134217728, 800.0))]
    (tmp_path / "t.csv").write_text(CSV + "".join(rows))
    one, other = (read([tmp_path / name]).collectives[0] for name in ("all_reduce_perf.txt", "t.csv"))
    assert one.seconds.tolist() == other.seconds.tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no measurement here\n", "found no row of sizes and times"),
        (printed(["a"] * 8, 1.75, "none"), "which collective it is"),
        (printed([], 1.75), "x.txt:8: the number of ranks is needed, 2 or more: found 1"),
        (printed(["a"] * 8, 1.75).replace(" 20.0 ", " fast "), "x.txt:16: time: found 'fast'"),
        (printed(["a"] * 8, 1.75).replace("  0  999.0  1.0  1.0  0", ""), "x.txt:16: found 8 values"),
        (printed(["a"] * 8, 1.75) + "hypercube_perf\n", "found the program 'hypercube_perf'"),
        (CSV + "h100-sxm,1,8,all_reduce,float32,0,20.0,x\n", "x.txt:2: bytes: found '0'"),
        (CSV + "h100-sxm,1,8,all_reduced,float32,8,20.0,x\n", "x.txt:2: op: found 'all_reduced'"),
        (CSV.replace("us,", ""), "x.txt:1: column us is missing"),
        (
            CSV + "h100-sxm,1,8,all_reduce,f,8,9,x\nmi300x,1,8,all_reduce,f,8,9,x\n",
            "choose one with --gpu: h100-sxm, mi300x",
        ),
    ],
)
def test_bad_input_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(InputError) as error:
        read([tmp_path / "x.txt"])
    assert said in str(error.value)


def test_rows_of_the_asked_gpu_are_taken(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(CSV + "h100-sxm,1,8,all_reduce,f,8,9,x\nmi300x,1,4,all_reduce,f,8,9,x\n")
    assert [table.ranks for table in read([tmp_path / "t.csv"], "mi300x").collectives] == [4]
    with pytest.raises(InputError, match="no collective of h200-sxm"):
        read([tmp_path / "t.csv"], "h200-sxm")
