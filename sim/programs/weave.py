"""Data parallelism's messages among the computations of a stage's blocks (`sim.programs.data_parallel`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from sim.core.program import Block, Comm, Compute, Item, Phase
from sim.programs.around_messages import behind_input, gradients_of, join_gradients, limit_bytes, unpack, waits
from sim.programs.data_parallel import DataParallel
from sim.programs.gathered_units import backward_gathers, backward_order, forward_gathers, forward_order, in_root
from sim.programs.parameters_on_host import to_host
from sim.programs.shared_gradients import sum_shared
from sim.programs.two_levels import second_copy


def weave_forward(blocks: tuple[Block, ...], dp: DataParallel, first: bool, early: bool = False) -> list[list[Item]]:
    """The forward of each block with what data parallelism adds; `first`: the step's first micro-batch here; `early`:
    no backward has ended here.

    ZeRO-3 gathers a block's parameters while the block before it computes, one block ahead as FSDP2 does, or several
    (`units_ahead`).
    ZeRO-1 and -2 wait for the gathers that the step began with (`prologue`), where these overlap.
    """
    phase = Phase.FORWARD
    out: list[list[Item]] = [[] for _ in blocks]
    if blocks and dp.zero == 3 and (first or not dp.stays):
        _gather(out, forward_gathers(blocks, dp, first, early), forward_order(blocks, dp), dp, phase)
    for block, items in zip(blocks, out, strict=True):
        items += block.forward
        if first and dp.secondary > 1:
            items += second_copy(
                dp.gathered_params(block), max(1, len(block.tensors)), dp.secondary, dp.parameter_bytes
            )
    return out


def weave_backward(
    blocks: tuple[Block, ...], dp: DataParallel, phases: frozenset[Phase], last: bool, early: bool = False
) -> list[list[Item]]:
    """The backward of each block, last block first, cut to `phases`, with gathers and gradient reductions.

    `last`: the step's last micro-batch here, after which gradients are complete, or (`each_row`) a row's last.
    `early`: the step's first backward here.
    """
    order = blocks[::-1]
    out: list[list[Item]] = [[] for _ in order]
    phase = Phase.INPUT_GRAD
    if blocks and dp.zero == 3 and dp.reshard and phase in phases:
        _gather(out, backward_gathers(order, dp, early), backward_order(order, dp), dp, phase)
    reduce_now = Phase.WEIGHT_GRAD in phases and (dp.each_micro_batch or (last and not dp.at_the_end))
    buckets = _Buckets(dp, last, early) if reduce_now or (last and dp.zero == 3) else None
    for block, items in zip(order, out, strict=True):
        if phase in phases:
            items += block.recompute
        left, tensors = [block.params, block.expert_params], list(block.tensors)
        for item in block.backward:
            if item.phase not in phases:
                continue
            items.append(item)
            # most computations complete no gradient, and buckets stay as they are
            if buckets is not None and isinstance(item, Compute) and any(ready := gradients_of(item)):
                items += buckets.add(block.name, ready, left)
                if ready[0] in tensors:
                    tensors.remove(ready[0])
        if buckets is not None and Phase.WEIGHT_GRAD in phases:
            items += buckets.finish(block, left, tensors, block is order[-1])
    return out


def _gather(
    out: list[list[Item]],
    gathers: Sequence[Sequence[Comm]],
    order: Iterable[Iterable[int]],
    dp: DataParallel,
    phase: Phase,
) -> None:
    """Add to each block the gathers that start before it, in this `order`, and the wait for its own."""
    for i, (items, sent) in enumerate(zip(out, order, strict=True)):
        comms = [c for j in sent for c in gathers[j]]
        items += behind_input(comms) if phase in dp.input_first else comms
        items += [*waits(gathers[i], phase), *unpack(gathers[i], dp, phase)]


class _Buckets:
    """Gradients that wait for their bucket to fill. ZeRO-3 reduces block by block, per_parameter at once.

    Experts have buckets of their own unless `DataParallel.mixes_experts` (Megatron-Core's distributed_data_parallel.py:
    `expert_parallel_buffers`).
    """

    def __init__(self, dp: DataParallel, last: bool, early: bool) -> None:
        self.dp, self.last, self.count = dp, last, 0
        self.adds = dp.host.adds and dp.keeps_shards and not early
        self.copied = ""  # the handle of the copy that the next reduction waits for
        self.limit_bytes = limit_bytes(dp)
        # By the kinds (0: dense, 1: experts) that fill it, each open bucket's dense and expert elements, and tensors.
        kinds: tuple[tuple[int, ...], ...] = ((0, 1),) if dp.mixes_experts else ((0,), (1,))
        self.open = dict.fromkeys(kinds, _NOTHING)
        self.later: list[Item] = []  # buckets that are sent when the backward has ended (`aligned`)
        self.of_root = _NOTHING  # what waits for the backward's end

    def add(self, name: str, ready: tuple[int, int], left: list[int]) -> list[Item]:
        """Count gradients as ready; `left` is what is left of the block's parameters."""
        given, out = (min(ready[0], left[0]), min(ready[1], left[1])), list[Item]()
        left[:] = left[0] - given[0], left[1] - given[1]
        for own in self.open:
            dense, experts = (given[kind] if kind in own else 0 for kind in (0, 1))
            if not dense + experts and not self.dp.mixes_experts:
                continue
            held, size = sum(self.open[own][:2]), dense + experts
            too_large = self.dp.engine.closes_before and (held + size) * self.dp.gradient_bytes > self.limit_bytes
            out += self._flush(name, own) if held and too_large else []
            self.open[own] = _joined(self.open[own], (dense, experts, 1))
            full = sum(self.open[own][:2]) * self.dp.gradient_bytes >= max(self.limit_bytes, 1.0)
            out += self._flush(name, own) if full else []
        return out

    def finish(self, block: Block, left: list[int], tensors: list[int], last_block: bool) -> list[Item]:
        """The end of a block: what is left of it (biases, norms) is ready; `per_parameter` sends tensor by tensor."""
        name, out = block.name, list[Item]()
        for n in reversed(tensors) if self.limit_bytes == 0.0 else ():
            out += self.add(name, (n, 0), left)
        out += self.add(name, (left[0], left[1]), left)
        out += sum_shared(block, self.dp)
        if self.dp.zero == 3 and not last_block and in_root(self.dp.engine, block):
            ((own, self.of_root),) = self.open.items()
            self.open[own] = _NOTHING
            return out
        for own in self.open if last_block or self.dp.zero == 3 else ():
            out += self._flush(name, own, last_block)
        return out

    def _flush(self, name: str, own: tuple[int, ...], at_end: bool = False) -> list[Item]:
        dense, experts, tensors = _joined(self.open[own], self.of_root if at_end else _NOTHING)
        self.open[own] = _NOTHING
        self.count += 1
        reduced = self.dp.reduce(name, dense, experts, f"g{self.count}", self.last, tensors)
        made: list[Item] = [*join_gradients(reduced, self.dp, tensors, dense + experts), *self._behind_copies(reduced)]
        if not at_end and self.dp.aligned:
            self.later += made
            return []
        before, self.later = self.later, []
        return [*before, *made]

    def _behind_copies(self, reduced: list[Comm]) -> list[Item]:
        """A reduction behind the copy to the host of the one before, with which it shares a stream; and the host's sum,
        for which the computation waits."""
        copies = to_host(reduced)
        out: list[Item] = [*reduced]
        if reduced and self.copied and not reduced[0].after:
            out[0] = replace(reduced[0], after=self.copied)
        if copies:
            self.copied = copies[-1].handle
        if self.adds and copies:
            out += [*waits(copies, Phase.WEIGHT_GRAD), *self.dp.host.summed(copies)]
            self.copied = ""
        return out


_NOTHING = (0.0, 0.0, 0)


def _joined(a: tuple[float, float, int], b: tuple[float, float, int]) -> tuple[float, float, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
