"""Interpolate measured seconds over sizes of which not every combination was measured."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

TILE = 64  # rows of a matrix that a kernel multiplies at once, at least
_Node = float | tuple[list[int], list["_Node"]]


class NestedGrid:
    """Hold seconds by sizes as a tree: values of the first size, under each of them those of the second, and so on.

    Between two values seconds are linear in that size, or a power of it. But kernels work in tiles, so time jumps
    behind multiples of a tile's rows: where the next value is beyond one and the value before is not, or the other way
    round, the line through the two values on the same side goes on. Beyond the largest value goes on the line through
    it and the value half as large, so that the jumps of neighbours are no slope; below the smallest, which may be large
    beside some of the other sizes, likewise that through it and the value twice as large.
    """

    def __init__(self, seconds: Mapping[tuple[int, ...], float], power: int | None = None) -> None:
        """Make a grid. `power`: the size of whose power seconds are."""
        self._root = _tree([(sizes, s) for sizes, s in sorted(seconds.items())])
        self._power = power

    def at(self, sizes: Sequence[float]) -> float:
        """Return the seconds at these sizes."""
        return self._at(self._root, sizes, 0)

    def _at(self, node: _Node, sizes: Sequence[float], depth: int) -> float:
        if isinstance(node, float):
            return node
        (known, below), size = node, sizes[depth]
        i = bisect_left(known, size)
        if len(known) == 1:
            return self._at(below[0], sizes, depth + 1)
        if i < len(known) and known[i] == size:
            return self._at(below[i], sizes, depth + 1)
        low, high = [(known[n], self._at(below[n], sizes, depth + 1)) for n in _line(known, i, size)]
        return _between(low, high, size, depth == self._power)


def _line(known: list[int], i: int, size: float) -> tuple[int, int]:
    """The numbers of the two values whose line has `size`, which is below the value number `i`."""
    if i == len(known):
        return max(0, bisect_right(known, known[-1] // 2) - 1), i - 1
    if i == 0:
        return 0, min(len(known) - 1, max(1, bisect_left(known, 2 * known[0])))
    tile, tiles = math.ceil(size / TILE), [math.ceil(n / TILE) for n in known[max(0, i - 2) : i + 2]]
    at = min(i, 2)  # of the value number `i` among these
    if tiles[:at] == [tile, tile] and tiles[at] != tile:
        return i - 2, i - 1
    if tiles[at:] == [tile, tile] and tiles[at - 1] != tile:
        return i, i + 1
    return i - 1, i


def _between(low: tuple[int, float], high: tuple[int, float], size: float, power: bool) -> float:
    """Seconds on the line through two values. Beyond both more work takes no less time, and less work no more, but at
    least its part of it."""
    (a, at_a), (b, at_b) = low, high
    if power and min(a, size, at_a, at_b) > 0.0:
        found = at_a * math.pow(at_b / at_a, math.log(size / a) / math.log(b / a))
    else:
        found = at_a + (at_b - at_a) * (size - a) / (b - a)
    if size > b:
        return max(found, at_b)
    return min(max(found, at_a * size / a), at_a) if size < a else found


def _tree(rows: list[tuple[tuple[int, ...], float]]) -> _Node:
    if not rows[0][0]:
        return rows[0][1]
    under: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for sizes, seconds in rows:
        under.setdefault(sizes[0], []).append((sizes[1:], seconds))
    return list(under), [_tree(each) for each in under.values()]
