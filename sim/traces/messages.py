"""Find what a traced collective or message was: kind, process group, ranks, bytes, and its key across ranks."""

from __future__ import annotations

import json
import re
from typing import Any

from sim.core.collectives import POINT_TO_POINT, collective_kind
from sim.core.json_values import is_integer
from sim.traces.kineto import GLOO, Event, whole
from sim.traces.recording import Message

MAX_RANKS = 100_000
_ITEM_BYTES = {
    "double": 8,
    "long": 8,
    "int64": 8,
    "longint": 8,
    "float": 4,
    "int": 4,
    "int32": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
}


def item_bytes(dtype: Any) -> int:
    """Return the bytes of an element by torch's or C++'s name of its type; 0 if the name is unknown."""
    text = re.sub(r"^c10::|[^a-z0-9]", "", str(dtype).lower()[:60])
    text = text.removeprefix("c10")
    return 1 if text.startswith("float8") else _ITEM_BYTES.get(text, 0)


def nccl_message(kernel: Event, operator: Event | None, rank: int) -> Message | None:
    """Return the collective that a kernel executes, from its own args and those of its record_param_comms.

    `sim.traces.matching` adds a number to the key that tells equal operations apart.
    """
    args = {**(operator.args if operator is not None else {}), **kernel.args}
    name = args.get("Collective name")
    kind = collective_kind(str(name)) if name is not None else None
    if kind is None:
        return None
    group = str(args.get("Process Group Name", ""))[:100]
    ranks = _ranks(args.get("Process Group Ranks"))
    inputs, outputs = (whole(args, f"{side} msg nelems") or 0 for side in ("In", "Out"))
    size = float(max(inputs, outputs) * item_bytes(args.get("dtype")))
    source, target = whole(args, "Src Rank"), whole(args, "Dst Rank")
    number = whole(args, "Seq")
    if kind in POINT_TO_POINT:
        ends = _ends(kind, rank, source, target)
        return Message(kind, group, ends, size, ("message", group, *ends)) if ends else None
    key: tuple[object, ...] = ("collective", group, ranks, kind)
    if number is not None:
        key = (*key, "Seq", number)
    return Message(kind, group, ranks, size, key)


def _ends(kind: str, rank: int, source: int | None, target: int | None) -> tuple[int, ...]:
    """Return (sender, receiver), of which this rank is one; () if the other is unknown."""
    source, target = (rank, target) if kind == "send" else (source, rank)
    return () if source is None or target is None else (source, target)


def _ranks(value: Any) -> tuple[int, ...]:
    """Return a group's ranks, given as a list or as text such as "[0, 1]"; () if they are cut short or missing."""
    if isinstance(value, str) and len(value) < 10 * MAX_RANKS:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list) or len(value) > MAX_RANKS:
        return ()
    if not all(is_integer(r) and 0 <= r < 10_000_000 for r in value):
        return ()
    return tuple(value)


def gloo_message(event: Event, operator: Event | None, rank: int, world: tuple[int, ...]) -> Message | None:
    """Return the collective of a gloo event; sizes come from its `Input Dims`, the peer from its c10d operator."""
    kind = collective_kind(event.name.removeprefix(GLOO))
    if kind is None:
        return None
    size = float(elements_of(event.args) * item_bytes(_first(event.args.get("Input type"))))
    if kind in ("all_gather", "all_to_all", "gather"):
        size *= len(world) if kind != "all_to_all" else 1
    if kind in POINT_TO_POINT:
        peer = _peer(operator)
        if peer is None:
            return None
        ends = (rank, peer) if kind == "send" else (peer, rank)
        return Message(kind, "", ends, size, ("message", "", *ends))
    return Message(kind, "", world, size, ("collective", "", world, kind))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def elements_of(args: dict[str, Any]) -> int:
    """Return the elements of all inputs, by `Input Dims`: lists of lists of whole numbers."""
    total = 0
    stack = [args.get("Input Dims")]
    for _ in range(10_000):
        if not stack:
            break
        value = stack.pop()
        if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            product = 1
            for v in value[:16]:
                product *= max(0, min(int(v), 2**40))
            total += min(product, 2**60)
        elif isinstance(value, list):
            stack += value[:1000]
    return total


def _peer(operator: Event | None) -> int | None:
    """Return the other rank of a c10d::send or c10d::recv_, its third argument."""
    if operator is None:
        return None
    inputs = operator.args.get("Concrete Inputs")
    if not isinstance(inputs, list) or len(inputs) < 3:
        return None
    return whole({"peer": inputs[2]}, "peer")
