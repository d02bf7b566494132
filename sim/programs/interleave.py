"""Two programs that run at once on one rank, merged into one (DualPipe's forward beside backward)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from sim.core.program import BLOCK_END, Compute, Item, Phase, Program, Wait, exchanges_tokens
from sim.prices.price import Price
from sim.programs.compile import CompiledProgram, compile_program


def interleave(forward: Program, backward: Program, price: Price, delays: bool = True) -> CompiledProgram:
    """A forward and a backward that take turns on one rank; each turn ends where an exchange of experts' tokens starts.

    ```text
    computes:   attention F │ experts B │ experts F  │ attention B
    exchanges:  combine B   │ dispatch F, dispatch B │ combine F
    ```

    Computations share one stream and exchanges another, in this order on all ranks. So an exchange runs beside the
    other program's computations, and all other messages of a program are waited for as if it ran alone.

    `delays`: what a turn of the backward computes for weights comes after its exchange has started, else before it.
    Megatron-Core 0.16.1, models/common/model_chunk_schedule_plan.py: `TransformerLayerSchedulePlan.run` calls each
    node's `backward_dw` behind its `backward`. An exchange waits for the event behind the latter alone
    (pipeline_parallel/utils.py: `ScheduleNode`). Without `delay_wgrad_compute`, `backward_dw` returns at once
    (models/gpt/fine_grained_callables.py), and `backward` computes both. DeepSeek-V3's technical report, figure 4,
    delays them, too.
    """
    first, second = _Side("b", backward, delays), _Side("a", forward, delays)
    merged: list[Item] = []
    while first.left or second.left:
        merged += first.turn()
        merged += second.turn()
    for side in (first, second):
        merged += side.waits(side.items[-1].phase if side.items else Phase.FORWARD)
    return compile_program(tuple(merged), price)


class _Side:
    """One of two interleaved programs: the items done so far, and the messages that its next computation waits for."""

    def __init__(self, tag: str, program: Program, delays: bool) -> None:
        self.tag, self.items, self.position = tag, tuple(i for i in program if i is not BLOCK_END), 0
        self.delays = delays
        self.pending: list[str] = []
        self.messages = 0

    @property
    def left(self) -> bool:
        return self.position < len(self.items)

    def turn(self) -> list[Item]:
        """Items up to the next exchanges and with them, and last what is for weights; without an exchange, the rest."""
        start = self.position
        while self.left and not exchanges_tokens(self.items[self.position]):
            self.position += 1
        end = self.position
        while self.left and exchanges_tokens(self.items[self.position]):
            self.position += 1
        computed, exchanged = self.items[start:end], self.items[end : self.position]
        if not exchanged:
            return list(self._placed(computed))
        later = [i for i in computed if self.delays and i.phase is Phase.WEIGHT_GRAD]
        needed = [i for i in computed if not (self.delays and i.phase is Phase.WEIGHT_GRAD)]
        placed = list(self._placed((*needed, *exchanged)))
        waited, self.pending = self.pending, []  # gradients of weights need nothing that is exchanged
        placed += self._placed(later)
        self.pending = waited + self.pending
        return placed

    def _placed(self, items: Program | list[Item]) -> Iterator[Item]:
        """A blocking message holds up its own program's next computation alone."""
        for item in items:
            if isinstance(item, Compute):
                yield from self.waits(item.phase)
                yield item
            elif isinstance(item, Wait):
                self.pending.append(self.tag + item.handle)
            else:
                self.messages += 1
                handle = self.tag + (item.handle or f"{self.messages}")
                yield replace(item, blocking=False, handle=handle, after=item.after and self.tag + item.after)
                if item.blocking:
                    self.pending.append(handle)

    def waits(self, phase: Phase) -> list[Wait]:
        """Wait for all that is pending."""
        handles, self.pending = self.pending, []
        return [Wait(h, phase) for h in handles]
