"""Read the tuning records of AITER, AMD's kernels for serving engines on Instinct GPUs.

A record is the fastest of the kernels that AITER tried for one shape (github.com/ROCm/aiter, MIT, `aiter/configs`).
Both the repository's own files and tables that join many of them are read, as CSV or gzipped CSV. Columns are found by
name:

- of a matmul `[m, k] x [k, n]`: M, N, K, us, and cu_num (or compute_units); kind, or a file named after it, such as
  `dsv3_a8w8_blockscale_tuned_gemm.csv`; gfx, dtype (or q_dtype_w) and libtype (or library) if known;
- of an expert layer of one rank: token(s), model_dim, inter_dim, expert(s), topk, q_dtype_a, q_dtype_w, q_type,
  use_g1u1, us and cu_num, and us2 (or us_stage2): 0 if one kernel computes the layer.

The times are the kernels' own, run again and again on the same operands. What a model adds, and other tables have in a
point, is added by these rules, so that prices need to know nothing of the source:

- to each kernel `DISPATCH_S`, from the end of the one before it to its start;
- to each kernel whose weights fit in the `CACHE_BYTES` that they stayed in, the time in which memory delivers them,
  less that of the cache: a model's other weights have replaced them, and these kernels hide no load behind another;
- to an expert layer what chooses experts and sorts tokens by expert, and with 8 or 4 bits the quantization of what
  goes into the first and, unless one kernel computes the layer, the second product. These read and write memory at
  `STREAMED` of its bandwidth, and take at least `SMALL_KERNEL_S` each.

The quantization of a matmul's input is an operator of its own in the programs of served layers.

A rank's layer of E experts of width w over n tokens is that of experts of width w·t that t ranks split, or of E·e
experts over n·e tokens that e ranks share. It is stored for all of `SPLITS`.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from calibrate.imports import Imported
from calibrate.imports.measured import MeasuredTable
from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.core.operator_kinds import MOE_LAYER
from sim.core.quantization import TABLE_FORMATS
from sim.inputs.input_source import nearest, show
from sim.prices.kernel_file import TableName
from topology.presets import GPUS
from topology.spec import GpuSpec

SOURCE = "AITER"
SAID = "AITER's tuning records (github.com/ROCm/aiter, MIT)"
# For each architecture and number of compute units the GPUs that have them, the usual one first.
MEASURED_ON: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("gfx942", 304): ("mi300x", "mi325x"),
    ("gfx950", 256): ("mi355x",),
}
GFX_OF = {units: gfx for gfx, units in MEASURED_ON}  # of files that do not name it
SMALL_KERNEL_S = 3.8e-6
"""A kernel that does next to nothing, in a chain of such kernels: 3.85 us in a HIP graph of 941 (ROCm/rocm-systems
issue 10834, gfx1100), 3.74 us in a stream (PETSc's ex1hip, MI250X). No such measurement of an MI300 was found."""
DISPATCH_S = 1.4e-6
"""`SMALL_KERNEL_S` without the 2.4 us that the shortest of AITER's kernels takes by itself."""
SORTING_S = 13.6e-6
"""Sorting tokens by expert, as long for 1 token as for 256 (ROCm/FlyDSL pull request 540: MI350X, 257 experts, in a HIP
graph)."""
CACHE_BYTES, CACHE_BYTES_PER_S = 256 * 2**20, 17.2e12
"""The Infinity Cache (AMD CDNA 3 white paper; a CDNA 4 chip has as much)."""
STREAMED = 0.79
"""Part of the bandwidth that streaming kernels reach; see `memory_efficiency` of the shipped profiles."""
SPLITS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8))  # ranks of an expert, ranks that share all
# For each kind of matmul the format and dtype of its table; None: the record's dtype tells it.
KINDS: Mapping[str, tuple[str, str] | None] = {
    "a4w4_blockscale": ("", "mxfp4"),
    "a8w8_blockscale_bpreshuffle": ("fp8_block", "fp8"),
    "a8w8_blockscale": ("fp8_block", "fp8"),
    "a8w8_bpreshuffle": None,
    "a8w8": None,
    "bf16": None,
}
OF_DTYPE = {
    "bfloat16": ("", "bf16"),
    "float16": ("", "fp16"),
    "float8_e4m3fn": ("", "fp8"),
    "float8_e4m3fnuz": ("", "fp8"),
    "int8": ("sq", "int8"),
}
# For the operands' dtypes of an expert layer, and the scales, the format and dtype of its table.
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
EXPERTS: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("bfloat16", "bfloat16", "No"): ("", "bf16"),
    ("float16", "float16", "No"): ("", "fp16"),
    **{(fp8, fp8, scale): ("", "fp8") for fp8 in _FP8 for scale in ("per_Token", "per_Tensor")},
    **{(fp8, fp8, scale): ("fp8_block", "fp8") for fp8 in _FP8 for scale in ("per_1x128", "per_128x128")},
    **{(fp8, fp8, "per_1x32"): ("", "mxfp8") for fp8 in _FP8},
    **{(fp8, "float4_e2m1fn_x2", "per_1x32"): ("w4a8_mxfp4_mxfp8", "mxfp8") for fp8 in _FP8},
    ("bfloat16", "float4_e2m1fn_x2", "per_1x32"): ("w4a16_mxfp4", "bf16"),
    ("float4_e2m1fn_x2", "float4_e2m1fn_x2", "per_1x32"): ("", "mxfp4"),
    ("bfloat16", "int4", "per_1x32"): ("int4_wo", "bf16"),
    ("int8", "int8", "per_Token"): ("sq", "int8"),
    ("int8", "int8", "per_Tensor"): ("sq", "int8"),
}
# Columns by this module's names: AITER's own, and those of joined tables.
_OWN = ("gfx", "cu_num", "kind", "dtype", "m", "n", "k", "model_dim", "inter_dim", "topk", "us")
NAMES: Mapping[str, str] = dict(zip(_OWN, _OWN, strict=True)) | {
    "compute_units": "cu_num",
    **dict.fromkeys(("q_dtype_w", "dtype_w"), "dtype_w"),
    **dict.fromkeys(("q_dtype_a", "dtype_a"), "dtype_a"),
    **dict.fromkeys(("q_type", "quantization"), "quantization"),
    **dict.fromkeys(("use_g1u1", "gated"), "gated"),
    **dict.fromkeys(("token", "tokens"), "tokens"),
    **dict.fromkeys(("expert", "experts"), "experts"),
    **dict.fromkeys(("us2", "us_stage2"), "us_stage2"),
    **dict.fromkeys(("libtype", "library"), "library"),
}
GEMM_NEEDS: tuple[str, ...] = ("cu_num", "m", "n", "k", "us")
LAYER_NEEDS: tuple[str, ...] = ("cu_num", "tokens", "model_dim", "inter_dim", "experts", "topk", "us")
LAYER_NEEDS += ("dtype_a", "dtype_w", "quantization")
PREFIXES = ("torch.", "QuantType.", "ActivationType.")


class Point(NamedTuple):
    """Hold one record: the table that it belongs to, its shape, the recorded time of its kernels and, in seconds, what
    is added to it, and whose kernel it is."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    us: float
    added_s: float
    library: str

    @property
    def seconds(self) -> float:
        return self.us * 1e-6 + self.added_s


def read(paths: Sequence[Path], gpu: str = "") -> Imported:
    """Read the records of one GPU from files, and from those files of folders that have such records.

    `gpu`: the preset whose records are taken, if the files have several or if several GPUs have as many units; empty:
    the only one, else the first of `MEASURED_ON`.

    Raises:
        InputError: for files that cannot be read, columns that are missing, values that are no numbers, and files
            without a record that prices an operator of this GPU.
    """
    skipped: dict[str, int] = {}
    records = [record for path in paths for file in _files(path) for record in _records(file, skipped, file == path)]
    where = ", ".join(map(str, paths))
    wanted = _wanted({_units(record) for record in records}, gpu, where)
    gpu = gpu or MEASURED_ON[wanted][0]
    points: list[Point] = []
    for record in records:
        if _units(record) != wanted:
            _count(skipped, f"of {_said(_units(record))}")
        elif (point := _point(record, GPUS[gpu], skipped)) is not None:
            points.append(point)
    return _imported(points, gpu, wanted, skipped, where)


class _Record(NamedTuple):
    where: str
    values: Mapping[str, str]
    kind: str  # of the file's name; empty if it has none


def _files(path: Path) -> list[Path]:
    """Return a file, or all files of tuned kernels in a folder."""
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.rglob("*.csv*") if p.name.endswith((".csv", ".csv.gz")) and "untuned" not in p.name)
    if not found:
        raise InputError(f"{path}: found no .csv or .csv.gz file")
    return found


def _open(file: Path) -> TextIO:
    return gzip.open(file, "rt", newline="", encoding="utf-8") if file.suffix == ".gz" else file.open(newline="")


def _records(file: Path, skipped: dict[str, int], given: bool) -> Iterator[_Record]:
    """Yield the rows of a file by this module's names of columns; none of one that nobody gave and that has others."""
    try:
        with _open(file) as text:
            rows = csv.reader(text)
            head = [name.strip().lower() for name in next(rows, [])]
            columns = {NAMES[name]: i for i, name in reversed(list(enumerate(head))) if name in NAMES}
            if missing := _missing(columns, head):
                if given:
                    raise InputError(f"{file}:1: {missing}")
                _count(skipped, f"{file.name}: {missing}", 0)
                return
            for name in sorted(set(head) - set(NAMES)):
                _count(skipped, f"column {name} is not used", 0)
            for row in rows:
                where = f"{file}:{rows.line_num}"
                if len(row) != len(head):
                    raise InputError(f"{where}: found {len(row)} values; the header has {len(head)} columns")
                yield _Record(where, {name: _plain(row[i]) for name, i in columns.items()}, _kind_of(file))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: cannot be read as CSV: {error}") from None


def _missing(columns: Mapping[str, int], head: Sequence[str]) -> str:
    """Say which column of a matmul or an expert layer a file lacks; empty if it has them."""
    layer = "tokens" in columns or "inter_dim" in columns
    lacks = next((name for name in (LAYER_NEEDS if layer else GEMM_NEEDS) if name not in columns), "")
    if not lacks:
        return ""
    spelled = " or ".join(name for name, own in NAMES.items() if own == lacks)
    return f"column {spelled} of {'an expert layer' if layer else 'a matmul'} is missing{nearest(lacks, head)}"


def _plain(value: str) -> str:
    value = value.strip()
    return next((value.removeprefix(prefix) for prefix in PREFIXES if value.startswith(prefix)), value)


def _kind_of(file: Path) -> str:
    """Return the kind of matmul after which a file is named; empty if it is none of `KINDS`."""
    return next((kind for kind in KINDS if re.search(rf"(^|_){kind}_(tuned|gemm)", file.name)), "")


def _units(record: _Record) -> tuple[str, int]:
    units = _whole(record, "cu_num")
    return record.values.get("gfx") or GFX_OF.get(units, ""), units


def _said(units: tuple[str, int]) -> str:
    return f"{units[0] or 'a GPU'} with {units[1]} compute units"


def _wanted(known: set[tuple[str, int]], gpu: str, where: str) -> tuple[str, int]:
    """Return the architecture and number of units of the GPU whose records are taken."""
    shipped = [units for units in MEASURED_ON if units in known]
    found = "; ".join(sorted(map(_said, known))) or "nothing"
    if gpu:
        own = next((units for units, names in MEASURED_ON.items() if gpu in names), None)
        if own is None:
            allowed = ", ".join(name for names in MEASURED_ON.values() for name in names)
            raise InputError(f"--gpu: found {show(gpu)}; allowed: {allowed}")
        if own not in known:
            raise InputError(f"{where}: no record of {_said(own)}, which {gpu} has; found those of {found}")
        return own
    if len(shipped) != 1:
        names = ", ".join(name for units in shipped for name in MEASURED_ON[units])
        several = f"of several GPUs; choose one with --gpu ({names})" if shipped else "of no GPU that is known"
        raise InputError(f"{where}: the records are {several}: {found}")
    return shipped[0]


def _point(record: _Record, gpu: GpuSpec, skipped: dict[str, int]) -> Point | None:
    """Return a record as a point; None if it is counted in `skipped`."""
    us = _time_us(record)
    if us is None:
        _count(skipped, "no kernel was found (us is nan or 0)")
        return None
    if "tokens" in record.values:
        return _layer(record, us, gpu, skipped)
    return _matmul(record, us, gpu, skipped)


def _matmul(record: _Record, us: float, gpu: GpuSpec, skipped: dict[str, int]) -> Point | None:
    kind = record.values.get("kind") or record.kind
    dtype = record.values.get("dtype_w") or record.values.get("dtype", "")
    table = KINDS.get(kind) or OF_DTYPE.get(dtype or ("bfloat16" if kind == "bf16" else ""))
    if kind not in KINDS or table is None:
        _count(
            skipped, f"matmuls {kind or 'of no kind'}{f' in {dtype}' if dtype else ''}: no operator is priced by them"
        )
        return None
    shape = 1, *(_whole(record, name) for name in ("m", "n", "k"))
    weights_s = _from_memory_s(shape[2] * shape[3] * _weight_bytes(*table), gpu)
    return Point(*_named("gemm", table), shape, us, DISPATCH_S + weights_s, record.values.get("library", ""))


def _layer(record: _Record, us: float, gpu: GpuSpec, skipped: dict[str, int]) -> Point | None:
    operands = record.values["dtype_a"], record.values["dtype_w"], record.values["quantization"]
    table = EXPERTS.get(operands)
    gated, top_k = record.values.get("gated", "1"), record.values["topk"]
    if table is None or gated in ("0", "False") or not top_k.isdigit():
        _count(
            skipped, f"expert layers in {operands[0]} by {operands[1]}, {operands[2]}: no operator is priced by them"
        )
        return None
    tokens, hidden, inner, experts, chosen = (
        _whole(record, name) for name in ("tokens", "model_dim", "inter_dim", "experts", "topk")
    )
    split = _number(record, "us_stage2") if record.values.get("us_stage2") else 0.0
    bandwidth = STREAMED * gpu.memory_bandwidth_bytes_per_s
    # A number of 2 bytes is read and one of `narrow` written.
    narrow = 0.0 if operands[0].endswith("float16") else 0.5 if "float4" in operands[0] else 1.0
    quantized = [tokens * hidden, tokens * chosen * inner][: 2 if split else 1] if narrow else []
    added_s = (2 if split else 1) * DISPATCH_S + SMALL_KERNEL_S + SORTING_S
    added_s += sum(SMALL_KERNEL_S + numbers * (2.0 + narrow) / bandwidth for numbers in quantized)
    shape = tokens, hidden, inner, chosen, experts, 1, 1
    # Rows are spread evenly: each of the first is for another expert.
    added_s += _from_memory_s(min(experts, tokens * chosen) * 3 * hidden * inner * _weight_bytes(*table), gpu)
    return Point(*_named(MOE_LAYER, table), shape, us, added_s, "two kernels" if split else "one kernel")


def _weight_bytes(form: str, dtype: str) -> float:
    return TABLE_FORMATS[form] if form else dtype_bytes(dtype)


def _from_memory_s(weight_bytes: float, gpu: GpuSpec) -> float:
    """Return how much longer a kernel's weights come from memory than from the cache that holds them."""
    if weight_bytes > CACHE_BYTES:
        return 0.0
    return weight_bytes / (STREAMED * gpu.memory_bandwidth_bytes_per_s) - weight_bytes / CACHE_BYTES_PER_S


def _named(op: str, table: tuple[str, str]) -> tuple[str, str]:
    return f"{op}:{table[0]}" if table[0] else op, table[1]


def _time_us(record: _Record) -> float | None:
    """Return the record's time; None if AITER found no kernel."""
    text = record.values["us"]
    if text.lower() in ("nan", "inf", ""):
        return None
    return _number(record, "us") or None


def _whole(record: _Record, name: str) -> int:
    text = record.values[name]
    if not text.isdigit() or not 0 < int(text) < 2**31:
        raise InputError(f"{record.where}: {name}: found {show(text)}; allowed: a whole number, 1 or more")
    return int(text)


def _number(record: _Record, name: str) -> float:
    text = record.values[name]
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found < 1e12:
        raise InputError(f"{record.where}: {name}: found {show(text)}; allowed: microseconds, 0 or more")
    return found


def _count(skipped: dict[str, int], why: str, records: int = 1) -> None:
    skipped[why] = skipped.get(why, 0) + records


def _imported(points: list[Point], gpu: str, units: tuple[str, int], skipped: dict[str, int], where: str) -> Imported:
    tables, covered = [], []
    for (op, dtype), own in groupby(sorted(points), key=lambda point: point[:2]):
        best = _without_copies(op, _fastest(own), skipped)
        if not best:
            continue
        split = SPLITS if op.startswith(MOE_LAYER) else SPLITS[:1]
        shapes = [_over_ranks(point.shape, *ranks) for point in best for ranks in split]
        seconds = [point.seconds for point in best for _ in split]
        kernels = ", ".join(sorted({point.library for point in best if point.library}))
        name = TableName(op, dtype, SOURCE)
        tables.append(MeasuredTable(name, np.array(shapes), np.array(seconds), f"AITER {kernels}".strip()))
        covered.append(f"{op} in {dtype}: {len(best):,} shapes")
    said = [f"{why} ({count:,} records)" if count else why for why, count in sorted(skipped.items())]
    if not tables:
        raise InputError(f"{where}: no record prices an operator; skipped: {'; '.join(said)}")
    estimated = ("attention", "memory-bound kernels", "collectives", "launches from the host")
    others = [name for name in MEASURED_ON[units] if name != gpu]
    if others:
        said.append(f"{', '.join(others)} has as many compute units: AITER does not say which of them it measured")
    return Imported(SAID, tuple(tables), gpu=gpu, covered=tuple(covered), estimated=estimated, skipped=tuple(said))


def _over_ranks(shape: tuple[int, ...], expert_tp: int, ep: int) -> tuple[int, ...]:
    """Return one rank's expert layer as that of all ranks; a matmul as it is."""
    if expert_tp == ep == 1:
        return shape
    tokens, hidden, inner, chosen, experts, _, _ = shape
    return tokens * ep, hidden, inner * expert_tp, chosen, experts * ep, expert_tp, ep


def _fastest(points: Iterator[Point]) -> list[Point]:
    """Return the fastest point of each shape: the records are of kernels that were chosen because they are fastest."""
    return [min(own, key=lambda point: point.seconds) for _, own in groupby(points, key=lambda point: point.shape)]


def _without_copies(op: str, points: list[Point], skipped: dict[str, int]) -> list[Point]:
    """Leave out records whose time stands at the next number of rows or tokens again, to the last digit: one of them
    was measured, and the others are its copies. The one beside another measurement is kept, which may be at either end.
    """
    rows = 1 if op.startswith("gemm") else 0

    def layer(point: Point) -> tuple[int, ...]:
        return point.shape[:rows] + point.shape[rows + 1 :]

    kept: list[Point] = []
    for _, own in groupby(sorted(points, key=lambda point: (layer(point), point.shape[rows])), key=layer):
        runs = [list(run) for _, run in groupby(own, key=lambda point: point.us)]
        for i, run in enumerate(runs):
            first, last = i == 0, i == len(runs) - 1
            # In the middle both ends are beside others; alone, none of them is.
            ends = run if len(run) == 1 else [] if first and last else run[-1:] if first else run[:1] if last else []
            kept += ends
            if len(ends) < len(run):
                _count(skipped, "copies of another number of rows", len(run) - len(ends))
    return kept
