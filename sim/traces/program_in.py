"""Turn captured programs of ranks into a recording: price them on a cluster, and compute their times.

On a GPU the host issues one operator or collective after the other. A kernel starts when it was issued, when the kernel
before it on its stream has ended, and when everything that its stream was told to wait for has ended. A collective runs
on its group's own stream, after the work that its issuing stream held (as with NCCL). On a CPU the host computes, so
all streams are one; only collectives run beside it, until they are waited for. They need its cores, so both are slower
meanwhile (`sim.traces.shared_host`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sim.core.collectives import POINT_TO_POINT
from sim.core.errors import InputError
from sim.core.timeline import OFFLOAD, RELOAD, Detail, RankClass
from sim.core.units import counted
from sim.engine.run import run_static
from sim.graph.taskgraph import GraphBuilder
from sim.inputs.program_file import CapturedOperator, HostCopy
from sim.inputs.script_program import Collective, RankProgram, What, alone_note
from sim.traces.program_prices import ProgramPrices
from sim.traces.recording import HOST, Message, Node, Recording
from sim.traces.shared_host import SharedHost

KINDS = {"forward": "F", "recomputed": "B", "backward": "B", "clip": "OPTIMIZER", "optimizer": "OPTIMIZER"}


def program_recording(ranks: Sequence[RankProgram], prices: ProgramPrices) -> Recording:
    """Return one step of the captured ranks.

    Raises:
        InputError: for two files of one rank, programs of different world sizes, or collectives that never meet.
    """
    ranks = sorted(ranks, key=lambda r: r.rank)
    paths = {r.rank: r.program.path for r in ranks}
    if len(paths) < len(ranks):
        twice = next(r for r, n in Counter(r.rank for r in ranks).items() if n > 1)
        same = ", ".join(r.program.path for r in ranks if r.rank == twice)
        raise InputError(f"rank {twice} is captured in several of the files: {same}")
    if len({r.world_size for r in ranks}) > 1:
        found = ", ".join(f"{r.program.path}: {r.world_size}" for r in ranks[:4])
        raise InputError(f"the programs were captured on worlds of different sizes: {found}")
    nodes: list[Node] = []
    for rank in ranks:
        _Rank(rank, prices, nodes).run()
    name = ranks[0].program.path if len(ranks) == 1 else f"{len(ranks)} programs"
    recording = Recording(name, tuple(paths), nodes, ranks[0].world_size, priced_on=prices.name)
    _lay_out(recording)
    recording.warnings += [*_stand_ins(recording), *_unknown(prices), *_unmeasured(prices)]
    if recording.world_size > 1 and not any(r.collectives for r in ranks):
        recording.warnings.append(alone_note(recording.world_size))
    if not prices.on_host and not all(r.on_gpu for r in ranks):
        recording.warnings.append(
            "the script chose the CPU, so its operators are a CPU's, in the optimizer one by one for each tensor; a "
            'script that asks for "cuda" is captured as a GPU runs it'
        )
    return recording


class _Rank:
    """Build the nodes of one rank; each starts at 0 and ends at its duration until `_lay_out`."""

    def __init__(self, rank: RankProgram, prices: ProgramPrices, nodes: list[Node]) -> None:
        self.rank, self.prices, self.nodes = rank, prices, nodes
        self.host: list[int] = []  # nodes that the host's next work waits for
        self.last: dict[int, list[int]] = {}  # nodes that a stream's next work waits for
        self.groups: dict[tuple[object, ...], int] = {}  # the last collective of each group
        self.events: list[list[int]] = []
        self.collectives: dict[int, int] = {}
        self.count: Counter[tuple[object, ...]] = Counter()
        self.shared = SharedHost(*prices.slowdowns)
        self.computed_s = 0.0  # since the last collective, at which ranks meet

    def run(self) -> None:
        """Add all operators and entries in the order of their issue."""
        entries = iter(self.rank.entries)
        entry = next(entries, None)
        for i, op in enumerate(self.rank.program.operators):
            while entry is not None and entry.before <= i:
                self._entry(entry.what, self._stream(entry.stream), entry.value)
                entry = next(entries, None)
            if op.launches:
                self._operator(op, self._stream(self.rank.streams[i]))
        while entry is not None:
            self._entry(entry.what, self._stream(entry.stream), entry.value)
            entry = next(entries, None)
        self.shared.finish()
        for node, seconds in self.shared.took_s.items():
            self.nodes[node].end_ns = round(seconds * 1e9)

    def _stream(self, number: int) -> int:
        return 0 if self.prices.on_host else number

    def _operator(self, op: CapturedOperator, stream: int) -> None:
        if op.host_copy is not None and not self.prices.on_host:
            self._host_copy(op, op.host_copy, stream)
            return
        seconds, host_s = self.prices.operator(op)
        seconds = self._computes(seconds)
        self._on_stream(stream, KINDS[op.phase], op, seconds, host_s, compute=True)

    def _host_copy(self, op: CapturedOperator, copy: HostCopy, stream: int) -> None:
        """Add a copy between the host's memory and the GPU's, in its stream's order; the host may wait for it."""
        seconds, host_s = self.prices.host_copy(op, copy, self.rank.rank)
        node = self._on_stream(stream, RELOAD if copy.to_device else OFFLOAD, op, seconds, host_s, compute=False)
        if copy.host_waits:
            self.host.append(node)

    def _on_stream(
        self, stream: int, kind: str, op: CapturedOperator, seconds: float, host_s: float, *, compute: bool
    ) -> int:
        label = f"{op.name} of {op.module}" if op.module else op.name
        waits = self._issued(host_s) + self.last.get(stream, [])
        name = "compute" if stream == 0 else f"stream {stream}"
        node = self._add(name, kind, label, seconds, waits, compute=compute)
        self.last[stream] = [node]
        return node

    def _computes(self, seconds: float) -> float:
        """Return the seconds that work of this rank takes beside its collectives."""
        seconds = self.shared.compute(seconds)
        self.computed_s += seconds
        return seconds

    def _host_work(self, kind: str, stream: int) -> None:
        """Add Python besides operators: on a CPU time of the rank itself, else of the host before its next launch."""
        host_s = self.prices.host_work(kind)
        if not host_s:
            return
        if not self.prices.on_host:
            self._issued(host_s)
        else:
            name = kind.removesuffix("_backward")
            waits = self.last.get(stream, [])
            self.last[stream] = [self._add("compute", HOST, name, self._computes(host_s), waits)]

    def _issued(self, host_s: float) -> list[int]:
        """Add the host's work of issuing an operator or collective, and return what the device waits for."""
        if self.prices.on_host:
            return []
        self.host = [self._add("host", HOST, "issues", host_s, self.host)]
        return list(self.host)

    def _entry(self, what: What, stream: int, value: int) -> None:
        if what is What.START:
            self._start(value, stream)
        elif what is What.WAIT:
            if value in self.collectives:
                self._follow(stream, [self.collectives[value]])
                self.shared.wait(self.collectives[value])
        elif what is What.RECORD:
            self.events.append(list(self.last.get(stream, [])))
        elif what is What.HOST_WORK:
            self._host_work(self.rank.host_work[value], stream)
        elif what is What.WAIT_EVENT:
            self._follow(stream, self.events[value])
        elif not self.prices.on_host:
            self.host = list(dict.fromkeys((*self.host, *self.events[value])))

    def _follow(self, stream: int, nodes: list[int]) -> None:
        self.last[stream] = list(dict.fromkeys((*self.last.get(stream, []), *nodes)))

    def _start(self, number: int, stream: int) -> None:
        found = self.rank.collectives[number]
        if len(found.ranks) < 2:
            return
        queue = (found.ranks, found.kind) if found.kind in POINT_TO_POINT else (found.ranks,)
        waits = self._issued(self.prices.collective_host_s) + self.last.get(stream, [])
        if queue in self.groups:
            waits.append(self.groups[queue])
        seconds = self.prices.collective(found) + self.prices.rank_skew_s(self.computed_s)
        self.computed_s = 0.0
        node = self._add(f"group {found.group}", found.kind.upper(), found.kind, seconds, waits)
        self.shared.start(node, queue, seconds)
        self.nodes[node].message = self._message(found)
        self.groups[queue] = self.collectives[number] = node

    def _message(self, found: Collective) -> Message:
        """Return the message with its key: members number their operations by ranks and kind, in order."""
        sends = found.kind in POINT_TO_POINT
        key: tuple[object, ...] = ("message", found.ranks) if sends else ("collective", found.ranks, found.kind)
        self.count[found.kind, key] += 1
        key = (*key, found.group, self.count[found.kind, key])
        return Message(found.kind, found.group, found.ranks, float(found.bytes), key)

    def _add(
        self, stream: str, kind: str, name: str, seconds: float, waits: Sequence[int], compute: bool = False
    ) -> int:
        edges = [(w, 0) for w in dict.fromkeys(waits)]
        node = Node(self.rank.rank, stream, kind, name, 0, round(seconds * 1e9), edges, compute=compute)
        self.nodes.append(node)
        return len(self.nodes) - 1


def _lay_out(recording: Recording) -> None:
    """Set the nodes' times from their durations, their waits, and the arrival of all members of a collective.

    Raises:
        InputError: if ranks wait for each other in a circle.
    """
    draft = GraphBuilder(tuple(RankClass(r, (r,), i) for i, r in enumerate(recording.ranks)))
    captured = draft.table.new_kind(Detail("captured"))
    arrive = [draft.add(0.0, [], captured) for _ in recording.nodes]
    done = [draft.add(n.end_ns * 1e-9, [arrive[i]], captured) for i, n in enumerate(recording.nodes)]
    for i, node in enumerate(recording.nodes):
        draft.waits[arrive[i]] += [done[w] for w, _ in node.waits]
    for members in recording.members().values():
        for m in members:
            draft.waits[done[m]] += [arrive[other] for other in members if other != m]
    try:
        times = run_static(draft.graph())
    except ValueError as error:
        raise InputError(f"{recording.name}: {error}") from None
    for i, node in enumerate(recording.nodes):
        node.start_ns, node.end_ns = round(times.start_s[arrive[i]] * 1e9), round(times.end_s[done[i]] * 1e9)


def _stand_ins(recording: Recording) -> list[str]:
    """Return notes on ranks that were not captured: those that others represent, and peers of messages."""
    said = []
    missing = recording.world_size - len(recording.ranks)
    if missing > 0:
        shown = ", ".join(map(str, recording.ranks[:8]))
        stands = "stands" if len(recording.ranks) == 1 else "stand"
        said.append(f"rank {shown} {stands} for all {recording.world_size} ranks, which run in step")
    apart = sorted(
        {r for n in recording.nodes if n.message and n.message.kind in POINT_TO_POINT for r in n.message.ranks}
        - set(recording.ranks)
    )
    if apart:
        ranks = ",".join(map(str, sorted({*recording.ranks, *apart})[:16]))
        said.append(
            f"messages to or from ranks {', '.join(map(str, apart[:8]))} wait for nobody: those are not captured; "
            f"capture them too with --ranks {ranks}"
        )
    return said


def _unknown(prices: ProgramPrices) -> list[str]:
    if not prices.unknown:
        return []
    names = ", ".join(f"{name} ({n})" for name, n in prices.unknown.most_common(12))
    launches = counted(prices.unknown.total(), "launch")
    return [f"operators that are not known are priced by their bytes, in {launches}: {names}"]


def _unmeasured(prices: ProgramPrices) -> list[str]:
    if not prices.unmeasured:
        return []
    names = ", ".join(f"{name} ({n})" for name, n in prices.unmeasured.most_common())
    calls = counted(prices.unmeasured.total(), "call")
    return [
        f"Python in DTensor and FSDP2 costs nothing ({calls}), as the profile has no time of it: {names}; "
        "calibrate.run measures it (group python)"
    ]
