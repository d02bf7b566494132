"""Write the tables that `build_profiles.py` reads out of NVIDIA AIConfigurator's database.

`python tools/aiconfigurator_tables.py SYSTEMS OUT [--only GPU …]`; needs pandas and pyarrow, which nothing else does.

SYSTEMS is the folder `systems` of the package aiconfigurator_core (PyPI, Apache-2.0). Of the engines there one is
taken for all GPUs: TensorRT-LLM 1.3.0rc20, the newest of its versions with all kinds of kernels, for it is the engine
of the tables of H100, H200, B200 and GB200, so that GPUs compare. Collectives are those of the newest NCCL of a GPU.

Kept: matmuls in 16 bits, fp8 and nvfp4, of every n and k and the `ROWS` that the other GPUs' tables have; causal
attention in 16 bits over the whole context; whole layers of experts in 16 bits and fp8, whose tokens are balanced;
all collectives. `bytes` of a collective are those of the whole buffer. Of a shape measured twice the median counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ENGINE = "trtllm/1.3.0rc20"
SYSTEMS = {  # by the names of the files: the folder, and its newest NCCL
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
    """A table of the database, sizes as numbers and `seconds` for its milliseconds."""
    import pandas as pd  # type: ignore[import-untyped]

    found = pd.read_parquet(path)
    texts = ("framework", "version", "device", "op_name", "kernel_source", "distribution")
    for name in found.columns:
        if name not in texts and not name.endswith("dtype"):
            found[name] = pd.to_numeric(found[name])
    found["seconds"] = found["latency"] * 1e-3
    return found


def gemm(found: Table) -> Table:
    kept = found[found.gemm_dtype.isin(["bfloat16", "fp8", "nvfp4"]) & found.m.isin(ROWS)]
    return kept.rename(columns={"gemm_dtype": "dtype"})[["dtype", "m", "n", "k", "seconds"]]


def attention(found: Table, length: str) -> Table:
    """Without a window, queries and cache in 16 bits; `length`: what the sum of `isl` and `step` is called."""
    wanted = (found.window_size == 0) & (found.attn_dtype == "bfloat16") & (found.kv_cache_dtype == "bfloat16")
    names = {"attn_dtype": "dtype", "batch_size": "batch", "num_heads": "heads", "num_key_value_heads": "kv_heads"}
    kept = found[wanted].assign(**{length: found.isl + found.step}).rename(columns=names)
    return kept[["dtype", "batch", length, "heads", "kv_heads", "head_dim", "seconds"]]


def moe(found: Table) -> Table:
    kept = found[found.moe_dtype.isin(["bfloat16", "fp8"]) & (found.distribution == "balanced")]
    names = {"moe_dtype": "dtype", "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "ffn"}
    names |= {"topk": "top_k", "num_experts": "experts", "moe_tp_size": "tp", "moe_ep_size": "ep"}
    columns = ["dtype", "distribution", "tokens", "hidden", "ffn", "top_k", "experts", "tp", "ep", "seconds"]
    return kept.rename(columns=names)[columns]


def nccl(found: Table) -> Table:
    whole = found.message_size * found.nccl_dtype.map(SIZES)
    names = {"op_name": "op", "nccl_dtype": "dtype", "num_gpus": "ranks"}
    return found.assign(bytes=whole).rename(columns=names)[["op", "dtype", "ranks", "bytes", "seconds"]]


def write(table: Table, path: Path) -> None:
    """Medians of equal shapes, in order, six digits."""
    shape = [name for name in table.columns if name != "seconds"]
    medians = table.groupby(shape, sort=True)["seconds"].median().reset_index()
    medians["seconds"] = medians["seconds"].map("{:.6g}".format)
    medians.to_csv(path, index=False)
    print(f"{path.name}: {len(medians)} points")


def main() -> None:
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
