"""Copies between a GPU and the memory below it, over links that carry one at a time in each direction."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Literal, NamedTuple

from msgspec import Struct, field

Copied = Literal["prefix", "preempted sequence", "LoRA adapter"]


class Copy(NamedTuple):
    """`below`: where from, or where to; `up`: towards the GPU; `tokens`: 0 of an adapter, whose name is `note`."""

    start_s: float
    end_s: float
    what: Copied
    below: str
    up: bool
    tokens: int = 0
    note: str = ""


class Link(Struct):
    """`free_s`: when its direction away from the GPU is free, and that towards it."""

    s_per_token: float = 0.0
    latency_s: float = 0.0
    free_s: list[float] = field(default_factory=lambda: [0.0, 0.0])


def copy_s(path: Items[Link], tokens: int) -> float:
    """Seconds of a copy that passes all these links at once: the slowest one's pace."""
    return sum([link.latency_s for link in path]) + tokens * max([link.s_per_token for link in path])


def copied(path: Items[Link], up: bool, at_s: float, seconds: float) -> tuple[float, float]:
    """From when to when a copy takes all these links, from `at_s` on at the earliest."""
    start_s = max([at_s, *[link.free_s[up] for link in path]])
    for link in path:
        link.free_s[up] = start_s + seconds
    return start_s, start_s + seconds
