"""A served workload over time: requests that arrive and finish, requests that wait, sequences that run.

All of it is cut into windows of one length, so that it stays small however many requests there are. A level's mean over
a window is its integral over the window's length, so no change in between is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sim.serve.replicas.replica import Replica
    from sim.serve.results.result import ServingSimulation

Floats = NDArray[np.float64]

LEVEL_WINDOWS = 240
MOST_RATE_WINDOWS, LEAST_RATE_WINDOWS = 120, 8
REQUESTS_A_WINDOW = 20  # at least, in the mean: a rate counted from fewer is mostly noise


class Level(Struct, frozen=True, eq=False):
    """A number that changes with time, by windows: its mean and its most, [windows]."""

    name: str
    mean: Floats
    most: Floats


class OverTime(Struct, frozen=True, eq=False):
    """`rate_edges_s` [windows + 1] belong to the rates (a second, [windows]), `level_edges_s` to the levels."""

    rate_edges_s: Floats
    arriving_per_s: Floats
    finishing_per_s: Floats
    level_edges_s: Floats
    waiting: Level  # arrived and running nowhere: not yet admitted, preempted, or between two pools
    running: tuple[Level, ...]  # sequences of each pool, all its replicas together
    replicas: tuple[Level, ...] = ()  # of each pool that are on, where a rule starts and stops them


def over_time(sim: ServingSimulation) -> OverTime:
    """From the first arrival to the last token."""
    arrival = np.sort([s.arrival_s for s in sim.sequences])
    finish = np.sort([s.finish_s for s in sim.sequences])
    windows = min(MOST_RATE_WINDOWS, max(LEAST_RATE_WINDOWS, len(arrival) // REQUESTS_A_WINDOW))
    rate_edges = np.linspace(sim.start_s, sim.end_s, windows + 1)
    width_s = (sim.end_s - sim.start_s) / windows or 1.0
    edges = np.linspace(sim.start_s, sim.end_s, LEVEL_WINDOWS + 1)
    ones = np.ones(len(arrival))
    changes = [_running_changes(pool.replicas) for pool in sim.pools]
    waiting = [(arrival, ones), (finish, -ones), *((times, -by) for times, by in changes)]
    return OverTime(
        rate_edges_s=rate_edges,
        arriving_per_s=np.histogram(arrival, rate_edges)[0] / width_s,
        finishing_per_s=np.histogram(finish, rate_edges)[0] / width_s,
        level_edges_s=edges,
        waiting=_level("waiting", waiting, edges),
        running=tuple(_level(pool.name, [c], edges) for pool, c in zip(sim.pools, changes, strict=True)),
        replicas=tuple(
            _level("replicas" if len(sim.pools) == 1 else pool.name, [_replica_changes(sim, n)], edges)
            for n, pool in enumerate(sim.pools if sim.spans else ())
        ),
    )


def _replica_changes(sim: ServingSimulation, pool: int) -> tuple[Floats, Floats]:
    """When the number of a pool's replicas that are on changes, and by how much."""
    times = [(max(span.start_s, sim.start_s), span.stop_s) for span in sim.spans if span.pool == pool]
    ends = [stop for _, stop in times if stop < sim.end_s]
    ones = np.concatenate((np.ones(len(times)), -np.ones(len(ends))))
    return np.array([start for start, _ in times] + ends), ones


def _running_changes(replicas: Sequence[Replica]) -> tuple[Floats, Floats]:
    """When the number of running sequences changes, and by how much."""
    states = [r.states.arrays() for r in replicas]
    by = [np.diff(s.running, prepend=0.0) for s in states]
    return np.concatenate([s.time_s for s in states]), np.concatenate(by)


def _level(name: str, changes: Sequence[tuple[Floats, Floats]], edges: Floats) -> Level:
    """The level that starts at zero and changes so, in the windows between `edges`."""
    times, by = (np.concatenate(column) for column in zip(*changes, strict=True))
    order = np.argsort(times, kind="stable")
    times, values = times[order], np.cumsum(by[order])
    # What is changed and changed back at one time was never so: the last value of a time holds.
    last = np.append(times[1:] != times[:-1], True)
    times, values = times[last], np.append(values[last], 0.0)  # values[-1]: before the first change
    points = np.union1d(times, edges)
    held = values[np.searchsorted(times, points, side="right") - 1]
    inside = (points >= edges[0]) & (points < edges[-1])
    points, held = points[inside], held[inside]
    starts = np.searchsorted(points, edges[:-1])
    seconds = np.diff(np.append(points, edges[-1]))
    if not len(points):  # the workload takes no time
        return Level(name, np.zeros(len(edges) - 1), np.zeros(len(edges) - 1))
    return Level(name, np.add.reduceat(held * seconds, starts) / np.diff(edges), np.maximum.reduceat(held, starts))
