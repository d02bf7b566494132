"""Where a rank stands, as far as its layers' shapes depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place in context and expert parallelism, and the part of the model (pipeline stage) it runs."""

    cp_rank: int = 0
    ep_rank: int = 0
    part: int = 0
