"""Turn one rank's kernels and copies into nodes: stream order, launches, events between streams, synchronization."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise, zip_longest

from sim.traces.host import Thread, is_runtime
from sim.traces.kineto import MAX_NS, Event, RankTrace, whole, within
from sim.traces.messages import elements_of, nccl_message
from sim.traces.rank_graph import MIN_WAIT_NS, RankGraph
from sim.traces.recording import Message

_SYNC = ("Synchronize", "cudaMemcpy", "hipMemcpy")
_STREAM_WAIT = ("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent")


def add_device(graph: RankGraph) -> None:
    """Add the kernels that a rank's step launched to its graph, after the host's nodes."""
    launches = _runtime(graph)
    kernels = _kernels(graph)
    if kernels:
        DeviceGraph(graph, kernels, launches).build()


def _runtime(graph: RankGraph) -> dict[int, tuple[Event, Thread]]:
    """Return the step's runtime calls by correlation, each with its thread."""
    out: dict[int, tuple[Event, Thread]] = {}
    for thread in graph.threads:
        for event in thread.events:
            number = whole(event.args, "correlation") if is_runtime(event) else None
            if number is not None and graph.begin_ns <= event.start_ns < graph.end_ns:
                out.setdefault(number, (event, thread))
    return out


def _kernels(graph: RankGraph) -> list[Event]:
    """Return the kernels that were launched in the window, and those that were launched before and still ran in it."""
    launched = launch_times(graph.trace)
    found = zip(graph.trace.device, launched, strict=True)
    return [k for k, launched_ns in found if launched_ns < graph.end_ns and k.end_ns > graph.begin_ns]


def launch_times(trace: RankTrace) -> list[int]:
    """Return when the host launched each event of a device; one without a launch in the file when it started."""
    calls = (e for events in trace.threads.values() for e in events if is_runtime(e))
    known = {number: e.start_ns for e in calls if (number := whole(e.args, "correlation")) is not None}
    return [known.get(whole(k.args, "correlation") or -1, k.start_ns) for k in trace.device]


class DeviceGraph:
    """Add a rank's device nodes to its graph, and the host's waits for them."""

    def __init__(self, graph: RankGraph, kernels: list[Event], launches: dict[int, tuple[Event, Thread]]) -> None:
        self.graph, self.kernels, self.launches = graph, kernels, launches
        self.latency_ns = self._latency()
        self.compute_stream = self._busiest()
        self.elements: dict[int, int] = {}  # of an operator's inputs, by its number
        self.position_of = {self._number(k): p for p, k in enumerate(kernels)}
        self.done: list[tuple[int, int]] = []  # ends of kernels, and their nodes
        self.node_of: dict[int, int] = {}  # by position among the kernels
        self.last: dict[tuple[str, str], int] = {}  # the last kernel so far on each stream
        at = dict(zip(map(id, graph.trace.device), launch_times(graph.trace), strict=True))
        self.launched = [(at[id(k)], self._number(k)) for k in kernels]
        self.by_launch: dict[tuple[str, str], list[tuple[tuple[int, int], int]]] = {}
        for position, kernel in enumerate(kernels):
            self.by_launch.setdefault(kernel.thread, []).append((self.launched[position], position))
        for listed in self.by_launch.values():
            listed.sort()

    def build(self) -> None:
        """Add all nodes and waits."""
        operators = {}
        for thread in self.graph.threads:
            for e in thread.events:
                number = whole(e.args, "External id")
                if number is not None and "Collective name" in e.args:
                    operators[number] = e
                if number is not None and "Input Dims" in e.args:
                    self.elements[number] = elements_of(e.args)
        across = self._stream_waits()
        for position, kernel in enumerate(self.kernels):
            self._add(position, kernel, across.get(position, []), operators)
        self._host_waits()
        self.done = sorted((k.end_ns, self.node_of[p]) for p, k in enumerate(self.kernels))
        self._queue_waits()

    def _add(self, position: int, kernel: Event, across: list[int], operators: dict[int, Event]) -> None:
        issued, launched_ns = self._launch(kernel), self.launched[position][0]
        begin_ns = self.graph.begin_ns
        waits = [(0, 0)]  # launched before the window
        if launched_ns >= begin_ns:
            waits = self.graph.after_launch(issued, kernel.start_ns, self.latency_ns if issued else 0)
        before = [self.last[kernel.thread]] if kernel.thread in self.last else []
        waits += [(self.node_of[p], 0) for p in [*before, *across] if p in self.node_of]
        message = self._message_of(kernel, operators)
        kind = message.kind.upper() if message else "F"
        if not message and issued is not None:
            kind = issued[1].kind_at(issued[0].start_ns)
        if kernel.category != "kernel":
            kind = "COPY"
        stream = "compute" if kernel.thread == self.compute_stream else f"stream {kernel.thread[1]}"
        node = self.graph.add(
            stream,
            kind,
            kernel.name,
            max(begin_ns, kernel.start_ns),
            kernel.end_ns,
            waits,
            message,
            message is None and kernel.category == "kernel" and not kernel.is_nccl,
        )
        made = self.graph.nodes[node]
        made.device, made.before = True, launched_ns < self.graph.own_ns
        made.elements = self.elements.get(whole(kernel.args, "External id") or -1, 0)
        self.node_of[position] = node
        self.last[kernel.thread] = position

    def _message_of(self, kernel: Event, operators: dict[int, Event]) -> Message | None:
        """Return the collective of an NCCL kernel; None for other kernels."""
        number = whole(kernel.args, "External id")
        operator = operators.get(number) if number is not None else None
        if "Collective name" not in kernel.args and (operator is None or not kernel.is_nccl):
            return None
        return nccl_message(kernel, operator, self.graph.trace.rank)

    @staticmethod
    def _number(kernel: Event) -> int:
        number = whole(kernel.args, "correlation")
        return -1 if number is None else number

    def _launch(self, kernel: Event) -> tuple[Event, Thread] | None:
        number = whole(kernel.args, "correlation")
        return self.launches.get(number) if number is not None else None

    def _latency(self) -> int:
        """Return the shortest time from a launch call's start to its kernel's start, in nanoseconds; where every kernel
        was queued that would be no latency."""
        seen = [k.start_ns - issued[0].start_ns for k in self.kernels if (issued := self._launch(k)) is not None]
        return max(0, min(*seen, MIN_WAIT_NS)) if seen else 0

    def _busiest(self) -> tuple[str, str]:
        """Return the stream with the most time in kernels other than NCCL's."""
        seconds: dict[tuple[str, str], int] = {}
        for k in self.kernels:
            computes = k.category == "kernel" and not k.is_nccl
            seconds[k.thread] = seconds.get(k.thread, 0) + (k.end_ns - k.start_ns if computes else 0)
        return max(seconds, key=lambda s: (seconds[s], s))

    # --- between streams

    def _stream_waits(self) -> dict[int, list[int]]:
        """Return for each kernel the kernels on other streams that it waits for, by position."""
        recorded = [e for e in self.graph.trace.syncs if "Wait Event" in e.name]
        return self._recorded_waits(recorded) if recorded else self._likely_waits()

    def _recorded_waits(self, syncs: list[Event]) -> dict[int, list[int]]:
        """Read the waits from `cuda_sync`: the first kernel launched on the stream after the call waits for the last
        kernel launched on the other stream before the event was recorded."""
        out: dict[int, list[int]] = {}
        for sync in syncs:
            number, source = whole(sync.args, "correlation"), whole(sync.args, "wait_on_stream")
            record = whole(sync.args, "wait_on_cuda_event_record_corr_id")
            if number is None or number not in self.launches or source is None or source < 0:
                continue
            called = self.launches[number][0].start_ns
            recorded = self.launches[record][0].start_ns if record in self.launches else called
            device, stream = sync.thread[0], str(whole(sync.args, "stream"))
            listed = self.by_launch.get((device, stream), [])
            after = bisect_left(listed, ((called, -1), -1))
            before = self._launched_before((device, str(source)), (recorded, -1))
            if after < len(listed) and before is not None:
                out.setdefault(listed[after][1], []).append(before)
        return out

    def _launched_before(self, stream: tuple[str, str], time: tuple[int, int], ended_ns: int = 1 << 63) -> int | None:
        """Return the last kernel launched on a stream before `time`, of those that had ended by `ended_ns`."""
        listed = self.by_launch.get(stream, [])
        for i in range(bisect_left(listed, (time, -1)) - 1, -1, -1):
            if self.kernels[listed[i][1]].end_ns <= ended_ns:
                return listed[i][1]
        return None

    def _likely_waits(self) -> dict[int, list[int]]:
        """Guess the waits: if cudaStreamWaitEvent was called since the thread's last launch, the kernel waits for the
        last kernel launched on each other stream of the device, if that one had ended when this one began."""
        out: dict[int, list[int]] = {}
        position_of = {
            number: p for p, k in enumerate(self.kernels) if (number := whole(k.args, "correlation")) is not None
        }
        for thread in self.graph.threads:
            waits = False
            for event in thread.events:
                waits |= event.name in _STREAM_WAIT
                number = whole(event.args, "correlation")
                position = position_of.get(number) if number in self.launches and number is not None else None
                if position is not None and waits:
                    out[position] = self._last_elsewhere(position)
                    waits = False
        return out

    def _last_elsewhere(self, position: int) -> list[int]:
        kernel = self.kernels[position]
        others = [s for s in self.by_launch if s != kernel.thread and s[0] == kernel.thread[0]]
        latest = (self._launched_before(s, self.launched[position]) for s in others)
        return [p for p in latest if p is not None and self.kernels[p].end_ns <= kernel.start_ns]

    # --- the host

    def _host_waits(self) -> None:
        """Make synchronizing calls wait for kernels that were launched before them and end within them."""
        streams = {
            whole(e.args, "correlation"): str(whole(e.args, "stream"))
            for e in self.graph.trace.syncs
            if "Stream Sync" in e.name
        }
        for thread in self.graph.threads:
            for i, segment in enumerate(thread.segments):
                owner = segment.owner
                if owner is None or not any(word in owner.name for word in _SYNC) or "Async" in owner.name:
                    continue
                stream = streams.get(whole(owner.args, "correlation"))
                self.graph.blocks(thread, i, self._ended_in(owner, stream))

    def _ended_in(self, call: Event, stream: str | None) -> list[int]:
        """Return the last kernel of each stream (or of one) that was launched before a call and ended by its end."""
        streams = [s for s in self.by_launch if stream is None or s[1] == stream]
        found = (self._launched_before(s, (call.start_ns, -1), call.end_ns) for s in streams)
        return [self.node_of[p] for p in found if p is not None]

    def _queue_waits(self) -> None:
        """Make the host wait for the GPU where a launch takes longer than the host's own time (`launch_gaps`).

        Only so many launches are queued; a further one waits until the GPU has taken one.
        """
        for thread in self.graph.threads:
            for calls, own_ns in launch_gaps(self.graph.trace, thread.name):
                for before, call, least_ns in zip(calls, calls[1:], own_ns, strict=False):
                    more_ns = call.end_ns - before.end_ns - least_ns
                    queued = self._queued(call) if more_ns > max(MIN_WAIT_NS, least_ns) else None
                    if queued is not None:
                        self._wait_in(thread, before.end_ns, call.end_ns, more_ns)
                        launched = thread.before(call.end_ns)
                        self.graph.nodes[queued].waits.append((launched, 0))

    def _queued(self, call: Event) -> int | None:
        """Return the node of a kernel that was launched within the window while the GPU had other work."""
        if call.start_ns < self.graph.begin_ns or call.start_ns >= self.graph.end_ns:
            return None
        position = self.position_of.get(self._number(call))
        if position is None or self.kernels[position].start_ns - call.end_ns <= self.latency_ns + MIN_WAIT_NS:
            return None
        return self.node_of[position]

    def _wait_in(self, thread: Thread, begin_ns: int, end_ns: int, more_ns: int) -> None:
        """Make the longest segment between two moments wait for what the GPU had done `more_ns` after its start."""
        first, last = bisect_left(thread.ends, begin_ns + 1), bisect_left(thread.ends, end_ns)
        inside = range(first, min(last + 1, len(thread.segments)))
        longest = max(inside, key=lambda i: thread.segments[i].end_ns - thread.segments[i].start_ns, default=None)
        if longest is None:
            return
        segment, node = thread.segments[longest], self.graph.nodes[thread.nodes[longest]]
        resumed_ns = min(segment.start_ns + more_ns, segment.end_ns)
        done = bisect_left(self.done, (resumed_ns + 1, -1)) - 1
        if resumed_ns > node.start_ns and done >= 0:
            ended_ns, awaited = self.done[done]
            node.waits.append((awaited, resumed_ns - ended_ns))
            node.start_ns = resumed_ns


def launch_gaps(trace: RankTrace, name: tuple[str, str]) -> list[tuple[list[Event], list[int]]]:
    """Return a thread's launches in each step, behind the last one before it, and the host's own time from the end of
    one to that of the next.

    It is the least over steps of as many launches, in which a call takes no longer than the trace's quickest.
    """
    kernels = {whole(k.args, "correlation") for k in trace.device}
    events = [e for e in trace.threads[name] if is_runtime(e) and whole(e.args, "correlation") in kernels]
    starts = [e.start_ns for e in events]
    if not events:
        return []
    quick_ns = min(e.end_ns - e.start_ns for e in events)
    alike: dict[int, list[list[Event]]] = {}
    for step in trace.steps.values():
        calls = within(events, step.start_ns, step.end_ns)
        first = bisect_left(starts, step.start_ns)
        alike.setdefault(len(calls), []).append(events[max(0, first - 1) : first] + calls)
    found = []
    for same in alike.values():
        gaps = [[b.start_ns - a.end_ns + min(b.end_ns - b.start_ns, quick_ns) for a, b in pairwise(c)] for c in same]
        least = [min(each) for each in zip_longest(*(reversed(g) for g in gaps), fillvalue=MAX_NS)]
        found += [(calls, least[len(calls) - 2 :: -1]) for calls in same if len(calls) > 1]
    return found
