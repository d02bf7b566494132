"""What a replica's cache held over time."""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STATE = struct.Struct("5d")  # packed at once: a third of the time of five numbers that an array takes one by one


class StateArrays(NamedTuple):
    """What `CacheStates` has noted, each [states]."""

    time_s: Floats
    held: Floats
    unused: Floats
    waste: Floats
    running: Floats


class CacheStates(Struct):
    """From each `time_s` to the next: blocks held by running sequences, blocks kept for prefixes that none reads, the
    waste, and how many sequences run; over a run of alike iterations their means.

    One array of all numbers, five for each state, as a long workload has hundreds of thousands of states.
    """

    numbers: array[float] = field(default_factory=lambda: array("d"))

    def note(self, time_s: float, occupancy: tuple[float, float, float], running: int) -> None:
        """The state from `time_s` on; `occupancy` as `KvCache.occupancy`'s."""
        self.numbers.frombytes(STATE.pack(time_s, *occupancy, running))

    def arrays(self) -> StateArrays:
        """All of it for numpy."""
        by_state = np.array(self.numbers).reshape(-1, len(StateArrays._fields))
        return StateArrays(*np.ascontiguousarray(by_state.T))
