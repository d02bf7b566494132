"""Read the events of one rank's PyTorch profiler trace (Kineto's Chrome trace JSON), sorted by category.

Formats: libkineto/src/output_json.cpp (events, args of collectives, baseTimeNanoseconds, distributedInfo),
CuptiActivity.cpp (kernels, cuda_sync) of https://github.com/pytorch/kineto; gloo's events and `Input Dims` as
torch 2.13 writes them. Timestamps are microseconds with three decimals, here whole nanoseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, field

from sim.core.errors import InputError
from sim.core.json_values import is_integer, is_number
from sim.traces.files import parse_trace, read_bytes

GLOO, NCCL = "gloo:", "nccl:"  # how torch begins the names of its events for a library's collectives
MAX_EVENTS = 5_000_000
MAX_NS = 2**62  # about 146 years
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")
STEP = re.compile(r"ProfilerStep#(\d{1,15})\Z")

Args = dict[str, Any]


class Event(NamedTuple):
    """Hold a complete event. `thread`: (pid, tid) for the host, (device, stream) for a device."""

    name: str
    category: str
    thread: tuple[str, str]
    start_ns: int
    end_ns: int
    args: Args

    @property
    def is_nccl(self) -> bool:
        """Tell whether NCCL runs the kernel: its kernels' names say so."""
        return "nccl" in self.name.lower()


class RankTrace(Struct):
    """Hold one rank's trace: host events by thread, device events in order of start, annotations, rank and device."""

    path: str
    rank: int
    world_size: int
    groups: int  # process groups that the file lists
    host_name: str
    gpu_name: str
    threads: dict[tuple[str, str], list[Event]] = field(default_factory=dict)
    device: list[Event] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)
    gloo: list[Event] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # limits of this file, for the replay's warnings


def looks_like_kineto(data: bytes) -> bool:
    """Tell whether a file's first bytes can be JSON."""
    return data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def read_kineto(path: str | Path, position: int = 0, data: bytes | None = None) -> RankTrace:
    """Read one rank's trace; `position` is its rank if neither the file nor its name gives one.

    Raises:
        InputError: if the file is no such trace.
    """
    content = parse_trace(read_bytes(path) if data is None else data, path)
    if isinstance(content, list):
        content = {"traceEvents": content}
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise InputError(
            f"{path}: traceEvents: is missing or no list; a profiler trace has the list of its events there"
        )
    if len(events) > MAX_EVENTS:
        raise InputError(
            f"{path}: traceEvents: holds {len(events)} events; at most {MAX_EVENTS} are read, record fewer steps"
        )
    trace = _header(content, path, position)
    base = _whole(content.get("baseTimeNanoseconds"), 0)
    if not 0 <= base < MAX_NS:
        raise InputError(f"{path}: baseTimeNanoseconds: found {str(base)[:40]}; must be at least 0 and below 2^62")
    for number, raw in enumerate(events):
        event = _event(raw, number, base, path)
        if event is not None:
            _sort_in(trace, event)
    if not trace.threads and not trace.device:
        raise InputError(
            f"{path}: traceEvents: holds no operators and no kernels of a profiler; was it recording when the trace "
            "was exported? A trace that stepsim wrote is for viewers"
        )
    for listed in (*trace.threads.values(), trace.device, trace.syncs, trace.gloo):
        listed.sort(key=lambda e: (e.start_ns, -e.end_ns))
    return trace


def _header(content: dict[str, Any], path: str | Path, position: int) -> RankTrace:
    info = content.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    named = rank_in_name(path)
    rank = _whole(info.get("rank"), position if named is None else named)
    world = _whole(info.get("world_size"), 1)
    if not 0 <= rank < 10_000_000 or not 1 <= world <= 10_000_000:
        raise InputError(
            f"{path}: distributedInfo: found rank {str(rank)[:20]} of {str(world)[:20]}; must be 0 to 9,999,999"
        )
    devices = content.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    return RankTrace(
        str(path),
        rank,
        world,
        _whole(info.get("pg_count"), 0),
        str(content.get("host_name", ""))[:200],
        str(first.get("name", ""))[:200],
    )


def rank_in_name(path: str | Path) -> int | None:
    """Return the rank in a file's name; None if there is none.

    >>> rank_in_name("run/rank_3.json.gz"), rank_in_name("trace.json")
    (3, None)
    """
    named = re.search(r"rank[-_]?(\d{1,7})", Path(path).name)
    return int(named[1]) if named else None


def _event(raw: Any, number: int, base: int, path: str | Path) -> Event | None:
    """Return a complete event ("ph": "X") of a category that a replay uses; None for all others."""
    if not isinstance(raw, dict):
        raise InputError(f"{path}: traceEvents[{number}]: must be a mapping")
    category = raw.get("cat")
    if raw.get("ph") != "X" or not isinstance(category, str):
        return None
    category = category.lower()
    if category not in ("cpu_op", "user_annotation", "cuda_sync", *DEVICE, *RUNTIME):
        return None
    start, length = (_nanoseconds(raw.get(key, 0), number, key, path) for key in ("ts", "dur"))
    args = raw.get("args")
    thread = (str(raw.get("pid"))[:60], str(raw.get("tid"))[:60])
    begin = base + start
    return Event(
        str(raw.get("name", ""))[:4000],
        category,
        thread,
        begin,
        begin + max(0, length),
        args if isinstance(args, dict) else {},
    )


def _nanoseconds(value: Any, number: int, key: str, path: str | Path) -> int:
    try:
        micros = float(value) if is_number(value) or isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        micros = math.nan
    if not math.isfinite(micros) or abs(micros) * 1000 >= MAX_NS:
        raise InputError(
            f"{path}: traceEvents[{number}].{key}: found {str(value)[:40]!r}; must be a number of microseconds"
        )
    return round(micros * 1000)


def _sort_in(trace: RankTrace, event: Event) -> None:
    if event.category in DEVICE:
        trace.device.append(event)
    elif event.category == "cuda_sync":
        trace.syncs.append(event)
    elif event.category == "user_annotation" and event.name.startswith(GLOO):
        trace.gloo.append(event)
    elif event.category == "user_annotation" and (step := STEP.match(event.name)):
        trace.steps[int(step[1])] = event
    elif not (event.category == "user_annotation" and event.name.startswith(NCCL)):
        trace.threads.setdefault(event.thread, []).append(event)


def whole(args: Args, key: str) -> int | None:
    """Return an argument that is a whole number or its text; None otherwise."""
    value = _whole(args.get(key), None)
    return value if value is not None and abs(value) < 2**63 else None


def _whole(value: Any, default: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if is_integer(value) else default


def within(events: Iterable[Event], begin_ns: int, end_ns: int) -> list[Event]:
    """Return the events that start in a window."""
    return [e for e in events if begin_ns <= e.start_ns < end_ns]
