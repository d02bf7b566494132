"""What a replica's cache held over time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class StateArrays(NamedTuple):
    """The lists of `CacheStates` as arrays, each [states]."""

    time_s: Floats
    held: Floats
    unused: Floats
    waste: Floats
    running: Floats


class CacheStates(Struct):
    """From each `time_s` to the next: blocks held by running sequences, blocks kept for prefixes that none reads, the
    waste, and how many sequences run; over a run of alike iterations their means.

    A list for each, as a long workload has hundreds of thousands of states.
    """

    time_s: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    unused: list[float] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def note(self, time_s: float, occupancy: tuple[float, float, float], running: int) -> None:
        """The state from `time_s` on; `occupancy` as `KvCache.occupancy`'s."""
        held, unused, waste = occupancy
        self.time_s.append(time_s)
        self.held.append(held)
        self.unused.append(unused)
        self.waste.append(waste)
        self.running.append(running)

    def arrays(self) -> StateArrays:
        """All of it for numpy."""
        columns = self.time_s, self.held, self.unused, self.waste, self.running
        return StateArrays(*[np.array(column) for column in columns])
