"""Read NVIDIA AIConfigurator's measured kernels: the package `aiconfigurator-core` (PyPI, Apache-2.0) or its folders.

Below its folder `systems/data`, `GPU/FAMILY/BACKEND/VERSION/NAME_perf.parquet` has a row for each measured shape: the
engine's kernel, dtypes, sizes, milliseconds. `FAMILIES` says for each file which operator and shape its rows are.

- Matmuls and experts in the formats of `sim.core.quantization.TABLE_FORMATS`, attention of prompts and of single tokens
  over a cache in 16 bits, engines' own all-reduces in CUDA graphs, and NCCL's collectives become tables.
- Rows that are not read are counted in `skipped` by the reason: sliding windows, caches in 8 bits, unevenly chosen
  experts, experts without a gate, single modules of one model.
- A table whose quickest kernel takes more than `OF_HOST` times that of another engine on this GPU was timed with its
  host's work (eager launches from Python), and is skipped.
- 8- and 4-bit matmuls of a linear layer include the quantization of their input. `quantizing` estimates it.
- Along the number of tokens, points that lie on the line between others are left out (`thinned`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.imports import Imported
from calibrate.imports.measured import MeasuredTable, left_out_error, thinned
from sim.core.errors import InputError
from sim.core.operator_kinds import ATTENTION_DECODE, MOE_LAYER
from sim.prices.kernel_file import TableName
from sim.prices.profile import CollectiveTable
from sim.prices.roofline import Device
from topology.presets import GPUS

SYSTEMS = {  # GPU presets by the names of folders
    "a100_sxm": "a100-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}
BACKENDS = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
# By the package's dtype: the dtype in which kernels multiply, and the format that it does not tell.
FORMATS = {
    "bfloat16": ("bf16", ""),
    "float16": ("fp16", ""),
    "fp8": ("fp8", ""),
    "fp8_block": ("fp8", "fp8_block"),
    "nvfp4": ("nvfp4", ""),
    "int8_wo": ("bf16", "int8_wo"),
    "int4_wo": ("bf16", "int4_wo"),
    "sq": ("int8", "sq"),
    "w4a16_mxfp4": ("bf16", "w4a16_mxfp4"),
    "w4a8_mxfp4_mxfp8": ("mxfp8", "w4a8_mxfp4_mxfp8"),
}
CACHES = {"bfloat16": ("bf16", "latent"), "fp8": ("bf16", "latent_fp8")}
ABSORBED = {"bfloat16": ("bf16", "absorbed"), "fp8": ("fp8", "absorbed")}
LATENT = 512 + 64  # numbers of a cached token of DeepSeek V3: its latent and its rope key
ELEMENT_BYTES = {"half": 2, "bfloat16": 2, "int8": 1}
OF_HOST = 2.0
FEWEST = 30  # points of a table
Rows = dict[str, NDArray[Any]]


class Family(NamedTuple):
    """Say what the rows of a file are: the operator, the column of its dtype, and its shape by columns or numbers.

    `runs`: the dimension of the shape along which points lie on lines. `where`: what rows must have, by column, and
    what the others are called ("": another family has them). `formats`: as `FORMATS`.
    """

    op: str
    dtype: str
    shape: tuple[str | int, ...]
    runs: int
    where: Mapping[str, tuple[str, str]] = {}
    formats: Mapping[str, tuple[str, str]] = FORMATS


_ATTENDED = {
    "kv_cache_dtype": ("bfloat16", "caches in 8 bits"),
    "window_size": ("0", "sliding windows"),
}
FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "gemm": (Family("gemm", "gemm_dtype", (1, "m", "n", "k"), 1),),
    "moe": (
        Family(
            MOE_LAYER,
            "moe_dtype",
            ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
            0,
            {"distribution": ("balanced", "unevenly chosen experts")},
        ),
    ),
    "context_attention": (
        Family(
            "attention_forward",
            "attn_dtype",
            ("batch_size", "num_heads", "num_key_value_heads", "isl", "isl", "head_dim", "head_dim", 1),
            3,
            _ATTENDED,
        ),
    ),
    "generation_attention": (
        Family(
            ATTENTION_DECODE,
            "attn_dtype",
            ("batch_size", "num_heads", "num_key_value_heads", "kv_len", "head_dim"),
            3,
            _ATTENDED,
        ),
    ),
    "context_mla": (
        Family(
            "attention_forward",
            "kv_cache_dtype",
            ("batch_size", "num_heads", "num_heads", "isl", "isl", 192, 128, 1),
            3,
            formats={"bfloat16": ("bf16", "latent")},
        ),
    ),
    "generation_mla": (
        Family(ATTENTION_DECODE, "kv_cache_dtype", ("batch_size", "num_heads", 1, "kv_len", LATENT), 3, formats=CACHES),
    ),
    "mla_bmm": (
        Family(
            "gemm", "bmm_dtype", ("num_heads", "num_tokens", 512, 128), 1, {"op_name": ("mla_gen_pre", "")}, ABSORBED
        ),
        Family(
            "gemm", "bmm_dtype", ("num_heads", "num_tokens", 128, 512), 1, {"op_name": ("mla_gen_post", "")}, ABSORBED
        ),
    ),
}
# Parts of kernels' names: experts without a gate, and those of one model whose activation another one stands for.
UNLIKE = {"nongated": "experts without a gate", "situ_as_silu": "experts of an activation that another stands for"}


def read(paths: Sequence[Path], gpu: str) -> Imported:
    """Read folders: the installed package, `systems/data`, or a GPU's folder in it.

    Raises:
        InputError: if a path has no such tables, they are of several GPUs and `gpu` chooses none, pyarrow is missing,
            or a file lacks a column.
    """
    files = sorted({file for path in paths for file in _files(path)})
    systems = sorted({_system(file) for file in files} & set(SYSTEMS))
    chosen = [system for system in systems if gpu in ("", SYSTEMS[system])]
    if len(chosen) != 1:
        names = ", ".join(SYSTEMS[system] for system in systems) or "none that is known"
        raise InputError(f"{paths[0]}: tables of {names}; choose one by --gpu")
    return _read_system([file for file in files if _system(file) == chosen[0]], SYSTEMS[chosen[0]])


def _files(path: Path) -> list[Path]:
    found = [*path.rglob("*_perf.parquet")] if path.is_dir() else [path] if path.name.endswith("_perf.parquet") else []
    if not found:
        raise InputError(f"{path}: has no *_perf.parquet; allowed: a folder of aiconfigurator-core's systems/data")
    return found


def _system(file: Path) -> str:
    """The folder of a GPU above GPU/FAMILY/BACKEND/VERSION/FILE."""
    return file.parts[-5] if len(file.parts) > 4 else ""


def _read_system(files: Sequence[Path], gpu: str) -> Imported:
    device = Device.of(GPUS[gpu])
    tables, collectives = list[MeasuredTable](), list[CollectiveTable]()
    skipped = dict[str, int]()
    for file in files:
        name, backend, version = file.name.removesuffix("_perf.parquet"), file.parts[-3], file.parts[-2]
        if name in FAMILIES and backend in BACKENDS:
            for family in FAMILIES[name]:
                tables += _tables(file, family, f"{BACKENDS[backend]} {version}", skipped)
        elif name == "scale_matrix" and backend == "vllm":
            tables.append(_quantizations(file, f"{BACKENDS[backend]} {version}"))
        elif name in ("scale_matrix", "computescale"):
            skipped["quantizations of torch's own operators, or of SGLang, in 20 times what memory takes"] = -1
        elif name == "custom_allreduce" and backend in BACKENDS:
            collectives += _reduces(file, f"{BACKENDS[backend]} {version}")
        elif name == "nccl":
            collectives += _nccl(file)
        else:
            skipped[f"rows of {name}, for which there is no operator"] = -1
    kept, host = _without_host(_joined(tables))
    finished = [_finished(table, kept, device) for table in kept]
    return Imported(
        "NVIDIA AIConfigurator's database (aiconfigurator-core, PyPI, Apache-2.0)",
        tuple(finished),
        tuple(_newest(collectives)),
        gpu=gpu,
        covered=tuple(
            f"{table.name.op} in {table.name.dtype} of {table.name.source}: {len(table.seconds):,} points, "
            f"a point left out is predicted with a standard deviation of {table.error:.1%} ({table.kernels})"
            for table in finished
        ),
        estimated=("backward kernels, elementwise kernels and everything between nodes",),
        skipped=(*host, *(what if n < 0 else f"{n:,} rows: {what}" for what, n in sorted(skipped.items()))),
    )


def _columns(file: Path) -> Rows:
    """The columns of a file; numbers may be written as texts."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError("reading parquet needs pyarrow; pip install 'stepsim[import]'") from None
    try:
        table = pyarrow.parquet.read_table(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: is no parquet file: {error}") from None
    return {name: np.asarray(table[name].to_pylist(), dtype=object) for name in table.column_names}


def _number(rows: Rows, name: str, file: Path) -> NDArray[np.float64]:
    if name not in rows:
        raise InputError(f"{file}: has no column {name!r}; it has {', '.join(rows)}")
    try:
        return rows[name].astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}: column {name!r}: {error}") from None


def _tables(file: Path, family: Family, source: str, skipped: dict[str, int]) -> Iterator[MeasuredTable]:
    """One table for each dtype of a file."""
    rows = _columns(file)
    count = len(next(iter(rows.values())))
    if "step" in rows:
        rows["kv_len"] = _number(rows, "isl", file) + _number(rows, "step", file)
    seconds = _number(rows, "latency", file) * 1e-3
    kernels = rows.get("kernel_source", np.full(count, ""))
    kept = np.isfinite(seconds) & (seconds > 0)
    for column, (wanted, others) in family.where.items():
        if column in rows:
            _leave_out(kept, rows[column].astype(str) == wanted, others, skipped)
    for part, others in UNLIKE.items():
        _leave_out(kept, np.array([part not in str(kernel) for kernel in kernels]), others, skipped)
    shape = [np.full(count, float(s)) if isinstance(s, int) else _number(rows, s, file) for s in family.shape]
    shapes = np.column_stack(shape).astype(np.int64)
    if family.dtype not in rows:
        raise InputError(f"{file}: has no column {family.dtype!r}; it has {', '.join(rows)}")
    for given in sorted({str(dtype) for dtype in rows[family.dtype]}):
        own = kept & (rows[family.dtype].astype(str) == given)
        if given not in family.formats:
            skipped[f"{family.op} in {given}"] = skipped.get(f"{family.op} in {given}", 0) + int(own.sum())
        elif own.sum() >= FEWEST:
            dtype, form = family.formats[given]
            name = TableName(f"{family.op}:{form}" if form else family.op, dtype, source)
            called = ", ".join(sorted({str(kernel) for kernel in kernels[own]}))
            yield MeasuredTable(name, *_medians(shapes[own], seconds[own]), called)


def _leave_out(kept: NDArray[np.bool], fits: NDArray[np.bool], others: str, skipped: dict[str, int]) -> None:
    dropped = int((kept & ~fits).sum())
    if dropped and others:
        skipped[others] = skipped.get(others, 0) + dropped
    kept &= fits


def _medians(shapes: NDArray[np.int64], seconds: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Shapes in order, each once, with the median of its seconds."""
    unique, of = np.unique(shapes, axis=0, return_inverse=True)
    order = np.lexsort((seconds, of.ravel()))
    ends = np.searchsorted(of.ravel()[order], np.arange(len(unique) + 1))
    middles = (ends[:-1] + ends[1:] - 1) / 2
    low, high = np.floor(middles).astype(int), np.ceil(middles).astype(int)
    return unique, (seconds[order][low] + seconds[order][high]) / 2


def _joined(tables: Sequence[MeasuredTable]) -> list[MeasuredTable]:
    """One table for each name."""
    found: dict[TableName, MeasuredTable] = {}
    for table in tables:
        if (had := found.get(table.name)) is not None:
            shapes = np.concatenate((had.shapes, table.shapes))
            table = had._replace(shapes=shapes, seconds=np.concatenate((had.seconds, table.seconds)))
        found[table.name] = table
    return list(found.values())


def _quantizations(file: Path, source: str) -> MeasuredTable:
    """The cast of [m, k] numbers from 16 to 8 bits with a scale for each token: with given scales, and what it takes
    more to find them (computescale), by the bytes that are read and written."""
    given, more = _columns(file), _columns(file.with_name("computescale_perf.parquet"))

    def by_shape(rows: Rows) -> dict[tuple[int, int], float]:
        m, k, seconds = (_number(rows, name, file) for name in ("m", "k", "latency"))
        return {(int(a), int(b)): float(c) * 1e-3 for a, b, c in zip(m, k, seconds, strict=True)}

    scales = by_shape(more)
    found = {shape: seconds + scales[shape] for shape, seconds in by_shape(given).items() if shape in scales}
    shapes = np.array([[3 * m * k] for m, k in found], dtype=np.int64)
    name = TableName("cast:quantize", "bf16", source)
    return MeasuredTable(name, *_medians(shapes, np.array(list(found.values()))), str(more["kernel_source"][0]))


def _without_host(tables: Sequence[MeasuredTable]) -> tuple[list[MeasuredTable], list[str]]:
    """The tables that were not timed with their host's work, and sentences about the others."""
    least: dict[tuple[str, str], float] = {}
    for table in tables:
        key = table.name[:2]
        least[key] = min(least.get(key, np.inf), float(table.seconds.min()))
    kept, said = [], []
    for table in tables:
        quickest_s = float(table.seconds.min())
        if quickest_s <= OF_HOST * least[table.name[:2]]:
            kept.append(table)
            continue
        said.append(
            f"{table.name.op} in {table.name.dtype} of {table.name.source}: its quickest kernel takes "
            f"{1e6 * quickest_s:.0f} us and another engine's {1e6 * least[table.name[:2]]:.0f} us, so its times have "
            "the host's work"
        )
    return kept, said


def _finished(table: MeasuredTable, tables: Sequence[MeasuredTable], device: Device) -> MeasuredTable:
    """The table with its input's quantization, without the points that its lines tell, with its error."""
    op = table.name.op.partition(":")[0]
    runs = next((f.runs for families in FAMILIES.values() for f in families if f.op == op), 0)
    input_s = (0.0, 0.0)
    plain = [t for t in tables if t.name == TableName("gemm", "bf16", table.name.source)]
    if table.name.op in ("gemm", "gemm:fp8_block") and table.name.dtype in ("fp8", "nvfp4") and plain:
        input_s = quantizing(table.shapes, table.seconds, plain[0].seconds)
    few = thinned(table, runs)._replace(input_s=input_s)
    return few._replace(error=left_out_error(few, device))


def quantizing(
    shapes: NDArray[np.integer[Any]], seconds: NDArray[np.floating[Any]], plain: NDArray[np.floating[Any]]
) -> tuple[float, float]:
    """Estimate the quantization of a layer's [m, k] input: fixed seconds, and seconds for each element.

    The fixed part is the difference between the shortest of these matmuls and the shortest in 16 bits. For the other
    part, a line is fitted through the seconds of matmuls that differ only in n. Its value at n = 0 does not depend on
    the matmul. The result is the median of these values ÷ (m k) over large inputs; neither is below 0.
    """
    start_s = max(0.0, float(seconds.min() - plain.min()))
    _, m, n, k = shapes.T.astype(np.float64)
    rates = []
    for rows, depth in sorted({(a, b) for a, b in zip(m.tolist(), k.tolist(), strict=True) if a * b >= 2**26}):
        line = (m == rows) & (k == depth) & (n >= 512) & (n <= 16384)
        if line.sum() >= 6:
            _, at_zero = np.polyfit(n[line], seconds[line], 1, w=1 / seconds[line])
            rates.append((at_zero - start_s) / (rows * depth))
    return start_s, max(0.0, float(np.median(rates))) if rates else 0.0


def _reduces(file: Path, source: str) -> Iterator[CollectiveTable]:
    """An engine's own all-reduces, as CUDA graphs replay them; TensorRT-LLM's were measured in no other way. A folder
    of another engine may hold a copy of TensorRT-LLM's."""
    rows = _columns(file)
    kernels = [str(kernel).lower() for kernel in rows["kernel_source"]]
    engine = next(short for short, name in BACKENDS.items() if name == source.partition(" ")[0])
    graphs = np.array(["eager" not in kernel and kernel.startswith(engine) for kernel in kernels])
    size = _number(rows, "message_size", file) * np.array([ELEMENT_BYTES[str(d)] for d in rows["allreduce_dtype"]])
    yield from _collectives("all_reduce", file, rows, size, graphs, source)


def _nccl(file: Path) -> Iterator[CollectiveTable]:
    """NCCL's collectives of 16 bits. `bytes` count the whole buffer, as nccl-tests does."""
    rows = _columns(file)
    half = rows["nccl_dtype"].astype(str) == "half"
    size = _number(rows, "message_size", file) * 2.0
    for op in sorted({str(op) for op in rows["op_name"]}):
        own = half & (rows["op_name"].astype(str) == op)
        yield from _collectives({"alltoall": "all_to_all"}.get(op, op), file, rows, size, own, "")


def _collectives(
    op: str, file: Path, rows: Rows, size: NDArray[np.float64], kept: NDArray[np.bool], source: str
) -> Iterator[CollectiveTable]:
    ranks, seconds = _number(rows, "num_gpus", file), _number(rows, "latency", file) * 1e-3
    for count in sorted(set(ranks[kept].tolist())):
        own = kept & (ranks == count)
        sizes, each = _medians(size[own].astype(np.int64)[:, None], seconds[own])
        spread = np.full(len(each), 0.02)
        yield CollectiveTable(op, int(count), sizes[:, 0].astype(np.float64), each, spread, source=source)


def _newest(tables: Sequence[CollectiveTable]) -> Iterator[CollectiveTable]:
    """Of NCCL's releases the newest, which is read last."""
    found: dict[tuple[str, int, str], CollectiveTable] = {(t.op, t.ranks, t.source): t for t in tables}
    yield from found.values()
