"""Writes the tables that `build_profiles.py` reads, from NVIDIA AIConfigurator's database.

    python tools/aiconfigurator_tables.py SYSTEMS OUT [--only GPU …]

It needs pandas and pyarrow. SYSTEMS is the folder `systems` of the package aiconfigurator_core (PyPI, Apache-2.0). All
GPUs take the same engine, so that they can be compared: TensorRT-LLM 1.3.0rc20, the engine of the tables of H100, H200,
B200 and GB200, and the newest of its versions with all kinds of kernels. Collectives are those of the newest NCCL of a
GPU.

The tables have matmuls in 16 bits, fp8 and nvfp4, with every n and k and the `ROWS` of the other GPUs' tables; causal
attention in 16 bits over the whole context; whole layers of experts in 16 bits and fp8 with balanced tokens; and all
collectives. `bytes` of a collective are those of the whole buffer. If a shape was measured twice, the median counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ENGINE = "trtllm/1.3.0rc20"
SYSTEMS = {  # for each GPU's file name the folder, and its newest NCCL
    "l40s": ("l40s", "2.27.3"),
    "rtx_pro_6000_server": ("rtx_pro_6000_server", "2.29.2"),
    "b300": ("b300_sxm", "2.29.2"),
    "gb300": ("gb300", "2.29.2"),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 4352)
ROWS += (8192, 16384, 32768)
SIZES = {"half": 2, "int8": 1}  # bytes of one element
Table = Any  # pandas.DataFrame


def read(path: Path) -> Table:
    """Read a table of the database, with sizes as numbers and `seconds` instead of its milliseconds."""
    import pandas as pd  # type: ignore[import-untyped]

    found = pd.read_parquet(path)
    texts = ("framework", "version", "device", "op_name", "kernel_source", "distribution")
    for name in found.columns:
        if name not in texts and not name.endswith("dtype"):
            found[name] = pd.to_numeric(found[name])
    found["seconds"] = found["latency"] * 1e-3
    return found


def gemm(found: Table) -> Table:
    """Select matmuls in 16 bits, fp8 and nvfp4 with the `ROWS` of other GPUs' tables."""
    kept = found[found.gemm_dtype.isin(["bfloat16", "fp8", "nvfp4"]) & found.m.isin(ROWS)]
    return kept.rename(columns={"gemm_dtype": "dtype"})[["dtype", "m", "n", "k", "seconds"]]


def attention(found: Table, length: str) -> Table:
    """Select attention without a window, with queries and cache in 16 bits; `length` names `isl` + `step`."""
    wanted = (found.window_size == 0) & (found.attn_dtype == "bfloat16") & (found.kv_cache_dtype == "bfloat16")
    names = {"attn_dtype": "dtype", "batch_size": "batch", "num_heads": "heads", "num_key_value_heads": "kv_heads"}
    kept = found[wanted].assign(**{length: found.isl + found.step}).rename(columns=names)
    return kept[["dtype", "batch", length, "heads", "kv_heads", "head_dim", "seconds"]]


def moe(found: Table) -> Table:
    """Select layers of experts in 16 bits and fp8 with balanced tokens."""
    kept = found[found.moe_dtype.isin(["bfloat16", "fp8"]) & (found.distribution == "balanced")]
    names = {"moe_dtype": "dtype", "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "ffn"}
    names |= {"topk": "top_k", "num_experts": "experts", "moe_tp_size": "tp", "moe_ep_size": "ep"}
    columns = ["dtype", "distribution", "tokens", "hidden", "ffn", "top_k", "experts", "tp", "ep", "seconds"]
    return kept.rename(columns=names)[columns]


def nccl(found: Table) -> Table:
    """Convert sizes of collectives from elements to bytes of the whole buffer."""
    whole = found.message_size * found.nccl_dtype.map(SIZES)
    names = {"op_name": "op", "nccl_dtype": "dtype", "num_gpus": "ranks"}
    return found.assign(bytes=whole).rename(columns=names)[["op", "dtype", "ranks", "bytes", "seconds"]]


def write(table: Table, path: Path) -> None:
    """Write the medians of equal shapes, sorted, with six digits."""
    shape = [name for name in table.columns if name != "seconds"]
    medians = table.groupby(shape, sort=True)["seconds"].median().reset_index()
    medians["seconds"] = medians["seconds"].map("{:.6g}".format)
    medians.to_csv(path, index=False)
    print(f"{path.name}: {len(medians)} points")


def main() -> None:
    """Write the tables of the chosen GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        folder, version = SYSTEMS[name]
        data = args.systems / "data" / folder
        tables = {
            "gemm": gemm(read(data / "gemm" / ENGINE / "gemm_perf.parquet")),
            "attention_prefill": attention(
                read(data / "attention" / ENGINE / "context_attention_perf.parquet"), "seq_len"
            ),
            "attention_decode": attention(
                read(data / "attention" / ENGINE / "generation_attention_perf.parquet"), "kv_len"
            ),
            "moe": moe(read(data / "moe" / ENGINE / "moe_perf.parquet")),
            "nccl": nccl(read(data / "comm" / "nccl" / version / "nccl_perf.parquet")),
        }
        for kind, table in tables.items():
            write(table, args.out / f"{name}_{kind}.csv.gz")


if __name__ == "__main__":
    main()
