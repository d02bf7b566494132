"""Turn one rank's kernels and copies into nodes: stream order, launches, events between streams, synchronization."""

from __future__ import annotations

from bisect import bisect_left

from sim.traces.host import Thread, is_runtime
from sim.traces.kineto import Event, whole
from sim.traces.messages import nccl_message
from sim.traces.rank_graph import RankGraph
from sim.traces.recording import Message

_SYNC = ("Synchronize", "cudaMemcpy", "hipMemcpy")
_STREAM_WAIT = ("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent")


def add_device(graph: RankGraph) -> None:
    """Add the kernels that a rank's step launched to its graph, after the host's nodes."""
    launches = _runtime(graph)
    kernels = _kernels(graph, launches)
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


def _kernels(graph: RankGraph, launches: dict[int, tuple[Event, Thread]]) -> list[Event]:
    """Return the kernels that the step launched; one without a launch in the file belongs to the step it starts in."""
    known = {whole(e.args, "correlation") for t in graph.trace.threads.values() for e in t if is_runtime(e)}
    out = []
    for kernel in graph.trace.device:
        number = whole(kernel.args, "correlation")
        if number in launches or (number not in known and graph.begin_ns <= kernel.start_ns < graph.end_ns):
            out.append(kernel)
    return out


class DeviceGraph:
    """Add a rank's device nodes to its graph, and the host's waits for them."""

    def __init__(self, graph: RankGraph, kernels: list[Event], launches: dict[int, tuple[Event, Thread]]) -> None:
        self.graph, self.kernels, self.launches = graph, kernels, launches
        self.latency_ns = self._latency()
        self.compute_stream = self._busiest()
        self.node_of: dict[int, int] = {}  # by position among the kernels
        self.last: dict[tuple[str, str], int] = {}  # the last kernel so far on each stream
        order = {number: (e.start_ns, number) for number, (e, _) in launches.items()}
        self.launched = [order.get(whole(k.args, "correlation") or -1, (k.start_ns, -1)) for k in kernels]
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
        across = self._stream_waits()
        for position, kernel in enumerate(self.kernels):
            self._add(position, kernel, across.get(position, []), operators)
        self._host_waits()

    def _add(self, position: int, kernel: Event, across: list[int], operators: dict[int, Event]) -> None:
        issued = self._launch(kernel)
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
            kernel.start_ns,
            kernel.end_ns,
            waits,
            message,
            message is None and kernel.category == "kernel" and not kernel.is_nccl,
        )
        self.node_of[position] = node
        self.last[kernel.thread] = position

    def _message_of(self, kernel: Event, operators: dict[int, Event]) -> Message | None:
        """Return the collective of an NCCL kernel; None for other kernels."""
        number = whole(kernel.args, "External id")
        operator = operators.get(number) if number is not None else None
        if "Collective name" not in kernel.args and (operator is None or not kernel.is_nccl):
            return None
        return nccl_message(kernel, operator, self.graph.trace.rank)

    def _launch(self, kernel: Event) -> tuple[Event, Thread] | None:
        number = whole(kernel.args, "correlation")
        return self.launches.get(number) if number is not None else None

    def _latency(self) -> int:
        """Return the shortest time from a launch call's start to its kernel's start, in nanoseconds."""
        seen = [k.start_ns - issued[0].start_ns for k in self.kernels if (issued := self._launch(k)) is not None]
        return max(0, min(seen, default=0))

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
