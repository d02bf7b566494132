"""Write a simulated step as Chakra execution traces: PREFIX.RANK.et for each rank, and PREFIX.groups.json.

Every rank has a file, even if equal ranks were simulated once. ASTRA-sim takes the prefix as its workload and the
groups file as its communicator groups. Chakra has whole microseconds; our own attribute has the exact duration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field

from sim.core.errors import InputError
from sim.core.files import write_bytes, write_text
from sim.core.timeline import MESSAGES, OFFLOAD, RELOAD, SENDS, Detail
from sim.graph.taskgraph import Collective
from sim.simulation import Simulation
from sim.traces.chakra import (
    COLLECTIVES,
    INT32,
    MAX_NODES,
    UINT64,
    Attribute,
    ChakraNode,
    NodeType,
    boolean,
    encode_file,
    int64,
    string,
)
from sim.traces.chakra_in import NANOS, OPERATORS, PUT_IN

Slot = tuple[str, str]  # stream, kind


def write_chakra(simulation: Simulation, prefix: str | Path) -> list[Path]:
    """Write the files of a step that was simulated with `expand=True`, and return their paths.

    Raises:
        InputError: with `optimizer_post_validation` or collectives as messages, or if the files would hold more than
            five million nodes.
    """
    export, written = Export(simulation), list[Path]()
    try:
        for rank in range(simulation.scenario.parallelism.ranks):
            path = Path(f"{prefix}.{rank}.et")
            write_bytes(path, encode_file(export.nodes(rank)))
            written.append(path)
        path = Path(f"{prefix}.groups.json")
        write_text(path, json.dumps({str(i): list(g) for g, i in export.groups.items()}, indent=1) + "\n")
        written.append(path)
    except BaseException:  # an interrupt too: files of some ranks alone are no trace
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


class Export(Struct):
    """Make the nodes of each rank. Groups are numbered from 1, in the order of their first use."""

    simulation: Simulation
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    rows: list[list[tuple[int, Slot]]] = field(default_factory=list)  # by class of ranks: task, slot
    details: list[Detail] = field(default_factory=list)  # of every task
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a message: sending and receiving class

    def __post_init__(self) -> None:
        graph, scenario = self.simulation.built.graph, self.simulation.scenario
        if scenario.for_training.optimizer_post_validation:
            why = "found true; no node of a Chakra trace can start when another starts, as gradient norms then do"
            raise scenario.error(("training", "optimizer_post_validation"), why)
        if scenario.engine.collectives == "messages":
            why = "found messages; must be closed_form: a Chakra trace holds whole collectives"
            raise scenario.error(("engine", "collectives"), why)
        if len(graph.columns.launches.first):
            raise ValueError("the step was simulated without expand=True; its actions hide what their streams do")
        streams, kinds = list(graph.streams), list(graph.span_kinds)
        self.rows, self.details = [[] for _ in graph.classes], graph.details()
        for task, index, stream, kind in graph.slot_table().tolist():
            self.rows[index].append((task, (streams[stream], kinds[kind])))
            if kinds[kind] in MESSAGES:
                sender, receiver = self.ends.get(task, (-1, -1))
                self.ends[task] = (index, receiver) if kinds[kind] in SENDS else (sender, index)
        count = sum(len(c.ranks) * len(rows) for c, rows in zip(graph.classes, self.rows, strict=True))
        if count > MAX_NODES:
            raise InputError(
                f"Chakra: {count} nodes on {scenario.parallelism.ranks} ranks; at most {MAX_NODES} are written"
            )

    def nodes(self, rank: int) -> Iterator[ChakraNode]:
        """Yield the nodes of one rank, in the order of the graph; task n has node 2n + 2, and 2n + 3 for a second."""
        plan, waits = self.simulation.plan, self.simulation.built.graph.waits_of
        index = plan.class_of(rank)
        own = {task for task, _ in self.rows[index]}
        twice = {task for task, slot in self.rows[index] if slot[1] == "SEND_RECV"}
        for task, slot in sorted(self.rows[index]):
            deps = [2 * w + 2 for w in dict.fromkeys(waits[task]) if w in own]
            deps += [2 * w + 3 for w in dict.fromkeys(waits[task]) if w in twice]
            yield from self._node(rank, index, task, slot, tuple(deps))

    def _node(self, rank: int, index: int, task: int, slot: Slot, deps: tuple[int, ...]) -> Iterator[ChakraNode]:
        times = self.simulation.times
        nanos = round((times.end_s[task] - times.start_s[task]) * 1e9)  # includes the slowdown by shared links
        detail, (stream, kind) = self.details[task], slot
        shared = [int64(NANOS, nanos), string("kind", kind), boolean("is_cpu_op", False)]
        start, duration = round(times.start_s[task] * 1e6), round(nanos / 1000)

        def node(type_: NodeType, extra: list[Attribute], second: int = 0) -> ChakraNode:
            # A ring's receive has a stream of its own: if sends came first on one stream, all ranks would wait.
            attributes = (*shared, string("stream", stream + "_recv" * second), *extra)
            number = 2 * task + 2 + second
            return ChakraNode(number, detail.name, type_, (), deps, start, duration, None, None, attributes)

        size = int64("comm_size", round(detail.bytes))
        if kind in MESSAGES:
            sends = kind in SENDS
            yield node(NodeType.COMM_SEND if sends else NodeType.COMM_RECV, [size, *self._ends(rank, index, task)])
        elif kind == "SEND_RECV":
            ring = self._members(rank, index, task)
            after, before = (ring[(ring.index(rank) + step) % len(ring)] for step in (1, -1))
            yield node(NodeType.COMM_SEND, [size, *_ends(rank, after, task)])
            yield node(NodeType.COMM_RECV, [size, *_ends(before, rank, task)], 1)
        elif kind.lower() in COLLECTIVES:
            members = self._members(rank, index, task)
            group = self.groups.setdefault(members, len(self.groups) + 1)
            number = int64("comm_type", COLLECTIVES.index(kind.lower()))
            if kind.lower() in PUT_IN:
                size = int64("comm_size", round(detail.bytes / len(members)))
            yield node(NodeType.COMM_COLL, [number, size, string("pg_name", str(group))])
        elif kind in (OFFLOAD, RELOAD):
            tensor = Attribute("tensor_size", UINT64, round(detail.bytes))
            yield node(NodeType.MEM_STORE if kind == OFFLOAD else NodeType.MEM_LOAD, [tensor])
        else:
            several = [int64(OPERATORS, detail.operators)] if detail.operators > 1 else []
            yield node(NodeType.COMP, [int64("num_ops", 0), Attribute("tensor_size", UINT64, 0), *several])

    def _ends(self, rank: int, index: int, task: int) -> list[Attribute]:
        """Return the attributes of sender and receiver: the ranks at the same position in their classes."""
        classes = self.simulation.built.graph.classes
        place = list(classes[index].ranks).index(rank)
        sender, receiver = (classes[c].ranks[place] for c in self.ends[task])
        return _ends(sender, receiver, task)

    def _members(self, rank: int, index: int, task: int) -> tuple[int, ...]:
        """Return the ranks of a collective."""
        graph = self.simulation.built.graph
        work = graph.task_kinds[graph.task_kind[task]].work
        assert isinstance(work, Collective)  # an expanded step joins no collectives
        return tuple(self.simulation.plan.group(dict(work.parts)[index].group, rank))


def _ends(sender: int, receiver: int, task: int) -> list[Attribute]:
    values = (("comm_src", sender), ("comm_dst", receiver), ("comm_tag", task))
    return [Attribute(name, INT32, value) for name, value in values]
