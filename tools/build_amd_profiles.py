"""Make the shipped profiles of AMD's GPUs: `python tools/build_amd_profiles.py AITER RCCL --date DATE`.

AITER: a folder that `calibrate.imports.aiter` reads; RCCL: a file of `calibrate.imports.nccl_tests`. The outputs are
sim/presets/kernels/GPU.safetensors and sim/presets/profiles/GPU.json. `profile_coefficients.py` holds the figures that
are in no table.

What nobody measured on one of these GPUs is that of another of them, scaled by the ratio of the two rooflines, and as
uncertain as any other chip's kernels: an MI300X's matmuls in 16 bits and its attention are an MI355X's. An MI325X has
an MI300X's kernels, whose multiprocessors it has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from profile_coefficients import AMD_SOURCES, COEFFICIENTS  # noqa: E402

from calibrate.imports import aiter, nccl_tests  # noqa: E402
from calibrate.imports.aiter import DISPATCH_S, SOURCE  # noqa: E402
from calibrate.imports.measured import MeasuredTable, left_out_error, thinned, write_kernels  # noqa: E402
from sim.core.files import write_json  # noqa: E402
from sim.core.operator_kinds import ATTENTION_DECODE, MOE_LAYER  # noqa: E402
from sim.prices.coefficients import Coefficient, coefficients_from  # noqa: E402
from sim.prices.kernel_file import TableName  # noqa: E402
from sim.prices.kernel_tables import bounds  # noqa: E402
from sim.prices.profile import CollectiveTable, Profile  # noqa: E402
from sim.prices.profile_input import profile_from  # noqa: E402
from sim.prices.reference_gpu import OTHER_CHIP_UNCERTAINTY  # noqa: E402
from sim.prices.roofline import Device  # noqa: E402
from topology.presets import GPUS  # noqa: E402

MI300X, MI325X, MI355X = "mi300x", "mi325x", "mi355x"
HEADS, LATENT = 32, 576  # of the latent attention below: query heads, and the width of what is cached for a token
# Latent attention of single tokens on an MI355X, 32 heads in bf16, in us by sequences and cached tokens (ROCm/aiter
# pull request 5456: the kernel and the sum of its splits).
LATENT_US = {
    (16, 4096): 34.78,
    (32, 4096): 47.26,
    (64, 4096): 75.76,
    (128, 4096): 130.5,
    (16, 16384): 73.48,
    (32, 16384): 126.2,
    (64, 16384): 230.7,
    (128, 16384): 428.8,
    (16, 65536): 229.4,
    (64, 65536): 844.9,
    (128, 65536): 1637.8,
    (128, 131072): 3246.2,
}
# Over 21 cached tokens by sequences (ROCm/aiter pull request 2039, assembly): its latency, whatever the heads.
SHORT = 21
SHORT_US = {
    MI300X: {1: 15.49, 5: 15.55, 16: 16.45, 32: 17.41, 64: 18.88, 128: 20.61},
    MI355X: {1: 12.11, 5: 12.94, 16: 13.59, 32: 14.82, 64: 15.12, 128: 16.19},
}
KERNELS_OF_LATENT = 2  # attention, and the sum of its splits
# Engines' own all-reduces: ranks, engine, and us by KiB. Four MI300X: sgl-project/sglang pull request 6619
# ("baseline"); eight MI355X: vllm-project/vllm pull request 39080 (before its change).
OWN_REDUCES: Mapping[str, tuple[int, str, Mapping[int, float]]] = {
    MI300X: (
        4,
        "SGLang 0.4.7",
        {2: 7.18, 16: 7.26, 32: 7.58, 256: 14.39, 512: 14.65, 1024: 22.91, 2048: 36.64, 4096: 63.86, 8192: 118.31},
    ),
    MI355X: (8, "vLLM 0.19.0", {24: 6.3, 48: 6.7, 96: 7.6, 192: 10.0, 384: 13.1, 768: 16.0, 1536: 24.2}),
}
SPREAD = 0.05  # of figures of one run, read off a page
LENT = (TableName("gemm", "bf16", SOURCE), TableName("gemm", "fp8", SOURCE), TableName(MOE_LAYER, "fp8", SOURCE))
"""The tables of an MI355X that an MI300X takes: it has none of its own."""


def kernels(folder: Path) -> dict[str, list[MeasuredTable]]:
    """Return the tables of an MI300X and of an MI355X."""
    measured = {gpu: list(aiter.read([folder], gpu).tables) for gpu in (MI300X, MI355X)}
    own = {table.name for table in measured[MI300X]}
    lent = [scaled(table) for table in measured[MI355X] if table.name in LENT and table.name not in own]
    out = {}
    for gpu, tables in measured.items():
        few = [thinned(table, 0 if table.name.op.startswith(MOE_LAYER) else 1) for table in tables]
        out[gpu] = [table._replace(error=left_out_error(table, Device.of(GPUS[gpu]))) for table in few]
    out[MI300X] += [thinned(table, 0 if table.name.op.startswith(MOE_LAYER) else 1) for table in lent]
    for gpu, tables in out.items():
        tables.append(latent_attention(gpu))
    return out


def scaled(table: MeasuredTable) -> MeasuredTable:
    """Return a table of an MI355X as it would be on an MI300X: with the same efficiency at each shape."""
    kind, columns, least_s = table.name.op, list(table.shapes.T.astype(np.float64)), table.seconds.min()
    there, here = (bounds(kind, columns, table.name.dtype, Device.of(GPUS[gpu])) for gpu in (MI355X, MI300X))
    seconds = table.seconds * (here + least_s) / (there + least_s)
    return table._replace(seconds=seconds, kernels=f"{table.kernels} on {MI355X}, scaled", error=OTHER_CHIP_UNCERTAINTY)


def latent_attention(gpu: str) -> MeasuredTable:
    """Return the decode kernels of latent attention: what an MI355X takes above its latency, an MI300X takes longer, by
    the ratio of their bandwidths."""
    own, other = SHORT_US[gpu], SHORT_US[MI355X]
    longer = GPUS[MI355X].memory_bandwidth_bytes_per_s / GPUS[gpu].memory_bandwidth_bytes_per_s
    us = {(batch, SHORT): each for batch, each in own.items()}
    us |= {key: own[key[0]] + longer * (each - other[key[0]]) for key, each in LATENT_US.items()}
    shapes = np.array([(batch, HEADS, 1, cached, LATENT) for batch, cached in us])
    seconds = np.array(list(us.values())) * 1e-6 + KERNELS_OF_LATENT * DISPATCH_S
    said = "AITER mla_decode_fwd" + ("" if gpu == MI355X else f" on {MI355X}, scaled above its latency")
    name, error = (
        TableName(f"{ATTENTION_DECODE}:latent", "bf16", SOURCE),
        SPREAD if gpu == MI355X else OTHER_CHIP_UNCERTAINTY,
    )
    return MeasuredTable(name, shapes, seconds, said, error=error)


def collectives(gpu: str, rccl: Path) -> tuple[CollectiveTable, ...]:
    """Return the collectives of a GPU: RCCL's, and an engine's own.

    An MI325X has an MI300X's links, and only its large messages were measured: it has an MI300X's smaller ones.
    """
    found = () if gpu == MI355X else nccl_tests.read([rccl], gpu).collectives
    if gpu == MI325X:
        found = tuple(
            joined(*tables) for tables in zip(nccl_tests.read([rccl], MI300X).collectives, found, strict=True)
        )
    ranks, source, us = OWN_REDUCES[MI355X if gpu == MI355X else MI300X]
    size, seconds = np.array(list(us)) * 1024.0, np.array(list(us.values())) * 1e-6
    return *found, CollectiveTable("all_reduce", ranks, size, seconds, np.full(len(size), SPREAD), source=source)


def joined(small: CollectiveTable, large: CollectiveTable) -> CollectiveTable:
    """Return a collective's sizes of one table below those of another."""
    below = small.bytes < large.bytes[0]
    columns = {
        name: np.concatenate((getattr(small, name)[below], getattr(large, name)))
        for name in ("bytes", "seconds", "spread")
    }
    return replace(large, **columns)


def profile(gpu: str, date: str, rccl: Path) -> dict[str, Any]:
    """Return a profile's file."""
    coefficients = coefficients_from({name: Coefficient(*each) for name, each in COEFFICIENTS[gpu].items()})
    like = MI300X if gpu == MI325X else gpu
    hardware = {"device": "cuda", "gpu": gpu}
    source = f"{GPUS[gpu].source}; {AMD_SOURCES[gpu]}"
    found = Profile(gpu, source, date, like, hardware, coefficients=coefficients, kernels=like)
    data = replace(found, collectives=collectives(gpu, rccl)).to_json()
    profile_from(json.loads(json.dumps(data)), gpu)
    return data


def main() -> None:
    """Write kernel files and profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("aiter", type=Path)
    parser.add_argument("rccl", type=Path)
    parser.add_argument("--date", required=True, help="date of the profiles, YYYY-MM-DD")
    args = parser.parse_args()
    for gpu, tables in kernels(args.aiter).items():
        path = ROOT / "sim" / "presets" / "kernels" / f"{gpu}.safetensors"
        write_kernels(path, tables)
        print(f"{path.name}: {len(tables)} tables, {path.stat().st_size:,} bytes")
    for gpu in (MI300X, MI325X, MI355X):
        write_json(ROOT / "sim" / "presets" / "profiles" / f"{gpu}.json", profile(gpu, args.date, args.rccl))


if __name__ == "__main__":
    main()
