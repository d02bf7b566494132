"""Turn Chakra execution traces of a job's ranks into a recording.

A trace says what waits for what and how long nodes take, but not when they ran. The times come from running the trace:
each rank runs one host operation, one computation and one communication at a time (ASTRA-sim's default of one hardware
resource of each kind), or one node on each stream if nodes name their streams. Of the nodes that are ready, the lowest
number runs first.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sim.core.errors import InputError
from sim.traces.chakra import COLLECTIVES, ChakraFile, ChakraNode, NodeType, read_chakra
from sim.traces.files import parse_trace, read_bytes
from sim.traces.recording import HOST, START, Message, Node, Recording

_COMM = (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
NANOS = "duration_nanos"  # our own attribute, because the schema's whole microseconds are too coarse for kernels
OPERATORS = "operators"  # our own attribute: how many operators a computation stands for, if more than one
# Collectives whose `comm_size` is each rank's input, not the output: in ASTRA-sim an all-gather's `final_data_size` is
# `data_size` times the ranks (system/collective/Ring.cc), and torch's converter sums the inputs.
PUT_IN = ("all_gather", "gather")
Groups = dict[str, tuple[int, ...]]


def rank_of(path: str | Path, position: int) -> int:
    """Return the rank in a file's name, PREFIX.RANK.et as ASTRA-sim names it; else the file's position.

    >>> rank_of("llama.12.et", 0), rank_of("other.et", 3)
    (12, 3)
    """
    found = re.search(r"\.(\d{1,7})\.et(?:\.gz)?$", Path(path).name)
    return int(found[1]) if found else position


def load(paths: Sequence[str | Path], contents: Sequence[bytes], groups: Groups | None = None) -> Recording:
    """Return a job's files, one for each rank, as a recording.

    Raises:
        InputError: for a file that is no trace, two files of one rank, or nodes that never end.
    """
    parts: dict[int, ChakraFile] = {}
    for position, (path, data) in enumerate(zip(paths, contents, strict=True)):
        rank = rank_of(path, position)
        if rank in parts:
            raise InputError(f"{path}: is of rank {rank}, and so is another file; names end in .RANK.et")
        parts[rank] = read_chakra(path, data)
    name = str(paths[0]) if len(paths) == 1 else f"{len(paths)} Chakra traces"
    build = _Build(name, {r: parts[r] for r in sorted(parts)}, groups or {})
    return build.run()


def read_groups(path: str | Path) -> Groups:
    """Read ASTRA-sim's communicator groups: a JSON mapping of group names to lists of ranks.

    Raises:
        InputError: if the file is something else.
    """
    data = parse_trace(read_bytes(path, 1 << 26), path)
    good = isinstance(data, dict) and all(
        isinstance(v, list) and all(isinstance(r, int) and 0 <= r < 10_000_000 for r in v) for v in data.values()
    )
    if not good:
        raise InputError(f"{path}: must be a mapping of group names to lists of ranks")
    return {str(k): tuple(v) for k, v in data.items()}


class _Build:
    """Build the nodes of all ranks, then compute their times."""

    def __init__(self, name: str, files: dict[int, ChakraFile], groups: Groups) -> None:
        self.name, self.files, self.groups = name, files, dict(groups)
        self.ranks = tuple(files)
        self.nodes: list[Node] = []
        self.resource: list[tuple[int, str]] = []
        self.source: list[int] = []  # the node's number in its file
        self.seen: Counter[tuple[object, ...]] = Counter()
        self.unpriced = 0

    def run(self) -> Recording:
        world = max(self.ranks) + 1
        for rank, file in self.files.items():
            for node in file.nodes:
                if node.type == NodeType.METADATA:
                    self._process_groups(node)
            self._rank(rank, file, world)
        _Clock(self.name, self.nodes, self.resource, self.source).run()
        out = Recording(self.name, self.ranks, self.nodes, world)
        if self.unpriced:
            out.warnings.append(
                f"{self.unpriced} communications have no duration in the traces and take no time; --cluster PRESET "
                "prices them"
            )
        return out

    def _process_groups(self, node: ChakraNode) -> None:
        """Read the groups that PyTorch's converter writes in a metadata node: "['[{"pg_name": …, "ranks": […]}]']"."""
        text = node.inputs.values if node.inputs else ""
        try:
            listed = json.loads(text[2:-2].replace("\\", "")) if len(text) > 4 else []
            for item in listed if isinstance(listed, list) else []:
                self.groups[str(item["pg_name"])] = tuple(int(r) for r in item["ranks"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return

    def _rank(self, rank: int, file: ChakraFile, world: int) -> None:
        base: dict[int, int] = {}
        for node in file.nodes:
            if node.id in base:
                raise InputError(f"{self.name}: rank {rank}: node {node.id} occurs twice")
            base[node.id] = len(self.nodes)
            self._add(rank, node, world)
        for node in file.nodes:
            deps = dict.fromkeys((*node.data_deps, *node.ctrl_deps))
            missing = [d for d in deps if d not in base]
            if missing:
                raise InputError(
                    f"{self.name}: rank {rank}: node {node.id} waits for node {missing[0]}, which is not in the file"
                )
            self.nodes[base[node.id]].waits += [(base[d], 0) for d in deps]

    def _add(self, rank: int, node: ChakraNode, world: int) -> None:
        nanos = node.whole(NANOS)
        duration = nanos if nanos >= 0 else node.duration_micros * 1000
        if duration >= 2**62:
            raise InputError(
                f"{self.name}: rank {rank}: node {node.id} takes {duration} ns; that is more than 146 years"
            )
        message = self._message(rank, node, world)
        host = node.get("is_cpu_op") is True and message is None
        kind, stream = HOST if host else "F", "host" if host else "compute"
        if message is not None:
            kind, stream = message.kind.upper(), "comm"
            self.unpriced += not duration
        elif node.type in (NodeType.INVALID, NodeType.METADATA):
            kind, stream, duration = START, "host", 0
        named, shown = node.get("stream"), node.get("kind")
        stream = named[:100] if isinstance(named, str) and named else stream
        kind = shown[:100] if isinstance(shown, str) and shown else kind
        computes = message is None and not host and node.type == NodeType.COMP
        name, operators = node.name[:4000] or f"node {node.id}", node.whole(OPERATORS, 1)
        self.nodes.append(Node(rank, stream, kind, name, 0, duration, [], message, computes, operators))
        self.resource.append((rank, "" if kind == START else stream))
        self.source.append(node.id)

    def _message(self, rank: int, node: ChakraNode, world: int) -> Message | None:
        if node.type not in _COMM:
            return None
        size = float(max(0, node.whole("comm_size", 0)))
        group = node.get("pg_name")
        group = group if isinstance(group, str) else str(node.whole("pg_name", 0)) if group is not None else ""
        if node.type == NodeType.COMM_COLL:
            number = node.whole("comm_type", 0)
            kind = COLLECTIVES[number] if 0 <= number < len(COLLECTIVES) else "all_reduce"
            ranks = self.groups.get(group) or tuple(range(world))
            size *= len(ranks) if kind in PUT_IN else 1
            return Message(kind, group, ranks, size, self._count(rank, ("collective", group, ranks, kind)))
        sends = node.type == NodeType.COMM_SEND
        source = rank if sends else node.whole("comm_src", rank)
        target = node.whole("comm_dst", rank) if sends else rank
        kind, tag = "send" if sends else "recv", node.whole("comm_tag", 0)
        return Message(kind, group, (source, target), size, self._count(rank, ("message", source, target, tag), kind))

    def _count(self, rank: int, key: tuple[object, ...], end: str = "") -> tuple[object, ...]:
        self.seen[rank, end, *key] += 1
        return (*key, self.seen[rank, end, *key])


class _Clock:
    """Set start and end of each node, and make each wait for the node before it on its resource.

    Before the run, `end_ns` is a node's duration. A collective begins on a rank when the rank's resource is free and
    its waits are over. Its duration counts from the moment at which all its members have begun.
    """

    def __init__(self, name: str, nodes: list[Node], resource: list[tuple[int, str]], source: list[int]) -> None:
        self.name, self.nodes, self.resource, self.source = name, nodes, resource, source
        self.missing = [len(n.waits) for n in nodes]
        self.after: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for w, _ in node.waits:
                self.after[w].append(i)
        self.members = Recording(name, (), nodes, 1).members()
        self.arrived: Counter[tuple[object, ...]] = Counter()
        self.busy: dict[tuple[int, str], int] = {}
        self.last: dict[tuple[int, str], int] = {}
        self.ready: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.events: list[tuple[int, int]] = []

    def run(self) -> None:
        """Run all nodes."""
        done = 0
        self._take([i for i, n in enumerate(self.missing) if n == 0], 0)
        while self.events:
            now = self.events[0][0]
            freed = []
            while self.events and self.events[0][0] == now:
                i = heapq.heappop(self.events)[1]
                done += 1
                if self.busy.get(self.resource[i]) == i:
                    del self.busy[self.resource[i]]
                freed += self._ended(i)
            self._take(freed, now)
        if done < len(self.nodes):
            stuck = [i for i, n in enumerate(self.missing) if n][:5]
            shown = ", ".join(f"node {self.source[i]} of rank {self.nodes[i].rank}" for i in stuck)
            count = len(self.nodes) - done
            raise InputError(
                f"{self.name}: {count} of {len(self.nodes)} nodes never end, they wait for each other or for a rank "
                f"without a trace; among them {shown or 'communications whose other end never comes'}"
            )

    def _ended(self, i: int) -> list[int]:
        freed = []
        for s in self.after[i]:
            self.missing[s] -= 1
            if self.missing[s] == 0:
                freed.append(s)
        return freed

    def _take(self, ready: list[int], now: int) -> None:
        """Begin the nodes that are ready and whose resource is free, the lowest numbers first."""
        for i in ready:
            heapq.heappush(self.ready.setdefault(self.resource[i], []), (self.source[i], i))
        for place, queue in self.ready.items():
            while queue and place not in self.busy:
                self._begin(heapq.heappop(queue)[1], place, now)

    def _begin(self, i: int, place: tuple[int, str], now: int) -> None:
        node = self.nodes[i]
        node.start_ns = now
        if place[1]:
            self.busy[place] = i
            if place in self.last:
                node.waits.append((self.last[place], 0))
            self.last[place] = i
        together = [i]
        if node.message is not None:
            self.arrived[node.message.key] += 1
            everyone = self.members[node.message.key]
            together = everyone if self.arrived[node.message.key] == len(everyone) else []
        for m in together:
            self.nodes[m].end_ns += now
            heapq.heappush(self.events, (self.nodes[m].end_ns, m))
