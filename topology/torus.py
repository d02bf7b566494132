"""Compute the shape of a torus of nodes, the place of a node, and the distance of two nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import pairwise


def torus_shape(nodes: int, nics_per_node: int) -> tuple[int, ...]:
    """Return the sides of the torus, as equal as `nodes` divides; it has 3 dimensions from 6 NICs on, 2 from 4, else 1.

    >>> torus_shape(64, 8), torus_shape(12, 4), torus_shape(7, 1)
    ((4, 4, 4), (3, 4), (7,))
    """
    dimensions = 3 if nics_per_node >= 6 else 2 if nics_per_node >= 4 else 1
    sides: list[int] = []
    for left in range(dimensions, 0, -1):
        target = round(nodes ** (1 / left))
        side = max(divisor for divisor in range(1, max(target, 1) + 1) if nodes % divisor == 0)
        side = side if left > 1 else nodes
        sides.append(side)
        nodes //= side
    return tuple(sorted(sides))


def torus_position(node: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a node; the last dimension varies fastest."""
    position: list[int] = []
    for side in reversed(shape):
        position.append(node % side)
        node //= side
    return tuple(reversed(position))


def torus_hops(a: int, b: int, shape: Sequence[int]) -> int:
    """Return the links of a shortest path between two nodes: the shorter direction of each dimension."""
    steps = zip(torus_position(a, shape), torus_position(b, shape), shape, strict=True)
    return sum(min((x - y) % side, (y - x) % side) for x, y, side in steps)


def torus_links(shape: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return each node with its next one along each axis, and how many of a node's directions their link is.

    Along a side of 2 both directions reach the same node, so they are one link.

    >>> torus_links((3,)), torus_links((1, 2))
    ({(0, 1): 1, (1, 2): 1, (2, 0): 1}, {(0, 1): 2, (1, 0): 2})
    """
    at = {torus_position(node, shape): node for node in range(math.prod(shape))}
    links = {}
    for place, node in at.items():
        for axis, side in enumerate(shape):
            if side > 1:
                following = (*place[:axis], (place[axis] + 1) % side, *place[axis + 1 :])
                links[node, at[following]] = 2 if side == 2 else 1
    return links


def ring_links(shape: Sequence[int], nodes: Collection[int]) -> tuple[float, int]:
    """Return the part of a node's links that rings over `nodes` fill, and the steps of one pass along all axes.

    Nodes that form a lattice (every combination of a few coordinates) run rings along each axis that they span at the
    same time, each on its part of the data (P. Sack, W. Gropp, "Collective algorithms for multiported torus networks",
    2015). A whole axis of c nodes is a ring with two links a node, one per direction, and c // 2 steps. A part of an
    axis is a line, which returns over the links of the other direction: one link a node, c - 1 steps. A lattice of
    every s-th place shares the axis with s - 1 such lattices; its steps cross s links. Other nodes use one link, and
    a step for each further node.

    >>> ring_links((4, 4, 4), range(64)), ring_links((4, 4, 4), range(4)), ring_links((4, 4, 4), range(2))
    ((1.0, 6), (0.3333333333333333, 2), (0.16666666666666666, 1))
    """
    places = [torus_position(node, shape) for node in nodes]
    axes = [sorted(set(values)) for values in zip(*places, strict=True)]
    count = 1
    for axis in axes:
        count *= len(axis)
    whole = 2 * len(shape)
    if count != len(places):
        return 1 / whole, len(places) - 1
    links, steps = 0.0, 0
    for axis, side in zip(axes, shape, strict=True):
        if len(axis) == 1:
            continue
        stride = min(b - a for a, b in pairwise(axis))
        around = len(axis) * stride == side
        links += (2.0 if around else 1.0) / stride
        steps += stride * (len(axis) // 2 if around else len(axis) - 1)
    return links / whole, steps


@lru_cache(maxsize=4096)
def exchange_links(shape: tuple[int, ...], nodes: tuple[int, ...]) -> tuple[float, float]:
    """Return the part of a node's links that an exchange among all `nodes` fills, and the links that a byte passes.

    A message takes a shortest path along one axis after the other; if both directions are equally long, half of it
    takes each. The most loaded link of all axes decides. All lines along an axis are assumed to be loaded equally, as
    they are in a lattice. Lattices of every s-th place share the axis as in `ring_links`.

    >>> [round(part, 3) for part, _ in (exchange_links((4, 4, 4), tuple(range(n))) for n in (2, 4, 64))]
    [0.167, 0.25, 0.328]
    >>> exchange_links((4,), (0, 1, 2, 3))
    (0.75, 1.3333333333333333)
    """
    import numpy as np  # takes long to load, and only exchanges on a torus need it

    places = [torus_position(node, shape) for node in nodes]
    fullest = passed = 0.0
    for i, side in enumerate(shape):
        members = np.bincount([place[i] for place in places], minlength=side).astype(float)
        taken = np.flatnonzero(members)
        if len(taken) == 1:
            continue
        carried = np.zeros(side)  # messages in one direction over the link that follows each place, on all lines
        for hops in range(1, side // 2 + 1):
            sent = members * np.roll(members, -hops) * (0.5 if 2 * hops == side else 1.0)
            upto = np.cumsum(np.concatenate(([0.0], sent[side - hops + 1 :], sent)))
            carried += upto[hops:] - upto[:side]
        passed += 2 * float(carried.sum())
        stride = int(np.diff(taken).min())
        shared = sum(np.roll(carried, step) for step in range(stride))
        lines = len({(*place[:i], *place[i + 1 :]) for place in places})
        fullest = max(fullest, float(np.max(shared)) / lines)
    others = len(places) - 1
    if not fullest:  # ranks that the cluster lacks
        return 1 / (2 * len(shape)), 1.0
    return others / fullest / (2 * len(shape)), passed / (len(places) * others)
