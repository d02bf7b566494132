"""Turn an Nsight Systems export (`nsys export --type sqlite`) into ranks' traces like those of PyTorch's profiler.

The use of each table (`sim.traces.nsys_tables` reads the columns):
- CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET: work on the device, by device and stream;
- CUPTI_ACTIVITY_KIND_RUNTIME: calls of host threads; `correlationId` joins a launch and its kernel, in one process;
- CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: streams that the host waits for, and, with CUPTI_ACTIVITY_KIND_CUDA_EVENT
  (`--cuda-event-trace=true`), streams that wait for one another;
- NVTX_EVENTS: steps, and ranges of host threads (operators, where torch's emit_nvtx wrote them).
Identifiers of processes and threads are `globalTid / 0x1000000 % 0x1000000` and `globalTid % 0x1000000`.

An export does not say which rank a process is, nor the process group and the bytes of a collective.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field

from sim.core.collectives import collective_kind
from sim.core.errors import InputError
from sim.traces.kineto import GLOO, MAX_NS, NCCL, STEP, Args, Event, RankTrace, rank_in_name, whole
from sim.traces.nsys_tables import HOW, Tables

KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, EVENT = (
    f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "CUDA_EVENT")
)
NVTX, STRINGS, GPU, GRAPH = "NVTX_EVENTS", "StringIds", "TARGET_INFO_GPU", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_SPAN, _ON_DEVICE = ("start", "end"), ("deviceId", "streamId")
NESTED, FREE = (59, 70), (60, 71)  # ENUM_NSYS_EVENT_TYPE: push/pop ranges of a thread; start/end ranges
WAIT_EVENT, STREAM_SYNC = 2, 3  # CUpti_ActivitySynchronizationType
COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}  # ENUM_CUDA_MEMCPY_OPER
MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}  # ENUM_CUDA_MEM_KIND
# Names of ranges that are steps. Only the first pattern that matches any range of a process counts. Ranges without a
# number are numbered from 0.
STEPS = (
    STEP,
    re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]{0,3}(\d{1,15})\Z", re.I),
    re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)()\Z", re.I),
)
_EMITTED = re.compile(r",(?: seq =| op_id =| sizes =).*", re.S)  # what torch's emit_nvtx adds to a name
_OPERATOR = re.compile(r"[A-Za-z_]\w*::")
_VERSION = re.compile(r"(?:_ptsz|_ptds)?(?:_v\d+)?\Z")  # cudaLaunchKernel_ptsz_v7000
_NCCL = re.compile(r"nccl\w{0,20}Kernel_([A-Za-z]+)")  # ncclKernel_, ncclDevKernel_, ncclSymkDevKernel_AllReduce_…
_BOUND = 0xFFFFFF


class _Process(Struct):
    """Hold the events of one process; `ranges`: NVTX ranges, and whether each is nested in its thread's."""

    device: list[Event] = field(default_factory=list)
    calls: list[Event] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)
    ranges: list[tuple[Event, bool]] = field(default_factory=list)


def read_nsys(paths: Sequence[str | Path]) -> list[RankTrace]:
    """Read the ranks of one or more exports.

    The rank of a file of one process is in its name, else it is the file's position. If a file has several processes,
    ranks are numbered by file, device and process.

    Raises:
        InputError: if a table or column is missing or holds something else; the text names file, table and column.
    """
    files = [_read(path) for path in paths]
    traces = [trace for file in files for trace in file]
    counted = any(len(file) > 1 for file in files)
    for position, trace in enumerate(traces):
        named = None if counted else rank_in_name(trace.path)
        trace.rank = position if named is None else named
    world = max(len(traces), max(t.rank for t in traces) + 1)
    for trace in traces:
        trace.world_size = world
    if counted:
        traces[0].notes.append(
            f"the files hold {len(traces)} processes with kernels; ranks are counted over files, devices and processes"
        )
    _name_collectives(traces)
    return traces


def _read(path: str | Path) -> list[RankTrace]:
    """Read the processes of one file, in order of first device and process, without rank numbers."""
    with Tables(path) as tables:
        strings = {key: text or "" for key, text in tables.rows(STRINGS, ["id"], texts=["value"])}
        processes: dict[int, _Process] = {}
        for pid, event in _device(tables, strings):
            processes.setdefault(pid, _Process()).device.append(event)
        if not processes:
            raise InputError(f"{path}: {KERNEL}: holds no kernels; {HOW}")
        one = next(iter(processes)) if set(processes) == {-1} else None  # the file does not distinguish processes
        for pid, event in _calls(tables, strings, one):
            if pid in processes:
                processes[pid].calls.append(event)
        for pid, event, nested in _ranges(tables, strings, one):
            if pid in processes:
                processes[pid].ranges.append((event, nested))
        _synchronization(tables, processes)
        names = _gpu_names(tables)
        notes = _notes(tables)
    order = sorted(processes, key=lambda pid: (min(int(e.thread[0]) for e in processes[pid].device), pid))
    return [_trace(str(path), processes[pid], names, notes) for pid in order]


def _notes(tables: Tables) -> list[str]:
    out = []
    if not tables.has(NVTX):
        out.append(f"{tables.path}: has no {NVTX} (nsys profile --trace=cuda,nvtx); all that it holds is one step")
    if tables.has(GRAPH):
        out.append(f"{tables.path}: CUDA graphs are traced whole and left out; nsys profile --cuda-graph-trace=node")
    return out


def _trace(path: str, process: _Process, gpu_names: dict[int, str], notes: list[str]) -> RankTrace:
    """Return one process as a rank's trace; `host_name` is the file, because a file's times have one clock."""
    device = min(int(e.thread[0]) for e in process.device)
    gpu = gpu_names.get(device, next(iter(gpu_names.values()), ""))
    trace = RankTrace(path, 0, 1, 0, host_name=path, gpu_name=gpu, notes=list(notes))
    trace.device, trace.syncs = process.device, process.syncs
    _number_steps(trace, [event for event, _ in process.ranges])
    chosen = {id(step) for step in trace.steps.values()}  # by identity: two ranges may have equal names and times
    listed = [event for event, nested in process.ranges if nested and id(event) not in chosen]
    for event in (*process.calls, *listed):
        if not event.name.startswith((NCCL, GLOO)):  # torch's words for what the kernels show
            trace.threads.setdefault(event.thread, []).append(event)
    for events in (*trace.threads.values(), trace.device, trace.syncs):
        events.sort(key=lambda e: (e.start_ns, -e.end_ns))
    return trace


def _number_steps(trace: RankTrace, ranges: list[Event]) -> None:
    """Number the trace's steps; of two ranges with one number the longer is the step."""
    for pattern in STEPS:
        found = [(match[1], e) for e in ranges if (match := pattern.match(e.name))]
        for position, (number, event) in enumerate(sorted(found, key=lambda item: item[1].start_ns)):
            key = int(number) if number else position
            known = trace.steps.get(key)
            if known is None or event.end_ns - event.start_ns > known.end_ns - known.start_ns:
                trace.steps[key] = event
        if found:
            break


# --- tables


def _pid(serialized: int | None) -> int:
    """Return the process of a serialized globalTid or globalPid; -1 if the file has none."""
    return -1 if serialized is None else (serialized >> 24) & _BOUND


def _thread(serialized: int | None) -> tuple[str, str]:
    return ("-1", "-1") if serialized is None else (str(_pid(serialized)), str(serialized & _BOUND))


def _event(
    tables: Tables, table: str, name: str, category: str, thread: tuple[str, str], span: tuple[int, int], args: Args
) -> Event:
    for column, at in zip(_SPAN, span, strict=True):
        if abs(at) >= MAX_NS:
            raise InputError(f"{tables.path}: {table}.{column}: found {at}; must be nanoseconds below 2^62")
    return Event(name, category, thread, span[0], max(span), args)


def _device(tables: Tables, strings: dict[int, str]) -> Iterator[tuple[int, Event]]:
    """Yield kernels, copies and memsets, each with its process."""
    numbers = (*_SPAN, *_ON_DEVICE)
    for table, more, maybe in (
        (KERNEL, ["demangledName"], ["shortName"]),
        (MEMCPY, ["copyKind"], ["srcKind", "dstKind"]),
        (MEMSET, [], ["memKind"]),
    ):
        if table != KERNEL and not tables.has(table):
            continue  # the export has a table only if there is something to put in it
        for row in tables.rows(table, (*numbers, *more), ("correlationId", "globalPid", *maybe)):
            start, end, device, stream = row[:4]
            number, process, *kinds = row[4 + len(more) :]
            if start == end == 0:
                continue  # CUPTI: "timestamp information could not be collected"
            if table == KERNEL:
                name, category = strings.get(row[4]) or strings.get(kinds[0]) or "kernel", "kernel"
            elif table == MEMCPY:
                source, target = (MEMORIES.get(k, "Unknown") for k in kinds)
                name, category = f"Memcpy {COPIES.get(row[4], 'Unknown')} ({source} -> {target})", "gpu_memcpy"
            else:
                name, category = f"Memset ({MEMORIES.get(kinds[0], 'Unknown')})", "gpu_memset"
            args: Args = {"stream": stream, "device": device} | ({} if number is None else {"correlation": number})
            thread = (str(device), str(stream))
            yield _pid(process), _event(tables, table, name, category, thread, (start, end), args)


def _calls(tables: Tables, strings: dict[int, str], one: int | None) -> Iterator[tuple[int, Event]]:
    """Yield calls of CUDA's runtime and driver, with names without the version, as in cudaLaunchKernel_v7000."""
    for start, end, name_id, number, thread in tables.rows(RUNTIME, (*_SPAN, "nameId"), ("correlationId", "globalTid")):
        name = _VERSION.sub("", strings.get(name_id, "cuda"))
        category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
        args = {} if number is None else {"correlation": number}
        event = _event(tables, RUNTIME, name, category, _thread(thread), (start, end), args)
        yield _pid(thread) if one is None else one, event


def _ranges(tables: Tables, strings: dict[int, str], one: int | None) -> Iterator[tuple[int, Event, bool]]:
    """Yield NVTX ranges that have ended, each with whether it is nested in its thread's."""
    if not tables.has(NVTX):
        return
    for start, event_type, end, thread, text_id, text in tables.rows(
        NVTX, ("start", "eventType"), ("end", "globalTid", "textId"), ("text",)
    ):
        if end is None or event_type not in (*NESTED, *FREE):
            continue
        given = text if isinstance(text, str) else strings.get(text_id, "")
        name = _EMITTED.sub("", given)
        category = "cpu_op" if _OPERATOR.match(name) else "user_annotation"
        event = _event(tables, NVTX, name, category, _thread(thread), (start, end), {})
        yield _pid(thread) if one is None else one, event, event_type in NESTED


def _synchronization(tables: Tables, processes: dict[int, _Process]) -> None:
    """Add the host's waits for streams, and streams' waits for events whose record is known."""
    if not tables.has(SYNC):
        return
    called = {pid: {whole(e.args, "correlation"): e.start_ns for e in p.calls} for pid, p in processes.items()}
    records = _records(tables, called)
    maybe = ("correlationId", "globalPid", "eventId", "eventSyncId")
    for start, end, device, stream, sync_type, number, serialized, event_id, sync_id in tables.rows(
        SYNC, (*_SPAN, *_ON_DEVICE, "syncType"), maybe
    ):
        pid, name, args = _pid(serialized), "Stream Sync", {"stream": stream}
        if pid not in processes or number is None or sync_type not in (WAIT_EVENT, STREAM_SYNC):
            continue
        args["correlation"] = number
        if sync_type == WAIT_EVENT:
            until = called[pid].get(number, start)
            found = _record_before(records, pid, event_id, sync_id, until)
            if found is None:
                continue  # recorded before the trace began, or --cuda-event-trace was off
            name = "Stream Wait Event"
            args["wait_on_stream"], args["wait_on_cuda_event_record_corr_id"] = found
        thread = (str(device), str(stream))
        processes[pid].syncs.append(_event(tables, SYNC, name, "cuda_sync", thread, (start, end), args))


_Records = dict[tuple[int, str, int], list[tuple[int, int, int]]]


def _records(tables: Tables, called: dict[int, dict[int | None, int]]) -> _Records:
    """Return (call's start, stream, correlation) of cudaEventRecord by process and event, in order of start."""
    out: _Records = {}
    if not tables.has(EVENT):
        return out
    for stream, event_id, number, serialized, sync_id in tables.rows(
        EVENT, ("streamId", "eventId"), ("correlationId", "globalPid", "eventSyncId")
    ):
        pid = _pid(serialized)
        start = called.get(pid, {}).get(number)
        if start is None or number is None:
            continue
        out.setdefault((pid, "event", event_id), []).append((start, stream, number))
        if sync_id:
            out.setdefault((pid, "sync", sync_id), []).append((start, stream, number))
    for listed in out.values():
        listed.sort()
    return out


def _record_before(
    records: _Records, pid: int, event_id: int | None, sync_id: int | None, until_ns: int
) -> tuple[int, int] | None:
    """Return (stream, correlation) of the record that a wait is for: its event's last record before the wait's call."""
    listed = records.get((pid, "sync", sync_id)) if sync_id else None
    if listed is None and event_id is not None:
        listed = records.get((pid, "event", event_id))
    before = bisect_right(listed, (until_ns, 1 << 62, 0)) if listed else 0
    return listed[before - 1][1:] if listed and before else None


def _gpu_names(tables: Tables) -> dict[int, str]:
    if not tables.has(GPU):
        return {}
    rows = tables.rows(GPU, ["id"], ["cuDevice"], ["name"])
    return {key if device is None else device: str(name)[:200] for key, device, name in rows if name}


# --- collectives


_Collective = tuple[Event, str]  # a kernel of NCCL's and the kind of its collective


def _name_collectives(traces: list[RankTrace]) -> None:
    """Add kind and ranks of their collectives to NCCL's kernels, from the kernels' names.

    Ranks that run the same collectives in the same order on one stream each are taken as one process group. Other
    collectives keep their recorded times, because the export does not say which belong together.
    """
    listed = [_collectives(trace) for trace in traces]
    if not any(listed):
        return
    steps = set.intersection(*(set(t.steps) for t in traces))
    orders = [_orders(trace, kernels, steps) for trace, kernels in zip(traces, listed, strict=True)]
    one_stream = all(len({e.thread for e, _ in kernels}) == 1 for kernels in listed)
    one_group = one_stream and all(order == orders[0] for order in orders)
    ranks = sorted(t.rank for t in traces)
    for trace, kernels in zip(traces, listed, strict=True):
        for event, kind in kernels:
            event.args["Collective name"] = kind
            event.args["Process Group Name"] = "nccl" if one_group else f"rank {trace.rank} stream {event.thread[1]}"
            event.args["Process Group Ranks"] = ranks if one_group else []
    if len(traces) > 1:
        taken = "are taken for one group" if one_group else "differ in them, which are kept as recorded"
        traces[0].notes.append(f"NCCL's kernels name neither process group nor bytes; the {len(traces)} ranks {taken}")


def _collectives(trace: RankTrace) -> list[_Collective]:
    """Return the kernels of collectives in order of start; names of sends and receives do not name the peer."""
    out = []
    for event in trace.device:
        found = _NCCL.search(event.name[:200]) if event.category == "kernel" else None
        kind = collective_kind(found[1]) if found else None
        if kind is not None:
            out.append((event, kind))
    return out


def _orders(trace: RankTrace, kernels: list[_Collective], steps: set[int]) -> dict[int | None, list[str]]:
    """Return the kinds of the collectives that each step launched, in order; without steps all of them, by None."""
    if not steps:
        return {None: [kind for _, kind in kernels]}
    windows = sorted((trace.steps[s].start_ns, trace.steps[s].end_ns, s) for s in steps)
    launched = {whole(e.args, "correlation"): e.start_ns for t in trace.threads.values() for e in t}
    out: dict[int | None, list[str]] = {}
    for event, kind in kernels:
        at = launched.get(whole(event.args, "correlation"), event.start_ns)
        i = bisect_right(windows, (at, MAX_NS, 0)) - 1
        if i >= 0 and at < windows[i][1]:
            out.setdefault(windows[i][2], []).append(kind)
    return out
