"""Find the slow rank of a recording: its slow operators, who waits for it, and the gain of its repair.

The peers of a rank's kernel are the ranks that ran a kernel of the same name as often in the step, on inputs of as many
elements (`Input Dims` of the operators that launched them): a rank with larger ones has more data, and is not slow. A
kernel that a rank ran more or less often than its replicas is compared with theirs; replicas are ranks with the same
collectives and messages. To repair a rank, its kernels get the median seconds of their peers, and the step is replayed
(`sim.traces.replay`). The gain is the difference of the two steps, so time that was hidden, or that waits for another
slow rank, is no gain. A group is repaired in the same way: its transfers are compared with those of groups of as many
ranks that moved as many bytes, and those that took longer get the median.

The recording itself shows who waits: a member of a collective that arrived early waited for the last one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from sim.core.collectives import POINT_TO_POINT
from sim.core.errors import InputError
from sim.results.metrics import uncovered_s
from sim.results.records import Record
from sim.traces.changes import Change
from sim.traces.recording import Recording
from sim.traces.replay import Replay, rank_times, replay
from sim.traces.uneven_data import SHOWS, Key, UnevenData, kernels_of, uneven_data

TRIED = 8  # the slowest ranks, and groups, whose repair is simulated
OPERATORS = 12  # slow operators listed for a rank
HOST_SHOWS = 0.02  # part of the step; healthy hosts differ more than healthy kernels


class SlowOperator(Record, frozen=True):
    """Hold number and seconds of a rank's kernels of one name, and the medians of the peers."""

    operator: str
    count: int
    seconds: float
    peers_count: float
    peers_s: float

    @property
    def lost_s(self) -> float:
        """Return the seconds above the peers' median."""
        return self.seconds - self.peers_s


class SlowRank(Record, frozen=True):
    """Hold a rank that computes longer than its peers, and the step time after its repair."""

    rank: int
    compute_s: float
    peers_s: float
    repaired_step_s: float
    gain_s: float
    waited_for_s: float  # sum over all other ranks, in the recording
    operators: tuple[SlowOperator, ...]


class SlowGroup(Record, frozen=True):
    """Hold a group whose transfers take longer than those of similar groups."""

    ranks: tuple[int, ...]
    kind: str
    bytes: float
    seconds: float  # mean of one transfer
    peers_s: float
    repaired_step_s: float
    gain_s: float


class Waiting(Record, frozen=True):
    """Hold the seconds that a rank waited for another rank, the last to arrive."""

    rank: int
    for_rank: int
    seconds: float


class Busy(Record, frozen=True):
    """Hold a rank whose host works alone, with an idle GPU, for longer than other ranks' hosts."""

    rank: int
    host_s: float
    peers_s: float


class Diagnosis(Record, frozen=True):
    """Hold what slows a recorded step, the largest gain first. Gains are relative to `replayed_step_s`, unchanged."""

    step_s: float
    replayed_step_s: float
    slow_ranks: tuple[SlowRank, ...]
    slow_groups: tuple[SlowGroup, ...]
    uneven_data: tuple[UnevenData, ...]
    waits: tuple[Waiting, ...]
    busy_hosts: tuple[Busy, ...]


def diagnose(recording: Recording) -> Diagnosis:
    """Compare the ranks of a recording, and simulate the repair of each of the slowest.

    Raises:
        InputError: for a recording of a single rank.
    """
    if len(recording.ranks) < 2:
        raise InputError(f"{recording.name}: holds only rank {recording.ranks[0]}; give the traces of several ranks")
    as_it_was = replay(recording)
    waits = _waits(as_it_was)
    ranks = _slow_ranks(as_it_was, waits)
    groups = _slow_groups(as_it_was)
    step_s, uneven = recording.step_ns * 1e-9, uneven_data(as_it_was)
    return Diagnosis(step_s, as_it_was.step_time_s, ranks, groups, uneven, waits, _busy_hosts(as_it_was))


def _slow_ranks(as_it_was: Replay, waits: Sequence[Waiting]) -> tuple[SlowRank, ...]:
    recording, step_s = as_it_was.recording, as_it_was.step_time_s
    compared, uneven = _compared(recording)
    own_s = {r: sum(row.seconds for row in (*rows, *uneven[r])) for r, rows in compared.items()}
    peers_s = {r: sum(row.peers_s for row in (*rows, *uneven[r])) for r, rows in compared.items()}
    lost = {rank: own_s[rank] - peers_s[rank] for rank in compared}
    found = []
    for rank in sorted(lost, key=lambda r: -lost[r])[:TRIED]:
        if lost[rank] <= SHOWS * step_s:
            break
        scales = {(rank, row.operator): row.peers_s / row.seconds for row in compared[rank] if row.seconds}
        scales |= {(rank, row.operator): _ratio(uneven[rank]) for row in uneven[rank]}
        repaired_s = replay(recording, Change(single=scales)).step_time_s
        rows = sorted((*compared[rank], *uneven[rank]), key=lambda row: -row.lost_s)
        found.append(
            SlowRank(
                rank,
                own_s[rank],
                peers_s[rank],
                repaired_s,
                step_s - repaired_s,
                sum(w.seconds for w in waits if w.for_rank == rank),
                tuple(row for row in rows[:OPERATORS] if row.lost_s > 0),
            )
        )
    return tuple(sorted(found, key=lambda row: (-row.gain_s, row.rank)))


def _compared(recording: Recording) -> tuple[dict[int, list[SlowOperator]], dict[int, list[SlowOperator]]]:
    """Return each rank's kernels beside those of peers that ran them as often, and beside replicas that did not."""
    own, count, elements = kernels_of(recording)
    uneven = _uneven(recording, own, count)
    compared: dict[int, list[SlowOperator]] = {rank: [] for rank in recording.ranks}
    for (rank, name), seconds in _peers(own, count, elements).items():
        if all(row.operator != name for row in uneven[rank]):
            number = count[rank, name]
            compared[rank].append(SlowOperator(name, number, own[rank, name], number, seconds))
    return compared, uneven


def _uneven(recording: Recording, own: Mapping[Key, float], count: Mapping[Key, int]) -> dict[int, list[SlowOperator]]:
    """Return the kernels that a rank ran more or less often than its replicas, if it loses time by them in all.

    They count together: where a library chooses another kernel on one rank, that rank runs the usual one less often.
    """
    names: dict[int, set[str]] = defaultdict(set)
    for rank, name in own:
        names[rank].add(name)
    out: dict[int, list[SlowOperator]] = {rank: [] for rank in recording.ranks}
    for group in _replicas(recording):
        for name in sorted(set[str]().union(*(names[rank] for rank in group))):
            for rank, row in _unlike(name, group, own, count):
                out[rank].append(row)
    return {rank: rows if sum(row.lost_s for row in rows) > 0 else [] for rank, rows in out.items()}


def _unlike(
    name: str, group: Sequence[int], own: Mapping[Key, float], count: Mapping[Key, int]
) -> Iterator[tuple[int, SlowOperator]]:
    """Yield the ranks of a group that ran a kernel more or less often than the median of the others."""
    numbers = {rank: count.get((rank, name), 0) for rank in group}
    if len(set(numbers.values())) == 1:
        return
    for rank, number in numbers.items():
        others = [r for r in group if r != rank]
        usual = median(numbers[r] for r in others)
        if number != usual:
            usual_s = median(own.get((r, name), 0.0) for r in others)
            yield rank, SlowOperator(name, number, own.get((rank, name), 0.0), usual, usual_s)


def _ratio(rows: Sequence[SlowOperator]) -> float:
    return sum(row.peers_s for row in rows) / sum(row.seconds for row in rows)


def _replicas(recording: Recording) -> list[list[int]]:
    """Return the groups of ranks that ran the same collectives, and messages to and from equally distant ranks.

    A rank with transfers of unknown ends is in none: the first and the last stage of a pipeline may look alike.
    """
    messages: dict[int, Counter[tuple[object, ...]]] = defaultdict(Counter)
    unknown: set[int] = set()
    for node in recording.own:
        if node.message is not None:
            kind, _, ranks, size, _ = node.message
            where = [rank - node.rank for rank in ranks] if kind in POINT_TO_POINT else [len(ranks)]
            messages[node.rank][kind, size, *where] += 1
        elif not node.compute and node.name.lower().startswith(("nccl", "gloo:")):
            unknown.add(node.rank)
    groups: dict[frozenset[tuple[tuple[object, ...], int]], list[int]] = defaultdict(list)
    for rank, found in messages.items():
        if rank not in unknown:
            groups[frozenset(found.items())].append(rank)
    return [group for group in groups.values() if len(group) > 1]


def _peers(own: Mapping[Key, float], count: Mapping[Key, int], elements: Mapping[Key, int]) -> dict[Key, float]:
    """Return the median seconds of the other ranks that ran a kernel as often on as large inputs; omit kernels without
    such ranks."""
    alike: dict[tuple[str, int, int], list[Key]] = defaultdict(list)
    for key in own:
        alike[key[1], count[key], elements[key]].append(key)
    out: dict[Key, float] = {}
    for keys in alike.values():
        for key in keys:
            others = [own[k] for k in keys if k is not key]
            if others:
                out[key] = median(others)
    return out


def _waits(as_it_was: Replay) -> tuple[Waiting, ...]:
    """Return who waited for whom within the step, the most seconds first; of waits at once on several streams one."""
    recording = as_it_was.recording
    from_s, until_s = recording.window(as_it_was.end_s)
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for members in recording.members().values():
        last = max(members, key=lambda m: as_it_was.arrive_s[m])
        for m in members:
            waited = max(from_s, as_it_was.arrive_s[m]), min(until_s, as_it_was.begin_s[m])
            if m != last and waited[1] > waited[0]:
                found[recording.nodes[m].rank, recording.nodes[last].rank].append(waited)
    nothing = np.zeros((0, 2))
    rows = [Waiting(rank, other, uncovered_s(np.array(waits), nothing)) for (rank, other), waits in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


class _Transfers(NamedTuple):
    """Equal transfers of a group: `peers_s` is the median of other groups' mean seconds for such transfers."""

    kind: str
    bytes: float
    times_s: list[float]
    peers_s: float

    @property
    def mean_s(self) -> float:
        return sum(self.times_s) / len(self.times_s)

    @property
    def lost_s(self) -> float:
        return (self.mean_s - self.peers_s) * len(self.times_s)


def _slow_groups(as_it_was: Replay) -> tuple[SlowGroup, ...]:
    """Return groups whose transfers take longer than the median of groups with equal size, kind and bytes."""
    step_s, slower = as_it_was.step_time_s, _slower_transfers(_transfer_times(as_it_was))
    found = []
    for ranks, rows in sorted(slower.items(), key=lambda item: -sum(row.lost_s for row in item[1]))[:TRIED]:
        worst = max(rows, key=lambda row: (row.lost_s, row.kind, row.bytes))
        scales = {(row.kind, row.bytes, ranks): row.peers_s / row.mean_s for row in rows}
        repaired_s = replay(as_it_was.recording, Change(transfers=scales)).step_time_s
        gain_s = step_s - repaired_s
        found.append(SlowGroup(ranks, worst.kind, worst.bytes, worst.mean_s, worst.peers_s, repaired_s, gain_s))
    kept = [row for row in found if row.gain_s > SHOWS * step_s]
    return tuple(sorted(kept, key=lambda row: -row.gain_s))


def _transfer_times(as_it_was: Replay) -> dict[tuple[str, float, tuple[int, ...]], list[float]]:
    """Return the seconds of each complete collective from its last member's begin, by kind, bytes and ranks."""
    recording = as_it_was.recording
    times: dict[tuple[str, float, tuple[int, ...]], list[float]] = defaultdict(list)
    for members in recording.members().values():
        message = recording.nodes[members[0]].message
        assert message is not None
        ranks = message.ranks or tuple(sorted(recording.nodes[m].rank for m in members))
        last = max(members, key=lambda m: as_it_was.begin_s[m])
        if len(ranks) > 1 and len(members) == len(ranks) and not recording.nodes[members[0]].before:
            times[message.kind, message.bytes, ranks].append(as_it_was.end_s[last] - as_it_was.begin_s[last])
    return times


def _slower_transfers(
    times: dict[tuple[str, float, tuple[int, ...]], list[float]],
) -> dict[tuple[int, ...], list[_Transfers]]:
    """Return the transfers of each group that take longer than those of the median of its peers."""
    mean = {key: sum(each) / len(each) for key, each in times.items()}
    slower: dict[tuple[int, ...], list[_Transfers]] = defaultdict(list)
    for key, seconds in mean.items():
        kind, size, ranks = key
        others = [s for k, s in mean.items() if k != key and k[:2] == (kind, size) and len(k[2]) == len(ranks)]
        if others and seconds > median(others):
            slower[ranks].append(_Transfers(kind, size, times[key], median(others)))
    return slower


def _busy_hosts(as_it_was: Replay) -> tuple[Busy, ...]:
    """Return ranks whose host works alone for longer than the median of the others, by at least HOST_SHOWS."""
    hosts = {row.rank: row.host_s for row in rank_times(as_it_was)}
    rows = []
    for rank, seconds in hosts.items():
        peers_s = median(s for r, s in hosts.items() if r != rank)
        if seconds - peers_s > HOST_SHOWS * as_it_was.step_time_s:
            rows.append(Busy(rank, seconds, peers_s))
    return tuple(sorted(rows, key=lambda row: row.peers_s - row.host_s))


def verdict(found: Diagnosis) -> str:
    """Return the diagnosis as a sentence."""
    least_s = SHOWS * found.replayed_step_s
    rank = found.slow_ranks[0] if found.slow_ranks else None
    group = found.slow_groups[0] if found.slow_groups else None
    if group is not None and group.gain_s > max(least_s, rank.gain_s if rank is not None else 0.0):
        return f"transfers of ranks {', '.join(map(str, group.ranks))} are slow"
    if rank is not None and rank.gain_s > least_s:
        more = any(row.count > row.peers_count for row in rank.operators[:1])  # the first loses most
        return f"rank {rank.rank} is slow" + (": it runs operators more often than its peers" if more else "")
    if found.uneven_data and (row := found.uneven_data[0]).gain_s > least_s:
        return f"rank {row.rank} has more data: its kernels' inputs are {row.inputs:.2f} times those of its peers"
    return "no rank is slow: repairing none of them would shorten the step"


def as_json(found: Diagnosis, recording: Recording) -> dict[str, Any]:
    """Return the diagnosis in format sim-diagnosis/1."""
    return {
        "format": "sim-diagnosis/1",
        "traces": recording.name,
        "ranks": list(recording.ranks),
        "world_size": recording.world_size,
        "verdict": verdict(found),
        **found.to_json(),
        "warnings": recording.warnings,
    }
