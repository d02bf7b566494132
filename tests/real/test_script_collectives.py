"""Scripts really run by two gloo ranks: their collectives are those that capture under a fake group foresees."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sim.inputs.script_program import What, read_rank_program
from tests.processes import HANGS_AFTER_S

WORKER = Path(__file__).with_name("counting_worker.py")
SCRIPT = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
MICRO_BATCHES, begin = 1, lambda micro_batch: None

class Block(nn.Module):
    def __init__(self, h=128):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

model = nn.Sequential(nn.Embedding(100, 128), *[Block() for _ in range(3)], nn.Linear(128, 100))
{parallel}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    for micro_batch in range(MICRO_BATCHES):
        begin(micro_batch)
        ids = torch.randint(0, 100, (8, 32))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
dist.destroy_process_group()
"""
HSDP = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
for layer in model[1:4]: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
MICRO_BATCHES = 3
"""
HSDP_KINDS = ("reduce_scatter", "all_reduce")
PARALLEL = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)",
    "ddp_views": "model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)",
    "fsdp2": """
from torch.distributed.fsdp import fully_shard
for layer in model[1:4]: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
""",
    "hsdp": HSDP,
    "hsdp_once": HSDP + "begin = lambda micro_batch: model.set_requires_all_reduce(micro_batch == MICRO_BATCHES - 1)",
    "tensor_parallel": """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
for layer in model[1:4]: parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
""",
    "sequence_parallel": """
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
for layer in model[1:4]: parallelize_module(layer, mesh, plan)
split = {"input_layouts": Replicate(), "output_layouts": Shard(1), "use_local_output": False}
parallelize_module(model[0], mesh, RowwiseParallel(**split))
parallelize_module(model[4], mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
""",
}


def really(folder: Path, script: Path, world_size: int) -> tuple[Counter[tuple[str, int]], int]:
    """Collectives of a later step of rank 0 of so many, and its operators of DTensors."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        more = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        environment = os.environ | {"MASTER_ADDR": "localhost"} | {k: str(v) for k, v in more.items()}
        command = [sys.executable, str(WORKER), str(folder / f"{rank}.json"), str(script)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=environment, text=True, **quiet))  # type: ignore[call-overload]
    for process in ranks:
        _, said = process.communicate(timeout=HANGS_AFTER_S)
        assert process.returncode == 0, said[-2000:]
    counted = json.loads((folder / "0.json").read_text())
    return Counter((kind, size) for kind, size in counted["collectives"]), counted["dtensor_operators"]


@pytest.mark.parametrize("name", PARALLEL)
def test_collectives_are_those_of_real_ranks(tmp_path: Path, name: str) -> None:
    """Equal in kind, number and bytes; so is the number of operators that DTensor dispatches."""
    world_size = 4 if HSDP in PARALLEL[name] else 2
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{parallel}", PARALLEL[name]), encoding="utf-8")
    command = [sys.executable, "-m", "calibrate.capture", "--script", str(script), "--world-size", str(world_size)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "p")], capture_output=True, text=True, timeout=HANGS_AFTER_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    program = read_rank_program(tmp_path / "p.rank0.json.gz")
    foreseen = Counter((c.kind, c.bytes) for c in program.collectives)
    assert foreseen
    collectives, of_dtensors = really(tmp_path, script, world_size)
    assert foreseen == collectives
    if world_size == 4:  # what `all_reduce_once` simulates (tests/closed_forms/test_traffic.py)
        reduced, sums = (sum(size * n for (k, size), n in collectives.items() if k == kind) for kind in HSDP_KINDS)
        assert sums == reduced / 2 / (3 if name == "hsdp_once" else 1)
    noted = [program.host_work[e.value] for e in program.entries if e.what is What.HOST_WORK]
    assert sum("operator" in kind for kind in noted) == of_dtensors
