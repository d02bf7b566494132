"""Build the blocks of every layout of one mesh, and cut them into stages; layouts that have them in common share them.

A layer is built and priced once for each (sp, micro-batch size, recomputation).
"""

from __future__ import annotations

from typing import NamedTuple

from sim.core.program import BlockKind
from sim.programs.stages import Stage, with_copy
from sim.ranks.plan import cut_model
from sim.search.block_sums import EMBEDDING, HEAD, KINDS, MODULE, MTP, NORM, Blocks, Cut, Signature, modules
from sim.search.cached import cached
from sim.search.mesh_prices import MeshPrices, PricedBlock
from sim.search.pipeline_bound import Actions, StagePlacement
from sim.search.space import Layout, Space, scenario_of, schedule_form, stage_layers


class Sharding(NamedTuple):
    """Name the data parallelism of layouts of one mesh. `alone`: a micro-batch that is the only one of a step without a
    pipeline, in a space that adds up whole gradients (`Scenario.sums_unsharded`)."""

    zero: int
    alone: bool = False


class MeshBlocks:
    """Hold the blocks of the layouts of one mesh."""

    def __init__(self, space: Space, prices: MeshPrices) -> None:
        self.space, self.prices = space, prices
        self._blocks: dict[tuple[object, ...], list[Blocks]] = {}
        self._of_order: dict[Signature, Blocks] = {}  # one example each: blocks of one order have equal parameters

    def blocks(self, x: Layout) -> list[Blocks]:
        """Return the blocks of a layout, for each rank that is bounded."""
        s = self.space
        # The key must hold everything that changes a block or its price.
        paired = s.fixed["ep_overlap"] and schedule_form(s, x).pairs
        # Blocks depend on the cut into stages only if the first n layers of each stage are recomputed.
        by_stage = s.recomputes[x.recompute].layers is not None
        # Additions of unsharded gradients (`accumulated` of `sim.models.dims`) change the weight-gradient half.
        sums = s.accumulates(x.pp, x.zero) and not self.sharding(x).alone
        whole = x.zero < 2 or sums or bool(s.base.parallelism.accumulate_in_a_row)
        # Megatron's FSDP adds up gradients by kernels of their own (`_switched` of `sim.models.dims`).
        sharded = (x.zero >= 2, x.zero == 3)  # the first: whole gradients have the reduction's dtype, and are copied
        cut_of = (x.schedule, x.virtual_stages) if by_stage else None
        casts = x.zero if s.base.for_training.param_dtype == "fp32" else 0  # see `sim.inputs.autocast`
        key = (x.sp, x.tp_overlap, x.micro_batch_size, x.recompute, whole, sharded, paired, cut_of, casts)
        if key not in self._blocks:
            scenario = scenario_of(s, x)
            self._blocks[key] = [Blocks(scenario, self.prices, rank) for rank in self.prices.bounded_ranks]
            for blocks in self._blocks[key]:
                self._of_order.setdefault(blocks.order, blocks)
        return self._blocks[key]

    def cut(self, order: Signature, placement: StagePlacement) -> Cut:
        """Return the model's cut into the stages of a schedule."""
        whole = self._cut(order, len(placement.chains[0]))
        return whole if placement.copies == 1 else self._copied(whole, placement)

    @cached
    def _cut(self, order: Signature, count: int) -> Cut:
        """Cut the model into `count` stages; schedules with equally many stages share the cut and its results."""
        n, out = self.space.base.model.mtp_layers, []
        parts = cut_model(stage_layers(self.space, count), self.space.fixed["mtp_stage"])
        of_head = [MTP] * n if any(part.predicts for part in parts) else modules(MTP, n)
        for part in parts:
            ends = (NORM,) * part.normed + modules(MODULE, n) * part.predicts + (HEAD, *of_head) * part.head
            out.append((EMBEDDING,) * part.embedding + order[part.layers.start : part.layers.stop] + ends)
        return Cut(order, tuple(out))

    @cached
    def _copied(self, cut: Cut, placement: StagePlacement) -> Cut:
        """Repeat the stages for a schedule whose ranks hold the model several times."""
        return Cut(cut.order, tuple([cut.stages[i] for i in placement.part_of_stage.tolist()]))

    def priced(self, cut: Cut) -> dict[int, PricedBlock]:
        """Return the blocks of a cut model by number."""
        return self._of_order[cut.order].priced

    def sharding(self, x: Layout) -> Sharding:
        """Return what names the data parallelism of a layout."""
        sums = self.space.accumulates(x.pp, x.zero)
        return Sharding(x.zero, sums and x.pp == 1 and self.micro_batches(x) == 1)

    def stage(self, sharding: Sharding, cut: Cut, held: Signature) -> Stage:
        """Return the stage of the blocks of these numbers."""
        priced = self.priced(cut)
        blocks, plan = tuple([priced[n].block for n in held]), self.prices.plan
        copied = with_copy(blocks, plan, any(b.kind is BlockKind.EMBEDDING for b in blocks))
        return Stage(copied, self.prices.dp(*sharding), self.prices.costs, (), 0.0)

    @cached
    def alone(self, blocks: Blocks, cut: Cut, gathered: bool) -> Actions:
        """Return the seconds of all stages' actions, block after block."""
        return Actions(*cut.each(lambda stage: [blocks.action_s(kind, stage, gathered) for kind in KINDS]).T)

    def micro_batches(self, x: Layout) -> int:
        """Return the number of micro-batches in a step."""
        return self.space.training.global_batch_size // (x.micro_batch_size * x.dp)

    def gathered(self, x: Layout) -> bool:
        """Tell whether every action gathers its parameters."""
        return x.zero == 3 and self.prices.dp(3).gathers_twice


def least_zeros(x: Layout) -> tuple[Layout, ...]:
    """Return the layout with the ZeRO stages that may have the least work: none, which adds up whole gradients, and 2,
    which adds up shards, but of gradients converted in every micro-batch."""
    return tuple([x._replace(zero=zero) for zero in ((0, 2) if x.dp * x.cp > 1 else (0,))])
