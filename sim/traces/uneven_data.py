"""Ranks of a recording whose kernels take longer than their peers' because they have more data."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import NamedTuple

from sim.results.records import Record
from sim.traces.changes import Change
from sim.traces.recording import Recording
from sim.traces.replay import Replay, replay

SHOWS = 0.002  # part of the step; a smaller gain is noise
Key = tuple[int, str]  # rank and kernel


class UnevenData(Record, frozen=True):
    """Hold a rank whose kernels take longer than its peers' because their inputs are larger."""

    rank: int
    inputs: float  # elements of these kernels' inputs ÷ those of peers
    compute_s: float
    peers_s: float
    even_step_s: float
    gain_s: float


def uneven_data(as_it_was: Replay) -> tuple[UnevenData, ...]:
    """Return the ranks that lose time by larger inputs of kernels that all ran as often, the largest gain first."""
    recording, step_s = as_it_was.recording, as_it_was.step_time_s
    found = []
    for rank, larger in _on_larger_inputs(recording).items():
        compute_s, peers_s = sum(row.seconds for row in larger), sum(row.peers_s for row in larger)
        if compute_s - peers_s <= SHOWS * step_s:
            continue
        scales = {(rank, row.name): row.peers_s / row.seconds for row in larger if row.seconds}
        even_s = replay(recording, Change(single=scales)).step_time_s
        ratio = sum(row.elements for row in larger) / max(1.0, sum(row.peers_elements for row in larger))
        found.append(UnevenData(rank, ratio, compute_s, peers_s, even_s, step_s - even_s))
    return tuple(sorted(found, key=lambda row: (-row.gain_s, row.rank)))


class _Larger(NamedTuple):
    """A rank's kernels of a name beside the median of ranks that ran it as often, on inputs of fewer elements."""

    name: str
    seconds: float
    peers_s: float
    elements: int
    peers_elements: float


def _on_larger_inputs(recording: Recording) -> dict[int, list[_Larger]]:
    own, count, elements = kernels_of(recording)
    alike: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for key in own:
        alike[key[1], count[key]].append(key)
    found: dict[int, list[_Larger]] = defaultdict(list)
    for keys in alike.values():
        for key in keys if len({elements[k] for k in keys}) > 1 else ():
            others = [k for k in keys if k is not key]
            usual = median(elements[k] for k in others)
            if elements[key] > usual:
                row = _Larger(key[1], own[key], median(own[k] for k in others), elements[key], usual)
                found[key[0]].append(row)
    return found


def kernels_of(recording: Recording) -> tuple[dict[Key, float], dict[Key, int], dict[Key, int]]:
    """Return seconds, number and inputs' elements of each rank's kernels by name (of operators, if a trace has no
    device)."""
    seconds: dict[Key, float] = defaultdict(float)
    count, elements = defaultdict[Key, int](int), defaultdict[Key, int](int)
    for node in recording.own:
        if node.compute:
            seconds[node.rank, node.name] += (node.end_ns - node.start_ns) * 1e-9
            count[node.rank, node.name] += 1
            elements[node.rank, node.name] += node.elements
    return seconds, count, elements
