"""From the logs of all ranks: the representative step, and the paired calibration as a Profile."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from calibrate.quiet import QUIET_CORES
from calibrate.rounds import LEAST, Log, foreign, good_rounds
from sim.parallelism import Parallelism
from sim.profile import BlockPoint, CollectiveTable, Facts, PointTable, Profile

LEAST_MESSAGE_S = 20e-6  # loopback's latency: what took less had arrived before anyone waited
Epilogue = Sequence[tuple[str, int]]  # (op, bytes) of clipping and optimizer, in order


def chosen_rounds(log: Log) -> list[int]:
    """The good rounds; the three in which others used least where none was good."""
    rounds = range(len(log.steps) // 2)
    return good_rounds(log) or sorted(sorted(rounds, key=lambda r: foreign(log, r))[:LEAST])


def representative(log: Log, chosen: Sequence[int]) -> int:
    """The step whose time is nearest the median of the chosen ones."""
    middle = statistics.median(log.steps[i].seconds for i in chosen)
    return min(chosen, key=lambda i: abs(log.steps[i].seconds - middle))


def median_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Median, and median absolute deviation divided by it."""
    values = list(values)
    middle = statistics.median(values)
    return middle, statistics.median(abs(v - middle) for v in values) / middle


def make_profile(
    name: str, date: str, logs: Sequence[Log], epilogues: Sequence[Epilogue], message_bytes: int,
    parallelism: Parallelism, hardware: Facts, software: Facts,
) -> Profile:
    """The calibrations of all ranks in the chosen rounds as a profile of blocks, optimizer, messages and all-reduces.

    `epilogues`: by rank, what the simulator calls the operators after the last backward.
    """
    chosen = chosen_rounds(logs[0])
    collectives = [*_messages(logs, chosen, message_bytes), *_all_reduces(logs, chosen, parallelism)]
    return Profile(
        name=name, source="calibrate.measure: blocks timed in step order between the steps", date=date,
        hardware=hardware, software=software,
        settings={"threads": 1, "calibrations": len(chosen)},
        points=_epilogue(logs, chosen, epilogues),
        blocks=_blocks(logs, chosen),
        collectives=tuple(collectives),
    )


def _blocks(logs: Sequence[Log], chosen: Sequence[int]) -> tuple[BlockPoint, ...]:
    """Median over actions and rounds on each rank, then the mean over ranks that have the block.

    Of quiet windows the wall time counts, of others the CPU time, which leaves out waiting for a core.
    """
    by_rank: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for log in logs:
        own: dict[tuple[str, str], list[float]] = defaultdict(list)
        for i in chosen:
            clock = 0 if log.calibrations[i].foreign_cores <= QUIET_CORES else 1
            for key, values in log.calibrations[i].blocks.items():
                own[key] += [v[clock] for v in values]
        for key, values in own.items():
            by_rank[key].append(values)
    points = []
    for (key, phase), ranks in by_rank.items():
        medians = [median_and_spread(values) for values in ranks]
        seconds, spread = (statistics.fmean(column) for column in zip(*medians, strict=True))
        points.append(BlockPoint(key, phase, 0, seconds, spread))
    return tuple(points)


def _epilogue(
    logs: Sequence[Log], chosen: Sequence[int], shapes: Sequence[Epilogue]
) -> tuple[PointTable, ...]:
    """Clipping and optimizer: a point for each operator and size, from all ranks that have it."""
    by_point: dict[tuple[str, int], list[float]] = defaultdict(list)
    for log, shape in zip(logs, shapes, strict=True):
        for i in chosen:
            records = [r for r in log.calibrations[i].epilogue if r.kind == "OPTIMIZER"]
            for (op, size), r in zip(shape, records, strict=True):
                by_point[op, size].append((r.end_ns - r.start_ns) * 1e-9)
    tables = []
    for op in dict.fromkeys(op for op, _ in by_point):
        rows = [(n, *median_and_spread(t), len(t)) for (o, n), t in sorted(by_point.items()) if o == op]
        sizes, seconds, spread, samples = (np.array(column) for column in zip(*rows, strict=True))
        tables.append(PointTable(op, "fp32", sizes.reshape(-1, 1), seconds, spread, samples))
    return tuple(tables)


def _messages(logs: Sequence[Log], chosen: Sequence[int], size: int) -> list[CollectiveTable]:
    """A message took from the later start of its two ends until it was received.

    Overlapped messages count only where the receiver was waiting already: else the transfer was hidden.
    """
    times: list[float] = []
    for i in chosen:
        times += _spans(ends for log in logs for ends in log.calibrations[i].messages)
    times = [t for t in times if t > LEAST_MESSAGE_S] or times
    return [_table("send_recv", 2, {size: times})] if times else []


def _all_reduces(logs: Sequence[Log], chosen: Sequence[int], p: Parallelism) -> list[CollectiveTable]:
    """Gradients over data-parallel ranks, and the four bytes of the gradient norm over pipeline ranks."""
    times: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for i in chosen:
        by_collective: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for log in logs:
            for number, size, start, end in log.calibrations[i].all_reduces:
                by_collective[p.dp, number, size].append((0, start, end))
            for r in log.calibrations[i].epilogue:
                if r.kind == "ALL_REDUCE":
                    by_collective[p.pp, -1, 4].append((0, r.start_ns, r.end_ns))
        for (ranks, _, size), ends in by_collective.items():
            times[ranks][size] += _spans(ends)
    return [_table("all_reduce", ranks, by_size) for ranks, by_size in times.items()]


def _spans(ends: Iterable[tuple[object, int, int]]) -> list[float]:
    """Seconds from the last member's start to the last member's end, for each number."""
    starts: dict[object, int] = {}
    stops: dict[object, int] = {}
    for number, start, end in ends:
        starts[number] = max(start, starts.get(number, start))
        stops[number] = max(end, stops.get(number, end))
    return [max(stops[n] - starts[n], 1000) * 1e-9 for n in starts]


def _table(op: str, ranks: int, by_size: dict[int, list[float]]) -> CollectiveTable:
    rows = [(size, *median_and_spread(by_size[size])) for size in sorted(by_size)]
    size, seconds, spread = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    return CollectiveTable(op, ranks, size, seconds, spread)


