"""Build and price the blocks of one way to run a model's layers, and sum their times by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.columns import Floats
from sim.inputs.scenario import Scenario
from sim.models.source import source_of
from sim.programs.data_parallel import DataParallel
from sim.programs.gathered_units import backward_order, forward_order, gathered_again, in_root, stays_all_step
from sim.programs.stages import shard_of, stage_input_bytes
from sim.search.cached import cached
from sim.search.mesh_prices import MeshPrices, PricedBlock
from sim.search.pipeline_bound import StagePlacement

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
# Numbers of a model's different blocks; those of layers are 0 and up. MTP: the first prediction module, or where these
# have a stage of their own (NORM, then MODULE, the first of them) their outputs; FURTHER: modules behind the first.
EMBEDDING, HEAD, MTP, NORM, MODULE, FURTHER = -1, -2, -3, -4, -5, -6
Signature = tuple[int, ...]  # the numbers of a stage's blocks, first to last


def modules(first: int, count: int) -> Signature:
    """The numbers of so many prediction modules, of which `first` is the first's; the others are equal."""
    return (first, *[FURTHER] * (count - 1))[:count]


class Blocks:
    """Hold the blocks of a rank for one way to run layers (sp, micro-batch size, recomputation), with sums by stage."""

    def __init__(self, scenario: Scenario, prices: MeshPrices, rank: int) -> None:
        plan, p = prices.plan, scenario.parallelism
        self.prices, self.scenario = prices, scenario
        shard = shard_of(prices.plan, rank)
        # With ep_overlap a paired action computes beside another's messages, so only computation surely takes time.
        paired = p.overlaps_exchanges and p.form.pairs
        self.priced: dict[int, PricedBlock] = {}
        numbers: dict[tuple[object, ...], int] = {}
        order, source = [], source_of(scenario)
        for layer in range(scenario.model.layers):
            # A model has few kinds of layers (dense, with experts, linear attention). Each is built and priced once.
            number = numbers.setdefault(source.layer_kind(layer), len(numbers))
            if number not in self.priced:
                self.priced[number] = PricedBlock(source.layer(layer, shard), prices, paired)
            order.append(number)
        self.order = tuple(order)
        head, *predicting = source.last(shard)
        self.priced[EMBEDDING] = PricedBlock(source.first(), prices, paired)
        self.priced[HEAD] = PricedBlock(head, prices, paired)
        if predicting:
            self.priced[MTP] = PricedBlock(predicting[0], prices, paired)
        apart = source.apart(shard)
        for number, block in zip((NORM, MODULE), apart, strict=False):
            self.priced[number] = PricedBlock(block, prices, paired)
        for block in (apart[1:] or predicting)[1:2]:
            self.priced[FURTHER] = PricedBlock(block, prices, paired)
        # The plan belongs to the mesh and has micro-batches of one sequence; the message needs this scenario's size.
        self.message_bytes = stage_input_bytes(replace(plan, scenario=scenario))

    @cached
    def work_s(self, gathered: bool) -> float:
        """Return the least seconds of one micro-batch's forward and backward of all blocks, whole or split backward."""
        # Summing by number is faster than summing 126 layers for each of thousands of layouts.
        n = self.scenario.model.mtp_layers
        apart = (NORM, *modules(MODULE, n), *[MTP] * n) if NORM in self.priced else modules(MTP, n)
        counts = Counter((EMBEDDING, HEAD, *self.order, *apart))
        return sum(n * self.priced[number].work_s(gathered) for number, n in counts.items() if n)

    @cached
    def action_s(self, kind: Kind, stage: Signature, gathered: bool) -> float:
        """Return the seconds of an action of a stage: its blocks one after the other."""
        # The sum is a lower bound: in a stage each block starts when the one before ends, with no stream freer.
        return sum([self.priced[n].action_s(kind, gathered) for n in stage])

    def zero3_s(self, kind: Kind, stage: Signature, dp: DataParallel) -> tuple[float, float, bool]:
        """Return `action_s` with ZeRO-3's gathers and reductions, how much later their stream ends, in seconds, and
        whether the action begins with a gather.

        Each block's parameters are gathered one block ahead, and its gradients are reduced after it. Both queue on one
        stream in the order of the program: a gather, then the reduction of the block before. The second number delays
        the next action if that begins with a gather.
        """
        # Backward gathers the last block first.
        blocks = [self.priced[n] for n in (stage if kind is Kind.F else stage[::-1])]
        if kind is Kind.F:  # a root is gathered with the first block; that block's own part is a bound
            needed = [
                not stays_all_step(dp.engine, b.block) and (i == 0 or not in_root(dp.engine, b.block))
                for i, b in enumerate(blocks)
            ]
        else:
            needed = gathered_again([b.block for b in blocks[::-1]], dp)[::-1]
        gathers = [b.gathers_s if need else 0.0 for b, need in zip(blocks, needed, strict=True)]
        # The input-gradient half of a split backward completes no weights' gradients, so it has nothing to reduce.
        reduces = dp.each_micro_batch and kind is Kind.B
        # The first gather is exposed, because nothing of this action runs before it. `stream`: when the data-parallel
        # stream is free; `arrived`: when the current block's parameters are gathered; `done`: when computation ends.
        stream = done = 0.0
        arrived = [0.0] * len(blocks)
        of_stage = [b.block for b in blocks]
        order = forward_order(of_stage, dp) if kind is Kind.F or not dp.prefetches else backward_order(of_stage, dp)
        for i, block in enumerate(blocks):
            for j in [j for j in order[i] if gathers[j]]:
                # FSDP issues gathers when a block starts, which is when the block before it ends.
                stream = arrived[j] = max(stream, done) + gathers[j]
            done = max(done, arrived[i]) + block.action_s(kind, True)
            if reduces and not in_root(dp.engine, block.block):  # those of a root come last, which the bound leaves out
                stream = max(stream, done) + block.reduces_s
        return done, max(0.0, stream - done), bool(needed) and needed[0]


class Cut(Struct, frozen=True, eq=False, dict=True):
    """Hold a model cut into stages: the numbers of its layers, and those of each stage's blocks."""

    order: Signature
    stages: tuple[Signature, ...]

    def each(self, of_stage: Callable[[Signature], Sequence[float]]) -> Floats:
        """Return `of_stage` of each stage, [stages, numbers]; it is called once for equal stages."""
        # Middle stages mostly hold equal blocks, so two or three calls serve a pipeline of any length.
        known = {stage: of_stage(stage) for stage in dict.fromkeys(self.stages)}
        return np.array([known[stage] for stage in self.stages])

    def each_by_place(self, of_stage: Callable[[Signature, bool], Sequence[float]]) -> Floats:
        """Return `of_stage` of each stage, as `each` does, with whether it is the first of all."""
        places = [(stage, i == 0) for i, stage in enumerate(self.stages)]
        known = {place: of_stage(*place) for place in dict.fromkeys(places)}
        return np.array([known[place] for place in places])

    def by_rank(self, placement: StagePlacement) -> list[Signature]:
        """Return the numbers of the blocks on each pipeline rank."""
        held: list[Signature] = [()] * placement.ranks
        for rank, stage in zip(placement.rank_of_stage.tolist(), self.stages, strict=True):
            held[rank] += stage
        return held
