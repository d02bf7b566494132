"""Bound the step time of every layout of one mesh from below.

An action takes at least as long as its blocks one after the other, with ZeRO-3's gathers and reductions on their
stream; `sim.search.pipeline_bound` combines the actions. A message has the price of the cheapest place that the mesh
gives it. The bound leaves out waits for earlier traffic of the data-parallel stream, copies to the host, and gathers of
stage inputs. Gradients' reductions are priced once for each ZeRO stage.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sim.core.actions import Kind
from sim.core.columns import Floats
from sim.core.program import Phase
from sim.inputs.scenario import Scenario
from sim.programs.gathered_units import gathered_again
from sim.programs.step_end import epilogue
from sim.programs.updated_parameters import gather_units
from sim.ranks.equal_ranks import embedding_ranks
from sim.ranks.faults import has_jitter, link_scales
from sim.schedules import FORMS
from sim.search.block_sums import Blocks, Cut, Signature
from sim.search.bounded import ROUNDING
from sim.search.cached import cached
from sim.search.mesh_blocks import MeshBlocks, Sharding, least_zeros
from sim.search.pipeline_bound import Actions, StagePlacement, StageSeconds, pipeline_bound_s, placement_of
from sim.search.space import Layout, overlaps


class TimeBound:
    """Bound the seconds of a step."""

    def __init__(self, mesh_blocks: MeshBlocks) -> None:
        self.mesh_blocks, self.space, self.prices = mesh_blocks, mesh_blocks.space, mesh_blocks.prices
        self.scale = _fault_scale(mesh_blocks.space.base)

    def work_bound_s(self, x: Layout) -> float:
        """Return the work of all stages divided by the pipeline ranks, in seconds: a bound for every schedule."""
        work_s = self.mesh_blocks.blocks(x)[0].work_s(self.mesh_blocks.gathered(x))
        # The slowest rank has at least the mean work.
        return self.mesh_blocks.micro_batches(x) * work_s / x.pp * self.scale * ROUNDING

    def least_work_s(self, x: Layout) -> float:
        """Return the work bound without recomputation and ZeRO: a bound for all recomputations and ZeRO stages."""
        # Recomputation and ZeRO-3's gathers only add work.
        return min([self.work_bound_s(y._replace(recompute="none")) for y in least_zeros(x)])

    def bound_s(self, x: Layout) -> float:
        """Return the lower bound of the layout's step time in seconds."""
        placement, m = placement_of(x.schedule, x.pp, x.virtual_stages), self.mesh_blocks.micro_batches(x)
        bound, sharding = 0.0, self.mesh_blocks.sharding(x)
        # A step ends when its last rank ends, so the largest bound of a rank bounds the step.
        for blocks in self.mesh_blocks.blocks(x):
            cut = self.mesh_blocks.cut(blocks.order, placement)
            t, end = self.stage_seconds(x, blocks, placement, cut), self._epilogue_s(sharding, placement, cut)
            blocking = not overlaps(self.space, x) and not FORMS[x.schedule].exchanges_jointly
            pipeline_s = pipeline_bound_s(placement, t, m, blocking, end)
            bound = max(bound, pipeline_s, self._stream_bound_s(sharding, placement, cut, m))
        return bound * self.scale * ROUNDING

    def stage_seconds(self, x: Layout, blocks: Blocks, placement: StagePlacement, cut: Cut) -> StageSeconds:
        """Return the seconds of each stage's actions, with the data-parallel communication that nothing hides."""
        sharding = self.mesh_blocks.sharding(x)
        dp, none = self.prices.dp(*sharding), np.zeros(len(cut.stages))
        alone = self.mesh_blocks.alone(blocks, cut, self.mesh_blocks.gathered(x))
        queued, lag = alone, none
        if self.mesh_blocks.gathered(x):
            queued, lag, gathers_first = self._queued(blocks, cut, sharding.alone)
            # Any action of the rank may be the next one. What begins without a gather does not wait for reductions.
            lag = lag * placement.least(gathers_first)[placement.rank_of_stage]
        # With ZeRO-3 the last backward includes its gathers, and reductions may hide under all of it.
        last = queued.weight_grad if placement.backward == "split" else queued.backward
        total, final = self._reductions_s(sharding, cut)
        # ZeRO-1 and 2 gather updated parameters during the forward. The first forward cannot end before the last
        # gather.
        gathered = self._gathers_s(x.zero, cut) if dp.zero in (1, 2) and dp.gather_overlap else none
        # Reductions of the last backward may hide under it, but no longer than it takes.
        return StageSeconds(
            alone, queued, lag, *self._sends(blocks, placement), np.maximum(final, total - last), gathered
        )

    @cached
    def _queued(self, blocks: Blocks, cut: Cut, alone: bool) -> tuple[Actions, Floats, Floats]:
        """Return the seconds of actions with ZeRO-3's gathers (weight gradients have none), how much later a backward's
        reductions end, and whether all actions of a stage begin with a gather (1 or 0), by stage."""
        dp, kinds = self.prices.dp(3, alone), (Kind.F, Kind.B, Kind.I)
        each = cut.each(lambda stage: [number for k in kinds for number in blocks.zero3_s(k, stage, dp)])
        f, _, gathers_f, b, lag, gathers_b, i, _, _ = each.T
        actions = Actions(f, b, i, self.mesh_blocks.alone(blocks, cut, True).weight_grad)
        return actions, lag, np.minimum(gathers_f, gathers_b)

    def _sends(self, blocks: Blocks, placement: StagePlacement) -> tuple[Floats, Floats]:
        p = blocks.scenario.parallelism
        # Without sequence parallelism all tp ranks hold the same tensor, so each may send 1 / tp of it.
        return self._sends_of(placement, blocks.message_bytes / (p.tp if p.p2p_scatter and not p.sp else 1))

    @cached
    def _sends_of(self, placement: StagePlacement, size: float) -> tuple[Floats, Floats]:
        """Return the seconds of each stage's message forward and back; 0 at a chain's ends and to the same rank."""
        forward, backward = np.zeros(len(placement.rank_of_stage)), np.zeros(len(placement.rank_of_stage))
        rank = placement.rank_of_stage.tolist()
        for chain in placement.chains:
            for a, b in pairwise(chain):
                forward[a] = self.prices.send_s(rank[a], rank[b], size, forward=True)
                backward[b] = self.prices.send_s(rank[b], rank[a], size, forward=False)
        return forward, backward

    @cached
    def _reductions_s(self, sharding: Sharding, cut: Cut) -> tuple[Floats, Floats]:
        """Return, by stage, the seconds of a micro-batch's gradient reductions, and of those after all computation."""
        dp, priced = self.prices.dp(*sharding), self.mesh_blocks.priced(cut)
        # Here the epilogue contains the reductions; they must not count twice.
        if dp.at_the_end and not dp.each_micro_batch and dp.zero < 3:
            return np.zeros(len(cut.stages)), np.zeros(len(cut.stages))

        def seconds(stage: Signature, first: bool) -> tuple[float, float]:
            return self.prices.reductions_s([priced[n].gradients for n in stage], dp if first else dp.behind_first)

        total, final = cut.each_by_place(seconds).T
        return total, final

    @cached
    def _gathers_s(self, zero: int, cut: Cut, again: bool = False) -> Floats:
        """Return the seconds of gathering each stage's parameters once; `again`: for a backward."""
        dp, priced = self.prices.dp(zero), self.mesh_blocks.priced(cut)

        def seconds(stage: Signature, first: bool) -> list[float]:
            blocks = [priced[n].block for n in stage]
            if again:
                blocks = [b for b, need in zip(blocks, gathered_again(blocks, dp), strict=True) if need]
            units = gather_units(blocks, dp if first else dp.behind_first)
            return [sum(self.prices.comms_s(dp.gather("", a, b, Phase.FORWARD, "g")) for a, b, _ in units)]

        return cut.each_by_place(seconds)[:, 0]

    @cached
    def _epilogue_s(self, sharding: Sharding, placement: StagePlacement, cut: Cut) -> Floats:
        """Return the seconds of clipping, optimizer and exposed gathers, by pipeline rank."""
        # Ranks that hold the embedding matrix all-reduce its gradient.
        straight = FORMS[placement.name].ends_on_last_rank
        holders = embedding_ranks(self.prices.plan.scenario) if straight else ()
        found: dict[tuple[Signature, bool], float] = {}
        out = []
        for rank, held in enumerate(cut.by_rank(placement)):
            key = (held, len(holders) > 1 and rank in holders)
            if key not in found:
                program = epilogue((self.mesh_blocks.stage(sharding, cut, held),), self.prices.plan, key[1])
                found[key] = self.prices.program_s(program)
            out.append(found[key])
        return np.array(out)

    @cached
    def _stream_bound_s(self, sharding: Sharding, placement: StagePlacement, cut: Cut, m: int) -> float:
        """Return the seconds of the busiest rank's data-parallel collectives, one after the other, and its epilogue."""
        zero, dp, runs = sharding.zero, self.prices.dp(*sharding), m // placement.copies
        # NCCL runs the collectives of a communicator one after the other, so their sum is a bound.
        seconds = self._reductions_s(sharding, cut)[0] * (runs if dp.each_micro_batch else 1)
        if zero == 3:
            # With `reshard_after_forward` the forward and the backward both gather the parameters.
            gathers_s = self._gathers_s(zero, cut)
            seconds = seconds + gathers_s
            if dp.gathers_twice:
                again_s = self._gathers_s(zero, cut, again=True)
                each_s = again_s if dp.engine.ends_stay else gathers_s  # what stays is gathered once
                seconds = seconds + (runs - 1) * each_s + runs * again_s
        elif dp.zero and dp.gather_overlap:
            seconds = seconds + self._gathers_s(zero, cut)
        busy: Floats = np.bincount(placement.rank_of_stage, seconds, placement.ranks) + self._epilogue_s(
            sharding, placement, cut
        )
        return float(busy.max())


def _fault_scale(scenario: Scenario) -> float:
    """Return the factor, at most 1, by which faults may make a step faster than priced; 0 with jitter."""
    if has_jitter(scenario):
        return 0.0
    # Prices here have no faults. A slower link only adds time; a faster link lowers the bound.
    return min([1.0, *(1 / scale for scale in link_scales(scenario).values())])
