"""Two gloo ranks under the profiler: rank 1 has more to compute. Arguments: folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule


def rank_main(rank: int, folder: str) -> None:
    """Four steps of data parallelism, an all-gather and a message each; the last two are recorded."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32 * (1 + 3 * rank), 128)

    def write(p: profile) -> None:
        p.export_chrome_trace(f"{folder}/rank{rank}.json.gz")

    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=write,
    ) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            t = torch.ones(1000)
            dist.all_gather([torch.empty(1000) for _ in range(2)], t)
            if rank == 0:
                dist.send(t, 1)
            else:
                dist.recv(t, 0)
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, args=(str(Path(sys.argv[1])),), nprocs=2)
