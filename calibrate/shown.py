"""Shows what collectives and split products compute, with small numbers on real ranks over gloo.

    python -m calibrate.shown

Three ranks hold [1, 1, 1], [2, 2, 2] and [3, 3, 3] and run every collective of data and tensor parallelism. Then two
ranks compute the product of a (4, 2) and a (2, 2) matrix, split by columns and by rows of the second. Below stand the
kernels of elu and five numbers in 8 bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.launch import join
from calibrate.quantization import _affine, _int8, _scale
from calibrate.ranks import stream_ranks
from sim.core.processes import python_module

RANKS, PATIENCE_S = 3, 120.0
X = ((0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (6.0, 7.0))
W = ((10.0, 30.0), (20.0, 40.0))
ALPHA = 1.0
WITH_OUTLIER = (15.0, 0.1, 0.02, 1.0, 0.01)


def start() -> Tensor:
    """Return what a rank holds before each collective: its number plus one, three times."""
    return torch.full((dist.get_world_size(),), dist.get_rank() + 1.0)


def _all_reduce() -> Tensor:
    mine = start()
    dist.all_reduce(mine)
    return mine


def _reduce() -> Tensor:
    mine = start()
    dist.reduce(mine, 0)
    return mine if dist.get_rank() == 0 else start()  # gloo leaves partial sums on the other ranks


def _broadcast() -> Tensor:
    mine = start()
    dist.broadcast(mine, 0)
    return mine


def _gather() -> Tensor:
    mine, parts = start()[:1], [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.gather(mine, parts if dist.get_rank() == 0 else None)
    return torch.cat(parts) if dist.get_rank() == 0 else mine


def _scatter() -> Tensor:
    mine = torch.zeros(1)
    dist.scatter(mine, list((10 * torch.arange(1.0, RANKS + 1)).split(1)) if dist.get_rank() == 0 else None)
    return mine


def _all_gather() -> Tensor:
    parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, start()[:1])
    return torch.cat(parts)


def _reduce_scatter() -> Tensor:
    mine = torch.zeros(1)
    dist.reduce_scatter_tensor(mine, start())
    return mine


def _all_to_all() -> Tensor:
    """Send 10 · sender + receiver to each rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    got = torch.zeros(n)
    dist.all_to_all_single(got, 10.0 * rank + torch.arange(float(n)))
    return got


COLLECTIVES: dict[str, Callable[[], Tensor]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def column_product() -> Tensor:
    """Compute X·W with a column of W on each rank: X·W = [X·w₁ X·w₂], gathered."""
    mine = torch.tensor(X) @ torch.tensor(W)[:, dist.get_rank()]
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts, 1)


def row_product() -> Tensor:
    """Compute X·W with a row of W and a column of X on each rank: X·W = x₁·w₁ + x₂·w₂, all-reduced."""
    rank = dist.get_rank()
    mine = torch.outer(torch.tensor(X)[:, rank], torch.tensor(W)[rank])
    dist.all_reduce(mine)
    return mine


class Kernels(TorchDispatchMode):
    """Counts the operators that run within it, each a kernel on a GPU."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run one."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def kernels_of(function: Callable[[Tensor], Tensor]) -> int:
    """Count the kernels of a function of a tensor."""
    x = torch.linspace(-1, 1, 8)
    with Kernels() as seen:
        function(x)
    return int(seen.count)


def elu(x: Tensor) -> Tensor:
    """The exponential linear unit, operator by operator."""
    return torch.where(x < 0, ALPHA * (torch.exp(x) - 1), x)


def on_ranks(ranks: int, what: str) -> Iterator[tuple[str, list[list[float]]]]:
    """Run `collectives` or `products` on ranks; yield each one's name and what every rank holds at the end.

    Raises:
        calibrate.launch.RankError: if a rank fails.
    """
    command = [*python_module("calibrate.shown"), "--rank-of", what, "--parent", str(os.getpid())]
    for line in stream_ranks(command, ranks, PATIENCE_S):
        name, rows = json.loads(line)
        yield name, rows


def _one_rank(what: str) -> None:
    rank, _ = join("cpu")
    products = {"columns": column_product, "rows": row_product}
    for name, run in (COLLECTIVES if what == "collectives" else products).items():
        found: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(found, run().tolist())
        if rank == 0:
            print(json.dumps([name, found]), flush=True)
    dist.destroy_process_group()


@click.command()
@click.option("--rank-of", type=click.Choice(("collectives", "products")), hidden=True)
@click.option("--parent", type=int, hidden=True)
def main(rank_of: str | None, parent: int | None) -> None:
    """Show every collective on three ranks, and a product split by columns and by rows on two ranks."""
    if rank_of is not None:
        if os.getppid() == parent:
            _one_rank(rank_of)
        return
    print("before: " + ", ".join(f"rank {r} has {[r + 1.0] * RANKS}" for r in range(RANKS)))
    for name, rows in on_ranks(RANKS, "collectives"):
        print(f"{name:>15}: " + ", ".join(map(str, rows)))
    print(f"\nX {[list(r) for r in X]} · W {[list(r) for r in W]} on two ranks")
    for name, rows in on_ranks(2, "products"):
        print(f"{'by ' + name:>15}: {rows[0]}")
    print(f"\nkernels of elu as written: {kernels_of(elu)}; fused: {kernels_of(torch.nn.functional.elu)}")
    x = torch.tensor(WITH_OUTLIER)
    integers, scale = _int8(x, _scale(x, None)), float(_scale(x, None))
    print(f"\n{list(WITH_OUTLIER)} in 8 bits by the largest: {[int(q) for q in integers]}, one step is {scale:.4f}")
    shifted, step = _affine(x, None)
    print(f"with a zero point: {[int(q) for q in shifted]}, one step is {float(step):.4f}")


if __name__ == "__main__":
    main()
