"""Kernels and copies of one rank as nodes: stream order, launches, events between streams, synchronization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.traces.host import Thread
from sim.traces.kineto import Event, whole

if TYPE_CHECKING:
    from sim.traces.rank_graph import RankGraph

_SYNC = ("Synchronize", "cudaMemcpy", "hipMemcpy")
_STREAM_WAIT = ("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent")


class DeviceGraph:
    """Adds a rank's device nodes to its graph, and the host's waits for them."""

    def __init__(
        self, graph: RankGraph, kernels: list[Event], launches: dict[int, tuple[Event, Thread]]
    ) -> None:
        self.graph, self.kernels, self.launches = graph, kernels, launches
        self.latency_ns = self._latency()
        self.compute_stream = self._busiest()
        self.node_of: dict[int, int] = {}  # by position among the kernels
        self.by_stream: dict[tuple[str, str], list[int]] = {}  # positions, in order
        order = {number: (e.start_ns, number) for number, (e, _) in launches.items()}
        self.launched = [order.get(whole(k.args, "correlation") or -1, (k.start_ns, -1)) for k in kernels]

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
        waits = self.graph._after_launch(issued, kernel.start_ns, self.latency_ns if issued else 0)
        before = self.by_stream.setdefault(kernel.thread, [])
        waits += [(self.node_of[p], 0) for p in [*before[-1:], *across] if p in self.node_of]
        message = self.graph.message_of(kernel, operators)
        kind = message.kind.upper() if message else "F"
        if not message and issued is not None:
            kind = self.graph.kind_at(issued[1], issued[0].start_ns)
        if kernel.category != "kernel":
            kind = "COPY"
        stream = "compute" if kernel.thread == self.compute_stream else f"stream {kernel.thread[1]}"
        node = self.graph._add(
            stream,
            kind,
            kernel.name,
            kernel.start_ns,
            kernel.end_ns,
            waits,
            message,
            message is None and kernel.category == "kernel",
        )
        self.node_of[position] = node
        before.append(position)

    def _launch(self, kernel: Event) -> tuple[Event, Thread] | None:
        number = whole(kernel.args, "correlation")
        return self.launches.get(number) if number is not None else None

    def _latency(self) -> int:
        """The shortest time from a launch call's start to its kernel's."""
        seen = [
            k.start_ns - issued[0].start_ns for k in self.kernels if (issued := self._launch(k)) is not None
        ]
        return max(0, min(seen, default=0))

    def _busiest(self) -> tuple[str, str]:
        """The stream with most seconds of kernels that are no collectives."""
        seconds: dict[tuple[str, str], int] = {}
        for k in self.kernels:
            nccl = "nccl" in k.name.lower() or k.category != "kernel"
            seconds[k.thread] = seconds.get(k.thread, 0) + (0 if nccl else k.end_ns - k.start_ns)
        return max(seconds, key=lambda s: (seconds[s], s))

    # --- between streams

    def _stream_waits(self) -> dict[int, list[int]]:
        """Per kernel the kernels on other streams that it waits for."""
        recorded = [e for e in self.graph.trace.syncs if "Wait Event" in e.name]
        return self._recorded_waits(recorded) if recorded else self._likely_waits()

    def _recorded_waits(self, syncs: list[Event]) -> dict[int, list[int]]:
        """From `cuda_sync`: the first kernel launched on the stream after the call waits for the last one launched
        on the other stream before the event was recorded."""
        out: dict[int, list[int]] = {}
        order = sorted(range(len(self.kernels)), key=lambda p: self.launched[p])
        for sync in syncs:
            number, source = whole(sync.args, "correlation"), whole(sync.args, "wait_on_stream")
            record = whole(sync.args, "wait_on_cuda_event_record_corr_id")
            if number is None or number not in self.launches or source is None or source < 0:
                continue
            called = self.launches[number][0].start_ns
            recorded = self.launches[record][0].start_ns if record in self.launches else called
            device, stream = sync.thread[0], str(whole(sync.args, "stream"))
            after = next(
                (
                    p
                    for p in order
                    if self.launched[p][0] >= called and self.kernels[p].thread == (device, stream)
                ),
                None,
            )
            before = [
                p
                for p in order
                if self.launched[p][0] < recorded and self.kernels[p].thread == (device, str(source))
            ]
            if after is not None and before:
                out.setdefault(after, []).append(before[-1])
        return out

    def _likely_waits(self) -> dict[int, list[int]]:
        """Where cudaStreamWaitEvent was called since the thread's last launch: the last kernel launched on each other
        stream of the device, if it had ended when this one began."""
        out: dict[int, list[int]] = {}
        position_of = {
            number: p
            for p, k in enumerate(self.kernels)
            if (number := whole(k.args, "correlation")) is not None
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
        kernel, latest = self.kernels[position], dict[tuple[str, str], int]()
        for p in range(position - 1, max(-1, position - 2000), -1):
            other = self.kernels[p]
            elsewhere = other.thread != kernel.thread and other.thread[0] == kernel.thread[0]
            if elsewhere and self.launched[p] < self.launched[position]:
                known = latest.get(other.thread)
                if known is None or self.launched[p] > self.launched[known]:
                    latest[other.thread] = p
        return [p for p in latest.values() if self.kernels[p].end_ns <= kernel.start_ns]

    # --- the host

    def _host_waits(self) -> None:
        """Synchronizing calls wait for what was launched before and ends within them."""
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
                self.graph._blocks(thread, i, self._ended_in(owner, stream))

    def _ended_in(self, call: Event, stream: str | None) -> list[int]:
        """The last kernel of each stream (or of one) launched before a call and ended by its end."""
        out = []
        for thread, positions in self.by_stream.items():
            if stream is not None and thread[1] != stream:
                continue
            done = [
                p
                for p in positions
                if self.launched[p][0] < call.start_ns and self.kernels[p].end_ns <= call.end_ns
            ]
            out += [self.node_of[done[-1]]] if done else []
        return out
