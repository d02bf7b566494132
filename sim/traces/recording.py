"""Hold a recorded step, from any format: nodes that took time, and what each waited for.

Times are whole nanoseconds on one clock for all ranks; zero is the step's first start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

START = "START"  # kind of the node of zero length at which a rank's step begins
HOST = "HOST"  # kind of host time that no operator covers


class Message(NamedTuple):
    """Hold a collective or one end of a message. `bytes`: as nccl-tests counts them; `ranks`: () if unknown.

    Nodes of different ranks with the same `key` are one operation.
    """

    kind: str  # all_reduce, all_gather, ..., send, recv
    group: str
    ranks: tuple[int, ...]
    bytes: float
    key: tuple[object, ...]


class Node(Struct):
    """Hold work that took time on one stream of one rank.

    `waits`: (node, ns) pairs; this node starts no earlier than so many nanoseconds after the other node's end.
    `before`: it belongs to the steps before the recorded one, with which it shares the GPU and the host.
    `elements`: of the inputs of the operator that launched it, where the trace has their shapes.
    """

    rank: int
    stream: str
    kind: str
    name: str
    start_ns: int
    end_ns: int
    waits: list[tuple[int, int]] = field(default_factory=list)
    message: Message | None = None
    compute: bool = False  # an operator's or kernel's own work, which a faster device shortens
    operators: int = 1  # that the node stands for, one after the other
    device: bool = False  # a GPU's
    before: bool = False
    elements: int = 0


class Recording(Struct):
    """Hold one recorded step of some ranks of a job, and what of the steps before it still ran."""

    name: str
    ranks: tuple[int, ...]
    nodes: list[Node]
    world_size: int
    step: int | None = None  # number of ProfilerStep#, if the file numbers its steps
    gpu_name: str = ""
    warnings: list[str] = field(default_factory=list)
    priced_on: str = ""  # GPU and profile of captured programs, whose times are prices

    @property
    def step_ns(self) -> int:
        """Return how long the step took, as recorded."""
        begin, end = self.window([n.end_ns for n in self.nodes])
        return int(end - begin)

    @property
    def own(self) -> list[Node]:
        """Return the step's own nodes."""
        return [n for n in self.nodes if not n.before]

    def window(self, ends: Sequence[float]) -> tuple[float, float]:
        """Return when the step begins and ends, by the ends of all nodes.

        A host launches a step while the GPU still works on the one before. So a step is the period of the GPUs: from
        the end of the last kernel of the steps before to that of the step's own. Where no such kernel is recorded it
        begins at zero, and ends with its last node.
        """
        pairs = list(zip(self.nodes, ends, strict=True))
        begun = [end for node, end in pairs if node.before and node.device]
        if not begun:
            return 0, max(ends, default=0)
        own = [end for node, end in pairs if node.device and not node.before]
        return max(begun), max(own, default=max(begun))

    @property
    def host_ns(self) -> int:
        """Return what the busiest host needs for the step where it shares its GPU with the step before; 0 elsewhere.

        A step cannot be shorter for long, however far the host has run ahead.
        """
        if not any(node.before and node.device for node in self.nodes):
            return 0
        busy = dict.fromkeys(self.ranks, 0)
        for node in self.own:
            busy[node.rank] += node.end_ns - node.start_ns if node.stream == "host" else 0
        return max(busy.values())

    def members(self) -> dict[tuple[object, ...], list[int]]:
        """Return the nodes of each collective or message, by key."""
        out: dict[tuple[object, ...], list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.message is not None:
                out.setdefault(node.message.key, []).append(i)
        return out


def merge(parts: list[Recording], name: str) -> Recording:
    """Merge recordings of single ranks; node numbers are shifted, and the earliest start becomes zero."""
    nodes: list[Node] = []
    zero = min((n.start_ns for p in parts for n in p.nodes), default=0)
    for part in parts:
        base = len(nodes)
        for node in part.nodes:
            waits = [(w + base, lag) for w, lag in node.waits]
            nodes.append(replace(node, waits=waits, start_ns=node.start_ns - zero, end_ns=node.end_ns - zero))
    ranks = tuple(r for p in parts for r in p.ranks)
    return Recording(
        name,
        ranks,
        nodes,
        max(p.world_size for p in parts),
        parts[0].step,
        parts[0].gpu_name,
        list(dict.fromkeys(w for p in parts for w in p.warnings)),
    )
