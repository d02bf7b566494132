"""Read what nccl-tests and rccl-tests print: collectives of one node, by operation, ranks and bytes.

The text of programs (`all_reduce_perf` and its like), with anything before, between and after it, or a CSV table with
the columns gpu, nodes, ranks, op, bytes, us. Of the text: columns by the names in its header, out of place; the ranks,
nodes and GPU by the lines `# Rank`, else the ranks by nThread and nGpus; the operation by the program's name in the
text or the file's name, else by the ratio of the two bandwidths, which is 2(n - 1)/n for an all-reduce of n ranks.

A time is the mean of calls that the host issues one after another (nccl-tests, common.cu: `BenchTime`), and the barrier
at their end. So it has the host's issuing of a call, which a program's collectives do not have again: a step's launches
are the host's own, and a CUDA graph has none. `launch_overhead_s` of the GPU is subtracted, at most half of the time.
How far a launch hides behind the call before it, the text does not tell: half of what is subtracted is the uncertainty.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.imports import Imported
from sim.core.errors import InputError
from sim.inputs.input_source import nearest, show
from sim.prices.profile import CollectiveTable
from topology.collective_kinds import KINDS, bus_factor
from topology.node_parts import gpu_by_name
from topology.presets import GPUS

SAID = "nccl-tests or rccl-tests"
SPREAD = 0.02  # of repeated runs, as of the shipped collectives
LAUNCH_S = 5e-6  # of a GPU that is not named
CSV_COLUMNS = ("gpu", "nodes", "ranks", "op", "bytes", "us")
PROGRAMS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}  # those whose names differ from the operation's
PROGRAM = re.compile(r"(?<![a-z_])([a-z_]+)_perf(?![a-z_])")
RANK = re.compile(r"^#\s+Rank\s+\d+\s.*?\bon\s+(\S+)\s+device")
COUNTS = re.compile(r"^#\s*nThread\s+(\d+)\s+nGpus\s+(\d+)")


class Call(NamedTuple):
    """Hold one measured size: the nodes and ranks, the operation, bytes as nccl-tests counts them, and seconds."""

    nodes: int
    ranks: int
    op: str
    bytes: int
    seconds: float


def read(paths: Sequence[Path], gpu: str = "") -> Imported:
    """Read files of text or CSV, and those in folders.

    `gpu`: the preset whose rows of a CSV table are taken; empty: the only one. For text it names the GPU.

    Raises:
        InputError: for files that cannot be read, hold no measured collective, or do not tell operation or ranks.
    """
    if gpu and gpu not in GPUS:
        raise InputError(f"--gpu: found {show(gpu)}; no such GPU{nearest(gpu, tuple(GPUS))}")
    calls: list[Call] = []
    named: set[str] = set()
    for file in _files(paths):
        text = _text(file)
        if text.lstrip().startswith(CSV_COLUMNS[0] + ","):
            of_gpu = dict(_table(file, text))
            named |= set(of_gpu)
            calls += [call for name, own in of_gpu.items() if gpu in ("", name) for call in own]
        else:
            device, printed = _printed(file, text)
            named |= {device} - {""}
            calls += printed
    where = ", ".join(map(str, paths))
    if not gpu and len(named) > 1:
        raise InputError(f"{where}: collectives of several GPUs; choose one with --gpu: {', '.join(sorted(named))}")
    if not calls:
        raise InputError(f"{where}: no collective of {gpu}; found those of {', '.join(sorted(named))}")
    return _imported(calls, gpu or next(iter(named), ""))


def _files(paths: Sequence[Path]) -> list[Path]:
    return [
        f for path in paths for f in (sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path])
    ]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as text: {error}") from None


def _table(file: Path, text: str) -> Iterator[tuple[str, list[Call]]]:
    """Yield the calls of a CSV table by GPU."""
    rows = csv.reader(text.splitlines())
    head = [name.strip().lower() for name in next(rows)]
    for name in CSV_COLUMNS:
        if name not in head:
            raise InputError(f"{file}:1: column {name} is missing{nearest(name, head)}")
    places = [head.index(name) for name in CSV_COLUMNS]
    found: dict[str, list[Call]] = {}
    for row in rows:
        where = f"{file}:{rows.line_num}"
        if len(row) != len(head):
            raise InputError(f"{where}: found {len(row)} values; the header has {len(head)} columns")
        gpu, nodes, ranks, op, size, us = (row[i].strip() for i in places)
        if op not in KINDS:
            raise InputError(f"{where}: op: found {show(op)}; allowed: {', '.join(KINDS)}")
        n, group = _whole(nodes, "nodes", where), _whole(ranks, "ranks", where)
        found.setdefault(gpu, []).append(Call(n, group, op, _whole(size, "bytes", where), _seconds(us, "us", where)))
    yield from found.items()


def _printed(file: Path, text: str) -> tuple[str, list[Call]]:
    """Return the GPU, empty if it is no shipped one, and the calls that programs printed, one after the other."""
    calls: list[Call] = []
    hosts, columns, devices = list[str](), list[str](), set[str | None]()
    counted, op = 0, _operation(file.stem, "")
    for number, line in enumerate(text.splitlines(), 1):
        where, words = f"{file}:{number}", line.lstrip("# ").split()
        op = _operation(line, where) or op
        if counts := COUNTS.search(line):
            counted, hosts, columns = int(counts[1]) * int(counts[2]), [], []
        elif rank := RANK.search(line):
            hosts.append(rank[1])
            devices.add(gpu_by_name(line))
        elif line.startswith("#"):
            columns = words if {"size", "count", "time", "busbw"} <= set(words) else columns
        elif columns and words and words[0].isdigit():
            if len(words) != len(columns):
                raise InputError(f"{where}: found {len(words)} values; the header has {len(columns)} columns")
            row = dict(zip(reversed(columns), reversed(words), strict=True))  # of equal names the first: out of place
            if (ranks := len(hosts) or counted) < 2:
                said = f"found {ranks}" if ranks else "there are neither lines `# Rank` nor nThread and nGpus"
                raise InputError(f"{where}: the number of ranks is needed, 2 or more: {said}")
            if size := int(row["size"]):
                name = op or _by_bandwidth(row, ranks, where)
                calls.append(Call(max(1, len(set(hosts))), ranks, name, size, _seconds(row["time"], "time", where)))
    if not calls:
        raise InputError(f"{file}: found no row of sizes and times, as nccl-tests and rccl-tests print them")
    return (next(iter(devices)) or "") if len(devices) == 1 else "", calls


def _operation(text: str, where: str) -> str:
    """Return the operation of the program that a text names; empty if it names none."""
    found = PROGRAM.search(text)
    if found is None:
        return ""
    op = PROGRAMS.get(found[1], found[1])
    if op not in KINDS:
        raise InputError(f"{where}: found the program {show(found[0])}; allowed: those of {', '.join(KINDS)}")
    return op


def _by_bandwidth(row: dict[str, str], ranks: int, where: str) -> str:
    """Return the reduction whose bus bandwidth has the row's ratio to size / time."""
    algorithm, bus = (_number(row[name], name, where) for name in ("algbw", "busbw"))
    near = [k for k in ("all_reduce", "reduce_scatter") if abs(bus - bus_factor(k, ranks) * algorithm) <= 0.02 * bus]
    if row.get("redop") in (None, "none") or len(near) != 1 or not bus:
        raise InputError(
            f"{where}: which collective it is, neither the text nor the file's name tells (all_reduce_perf, …)"
        )
    return near[0]


def _whole(text: str, name: str, where: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 2**50:
        raise InputError(f"{where}: {name}: found {show(text)}; allowed: a whole number, 1 or more")
    return int(text)


def _number(text: str, name: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < 1e12:
        raise InputError(f"{where}: {name}: found {show(text)}; allowed: a number, 0 or more")
    return found


def _seconds(text: str, name: str, where: str) -> float:
    found = _number(text, name, where) * 1e-6
    if not found:
        raise InputError(f"{where}: {name}: found {show(text)}; allowed: microseconds, more than 0")
    return found


def _imported(calls: list[Call], gpu: str) -> Imported:
    launch_s = GPUS[gpu].launch_overhead_s if gpu in GPUS else LAUNCH_S
    groups: dict[tuple[str, int], dict[int, list[float]]] = {}
    skipped: dict[str, int] = {}
    for call in calls:
        if call.nodes > 1:
            why = f"{call.op} of {call.ranks} ranks on {call.nodes} nodes: a profile has the collectives of one node"
            skipped[why] = skipped.get(why, 0) + 1
        else:
            groups.setdefault((call.op, call.ranks), {}).setdefault(call.bytes, []).append(call.seconds)
    tables, covered = [], []
    for (op, ranks), sizes in sorted(groups.items()):
        size = np.array(sorted(sizes), dtype=np.float64)
        time = np.array([float(np.median(sizes[int(each)])) for each in size])
        launch = np.minimum(launch_s, time / 2)
        spread = np.maximum(SPREAD, launch / (2 * time))
        tables.append(CollectiveTable(op, ranks, size, time - launch, spread))
        covered.append(f"{op} of {ranks} ranks: {len(size)} sizes, {size[0]:,.0f} to {size[-1]:,.0f} bytes")
    said = tuple(f"{why} ({count} sizes)" for why, count in sorted(skipped.items()))
    estimated = ("collectives of several nodes", "groups of other sizes", "kernels")
    return Imported(SAID, (), tuple(tables), gpu=gpu, covered=tuple(covered), estimated=estimated, skipped=said)
