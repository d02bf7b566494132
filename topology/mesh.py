"""Describe GPUs linked without a switch: the links between each pair, and how many rings fit on them.

`full`: every two GPUs have the same number of links (xGMI, Gaudi's Ethernet). Otherwise 8 GPUs form NVIDIA's hybrid
cube mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, permutations

# Links between the 8 GPUs of a DGX-1 with V100 (hybrid cube mesh), as `nvidia-smi topo -m` prints them: 6
# links a GPU. NVIDIA DGX-1 with Tesla V100 System Architecture whitepaper, 2017, figure 4.
_CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)


def links(gpus: int, full: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the links between each pair of a node's GPUs: the hybrid cube mesh of 8, otherwise one for each pair."""
    if gpus == len(_CUBE_MESH) and not full:
        return _CUBE_MESH
    return tuple(tuple(int(a != b) for b in range(gpus)) for a in range(gpus))


def links_per_gpu(gpus: int, full: bool = False) -> int:
    """Return the number of links that leave one GPU; one link has this part of the GPU's bandwidth."""
    return max(1, sum(links(gpus, full)[0]))


def relay(gpus: int, src: int, dst: int, full: bool = False) -> tuple[int, ...]:
    """Return the path from one GPU to another: direct, or through the GPU with the most links to both.

    NCCL relays over NVLink the same way (PATH_NVB). Among equally good relays src + dst selects one, so that not all
    pairs take the same.

    >>> relay(8, 0, 3), relay(8, 0, 7)
    ((0, 3), (0, 4, 7))
    """
    count = links(gpus, full)
    if count[src][dst] or src == dst:
        return (src, dst)
    most = max(min(count[src][via], count[via][dst]) for via in range(gpus))
    best = [via for via in range(gpus) if min(count[src][via], count[via][dst]) == most]
    return (src, best[(src + dst) % len(best)], dst)


def relay_links(gpus: int, src: int, dst: int, full: bool = False) -> int:
    """Return the number of links on the narrowest part of the path from one GPU to another."""
    way = relay(gpus, src, dst, full)
    return min(links(gpus, full)[a][b] for a, b in pairwise(way))


@lru_cache(maxsize=1024)
def exchange_load(gpus: int, members: tuple[int, ...], full: bool = False) -> float:
    """Return the number of blocks that the most loaded link carries when each member sends one block to every other."""
    load: dict[tuple[int, int], int] = {}
    for src in members:
        for dst in members:
            way = relay(gpus, src, dst, full) if src != dst else ()
            for hop in pairwise(way):
                load[hop] = load.get(hop, 0) + 1
    return max(blocks / links(gpus, full)[a][b] for (a, b), blocks in load.items())


@lru_cache(maxsize=1024)
def ring_cycles(gpus: int, members: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the most cycles through all members of a cube mesh that share no link.

    They are found by search, as in NCCL (src/graph/search.cc). Each cycle is two rings, one per direction. The result
    is empty if no cycle exists.
    """
    free = [list(row) for row in links(gpus)]
    cycles = [(members[0], *rest) for rest in permutations(members[1:]) if rest[0] < rest[-1]]
    return _pack([cycle for cycle in cycles if _fits(free, cycle)], free)


def rings(gpus: int, members: tuple[int, ...], full: bool = False) -> int:
    """Return how many one-way rings over `members` fit on the links without sharing one.

    If every two GPUs are linked, m members fill all their m-1 links with rings (Tillson 1980; with 4 and 6 members,
    if every link is split in two).

    >>> [rings(8, tuple(range(members))) for members in range(2, 9)]
    [1, 2, 4, 0, 2, 4, 6]
    >>> rings(8, tuple(range(8)), full=True)
    7
    """
    if len(members) == 2:
        return links(gpus, full)[members[0]][members[1]]
    if full or gpus != len(_CUBE_MESH):
        return len(members) - 1
    return 2 * len(ring_cycles(gpus, members))


def _edges(cycle: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))


def _fits(free: list[list[int]], cycle: Sequence[int]) -> bool:
    return all(free[a][b] > 0 for a, b in _edges(cycle))


def _take(free: list[list[int]], cycle: Sequence[int], count: int) -> None:
    for a, b in _edges(cycle):
        free[a][b] -= count
        free[b][a] -= count


def _pack(cycles: Sequence[tuple[int, ...]], free: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the most cycles that share no link, by backtracking; a GPU's 6 links allow at most 3."""
    best: tuple[tuple[int, ...], ...] = ()
    for index, cycle in enumerate(cycles):
        if not _fits(free, cycle):
            continue
        _take(free, cycle, 1)
        packed = (cycle, *_pack(cycles[index:], free))
        _take(free, cycle, -1)
        best = max(best, packed, key=len)
        if len(best) == 3:
            break
    return best
