"""Makes the shipped profiles from measured kernels: `python tools/build_profiles.py FOLDER_OF_CSV --date DATE`.

The folder holds GPU_gemm.csv.gz, GPU_attention_prefill.csv.gz, GPU_attention_decode.csv.gz, GPU_moe.csv.gz and
GPU_nccl.csv.gz, with `seconds` as the last column. `aiconfigurator_tables.py` writes such files from NVIDIA
AIConfigurator's performance database. The outputs are sim/presets/kernels/GPU.safetensors and
sim/presets/profiles/NAME.json. `profile_coefficients.py` holds the figures that are in no table.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from profile_coefficients import COEFFICIENTS, RELATIVES, source_of  # noqa: E402

from sim.core.files import write_json  # noqa: E402
from sim.prices.kernel_file import TYPES  # noqa: E402
from sim.prices.kernel_shapes import Shapes  # noqa: E402
from sim.prices.kernel_tables import make_table  # noqa: E402
from sim.prices.profile import PointTable  # noqa: E402
from sim.prices.profile_input import profile_from  # noqa: E402
from sim.prices.roofline import Device  # noqa: E402
from sim.validation.fused_rows import fused_kernel  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402
from topology.collective_kinds import bus_factor  # noqa: E402
from topology.presets import GPUS  # noqa: E402
from topology.spec import GpuSpec  # noqa: E402

MEASURED = {"a100": "a100-sxm", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "gb200": "gb200"}
MEASURED |= {"b300": "b300-sxm", "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000-server"}
DTYPES = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16"}
QUANTIZED = ("fp8", "nvfp4")  # measured with the quantization of a 16-bit input: sim.prices.kernel_file
SUSTAINED = ("all_reduce", "all_gather", "reduce_scatter")
SUSTAINED_BYTES = 32 << 20  # from here on; the published lines' latency does not fit small messages
HOST_SHARE = 0.25  # of a GPU's PCIe bandwidth: what groups with a direct path reach at least
COLLECTIVES = {"alltoall": "all_to_all"}
Columns = dict[str, np.ndarray]


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of a gzipped CSV file."""
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def by_dtype(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Group rows by dtype, under this project's names."""
    out: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        out.setdefault(DTYPES.get(row["dtype"], row["dtype"]), []).append(row)
    return out


def ints(rows: list[dict[str, str]], *keys: str) -> np.ndarray:
    """Return the columns `keys` as integers [rows, keys]."""
    return np.array([[int(r[k]) for k in keys] for r in rows], dtype=np.int32)


def gemm_shapes(rows: list[dict[str, str]]) -> np.ndarray:
    """Return (batch, m, n, k) of each row."""
    return np.column_stack((np.ones(len(rows), dtype=np.int32), ints(rows, "m", "n", "k")))


def prefill_shapes(rows: list[dict[str, str]]) -> np.ndarray:
    """Return the shapes of causal attention, as `sim.core.program.Compute` has them."""
    keys = ("batch", "heads", "kv_heads", "seq_len", "seq_len", "head_dim", "head_dim")
    return np.column_stack((ints(rows, *keys), np.ones(len(rows), dtype=np.int32)))


def decode_shapes(rows: list[dict[str, str]]) -> np.ndarray:
    """Return (batch, heads, KV heads, cached tokens, head size) of each row."""
    return ints(rows, "batch", "heads", "kv_heads", "kv_len", "head_dim")


def moe_shapes(rows: list[dict[str, str]]) -> np.ndarray:
    """Return (tokens, hidden, ffn, top_k, experts, tp, ep) of each row."""
    return ints(rows, "tokens", "hidden", "ffn", "top_k", "experts", "tp", "ep")


SHAPES = {
    "gemm": ("gemm", gemm_shapes),
    "attention_prefill": ("attention_forward", prefill_shapes),
    "attention_decode": ("attention_decode", decode_shapes),
    "moe": ("moe_layer", moe_shapes),
}


def columns(folder: Path, short: str) -> Columns:
    """Return all measured kernels of a GPU as columns of a file."""
    gpu = GPUS[MEASURED[short]]
    device = Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count)
    out: Columns = {}
    for file, (op, shape) in SHAPES.items():
        for dtype, rows in by_dtype(read(folder / f"{short}_{file}.csv.gz")).items():
            if file == "moe":  # the most even measured distribution of tokens over experts
                flattest = min({r["distribution"] for r in rows})
                even = flattest == "balanced"  # else the timed rank of several had more tokens than its share
                rows = [r for r in rows if r["distribution"] == flattest and (even or r["ep"] == "1")]
            shapes = shape(rows)
            seconds = np.array([float(r["seconds"]) for r in rows], dtype=np.float32)
            out[f"{op}|{dtype}|shapes"], out[f"{op}|{dtype}|seconds"] = shapes, seconds
            input_s = np.zeros(2)
            if file == "gemm" and dtype in QUANTIZED:
                input_s = out[f"{op}|{dtype}|input_s"] = quantizing(shapes, seconds, out["gemm|bf16|seconds"])
            out[f"{op}|{dtype}|error"] = np.float64(left_out_error(op, dtype, shapes, seconds, device, input_s))
    return out


def quantizing(shapes: np.ndarray, seconds: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """Estimate the quantization of a layer's [m, k] input: fixed seconds, and seconds for each element.

    The fixed part is the difference between the shortest of these matmuls and the shortest in 16 bits. For the other
    part, a line is fitted through the seconds of matmuls that differ only in n. Its value at n = 0 does not depend on
    the matmul. The result is the median of these values ÷ (m k) over large inputs.
    """
    start_s = float(seconds.min() - plain.min())
    _, m, n, k = shapes.T.astype(np.float64)
    rates = []
    for rows, depth in sorted({(a, b) for a, b in zip(m.tolist(), k.tolist(), strict=True) if a * b >= 2**26}):
        line = (m == rows) & (k == depth) & (n >= 512) & (n <= 16384)
        if line.sum() >= 6:
            _, at_zero = np.polyfit(n[line], seconds[line], 1, w=1 / seconds[line])
            rates.append((at_zero - start_s) / (rows * depth))
    return np.array([start_s, np.median(rates)])


def left_out_error(
    op: str, dtype: str, shapes: np.ndarray, seconds: np.ndarray, device: Device, input_s: np.ndarray
) -> float:
    """Compute `Surface.leave_one_out_error`, so that no simulation needs to compute it again."""
    if op not in ("gemm", "attention_forward") or dtype not in device.peak_flops_per_s:
        return 0.1
    count = len(seconds)
    points = PointTable(
        op, dtype, shapes.astype(np.int64), seconds.astype(np.float64), np.zeros(count), np.ones(count, dtype=np.int64)
    )
    start_s, element_s = input_s.tolist()
    (surface,) = make_table(op, dtype, [points], device, True, input_s=(start_s, element_s)).surfaces.values()
    return round(surface.leave_one_out_error(), 4)


def save(path: Path, data: Columns) -> None:
    """Write a file that `sim.prices.kernel_file` reads."""
    columns: Columns = {}
    for key, array in data.items():
        if key.endswith("|shapes"):
            shapes, of = Shapes.of(array), key.removesuffix("shapes")
            columns[f"{of}sizes"] = np.concatenate(shapes.sizes).astype(np.int32)
            columns[f"{of}counts"] = np.array([len(sizes) for sizes in shapes.sizes], dtype=np.int32)
            columns[f"{of}codes"] = shapes.codes.astype(np.uint8)
        else:
            columns[key] = np.atleast_1d(array)
    names = {np.dtype(kind): name for name, kind in TYPES.items()}
    header, end = {}, 0
    for key, array in sorted(columns.items()):
        start, end = end, end + array.nbytes
        header[key] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the columns to 8 bytes where their sizes allow it
    parts = [np.ascontiguousarray(array).tobytes() for _, array in sorted(columns.items())]
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def collectives(folder: Path, short: str) -> list[dict[str, object]]:
    """Return 16-bit NCCL collectives within a node by operation and ranks; over PCIe only direct groups."""
    groups: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in read(folder / f"{short}_nccl.csv.gz"):
        if row["dtype"] == "half":
            key = (COLLECTIVES.get(row["op"], row["op"]), int(row["ranks"]))
            groups.setdefault(key, []).append((int(row["bytes"]), float(row["seconds"])))
    out = []
    for (op, ranks), points in sorted(groups.items()):
        size, seconds = zip(*sorted(points), strict=True)
        out.append({"op": op, "ranks": ranks, "bytes": size, "seconds": seconds, "spread": 0.02})
    return [each for each in out if _direct(out, int(str(each["ranks"])), GPUS[MEASURED[short]])]


def _direct(tables: list[dict[str, object]], ranks: int, gpu: GpuSpec) -> bool:
    """Return whether groups of `ranks` had a direct path on the measured host.

    They had if every operation reached a quarter of a GPU's PCIe bandwidth with the largest message. Otherwise the
    figures are special to that host, and no other host should be priced by them.
    """
    if gpu.nvlink:
        return True
    of_size = [t for t in tables if t["ranks"] == ranks]
    bus = (t["bytes"][-1] / t["seconds"][-1] * bus_factor(str(t["op"]), ranks) for t in of_size)  # type: ignore[index]
    return min(bus) >= HOST_SHARE * gpu.host_bandwidth_bytes_per_s


def published_lines(table: Path) -> dict[str, tuple[float, float, float, float, float]]:
    """Return a table's fitted collectives by operation: bytes/s, hop latency (s), fixed latency (s), scale, offset."""
    keys = ("bytes_per_s", "latency_per_hop_s", "fixed_latency_s", "scale", "offset")
    return {
        r.data["op"]: tuple(float(r.data[k]) for k in keys)
        for r in read_table(table).rows
        if r.data.get("fit") and r.data["op"] in SUSTAINED
    }


def sustained(
    measured: list[dict[str, object]], lines: dict[str, tuple[float, float, float, float, float]]
) -> list[dict[str, object]]:
    """Replace large messages of collectives, up to 16 GiB, by the published lines:

    seconds = bytes x scale x (1 + offset / ranks) / (bytes/s) + latency x scale x (ranks + offset) + fixed latency.
    """
    out = []
    for table in measured:
        points = dict(zip(table["bytes"], table["seconds"], strict=True))  # type: ignore[call-overload]
        if table["op"] in lines:
            speed, hop_s, fixed_s, scale, offset = lines[str(table["op"])]
            ranks = int(str(table["ranks"]))
            for size in (SUSTAINED_BYTES << i for i in range(10)):
                moved = size * scale * (1 + offset / ranks) / speed
                points[size] = float(f"{moved + hop_s * scale * (ranks + offset) + fixed_s:.4g}")
        size, seconds = zip(*sorted(points.items()), strict=True)
        out.append({**table, "bytes": size, "seconds": seconds})
    return out


def fused_points(table: Path, gpu: str) -> list[dict[str, object]]:
    """Return every second row of Liger-Kernel's measurements as points of the operators in `validation.fused_rows`."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    rows = [r for r in read_table(table).rows if r.measured.get("seconds") and r.scenario["calibration"] == gpu]
    for row in rows[::2]:
        (item,) = fused_kernel(str(row.data["op"]), row.data)
        groups.setdefault((f"elementwise:{item.kernel}", item.dtype), []).append(
            (int(item.bytes), row.measured["seconds"])
        )
    out = []
    for (op, dtype), points in sorted(groups.items()):
        sizes, seconds = zip(*sorted(dict(points).items()), strict=True)
        out.append(
            {"op": op, "dtype": dtype, "shape": [[n] for n in sizes], "seconds": seconds, "spread": 0.03, "samples": 1}
        )
    return out


def profile(
    name: str, date: str, points: list[dict[str, object]], measured: list[dict[str, object]]
) -> dict[str, object]:
    """Return a profile's file; a GPU without measurements takes a relative's kernels, scaled by the roofline."""
    relative = RELATIVES.get(name, name)
    kernels = next((short for short, gpu in MEASURED.items() if gpu == relative), "")
    source = f"{GPUS[name].source}; "
    if kernels and relative == name:
        source += source_of(name)
    elif kernels:
        source += f"kernels of {relative} scaled by the two data sheets ({source_of(relative)})"
    else:
        source += "nothing measured"
    data = {
        "format": "profile/1",
        "name": name,
        "source": source,
        "date": date,
        "reference": relative,
        "hardware": {"device": "cpu" if GPUS[name].chip.is_host else "cuda", "gpu": name},
        "software": {},
        "settings": {},
        "coefficients": {k: {"value": v, "source": s} for k, (v, s) in COEFFICIENTS[name].items()},
        "points": points,
        "blocks": [],
        "collectives": measured if relative == name else [],
        "kernels": kernels,
    }
    profile_from(json.loads(json.dumps(data)), name)
    return data


def main() -> None:
    """Write kernel files and profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--date", required=True, help="date of the profiles, YYYY-MM-DD")
    parser.add_argument("--fused", type=Path, default=ROOT / "scenarios" / "published" / "liger_kernels.json")
    parser.add_argument("--lines", type=Path, default=ROOT / "scenarios" / "published" / "b200_kernels.json")
    parser.add_argument("--only", nargs="+", choices=COEFFICIENTS, default=list(COEFFICIENTS), metavar="PROFILE")
    parser.add_argument("--coefficients-only", action="store_true", help="do not write kernel files")
    args = parser.parse_args()
    for short, gpu in MEASURED.items():
        if gpu in args.only and not args.coefficients_only:
            save(ROOT / "sim" / "presets" / "kernels" / f"{short}.safetensors", columns(args.folder, short))
    for name in args.only:
        short = next((s for s, gpu in MEASURED.items() if gpu == name), "")
        measured = collectives(args.folder, short) if short else []
        if name == "b200-sxm":
            measured = sustained(measured, published_lines(args.lines))
        write_json(
            ROOT / "sim" / "presets" / "profiles" / f"{name}.json",
            profile(name, args.date, fused_points(args.fused, name), measured),
        )


if __name__ == "__main__":
    main()
