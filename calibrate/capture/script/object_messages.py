"""Passes Python objects between captured ranks, as `send_object_list` and `recv_object_list` do.

Other ranks do not exist while a rank is captured alone. torch's pipelines begin with such messages: each stage tells
the next the shapes of its outputs. So ranks that wait for each other's objects are captured at the same time, and the
objects pass through files.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sim.core.errors import InputError

WAIT_S = 0.05


class NeedsOthers(BaseException):
    """Raised where a rank that is captured alone waits for an object of another one that is to be captured too."""


class ObjectMessages:
    """Messages of a rank. `folder`: holds them as files; None if the rank is captured alone. `ranks`: the captured."""

    def __init__(self, rank: int, ranks: Sequence[int], folder: Path | None) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.sent, self.received = Counter[int](), Counter[int]()

    def send(
        self,
        objects: list[Any],
        dst: int | None = None,
        group: Any = None,
        *_: object,
        group_dst: int | None = None,
        **__: object,
    ) -> None:
        """Leave the objects for the other rank."""
        peer = _peer(dst, group, group_dst)
        number = self.sent[peer]
        self.sent[peer] += 1
        if self.folder is not None:
            written = self.folder / f"{self.rank}.{peer}.{number}.part"
            written.write_bytes(pickle.dumps(objects))
            os.replace(written, written.with_suffix(""))

    def receive(
        self,
        objects: list[Any],
        src: int | None = None,
        group: Any = None,
        *_: object,
        group_src: int | None = None,
        **__: object,
    ) -> int:
        """Wait for the other rank's objects, fill `objects` with them, and return its rank.

        Raises:
            InputError: if that rank is not captured.
            NeedsOthers: if this rank is captured alone.
        """
        peer = _peer(src, group, group_src)
        if peer not in self.ranks:
            raise InputError(
                f"--ranks: rank {self.rank} waits for an object of rank {peer} (recv_object_list), as stages of a "
                "pipeline do at first; give all ranks that exchange objects, such as --ranks 0,1"
            )
        if self.folder is None:
            raise NeedsOthers
        path = self.folder / f"{peer}.{self.rank}.{self.received[peer]}"
        self.received[peer] += 1
        while not path.exists():  # if the other rank fails, the command ends this one too
            time.sleep(WAIT_S)
        objects[:] = pickle.loads(path.read_bytes())
        return peer


def _peer(rank: int | None, group: Any, in_group: int | None) -> int:
    if rank is None and in_group is None:
        raise NotImplementedError("an object from any rank cannot be captured")
    if rank is not None:
        return rank
    found: Any = group or dist.group.WORLD
    return dist.get_global_rank(found, in_group or 0)
