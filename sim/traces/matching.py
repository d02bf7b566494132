"""Join the traces of several ranks to one recording: choose the step, align clocks, match collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from sim.core.errors import InputError
from sim.traces.device import add_device
from sim.traces.kineto import RankTrace
from sim.traces.rank_graph import RankGraph
from sim.traces.recording import Recording, merge


def join(traces: Sequence[RankTrace], step: int | None = None) -> Recording:
    """Return one recorded step of all traced ranks; without `step` the step of median length, if steps are marked.

    Raises:
        InputError: for two files of one rank, or a step that not every rank has.
    """
    count = Counter(t.rank for t in traces)
    for trace in traces:
        if count[trace.rank] > 1:
            same = ", ".join(t.path for t in traces if t.rank == trace.rank)
            raise InputError(f"{trace.path}: is of rank {trace.rank}, and so are others: {same}")
    traces = sorted(traces, key=lambda t: t.rank)
    number = _step(traces, step)
    world = tuple(range(max(t.world_size for t in traces)))
    parts = [_recorded(t, number, world) for t in traces]
    for part in parts:
        _count_keys(part)
    _one_clock(parts, traces)
    _check_times(parts)
    out = merge(parts, traces[0].path if len(traces) == 1 else f"{len(traces)} traces")
    _check_members(out)
    return out


def _recorded(trace: RankTrace, step: int | None, world: tuple[int, ...]) -> Recording:
    """Return one rank's nodes; `world`: ranks of the default group."""
    graph = RankGraph(trace, *_window(trace, step))
    graph.add_host(world)
    add_device(graph)
    graph.warnings += trace.notes
    return graph.recording(step)


def _step(traces: Sequence[RankTrace], wanted: int | None) -> int | None:
    common = set.intersection(*(set(t.steps) for t in traces))
    if wanted is not None and wanted not in common:
        found = ", ".join(map(str, sorted(common)[:16])) or "no steps"
        raise InputError(f"--step: found {wanted}; every trace has {found}")
    if wanted is not None or not common:
        return wanted
    length = {n: max(t.steps[n].end_ns - t.steps[n].start_ns for t in traces) for n in common}
    return sorted(common, key=lambda n: (length[n], n))[(len(common) - 1) // 2]


def _window(trace: RankTrace, step: int | None) -> tuple[int, int]:
    if step is not None:
        return trace.steps[step].start_ns, trace.steps[step].end_ns
    events = [e for listed in (*trace.threads.values(), trace.device, trace.gloo) for e in listed]
    return min(e.start_ns for e in events), max(e.end_ns for e in events) + 1


def _count_keys(part: Recording) -> None:
    """Number a rank's collectives of equal key in order of their start."""
    seen: Counter[tuple[object, ...]] = Counter()
    for node in sorted((n for n in part.nodes if n.message), key=lambda n: n.start_ns):
        message = node.message
        assert message is not None
        seen[message.kind, *message.key] += 1
        node.message = message._replace(key=(*message.key, seen[message.kind, *message.key]))


def _one_clock(parts: list[Recording], traces: Sequence[RankTrace]) -> None:
    """Shift ranks of other hosts, whose clocks differ, so that common collectives end together in the median."""
    reference = {n.message.key: n.end_ns for n in parts[0].nodes if n.message}
    for part, trace in zip(parts[1:], traces[1:], strict=True):
        if trace.host_name and trace.host_name == traces[0].host_name:
            continue
        late = [n.end_ns - reference[n.message.key] for n in part.nodes if n.message and n.message.key in reference]
        offset = round(median(late)) if late else part.nodes[0].start_ns - parts[0].nodes[0].start_ns
        for node in part.nodes:
            node.start_ns -= offset
            node.end_ns -= offset
        how = f"by its {len(late)} common collectives" if late else "by its start: no common collectives"
        part.warnings.append(
            f"rank {part.ranks[0]}: its clock differs; its times were moved by {-offset / 1e6:.3f} ms {how}"
        )


def _check_times(parts: Sequence[Recording]) -> None:
    """Warn of a rank whose step begins after another rank's has ended, as in traces of two runs."""
    first = min(parts, key=lambda part: max(node.end_ns for node in part.nodes))
    ended_ns = max(node.end_ns for node in first.nodes)
    for part in parts:
        begun_ns = min(node.start_ns for node in part.nodes)
        if begun_ns > ended_ns:
            part.warnings.append(
                f"rank {part.ranks[0]}: its step begins {(begun_ns - ended_ns) / 1e9:.3g} s after rank "
                f"{first.ranks[0]}'s has ended; are these traces of one run?"
            )


def _check_members(recording: Recording) -> None:
    """Warn of operations with untraced members; they keep their recorded seconds, including waits."""
    alone = 0
    for members in recording.members().values():
        message = recording.nodes[members[0]].message
        assert message is not None
        expected = set(message.ranks) or set(range(recording.world_size))
        ranks = {recording.nodes[m].rank for m in members}
        alone += not expected <= ranks and len(expected) > 1
    if alone:
        recording.warnings.append(
            f"{alone} collectives or messages have members without a trace; waiting for those stays as recorded"
        )
    missing = recording.world_size - len(recording.ranks)
    if missing > 0:
        recording.warnings.append(f"only {len(recording.ranks)} of {recording.world_size} ranks recorded a trace")
