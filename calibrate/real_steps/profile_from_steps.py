"""Makes a profile from the paired calibrations of all ranks, and chooses the representative step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from calibrate.launch import ranks_here
from calibrate.real_steps.block_cuts import Transfer
from calibrate.real_steps.blocks import RECOMPUTING, Sample
from calibrate.real_steps.gradient_times import Beneath, expected_waits_s
from calibrate.real_steps.timed_rounds import LEAST, Log, foreign, good_rounds
from calibrate.real_steps.transfer_times import seconds_of
from sim.inputs.measured_run import QUIET_CORES
from sim.inputs.parallelism import Parallelism
from sim.prices.coefficients import Coefficients
from sim.prices.profile import BlockPoint, CollectiveTable, Facts, PointTable, Profile

LEAST_MESSAGE_S = 20e-6  # loopback's latency: a message that took less had arrived before the receiver waited
LEAST_S = 1e-6
Times = dict[tuple[str, int], dict[int, list[float]]]  # by collective and number of ranks, by bytes: seconds
Epilogue = Sequence[tuple[str, int]]  # (op, bytes) of clipping and optimizer, in order
Middle = Callable[[Iterable[float]], tuple[float, float]]  # median or mean of many values, and their spread around it


def chosen_rounds(log: Log) -> list[int]:
    """Return the good rounds; if none is good, the three in which other processes used the fewest cores."""
    rounds = range(len(log.steps) // 2)
    return good_rounds(log) or sorted(sorted(rounds, key=lambda r: foreign(log, r))[:LEAST])


def representative(log: Log, chosen: Sequence[int]) -> int:
    """Return the number of the chosen step whose time is nearest to their median."""
    middle = statistics.median(log.steps[i].seconds for i in chosen)
    return min(chosen, key=lambda i: abs(log.steps[i].seconds - middle))


def ranks_per_core(ranks: int, hardware: Facts) -> float:
    """Return how many of a machine's ranks share each core of its CPU; 0 on GPUs, which ranks do not share in turns."""
    return ranks / float(hardware["cores"]) if hardware.get("device") == "cpu" else 0.0


def median_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the median, and the median absolute deviation divided by it."""
    values = list(values)
    middle = statistics.median(values)
    return middle, statistics.median(abs(v - middle) for v in values) / middle


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean, and the mean absolute deviation divided by it."""
    values = list(values)
    middle = statistics.fmean(values)
    return middle, statistics.fmean(abs(v - middle) for v in values) / middle


def profile_of_rounds(
    name: str,
    date: str,
    logs: Sequence[Log],
    epilogues: Sequence[Epilogue],
    message_bytes: int,
    parallelism: Parallelism,
    environment: Mapping[str, Facts],
) -> Profile:
    """Make a profile of blocks, optimizer, messages and collectives from all ranks' calibrations in the chosen rounds.

    `environment`: "hardware" and "software" of the machine. `epilogues`: for each rank the simulator's operators after
    the last backward, as (op, bytes). `message_bytes`: size of a message between stages.

    If ranks share cores, means are used instead of medians. A rank rarely waits for a core, but then for milliseconds.
    The step includes these waits; a median would not.
    """
    chosen = chosen_rounds(logs[0])
    sharing = ranks_per_core(ranks_here(len(logs)), environment["hardware"])
    middle = median_and_spread if sharing <= 1 else mean_and_spread
    gradients = _collectives(logs, chosen, parallelism, sharing > 1)
    within = _within_blocks(logs, chosen, middle)
    collectives = _tables([_messages(logs, chosen, message_bytes), gradients, within], middle)
    return Profile(
        name=name,
        source="calibrate.measure: blocks timed in step order between the steps",
        date=date,
        hardware=environment["hardware"],
        software=environment["software"],
        settings={"threads": 1, "calibrations": len(chosen), "ranks_per_core": sharing},
        coefficients=_share(logs, chosen, gradients, middle),
        points=_epilogue(logs, chosen, epilogues, middle),
        blocks=_blocks(logs, chosen, middle, sharing > 1),
        collectives=collectives,
    )


def _blocks(logs: Sequence[Log], chosen: Sequence[int], middle: Middle, shared: bool) -> tuple[BlockPoint, ...]:
    """Return each block's seconds: `middle` over actions and rounds on each rank, then the mean over ranks.

    In a quiet window wall time counts. In other windows CPU time counts, which leaves out waits for a core. If ranks
    share cores (`shared`), wall time always counts, as waits for a core belong to the step.
    """
    by_rank: dict[Sample, list[list[float]]] = defaultdict(list)
    for log in logs:
        own: dict[Sample, list[float]] = defaultdict(list)
        for i in chosen:
            clock = 0 if shared or log.calibrations[i].foreign_cores <= QUIET_CORES else 1
            for key, values in log.calibrations[i].blocks.items():
                own[key] += [v[clock] for v in values]
        for sample, times in own.items():
            by_rank[sample].append(times)
    points = []
    for (block, phase, run), ranks in by_rank.items():
        middles = [middle(times) for times in ranks]
        seconds, spread = (statistics.fmean(column) for column in zip(*middles, strict=True))
        points.append(BlockPoint(block, phase, run, seconds, spread))
    return _apart(points)


def _apart(points: Sequence[BlockPoint]) -> tuple[BlockPoint, ...]:
    """Subtract the backward's (or input gradient's) seconds from those with recomputation, which gives "recompute"."""
    plain: dict[str, float] = defaultdict(float)
    for p in points:
        if p.phase in ("backward", "input_grad"):
            plain[p.key] += p.seconds
    found = []
    for p in points:
        if p.phase != RECOMPUTING:
            found.append(p)
        elif p.key in plain:
            seconds = max(LEAST_S, p.seconds - plain[p.key])
            found.append(p._replace(phase="recompute", seconds=seconds))
    return tuple(found)


def _epilogue(
    logs: Sequence[Log], chosen: Sequence[int], shapes: Sequence[Epilogue], middle: Middle
) -> tuple[PointTable, ...]:
    """Return a point of clipping and optimizer for each operator and size, from all ranks that have it."""
    by_point: dict[tuple[str, int], list[float]] = defaultdict(list)
    for log, shape in zip(logs, shapes, strict=True):
        for i in chosen:
            records = [r for r in log.calibrations[i].epilogue if r.kind == "OPTIMIZER"]
            for (op, size), r in zip(shape, records, strict=True):
                by_point[op, size].append((r.end_ns - r.start_ns) * 1e-9)
    tables = []
    for op in dict.fromkeys(op for op, _ in by_point):
        rows = [(n, *middle(t), len(t)) for (o, n), t in sorted(by_point.items()) if o == op]
        sizes, seconds, spread, samples = (np.array(column) for column in zip(*rows, strict=True))
        tables.append(PointTable(op, "fp32", sizes.reshape(-1, 1), seconds, spread, samples))
    return tuple(tables)


def _within_blocks(logs: Sequence[Log], chosen: Sequence[int], middle: Middle) -> Times:
    """Return seconds of the collectives within blocks, as the ranks that wait least saw them.

    The other ranks of the group also wait for these ranks' computation, which the simulator knows. Ranks with the same
    blocks count as one kind, and their mean is taken, because it is chance which of them is late. Times start when the
    rank itself arrives. So waits among equal ranks count as communication, as nothing else in the simulation has them.
    """
    kinds = [frozenset(key for key, _, _ in log.calibrations[chosen[0]].blocks) for log in logs]
    waits: dict[tuple[str, int, int], dict[tuple[str, int], list[tuple[frozenset[str], list[float]]]]] = {}
    for log, kind in zip(logs, kinds, strict=True):
        for (sort, members), seconds in _waits(log, chosen).items():
            waits.setdefault(sort, {}).setdefault(members, []).append((kind, seconds))
    out: Times = defaultdict(lambda: defaultdict(list))
    for (op, ranks, size), groups in waits.items():
        alike: dict[frozenset[frozenset[str]], dict[frozenset[str], list[list[float]]]] = {}
        for seen in groups.values():
            by_kind = alike.setdefault(frozenset(kind for kind, _ in seen), {})
            for kind, seconds in seen:
                by_kind.setdefault(kind, []).append(seconds)
        for by_kind in alike.values():
            means = [[statistics.fmean(x) for x in zip(*same, strict=True)] for same in by_kind.values()]
            out[op, ranks][size] += min(means, key=lambda seconds: middle(seconds)[0])
    return out


def _waits(log: Log, chosen: Sequence[int]) -> dict[tuple[tuple[str, int, int], tuple[str, int]], list[float]]:
    """Return by (op, ranks, bytes) and group the seconds of such a collective in each of the chosen rounds."""
    out: dict[tuple[tuple[str, int, int], tuple[str, int]], list[float]] = defaultdict(list)
    for i in chosen:
        groups: dict[tuple[str, int], list[Transfer]] = defaultdict(list)
        for t in log.calibrations[i].transfers:
            groups[t.members].append(t)
        for members, seen in groups.items():
            for sort, seconds in seconds_of(seen).items():
                out[sort, members].append(max(seconds, LEAST_S))
    return out


def _messages(logs: Sequence[Log], chosen: Sequence[int], size: int) -> Times:
    """Return the seconds of messages, from the later of their two starts until they were received.

    Overlapped messages count only if the receiver was already waiting. Otherwise the transfer was hidden.
    """
    times: list[float] = []
    for i in chosen:
        times += _spans(ends for log in logs for ends in log.calibrations[i].messages)
    times = [t for t in times if t > LEAST_MESSAGE_S] or times
    return {("send_recv", 2): {size: times}} if times else {}


def _collectives(logs: Sequence[Log], chosen: Sequence[int], p: Parallelism, shared: bool) -> Times:
    """Return the seconds of collectives of gradients and parameters, and of the norm's 4-byte all-reduces."""
    times: Times = defaultdict(lambda: defaultdict(list))
    norms = [n for n in (p.tp * p.pp, _shards(p) if p.zero else 1) if n > 1]
    for i in chosen:
        members: dict[tuple[str, int, int], list[tuple[object, int, int]]] = defaultdict(list)
        for log in logs:
            for t in log.calibrations[i].collectives:
                members[t.op, t.ranks, t.bytes].append(((t.first, t.number), t.start_ns, t.end_ns))
            small = [r for r in log.calibrations[i].epilogue if r.kind == "ALL_REDUCE"]
            for ranks, r in zip(norms, small, strict=True):
                members["all_reduce", ranks, 4].append((ranks, r.start_ns, r.end_ns))
        first = _first_after_backward(members, p)
        # If each rank has its own core, a rank that is late in a busy window was delayed by another process.
        counts = shared or logs[0].calibrations[i].foreign_cores <= QUIET_CORES
        counts &= ranks_here(len(logs)) == len(logs)  # clocks of several machines cannot be compared
        for (op, ranks, size), ends in members.items():
            late_s = _late_s(logs, i) if (op, ranks, size) == first and counts else 0.0
            times[op, ranks][size] += [seconds + late_s for seconds in _spans(ends)]
    return times


def _first_after_backward(sorts: Iterable[tuple[str, int, int]], p: Parallelism) -> tuple[str, int, int] | None:
    """Return the collective of all gradients if its ranks have not waited for each other before, else None.

    They wait there for the slowest one. With messages between stages or earlier collectives they have already waited.
    """
    alone = p.dp_sync == "after_backward" and p.zero < 2 and p.pp == 1
    op = "reduce_scatter" if p.zero else "all_reduce"
    whole = [(ranks, size) for kind, ranks, size in sorts if kind == op]
    return (op, *max(whole)) if alone and whole else None


def _late_s(logs: Sequence[Log], i: int) -> float:
    """Return the mean seconds for which ranks wait for the one that finished its blocks last in a calibration.

    The simulator gives equal ranks equal times, so there they never wait. Real ranks always do, though each time for
    another rank.
    """
    ends = [log.calibrations[i].walked_ns for log in logs]
    return (max(ends) - statistics.fmean(ends)) * 1e-9


def _shards(p: Parallelism) -> int:
    return min(p.shard_size or p.dp * p.cp, p.dp * p.cp)


def _share(logs: Sequence[Log], chosen: Sequence[int], times: Times, middle: Middle) -> Coefficients:
    """Return the share that collectives take from computation beside them: seconds lost ÷ the collectives' own seconds.

    In a quiet window the lost wall time counts, less the waits that the simulator has. In other windows the lost CPU
    time counts. The simulator has one share for collectives of all kinds.
    """

    def alone(c: Beneath) -> float:
        return middle(times[c.op, c.ranks][c.bytes])[0]

    lost_s = alone_s = 0.0
    for log in logs:
        rounds = [(c.foreign_cores <= QUIET_CORES, c.beside) for c in (log.calibrations[i] for i in chosen)]
        lost = [
            b.wall_s - expected_waits_s(b.waits, alone) if quiet else b.cpu_s
            for quiet, b in rounds
            if b is not None and b.sent
        ]
        if lost:
            lost_s += middle(lost)[0]
            beside = log.calibrations[chosen[0]].beside
            sent = beside.sent if beside is not None else ()
            alone_s += sum(middle(times[op, ranks][n])[0] for op, ranks, n in sent)
    if not alone_s:
        return Coefficients()
    source = "how much longer a micro-batch took with its gradients' collectives, divided by the collectives' seconds"
    return Coefficients(collective_sm_share=max(0.0, lost_s) / alone_s, sources={"collective_sm_share": source})


def _spans(ends: Iterable[tuple[object, int, int]]) -> list[float]:
    """Return for each number the seconds from its last start to its last end; `ends`: (number, start, end) in ns."""
    starts: dict[object, int] = {}
    stops: dict[object, int] = {}
    for number, start, end in ends:
        starts[number] = max(start, starts.get(number, start))
        stops[number] = max(end, stops.get(number, end))
    return [max(stops[n] - starts[n], 1000) * 1e-9 for n in starts]


def _tables(found: Sequence[Times], middle: Middle) -> tuple[CollectiveTable, ...]:
    """Return one table for each collective and number of ranks, of all seconds found."""
    every: Times = defaultdict(lambda: defaultdict(list))
    for times in found:
        for sort, by_size in times.items():
            for size, seconds in by_size.items():
                every[sort][size] += seconds
    return tuple(_table(op, ranks, by_size, middle) for (op, ranks), by_size in every.items())


def _table(op: str, ranks: int, by_size: dict[int, list[float]], middle: Middle) -> CollectiveTable:
    rows = [(size, *middle(by_size[size])) for size in sorted(by_size)]
    size, seconds, spread = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    return CollectiveTable(op, ranks, size, seconds, spread)
