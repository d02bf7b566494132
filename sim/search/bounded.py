"""Parts of a search's space, with their bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from msgspec import Struct

from sim.search.space import Layout, MeshSizes, PartialLayout

ROUNDING = 1 - 1e-9  # keeps a bound below the simulated figure though the engine adds in another order


class Bounded(NamedTuple):
    """Hold a part of the space with its bounds in seconds and bytes. Parts sort by bounds, then by `depth` and part.

    `depth`: 0 for a mesh, 1 for a partial layout, 2 for a layout. `legal`: the number of its legal layouts.
    """

    bound_s: float
    memory_bytes: float
    depth: int
    part: MeshSizes | PartialLayout | Layout
    legal: int = 1


class Bounds(Struct, frozen=True):
    """Hold the parts of a mesh or a partial layout that the bounds leave; `counts`: number of layouts by outcome.

    `too_large_bytes`: of the layouts that their memory rules out, the least bytes of a worst rank. `of_mesh`: whether
    these are the parts of a mesh.
    """

    bounded: list[Bounded]
    counts: Counter[str]
    too_large_bytes: float = math.inf
    cpu_s: float = 0.0  # of computing the bounds
    of_mesh: bool = False
