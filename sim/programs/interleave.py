"""Two programs that run at once on one rank, merged into one (DualPipe's forward beside backward)."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import BLOCK_END, Comm, Compute, Item, Program, Wait
from sim.prices.price import Price
from sim.programs.compile import CompiledProgram, compile_program

Pair = tuple[Program, Program]


def interleave(programs: Pair, price: Price, leaders: Pair, planned: Price) -> CompiledProgram:
    """Two programs run at once on one rank (DualPipe's forward beside backward).

    Their computations share the device one after the other, their communications have their streams; at each point
    the program whose next computation could start first goes on, so each hides the other's messages
    (DeepSeek-V3 technical report, figure 4, orders them by hand to the same end). All peers of a collective must agree
    on the order of communications: `leaders`, the programs of the first of them, set it by the prices `planned`,
    whatever the others' computations and speeds are.
    """
    merged, order = _merge(leaders, planned, None)
    if programs != leaders:
        merged, _ = _merge(programs, planned, order)
    return compile_program(tuple(merged), price)


def _merge(programs: Pair, price: Price, order: list[int] | None) -> tuple[list[Item], list[int]]:
    """One list of both programs' items, and which of them each communication is of: as in `order`, if that is given."""
    sides = (_Side(programs[0], "a"), _Side(programs[1], "b"))
    merged: list[Item] = []
    turns: list[int] = []
    clock = 0.0
    streams: dict[str, float] = {}
    while any(s.left for s in sides):
        able = [s for i, s in enumerate(sides) if s.left and (order is None or not s.on_comm or order[len(turns)] == i)]
        side = min(able, key=lambda s: (s.on_compute, max(clock, s.ready_s)))
        if side.on_comm:
            turns.append(sides.index(side))
        clock = side.advance(merged, price, max(clock, side.ready_s) if side.on_compute else clock, streams)
    for side in sides:
        merged.extend(Wait(h, side.items[-1].phase) for h in side.pending)
    return merged, turns


class _Side:
    """One of two interleaved programs: its next item and when its last communication ends."""

    def __init__(self, program: Program, tag: str) -> None:
        self.items, self.tag, self.position = program, tag, 0
        self.ready_s = 0.0
        self.pending: list[str] = []
        self.ends: dict[str, float] = {}
        self.compute_end_s = 0.0

    @property
    def left(self) -> bool:
        return self.position < len(self.items)

    @property
    def on_compute(self) -> bool:
        return isinstance(self.items[self.position], Compute)

    @property
    def on_comm(self) -> bool:
        return isinstance(self.items[self.position], Comm)

    def advance(self, merged: list[Item], price: Price, clock: float, streams: dict[str, float]) -> float:
        """Move on to just before the next computation but one; returns the compute stream's clock."""
        item = self.items[self.position]
        self.position += 1
        if isinstance(item, Compute):
            merged.extend(Wait(h, item.phase) for h in self.pending)
            self.pending = []
            merged.append(item)
            self.compute_end_s = clock + price(item).seconds
            self.ready_s = self.compute_end_s
            return self.compute_end_s
        if item is BLOCK_END:
            return clock
        if isinstance(item, Wait):
            self.pending.append(self.tag + item.handle)
            self.ready_s = max(self.ready_s, self.ends.get(item.handle, 0.0))
            return clock
        stream = item.stream or item.group
        start = max(streams.get(stream, 0.0), self.ready_s if item.blocking else self.compute_end_s)
        start = max(start, self.ends.get(item.after, 0.0))
        streams[stream] = end = start + price(item).seconds
        handle = item.handle or f"{self.position}"
        after = item.after and self.tag + item.after
        merged.append(replace(item, blocking=False, handle=self.tag + handle, after=after))
        self.ends[handle] = end
        if item.blocking:
            self.pending.append(self.tag + handle)
            self.ready_s = end
        return clock
