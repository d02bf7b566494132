"""NVLink without a switch: which GPUs have how many links between them, and how many rings fit on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

# Links between the 8 GPUs of a DGX-1 with V100 (hybrid cube mesh), as `nvidia-smi topo -m` prints them: 6 links
# a GPU. NVIDIA DGX-1 with Tesla V100 System Architecture whitepaper, 2017, figure 4.
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


def links(gpus: int) -> tuple[tuple[int, ...], ...]:
    """Links between each pair of a node's GPUs: the hybrid cube mesh of 8, else one between every two."""
    if gpus == len(_CUBE_MESH):
        return _CUBE_MESH
    return tuple(tuple(int(a != b) for b in range(gpus)) for a in range(gpus))


def links_per_gpu(gpus: int) -> int:
    """Links that leave one GPU: its bandwidth divided by this is one link's."""
    return max(1, sum(links(gpus)[0]))


@lru_cache(maxsize=1024)
def rings(gpus: int, members: tuple[int, ...]) -> int:
    """How many one-way rings over `members` fit on the links, each on links of its own.

    On the cube mesh found by search (as NCCL does, src/graph/search.cc); between every two, m members have
    m-1 links each: the complete digraph splits into m-1 rings (Tillson 1980; for m = 4 and 6, one fewer, which
    is ignored). Every ring runs in both directions.
    """
    if len(members) == 2:
        return links(gpus)[members[0]][members[1]]
    if gpus != len(_CUBE_MESH):
        return len(members) - 1
    free = [list(row) for row in _CUBE_MESH]
    cycles = [(members[0], *rest) for rest in permutations(members[1:]) if rest[0] < rest[-1]]
    return 2 * _pack([cycle for cycle in cycles if _fits(free, cycle)], free)


def _edges(cycle: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))


def _fits(free: list[list[int]], cycle: Sequence[int]) -> bool:
    return all(free[a][b] > 0 for a, b in _edges(cycle))


def _take(free: list[list[int]], cycle: Sequence[int], count: int) -> None:
    for a, b in _edges(cycle):
        free[a][b] -= count
        free[b][a] -= count


def _pack(cycles: Sequence[Sequence[int]], free: list[list[int]]) -> int:
    """The most cycles that share no link, by backtracking; a GPU's links bound them at 3."""
    best = 0
    for index, cycle in enumerate(cycles):
        if not _fits(free, cycle):
            continue
        _take(free, cycle, 1)
        best = max(best, 1 + _pack(cycles[index:], free))
        _take(free, cycle, -1)
        if best == 3:
            break
    return best
