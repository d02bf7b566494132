"""torchtitan's optimizer and replicas without shards as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
"""


@pytest.mark.parametrize(
    ("line", "kernels"),
    [
        ('implementation = "foreach"', "foreach"),
        ('implementation = "fused"', None),
        ("fused = false", "foreach"),  # of 2024
        ("fused = true", None),
    ],
)
def test_the_kernels_of_adamw_are_read(tmp_path: Path, line: str, kernels: str | None) -> None:
    text = TITAN.replace("[parallelism]", f"[optimizer]\n{line}\n[parallelism]")
    data, said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert data["training"].get("adamw_kernels") == kernels
    assert "optimizer" not in said


@pytest.mark.parametrize(("replicate", "bucket"), [(1, None), (8, "100MiB")])
def test_replicas_without_shards_have_torchtitan_s_buckets(tmp_path: Path, replicate: int, bucket: str | None) -> None:
    """`apply_ddp` of models/llama3/infra/parallelize.py."""
    degrees = f"data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = {replicate}"
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[parallelism]\n{degrees}\n'
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100")
    assert data["parallelism"].get("bucket_bytes") == bucket
