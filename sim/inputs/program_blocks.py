"""Where a captured program can be cut: blocks are found where modules repeat.

A path such as `model.layers.7.self_attn` has an index, 7, in a container, `model.layers`. The members of the outermost
container of which two run alike are blocks; a container whose members are all different is opened, as long as there is
one inside (a Sequential of an embedding, the layers and a head). What runs before the first block is the input, after
the last one the output; what runs between two belongs to the later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sim.inputs.program_file import CapturedOperator, CapturedProgram

INPUT = 0  # number of the piece before the first block
PARAMETERS = ("parameter", "frozen parameter")
BACK = ("recomputed", "backward")
Member = tuple[str, str]  # container and index


class Pieces(NamedTuple):
    """The piece of each operator of forward and backward: `INPUT`, 1 to `blocks`, or `blocks` + 1, the output; -1 for
    clipping and optimizer."""

    blocks: int
    of_operator: tuple[int, ...]

    @property
    def output(self) -> int:
        """Number of the piece after the last block."""
        return self.blocks + 1


@lru_cache(maxsize=32)
def pieces_of(program: CapturedProgram) -> Pieces:
    """The program cut into input, blocks and output; one block holds it all where no modules have an index."""
    forward = [o for o in program.operators if o.phase == "forward"]
    containers = _containers(forward)
    labels = [_member(o.module, containers) for o in forward]
    numbers: dict[Member, int] = {}
    for label in labels:
        if label is not None:
            numbers.setdefault(label, len(numbers) + 1)
    if not numbers:
        return Pieces(1, tuple(1 if o.phase in ("forward", *BACK) else -1 for o in program.operators))
    found = {"forward": iter(_ascending([0 if x is None else numbers[x] for x in labels]))}
    back = [_member(o.module, containers) for o in program.operators if o.phase in BACK]
    descending = iter(_descending([0 if x is None else numbers.get(x, 0) for x in back], len(numbers)))
    found |= dict.fromkeys(BACK, descending)
    return Pieces(len(numbers), tuple(next(found[o.phase]) if o.phase in found else -1 for o in program.operators))


def owners(program: CapturedProgram) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first and the last piece whose forward reads each storage; what no forward reads belongs to the input."""
    first, last = [-1] * len(program.storages), [INPUT] * len(program.storages)
    for piece, op in zip(pieces_of(program).of_operator, program.operators, strict=True):
        if op.phase == "forward":
            for n in op.reads:
                first[n] = piece if first[n] < 0 else first[n]
                last[n] = piece
    return tuple([max(INPUT, n) for n in first]), tuple(last)


def tied_elements(program: CapturedProgram) -> int:
    """Elements of parameters that both input and output read, as a tied embedding."""
    elements, output = {p.name: p.elements for p in program.parameters}, pieces_of(program).output
    return sum(
        elements.get(s.name, 0)
        for s, first, last in zip(program.storages, *owners(program), strict=True)
        if s.kind in PARAMETERS and first == INPUT and last == output
    )


def _ascending(labels: Sequence[int]) -> list[int]:
    """The piece of each operator of a forward; 0 stands for no block.

    >>> _ascending([0, 1, 1, 0, 2, 1, 2, 0])
    [0, 1, 1, 2, 2, 2, 2, 3]
    """
    out, following = [0] * len(labels), max(labels, default=0) + 1
    for i in reversed(range(len(labels))):
        out[i] = following = labels[i] or following
    highest = INPUT
    for i, piece in enumerate(out):  # a block that runs again is part of where it does
        highest = out[i] = max(highest, piece)
    first = next((i for i, x in enumerate(labels) if x), 0)
    return [INPUT] * first + out[first:]


def _descending(labels: Sequence[int], blocks: int) -> list[int]:
    """The piece of each operator of a backward, which runs the blocks last to first.

    >>> _descending([0, 2, 0, 1, 2, 0, 1, 0], 2)
    [3, 2, 2, 2, 2, 1, 1, 0]
    """
    out, ahead = [INPUT] * len(labels), 0
    for i in reversed(range(len(labels))):
        ahead = max(ahead, labels[i])
        out[i] = ahead
    first = next((i for i, x in enumerate(labels) if x), 0)
    out[:first] = [blocks + 1] * first
    return out


def _containers(forward: Sequence[CapturedOperator]) -> frozenset[str]:
    """The containers whose members are blocks."""
    inside: dict[str, dict[str, list[tuple[object, ...]]]] = defaultdict(lambda: defaultdict(list))
    for o in forward:
        parts = o.module.split(".")
        what = (o.name, tuple((t.dtype, t.shape) for t in o.inputs))
        for i, part in enumerate(parts):
            if part.isdigit():
                inside[".".join(parts[:i])][part].append(what)
    found: set[str] = set()
    for container in sorted(inside, key=lambda c: (c.count(".") + bool(c), c)):
        if any(_within(container, outer) for outer in found):
            continue
        members = inside[container]
        alike = len({tuple(m) for m in members.values()}) < len(members)
        opened = any(_within(other, container) for other in inside if other != container)
        if len(members) > 1 and (alike or not opened):
            found.add(container)
    return frozenset(found)


def _within(path: str, container: str) -> bool:
    return path != container and (not container or path.startswith(container + "."))


def _member(path: str, containers: frozenset[str]) -> Member | None:
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and (container := ".".join(parts[:i])) in containers:
            return container, part
    return None
