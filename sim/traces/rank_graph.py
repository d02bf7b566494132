"""Turn one rank's events into nodes, and find what each node waited for.

Evidence, in the order in which it is used:
- A host thread runs its operators one after the other; gaps are host work that was not traced.
- A kernel starts after the kernel before it on its stream, and after its launch (same `correlation`) by at least the
  launch latency, the shortest in the trace.
- A stream waits for a kernel of another stream if a "Stream Wait Event" says so (`cuda_sync`). In traces without these
  it waits for the last kernels launched on other streams, if the host called cudaStreamWaitEvent before the launch.
- The host waits for kernels in cuda*Synchronize, for autograd's threads in the gap that they fill, and for gloo's
  collectives in a gap in which one ends.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct, field

from sim.core.collectives import collective_kind
from sim.traces.host import Segment, Thread, segments
from sim.traces.kineto import GLOO, Event, RankTrace, within
from sim.traces.messages import elements_of, gloo_message
from sim.traces.recording import HOST, START, Message, Node, Recording

MIN_WAIT_NS = 20_000  # a shorter gap between operators is Python's own time and no wait
LATE = 0.1  # part of a gloo event's length by which it may end after the gap that waited for it
_WAITING_OPERATORS = ("wait_tensor", "Work::wait", "_wait")


class RankGraph(Struct):
    """Build one rank's recording within a window of time, by the evidence in the module's docstring.

    `own_ns`: where the step itself begins on the host; what comes before is of the step before it.
    """

    trace: RankTrace
    begin_ns: int
    own_ns: int
    end_ns: int
    nodes: list[Node] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    main: Thread | None = None
    warnings: list[str] = field(default_factory=list)

    def add_host(self, world: tuple[int, ...]) -> None:
        """Add the step's start, host threads and gloo's collectives; `world`: ranks of the default group."""
        self.add("host", START, "step", self.begin_ns, self.begin_ns, [])
        self._host()
        self._gloo(world)

    def recording(self, step: int | None) -> Recording:
        """Return the rank's recording, after all nodes were added."""
        self._hand_over()
        return Recording(
            self.trace.path,
            (self.trace.rank,),
            self.nodes,
            self.trace.world_size,
            step,
            self.trace.gpu_name,
            self.warnings,
        )

    def add(
        self,
        stream: str,
        kind: str,
        name: str,
        start: int,
        end: int,
        waits: list[tuple[int, int]],
        message: Message | None = None,
        compute: bool = False,
    ) -> int:
        """Add a node and return its number. `waits`: (node, nanoseconds after its end)."""
        node = Node(self.trace.rank, stream, kind, name, start, end, waits, message, compute)
        node.before = start < self.own_ns
        self.nodes.append(node)
        return len(self.nodes) - 1

    # --- host threads

    def _host(self) -> None:
        listed = sorted(self.trace.threads.items(), key=lambda item: (-len(item[1]), item[0]))
        first = self._main_name(dict(listed))
        listed.sort(key=lambda item: item[0] != first)
        on_host = not self.trace.device
        workers = {e.thread for e in self.trace.gloo}
        for name, events in listed:
            if name != first and name in workers and not any(e.name.startswith("c10d::") for e in events):
                continue  # one of gloo's own threads, whose copies are part of a collective
            inside = [e for e in events if e.end_ns > self.begin_ns and e.start_ns < self.end_ns]
            if not inside:
                continue
            is_main = name == first
            end = self.end_ns if is_main else min(self.end_ns, max(e.end_ns for e in inside))
            thread = Thread(name, inside, segments(inside, self.begin_ns, end))
            stream = (
                ("compute" if is_main else f"thread {name[1]}")
                if on_host
                else ("host" if is_main else f"host {name[1]}")
            )
            self._chain(thread, stream, on_host, is_main)
            self.threads.append(thread)
            self.main = thread if is_main else self.main

    def _main_name(self, threads: dict[tuple[str, str], list[Event]]) -> tuple[str, str] | None:
        """Return the thread on which the steps are annotated, else the one with most events."""
        for step in self.trace.steps.values():
            if step.thread in threads:
                return step.thread
        return next(iter(threads), None)

    def _chain(self, thread: Thread, stream: str, computes: bool, is_main: bool) -> None:
        """Add a thread's nodes. A gap of the main thread is host work; a gap of another thread is not shown."""
        before, gap = 0, HOST if is_main else START
        for s in thread.segments:
            if s.owner is None:
                node = self.add("host", gap, "host", s.start_ns, s.end_ns, [(before, 0)])
            else:
                kind = s.kind if computes else HOST
                node = self.add(stream, kind, s.owner.name, s.start_ns, s.end_ns, [(before, 0)], None, computes)
                self.nodes[node].elements = elements_of(s.owner.args)
            thread.nodes.append(node)
            thread.ends.append(s.end_ns)
            before = node

    def _hand_over(self) -> None:
        """Make autograd's threads start when the main thread begins a gap, and make them end the gap."""
        busy = [t for t in self.threads if t.autograd and t is not self.main]
        if self.main is None or not busy:
            return
        for i, gap in enumerate(self.main.segments):
            if gap.owner is not None:
                continue
            for thread in busy:
                self._burst(self.main, i, gap, thread)

    def _burst(self, waiter: Thread, i: int, gap: Segment, thread: Thread) -> None:
        inside = [
            k
            for k, s in enumerate(thread.segments)
            if s.owner is not None and s.start_ns >= gap.start_ns and s.end_ns <= gap.end_ns
        ]
        if not inside:
            return
        before = waiter.nodes[i - 1] if i else 0
        first, last = inside[0], inside[-1]
        if first and thread.segments[first - 1].owner is None:
            idle = self.nodes[thread.nodes[first - 1]]  # the thread slept; its host time begins with the gap
            idle.start_ns = min(max(idle.start_ns, gap.start_ns), idle.end_ns)
            idle.waits.append((before, 0))
        self.blocks(waiter, i, [thread.nodes[last]])

    def blocks(self, thread: Thread, i: int, awaited: list[int]) -> None:
        """Make segment i of a thread wait for nodes that end within it; its own time begins when the last one ends."""
        node, segment = self.nodes[thread.nodes[i]], thread.segments[i]
        for w in awaited:
            if self.nodes[w].end_ns <= segment.end_ns:
                node.waits.append((w, 0))
                node.start_ns = max(node.start_ns, self.nodes[w].end_ns)

    # --- gloo

    def _gloo(self, world: tuple[int, ...]) -> None:
        events = within(self.trace.gloo, self.begin_ns, self.end_ns)
        if events and self.trace.groups > 1:
            self.warnings.append(
                f"rank {self.trace.rank}: gloo's events do not name their process group and the job has "
                f"{self.trace.groups}; collectives are kept as recorded"
            )
        operators = self._c10d()
        last: dict[tuple[str, str], int] = {}
        pending: list[tuple[int, Event, Thread]] = []
        for event in events:
            kind = collective_kind(event.name.removeprefix(GLOO))
            queue = operators.get(kind or "", [])
            issued = queue.pop(0) if queue else None
            message = None
            if self.trace.groups <= 1:
                message = gloo_message(event, issued[0] if issued else None, self.trace.rank, world)
            waits = self.after_launch(issued, event.start_ns, 0)
            if event.thread in last and self.nodes[last[event.thread]].end_ns <= event.start_ns:
                waits.append((last[event.thread], 0))
            shown = (kind or "message").upper()
            node = self.add(f"gloo {event.thread[1]}", shown, event.name, event.start_ns, event.end_ns, waits, message)
            last[event.thread] = node
            thread = issued[1] if issued else self.main
            if thread is not None:
                pending.append((node, issued[0] if issued else event, thread))
        for thread in self.threads:
            self._joined(thread, [(n, e) for n, e, t in pending if t is thread])

    def _c10d(self) -> dict[str, list[tuple[Event, Thread]]]:
        """Return c10d's operators by kind, in order of start."""
        out: dict[str, list[tuple[Event, Thread]]] = {}
        for thread in self.threads:
            for event in thread.events:
                if event.name.startswith("c10d::") and event.start_ns >= self.begin_ns:
                    kind = collective_kind(event.name.removeprefix("c10d::").removesuffix("any_source_"))
                    out.setdefault(kind or "", []).append((event, thread))
        for listed in out.values():
            listed.sort(key=lambda item: item[0].start_ns)
        return out

    def _joined(self, thread: Thread, pending: list[tuple[int, Event]]) -> None:
        """Make a gap in which a collective ends wait for it and for all collectives issued before that ended by then.

        gloo wakes the waiter before its own event ends. If the event ends after the gap by at most LATE of its length,
        because its thread was not on a core, the collective is taken to end with the gap.
        """
        open_ = sorted((issued.start_ns, n) for n, issued in pending)
        for i, s in enumerate(thread.segments):
            waits = s.owner is None and s.end_ns - s.start_ns >= MIN_WAIT_NS
            waits |= s.owner is not None and any(word in s.owner.name for word in _WAITING_OPERATORS)
            if not waits or not open_ or open_[0][0] > s.start_ns:
                continue
            begun = [n for _, n in open_[: bisect_right(open_, (s.start_ns, 1 << 60))]]
            joined = [n for n in begun if self._done_by(self.nodes[n], s.end_ns)]
            if any(self.nodes[n].end_ns > s.start_ns for n in joined):
                for n in joined:
                    self.nodes[n].end_ns = min(self.nodes[n].end_ns, s.end_ns)
                self.blocks(thread, i, joined)
                open_ = [(at, n) for at, n in open_ if n not in joined]
        open_ = [(at, n) for at, n in open_ if not self._outlasts(thread, at, n)]
        if open_ and thread.segments:
            last = thread.segments[-1].start_ns
            self.nodes[thread.nodes[-1]].waits += [(n, 0) for _, n in open_ if self.nodes[n].end_ns <= last]

    def _outlasts(self, thread: Thread, issued_ns: int, n: int) -> bool:
        """Tell whether a collective's event ends after the step, and if so move its end into the step.

        Its thread was not on a core to write the end. The step's own thread may have waited for it only in the longest
        gap since its issue; without a gap the collective ends with the step.
        """
        node = self.nodes[n]
        if not thread.segments or node.end_ns <= thread.segments[-1].end_ns:
            return False
        gaps = [
            i
            for i, s in enumerate(thread.segments)
            if s.owner is None
            and s.start_ns >= issued_ns
            and s.end_ns - s.start_ns >= MIN_WAIT_NS
            and s.end_ns > node.start_ns
        ]
        longest = max(gaps, key=lambda i: thread.segments[i].end_ns - thread.segments[i].start_ns, default=None)
        node.end_ns = thread.segments[-1 if longest is None else longest].end_ns
        if longest is not None:
            self.blocks(thread, longest, [n])
        return True

    @staticmethod
    def _done_by(node: Node, time_ns: int) -> bool:
        late = int((node.end_ns - node.start_ns) * LATE)
        return node.start_ns < time_ns and node.end_ns <= time_ns + late

    def after_launch(
        self, issued: tuple[Event, Thread] | None, start_ns: int, latency_ns: int
    ) -> list[tuple[int, int]]:
        """Return the wait for the moment at which the operator that issued a kernel or collective began."""
        if issued is None:
            before = self.main.before(start_ns) if self.main is not None else -1
            return [(max(before, 0), 0)]
        before = issued[1].before(issued[0].start_ns)
        return [(max(before, 0), latency_ns)]
