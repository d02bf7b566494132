"""Make the shipped profiles: `python tools/build_profiles.py SYSTEMS --date DATE [--only PROFILE …]`.

SYSTEMS is the folder `systems/data` of the package aiconfigurator-core 0.12.0, which `calibrate.imports` reads. The
outputs are sim/presets/kernels/GPU.safetensors and sim/presets/profiles/NAME.json. `profile_coefficients.py` holds the
figures that are in no table.

A kernel file keeps its tables without a source: those of TensorRT-LLM 1.3.0rc20 and, on an A100, vLLM 0.14 and
TensorRT-LLM 1.0, of an earlier state of the same database. Of each engine's tables the newest release is added, but not
matmuls in 16 bits, which all engines leave to cuBLAS, nor TensorRT-LLM's where a table without a source has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from profile_coefficients import COEFFICIENTS, RELATIVES, source_of  # noqa: E402

from calibrate.imports import FORMATS, Imported  # noqa: E402
from calibrate.imports.aiconfigurator import SYSTEMS  # noqa: E402
from calibrate.imports.measured import MeasuredTable, write_kernels  # noqa: E402
from sim.core.files import write_json  # noqa: E402
from sim.prices.kernel_file import KernelFile, TableName  # noqa: E402
from sim.prices.profile import CollectiveTable, Profile  # noqa: E402
from sim.prices.profile_input import profile_from  # noqa: E402
from sim.prices.profiles import load_profile  # noqa: E402
from sim.prices.table_prices import release_of  # noqa: E402
from sim.validation.fused_rows import fused_kernel  # noqa: E402
from sim.validation.tables import read_table  # noqa: E402
from topology.presets import GPUS  # noqa: E402

SUSTAINED = ("all_reduce", "all_gather", "reduce_scatter")
SUSTAINED_BYTES = 32 << 20  # from here on; the published lines' latency does not fit small messages


def stored(name: str) -> list[MeasuredTable]:
    """Return the tables without a source of a shipped file."""
    file, out = KernelFile(name), []
    for table in sorted(file.tables):
        if not table.source:
            points, error = file.table(*table)
            out.append(MeasuredTable(table, points.shapes, points.seconds, error=error, input_s=file.input_s(*table)))
    return out


def added(imported: Imported, known: Sequence[TableName]) -> list[MeasuredTable]:
    """Return the tables that a file gets, of each engine the newest release."""
    newest: dict[tuple[str, ...], MeasuredTable] = {}
    for table in imported.tables:
        op, dtype, source = table.name
        had = source.startswith("TensorRT-LLM") and TableName(op, dtype) in known
        if (op, dtype) == ("gemm", "bf16") or had:
            continue
        key = op, dtype, source.partition(" ")[0]
        if key not in newest or release_of(source) > release_of(newest[key].name.source):
            newest[key] = table
    return list(newest.values())


def own_reduces(imported: Imported) -> list[CollectiveTable]:
    """Return engines' own all-reduces, of each engine every release."""
    return [table for table in imported.collectives if table.source]


def published_lines(table: Path) -> dict[str, tuple[float, float, float, float, float]]:
    """Return a table's fitted collectives by operation: bytes/s, hop latency (s), fixed latency (s), scale, offset."""
    keys = ("bytes_per_s", "latency_per_hop_s", "fixed_latency_s", "scale", "offset")
    return {
        r.data["op"]: tuple(float(r.data[k]) for k in keys)  # type: ignore[misc]
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
        out.append(table | {"bytes": list(size), "seconds": list(seconds)})
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


def profile(name: str, date: str, imported: Imported | None, fused: Path, lines: Path) -> dict[str, Any]:
    """Return a profile's file; a GPU without measurements takes a relative's kernels, scaled by the roofline.

    NCCL's collectives stay those that the profile has.
    """
    relative = RELATIVES.get(name, name)
    old: Profile = load_profile(name)
    source = f"{GPUS[name].source}; "
    if old.kernels and relative == name:
        source += source_of(name)
    elif old.kernels:
        source += f"kernels of {relative} scaled by the two data sheets ({source_of(relative)})"
    else:
        source += "nothing measured"
    found = old.to_json()
    found |= {"source": source, "date": date, "points": fused_points(fused, name)}
    found["coefficients"] = {k: {"value": v, "source": s} for k, (v, s) in COEFFICIENTS[name].items()}
    if imported is not None:
        kept = [t for t in old.collectives if not t.source]
        whole = Profile(name, source, collectives=(*kept, *own_reduces(imported)))
        found["collectives"] = whole.to_json()["collectives"]
    if name == "b200-sxm":
        found["collectives"] = sustained(found["collectives"], published_lines(lines))
    for table in found["collectives"]:
        table["spread"] = 0.02 if len(set(table["spread"])) == 1 else table["spread"]
    profile_from(json.loads(json.dumps(found)), name)
    return found


def main() -> None:
    """Write kernel files and profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path)
    parser.add_argument("--date", required=True, help="date of the profiles, YYYY-MM-DD")
    parser.add_argument("--fused", type=Path, default=ROOT / "scenarios" / "published" / "liger_kernels.json")
    parser.add_argument("--lines", type=Path, default=ROOT / "scenarios" / "published" / "b200_kernels.json")
    parser.add_argument("--only", nargs="+", choices=COEFFICIENTS, default=list(COEFFICIENTS), metavar="PROFILE")
    args = parser.parse_args()
    folders = {gpu: folder for folder, gpu in SYSTEMS.items()}
    for name in args.only:
        imported = None
        if name in folders:
            imported = FORMATS["aiconfigurator"]([args.systems / folders[name]], name)
            kernels = load_profile(name).kernels
            tables = stored(kernels)
            tables += added(imported, [table.name for table in tables])
            path = ROOT / "sim" / "presets" / "kernels" / f"{kernels}.safetensors"
            write_kernels(path, tables)
            print(f"{path.name}: {len(tables)} tables, {path.stat().st_size:,} bytes")
        data = profile(name, args.date, imported, args.fused, args.lines)
        write_json(ROOT / "sim" / "presets" / "profiles" / f"{name}.json", data)


if __name__ == "__main__":
    main()
