"""Calls of single collectives, for all that times them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MAX_CPU_RANKS = 8
Work = Callable[[], object]


class Call(NamedTuple):
    """A collective to be timed: `size_bytes` as nccl-tests counts them; `key` names its measurement."""

    key: str
    op: str
    ranks: int
    size_bytes: int


def repeat(work: Work, times: int) -> None:
    """Do work several times."""
    for _ in range(times):
        work()


def make(op: str, size: int, device: str, group: dist.ProcessGroup | None = None) -> Work:
    """Return a call of the collective over `size` bytes of fp32 by the ranks of `group` (None: by all ranks)."""
    members = dist.get_process_group_ranks(group)
    n, place = len(members), members.index(dist.get_rank())
    full = torch.zeros(max(n, size // 4 // n * n), device=device)
    part = torch.zeros(len(full) // n, device=device)
    if op == "send_recv":
        to, source = members[(place + 1) % n], members[(place - 1) % n]
        return partial(_shift, full, torch.empty_like(full), to, source, group)
    first, pieces = members[0], list(full.split(len(part))) if place == 0 else None
    calls: dict[str, Work] = {
        "all_reduce": partial(dist.all_reduce, full, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, full, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, full, group=group),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(full), full, group=group),
        "broadcast": partial(dist.broadcast, full, first, group=group),
        "reduce": partial(dist.reduce, full, first, group=group),
        "gather": partial(dist.gather, part, pieces, first, group=group),
        "scatter": partial(dist.scatter, part, pieces, first, group=group),
    }
    return calls[op]


def _shift(send: Tensor, receive: Tensor, to: int, source: int, group: dist.ProcessGroup | None) -> None:
    """Shift along the ring: every rank sends to the next rank and receives from the previous one."""
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, to, group),
            dist.P2POp(dist.irecv, receive, source, group),
        ]
    )
    for work in works:
        work.wait()
