"""Hold the facts of each kind of collective: how often its bytes go round, and who sends what to whom.

Times, loads on links and messages read them here. Sizes are those of nccl-tests: the whole buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Kind(Struct, frozen=True):
    """Hold the facts of one kind.

    `passes`: how often every byte visits every rank, but for the step that would bring it home: twice where a
    reduce-scatter and an all-gather follow each other. `whole`: each sender sends the whole buffer on, not all but its
    own n-th. `exchanges`: blocks go from each rank, or from the root, to each other rank. `messages`: NCCL runs it as
    grouped sends and receives, so it chooses no algorithm.
    """

    passes: int = 1
    whole: bool = False
    exchanges: bool = False
    messages: bool = False


KINDS: Mapping[str, Kind] = {
    "all_reduce": Kind(passes=2),
    "all_gather": Kind(),
    "reduce_scatter": Kind(),
    "broadcast": Kind(whole=True),
    "reduce": Kind(whole=True),
    "all_to_all": Kind(exchanges=True, messages=True),
    "gather": Kind(exchanges=True, messages=True),
    "scatter": Kind(exchanges=True, messages=True),
    "send_recv": Kind(whole=True, messages=True),  # every rank sends to the next
}


def bus_factor(kind: str, ranks: int) -> float:
    """Return bus bandwidth ÷ (size/time), as nccl-tests defines it (PERFORMANCE.md): what a rank sends ÷ the size.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    facts = KINDS[kind]
    return 1.0 if facts.whole else facts.passes * (ranks - 1) / ranks


def sent_between_trees(domains: int) -> int:
    """Return the bytes that a domain sends to others in an all-reduce over two trees ÷ the size.

    Each tree carries half of the size up and down, and an inner node of one is a leaf of the other: S up and S down. Of
    two domains each is the other's only neighbour, root of one tree and leaf of the other: S/2 up and S/2 down.
    """
    return 1 if domains == 2 else 2
