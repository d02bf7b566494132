"""Join the traces of several ranks to one recording: choose the step, align clocks, match collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from sim.core.errors import InputError
from sim.traces.device import add_device, launch_times
from sim.traces.kineto import RankTrace
from sim.traces.rank_graph import RankGraph
from sim.traces.recording import Recording, merge

DAY_NS = 86_400 * 10**9


def join(traces: Sequence[RankTrace], step: int | None = None) -> Recording:
    """Return one recorded step of all traced ranks; without `step` the step of median length, if steps are marked.

    Raises:
        InputError: for two files of one rank, traces of two runs, or a step that not every rank has.
    """
    count = Counter(t.rank for t in traces)
    for trace in traces:
        if count[trace.rank] > 1:
            same = ", ".join(t.path for t in traces if t.rank == trace.rank)
            raise InputError(f"{trace.path}: is of rank {trace.rank}, and so are others: {same}")
    traces = sorted(traces, key=lambda t: t.rank)
    number, lead = _step(traces, step)
    world = tuple(range(max(t.world_size for t in traces)))
    parts = [_recorded(t, number, lead, world) for t in traces]
    for part in parts:
        _count_keys(part)
    _check_one_run(parts, traces)
    _one_clock(parts, traces)
    _check_times(parts)
    out = merge(parts, traces[0].path if len(traces) == 1 else f"{len(traces)} traces")
    _check_members(out)
    return out


def _recorded(trace: RankTrace, step: int | None, lead: int | None, world: tuple[int, ...]) -> Recording:
    """Return one rank's nodes; `lead`: the step before; `world`: ranks of the default group."""
    begin_ns, end_ns = _window(trace, step)
    graph = RankGraph(trace, begin_ns if lead is None else trace.steps[lead].start_ns, begin_ns, end_ns)
    graph.add_host(world)
    add_device(graph)
    graph.warnings += trace.notes
    return graph.recording(step)


def _step(traces: Sequence[RankTrace], wanted: int | None) -> tuple[int | None, int | None]:
    """Choose a step, and the one before it that shares the GPU with it; None where there is none.

    A step has work for the GPU, if there is one: a profiler leaves a stub behind the last step.
    """
    common = set.intersection(*(set(t.steps) for t in traces))
    ends = [_kernel_ends(t) for t in traces if t.device]
    worked = sorted(n for n in common if all(n in of_trace for of_trace in ends))
    if wanted is not None and wanted not in common:
        found = ", ".join(map(str, sorted(common)[:16])) or "no steps"
        raise InputError(f"--step: found {wanted}; every trace has {found}")
    if wanted is not None and wanted not in worked:
        found = ", ".join(map(str, worked[:16])) or "none"
        raise InputError(f"--step: step {wanted} launches nothing on the GPU; steps that do: {found}")
    if not worked:
        return None, None
    before = dict(pairwise(worked)) if ends else {}
    before = {n: lead for lead, n in before.items()}
    if wanted is not None:
        return wanted, before.get(wanted)
    length = {n: _length(traces, ends, n, before.get(n)) for n in before or worked}
    step = sorted(length, key=lambda n: (length[n], n))[(len(length) - 1) // 2]
    return step, before.get(step)


def _length(traces: Sequence[RankTrace], ends: Sequence[dict[int, int]], step: int, before: int | None) -> int:
    """Return a step's length on the slowest rank: from kernel to kernel, or as its mark on the host."""
    if before is None:
        return max(t.steps[step].end_ns - t.steps[step].start_ns for t in traces)
    return max(of_trace[step] - of_trace[before] for of_trace in ends)


def _kernel_ends(trace: RankTrace) -> dict[int, int]:
    """Return when the last kernel ends that each step launched; steps without kernels are left out."""
    marks = sorted((mark.start_ns, mark.end_ns, n) for n, mark in trace.steps.items())
    starts, ends = [start for start, _, _ in marks], dict[int, int]()
    for kernel, launched_ns in zip(trace.device, launch_times(trace), strict=True):
        i = bisect_right(starts, launched_ns) - 1
        if i >= 0 and launched_ns < marks[i][1]:
            ends[marks[i][2]] = max(ends.get(marks[i][2], 0), kernel.end_ns)
    return ends


def _window(trace: RankTrace, step: int | None) -> tuple[int, int]:
    if step is not None:
        return trace.steps[step].start_ns, trace.steps[step].end_ns
    events = [e for listed in (*trace.threads.values(), trace.device, trace.gloo) for e in listed]
    return min(e.start_ns for e in events), max(e.end_ns for e in events) + 1


def _count_keys(part: Recording) -> None:
    """Number a rank's collectives of equal key in order of their start; those of steps before from the last one back,
    as the first that is recorded differs from rank to rank."""
    for before in (False, True):
        seen: Counter[tuple[object, ...]] = Counter()
        mine = (n for n in part.nodes if n.message and n.before == before)
        for node in sorted(mine, key=lambda n: n.start_ns, reverse=before):
            message = node.message
            assert message is not None
            seen[message.kind, *message.key] += 1
            number = seen[message.kind, *message.key]
            node.message = message._replace(key=(*message.key, -number if before else number))


def _check_one_run(parts: Sequence[Recording], traces: Sequence[RankTrace]) -> None:
    """Refuse ranks that cannot be of one run.

    Raises:
        InputError: for other numbers of ranks, clocks more than a day apart, or other GPUs without a common collective.
    """
    first, keys = traces[0], {n.message.key for n in parts[0].nodes if n.message}
    for part, trace in zip(parts[1:], traces[1:], strict=True):
        own = {n.message.key for n in part.nodes if n.message}
        worlds = first.world_size != trace.world_size and min(first.world_size, trace.world_size) > 1
        days = abs(part.nodes[0].start_ns - parts[0].nodes[0].start_ns) / DAY_NS
        gpus = trace.gpu_name != first.gpu_name and bool(trace.gpu_name and first.gpu_name)
        alone = bool(own and keys) and not own & keys
        if worlds or days > 1 or (gpus and alone):
            said = [
                f"world_size {first.world_size} and {trace.world_size}" * worlds,
                f"{first.gpu_name} and {trace.gpu_name}" * gpus,
                "no collective in common" * alone,
                f"clocks {days:,.1f} days apart" * (days > 1),
            ]
            reasons = ", ".join(filter(None, said))
            raise InputError(f"{trace.path}: is of another run than {first.path}: {reasons}; give traces of one run")


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
        if recording.nodes[members[0]].before:
            continue
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
