"""Bound the step time and the memory of every layout of one mesh from below.

Both bounds use the blocks, prices and states of the simulation. Results are cached by what they depend on: a layer
once for each (sp, micro-batch size, recomputation), its gradients' reductions once for each ZeRO stage.

Time: an action takes at least as long as its blocks one after the other, with ZeRO-3's gathers and reductions on their
stream; `sim.search.pipeline_bound` combines the actions. A message has the price of the cheapest place that the mesh
gives it. The bound leaves out waits for earlier traffic of the data-parallel stream, copies to the host, and gathers of
stage inputs.

Memory: exact states, and the activations of the forwards that a schedule runs before its first backward.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Literal

import numpy as np

from sim.core.actions import Kind
from sim.core.program import BlockKind, Phase
from sim.inputs.scenario import Scenario
from sim.programs.stages import Stage, epilogue, with_copy
from sim.programs.updated_parameters import gather_units
from sim.ranks.equal_ranks import embedding_ranks
from sim.ranks.faults import has_jitter, link_scales
from sim.ranks.plan import cut_model
from sim.results.states import states
from sim.schedules import FORMS
from sim.search.block_sums import EMBEDDING, HEAD, KINDS, MODULE, MTP, NORM, Blocks, Cut, Signature
from sim.search.bounded import Bounded, Bounds
from sim.search.cached import cached
from sim.search.mesh_prices import GridPrices
from sim.search.pipeline_bound import Actions, Floats, StagePlacement, StageSeconds, pipeline_bound_s, placement_of
from sim.search.space import (
    Grid,
    Layout,
    PartialLayout,
    Space,
    layouts_of,
    overlaps,
    partial_layouts_of,
    scenario_of,
    schedule_form,
    stage_layers,
)
from sim.search.stage_bytes import stage_bytes

ROUNDING = 1 - 1e-9  # keeps a bound below the simulated time though the engine adds in another order


class GridSearch:
    """Bound the ways and layouts of one mesh; results that layouts share are computed once."""

    def __init__(self, space: Space, grid: Grid, prices: GridPrices, limit_bytes: float) -> None:
        self.space, self.grid, self.prices, self.limit_bytes = space, grid, prices, limit_bytes
        self.scale = _fault_scale(space.base)
        self._blocks: dict[tuple[object, ...], list[Blocks]] = {}
        self._of_order: dict[Signature, Blocks] = {}  # one example each: blocks of one order have equal parameters

    def ways(self) -> Bounds:
        """Return the ways to run layers on the mesh, which is legal, each with the least work of its layouts.

        Layouts whose states alone do not fit in memory are ruled out here, before anything is priced.
        """
        bounded, counts, too_large_bytes = [], Counter[str](), math.inf
        for partial in partial_layouts_of(self.space, self.grid):
            found = list(layouts_of(self.space, partial))
            legal = [x for x, fine in found if fine]
            left = [x for x in legal if self._states_alone(x) <= self.limit_bytes]
            counts.update(enumerated=len(found), legal=len(legal), pruned_by_memory=len(legal) - len(left))
            if len(left) < len(legal):
                too_large = [x for x in map(self._states_alone, legal) if x > self.limit_bytes]
                too_large_bytes = min(too_large_bytes, *too_large)
            if left:
                examples = self._unlike(left)
                bounded.append(Bounded(min(map(self.least_work_s, examples)), 0.0, 1, partial, len(left)))
        return Bounds(bounded, counts, too_large_bytes)

    def layouts(self, partial: PartialLayout, patience_s: float, ceiling_s: float) -> Bounds:
        """Return the layouts of a partial layout that may fit in memory and take at most `ceiling_s` seconds.

        If the work alone takes longer than `patience_s` seconds, return the partial layout with a sharper bound.
        """
        left = [x for x, fine in layouts_of(self.space, partial) if fine and self._states_alone(x) <= self.limit_bytes]
        # ZeRO-3 adds gathers, but its recomputation may stop earlier, so it is bounded by itself.
        least = [y for x in self._unlike(left) for y in ((x,) if x.zero == 3 else _least_zeros(x))]
        if (work_s := min(map(self.work_bound_s, least))) > patience_s:
            return Bounds([Bounded(work_s, 0.0, 1, partial, len(left))], Counter())
        bounded, counts, too_large_bytes = [], Counter[str](), math.inf
        for layout in left:
            found = self._bounded(layout, ceiling_s)
            if isinstance(found, Bounded):
                bounded.append(found)
                continue
            counts[found] += 1
            if found == "pruned_by_memory":
                too_large_bytes = min(too_large_bytes, self.memory_bytes(layout))
        return Bounds(bounded, counts, too_large_bytes)

    def _unlike(self, layouts: list[Layout]) -> list[Layout]:
        """Return one of the layouts of each sort: a partial layout's with one work bound (see `blocks`)."""
        by_stage = self.space.recomputes[layouts[0].recompute].layers is not None
        pairs = {x.schedule: schedule_form(self.space, x).pairs for x in layouts}
        sorts = {
            (x.zero == 3, pairs[x.schedule], (x.schedule, x.virtual_stages) if by_stage else None): x for x in layouts
        }
        return list(sorts.values())

    def _bounded(self, x: Layout, ceiling_s: float) -> Bounded | Literal["pruned_by_memory", "pruned_by_bound"]:
        """Return a layout with its bounds, or the name of the bound that rules it out."""
        # From the cheapest test to the most expensive: work, memory, the pipeline's bound.
        if self.work_bound_s(x) > ceiling_s:
            return "pruned_by_bound"
        if (memory := self.memory_bytes(x)) > self.limit_bytes:
            return "pruned_by_memory"
        if (bound := self.bound_s(x)) > ceiling_s:
            return "pruned_by_bound"
        # Only a searched schedule chooses its forwards by seconds, so only it needs prices for its memory.
        if FORMS[x.schedule].follows_times and (memory := self.memory_bytes(x, True)) > self.limit_bytes:
            return "pruned_by_memory"
        return Bounded(bound, memory, 2, x)

    # --- memory

    def _states_alone(self, x: Layout) -> float:
        """Return bytes of parameters, gradients and optimizer on the worst rank."""
        # Recomputation and the micro-batch's size do not change them, so most layouts share the few that are left.
        return self._states_of(x.sp, x.zero, x.schedule, x.virtual_stages, x.tp_overlap)

    @cached
    def _states_of(self, sp: bool, zero: int, schedule: str, virtual_stages: int, tp_overlap: str) -> float:
        (tp, cp, pp, dp, ep), placement = self.grid, placement_of(schedule, self.grid.pp, virtual_stages)
        x = Layout(tp, sp, cp, pp, dp, ep, zero, schedule, virtual_stages, 1, "none", tp_overlap)
        cut = self.cut(self.blocks(_least_zeros(x)[-1])[0].order, placement)
        return float(self._state_bytes(zero, placement, cut).max()) * ROUNDING

    def memory_bytes(self, x: Layout, timed: bool = False) -> float:
        """Return the least bytes of the worst rank; `timed`: use the actions' seconds if the schedule follows them."""
        blocks, placement = self.blocks(x)[0], placement_of(x.schedule, x.pp, x.virtual_stages)
        cut = self.cut(blocks.order, placement)
        # By pipeline rank; the fullest rank decides.
        kept = self._state_bytes(x.zero, placement, cut) + self._activation_bytes(
            blocks, placement, cut, self._micro_batches(x)
        )
        if timed and (count := self._searched_forwards(x, blocks, cut)) > 1:
            # Only rank 0 is known to run more than one forward first.
            saved, _, backward = self._stage_bytes(blocks, cut)
            # Arrays are cached: a change in place would change the bound of the next layout.
            kept = kept.copy()
            # Rank 0 keeps `count` micro-batches when its first backward starts, which needs `backward` bytes more.
            first = self._state_bytes(x.zero, placement, cut)[0] + count * saved[0] + backward[0]
            kept[0] = max(kept[0], first)
        return float(kept.max()) * ROUNDING

    @cached
    def _state_bytes(self, zero: int, placement: StagePlacement, cut: Cut) -> Floats:
        """Return the exact bytes of states and of gathered parameters, by pipeline rank."""
        found: dict[Signature, float] = {}
        for held in cut.by_rank(placement):
            if held not in found:
                # The function of the simulation's memory: states are exact.
                s = states(self.prices.plan, [self._stage(zero, cut.order, held)])
                found[held] = s.parameters + s.gradients + s.optimizer + s.gathered
        return np.array([found[held] for held in cut.by_rank(placement)])

    @cached
    def _activation_bytes(self, blocks: Blocks, placement: StagePlacement, cut: Cut, m: int) -> Floats:
        """Return the larger of what the forwards before a rank's first backward keep and one micro-batch, in bytes."""
        saved, forward, backward = self._stage_bytes(blocks, cut)
        # Any schedule runs each stage, and then at least that micro-batch's activations are present.
        single = placement.most(saved + np.maximum(forward, backward))
        if self.space.training.activation_offload:
            return single
        # When the first backward starts, all forwards before it are kept. The schedule chooses the stage of this
        # backward, so the least one counts.
        many = np.bincount(placement.rank_of_stage, placement.forwards_first(m) * saved, placement.ranks)
        return np.maximum(single, many + placement.least(backward))

    def _searched_forwards(self, x: Layout, blocks: Blocks, cut: Cut) -> float:
        """Return rank 0's number of forwards before its first backward; 1 if a forward's longest time is unknown."""
        p, prices = self.space.base.parallelism, self.prices
        first_forwards = FORMS[x.schedule].first_forwards
        # Scattered messages are gathered on arrival, which is no part of the forward's program here.
        scattered = p.p2p_scatter and x.tp > 1 and not x.sp
        # The schedule is searched with exact seconds. If ranks or places differ, only least times are known here.
        if first_forwards is None or self.space.training.activation_offload or not prices.alike or scattered:
            return 1.0
        gathered = self._gathered(x)
        gathers = [blocks.sorts[s].gathers_s for s in cut.stages[0]] if gathered else []
        slowed = prices.costs.coefficients.collective_sm_share  # by which computation beside a collective is slowed
        t = self._alone(blocks, cut, gathered)
        # Here an upper bound is needed: the longer a forward may take, the fewer forwards are sure.
        waits_s = sum(gathers) * (1.0 + slowed)
        return first_forwards(p.schedule_memory, self._micro_batches(x), t.forward, t.input_grad, waits_s)

    def _stage(self, zero: int, order: Signature, sorts: Signature) -> Stage:
        sort_of = self._of_order[order].sorts
        blocks, plan = tuple([sort_of[s].block for s in sorts]), self.prices.plan
        held = with_copy(blocks, plan, any(b.kind is BlockKind.EMBEDDING for b in blocks))
        return Stage(held, self.prices.dp(zero), self.prices.costs, (), 0.0)

    @cached
    def _stage_bytes(self, blocks: Blocks, cut: Cut) -> tuple[Floats, Floats, Floats]:
        """Return `stage_bytes` of each stage."""
        offload = self.space.training.activation_offload
        each = cut.each(lambda stage: stage_bytes([blocks.sorts[s] for s in stage], offload))
        saved, forward, backward = each.T
        return saved, forward, backward

    # --- time

    def work_bound_s(self, x: Layout) -> float:
        """Return the work of all stages divided by the pipeline ranks, in seconds: a bound for every schedule."""
        work_s = self.blocks(x)[0].work_s(self._gathered(x))
        # The slowest rank has at least the mean work.
        return self._micro_batches(x) * work_s / x.pp * self.scale * ROUNDING

    def least_work_s(self, x: Layout) -> float:
        """Return the work bound without recomputation and ZeRO: a bound for all recomputations and ZeRO stages."""
        # Recomputation and ZeRO-3's gathers only add work.
        return min([self.work_bound_s(y._replace(recompute="none")) for y in _least_zeros(x)])

    def bound_s(self, x: Layout) -> float:
        """Return the lower bound of the layout's step time in seconds."""
        placement, m = placement_of(x.schedule, x.pp, x.virtual_stages), self._micro_batches(x)
        bound = 0.0
        # A step ends when its last rank ends, so the largest bound of a rank bounds the step.
        for blocks in self.blocks(x):
            cut = self.cut(blocks.order, placement)
            t, end = self.stage_seconds(x, blocks, placement, cut), self._epilogue_s(x.zero, placement, cut)
            blocking = not overlaps(self.space, x) and not FORMS[x.schedule].exchanges_jointly
            pipeline_s = pipeline_bound_s(placement, t, m, blocking, end)
            bound = max(bound, pipeline_s, self._stream_bound_s(x.zero, placement, cut, m))
        return bound * self.scale * ROUNDING

    def _micro_batches(self, x: Layout) -> int:
        return self.space.training.global_batch_size // (x.micro_batch_size * x.dp)

    def _gathered(self, x: Layout) -> bool:
        """Tell whether every action gathers its parameters."""
        return x.zero == 3 and self.prices.dp(3).gathers_twice

    def stage_seconds(self, x: Layout, blocks: Blocks, placement: StagePlacement, cut: Cut) -> StageSeconds:
        """Return the seconds of each stage's actions, with the data-parallel communication that nothing hides."""
        dp, none = self.prices.dp(x.zero), np.zeros(len(cut.stages))
        alone = self._alone(blocks, cut, self._gathered(x))
        queued, lag = self._queued(blocks, cut) if self._gathered(x) else (alone, none)
        # With ZeRO-3 the last backward includes its gathers, and reductions may hide under all of it.
        last = queued.weight_grad if placement.backward == "split" else queued.backward
        total, final = self._reductions_s(x.zero, cut)
        # ZeRO-1 and 2 gather updated parameters during the forward. The first forward cannot end before the last
        # gather.
        gathered = self._gathers_s(x.zero, cut) if dp.zero in (1, 2) and dp.gather_overlap else none
        # Reductions of the last backward may hide under it, but no longer than it takes.
        return StageSeconds(
            alone, queued, lag, *self._sends(blocks, placement), np.maximum(final, total - last), gathered
        )

    @cached
    def _alone(self, blocks: Blocks, cut: Cut, gathered: bool) -> Actions:
        """Return the seconds of all stages' actions, block after block."""
        return Actions(*cut.each(lambda stage: [blocks.action_s(kind, stage, gathered) for kind in KINDS]).T)

    @cached
    def _queued(self, blocks: Blocks, cut: Cut) -> tuple[Actions, Floats]:
        """Return the seconds of actions with ZeRO-3's gathers (weight gradients have none), and `StageSeconds.lag`."""
        dp, kinds = self.prices.dp(3), (Kind.F, Kind.B, Kind.I)
        each = cut.each(lambda stage: [seconds for k in kinds for seconds in blocks.zero3_s(k, stage, dp)])
        f, _, b, lag, i, _ = each.T
        return Actions(f, b, i, self._alone(blocks, cut, True).weight_grad), lag

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
    def _reductions_s(self, zero: int, cut: Cut) -> tuple[Floats, Floats]:
        """Return, by stage, the seconds of a micro-batch's gradient reductions, and of those after all computation."""
        dp, sort_of = self.prices.dp(zero), self._of_order[cut.order].sorts
        # Here the epilogue contains the reductions; they must not count twice.
        if dp.at_the_end and not dp.each_micro_batch and dp.zero < 3:
            return np.zeros(len(cut.stages)), np.zeros(len(cut.stages))

        def seconds(stage: Signature, first: bool) -> tuple[float, float]:
            return self.prices.reductions_s([sort_of[s].gradients for s in stage], dp if first else dp.behind_first)

        total, final = cut.each_by_place(seconds).T
        return total, final

    @cached
    def _gathers_s(self, zero: int, cut: Cut) -> Floats:
        """Return the seconds of gathering each stage's parameters once."""
        dp, sort_of = self.prices.dp(zero), self._of_order[cut.order].sorts

        def seconds(stage: Signature, first: bool) -> list[float]:
            units = gather_units([sort_of[s].block for s in stage], dp if first else dp.behind_first)
            return [sum(self.prices.comms_s(dp.gather("", a, b, Phase.FORWARD, "g")) for a, b, _ in units)]

        return cut.each_by_place(seconds)[:, 0]

    @cached
    def _epilogue_s(self, zero: int, placement: StagePlacement, cut: Cut) -> Floats:
        """Return the seconds of clipping, optimizer and exposed gathers, by pipeline rank."""
        # Ranks that hold the embedding matrix all-reduce its gradient.
        straight = FORMS[placement.name].ends_on_last_rank
        holders = embedding_ranks(self.prices.plan.scenario) if straight else ()
        found: dict[tuple[Signature, bool], float] = {}
        out = []
        for rank, held in enumerate(cut.by_rank(placement)):
            key = (held, len(holders) > 1 and rank in holders)
            if key not in found:
                program = epilogue((self._stage(zero, cut.order, held),), self.prices.plan, key[1])
                found[key] = self.prices.program_s(program)
            out.append(found[key])
        return np.array(out)

    @cached
    def _stream_bound_s(self, zero: int, placement: StagePlacement, cut: Cut, m: int) -> float:
        """Return the seconds of the busiest rank's data-parallel collectives, one after the other, and its epilogue."""
        dp, runs = self.prices.dp(zero), m // placement.copies
        # NCCL runs the collectives of a communicator one after the other, so their sum is a bound.
        seconds = self._reductions_s(zero, cut)[0] * (runs if dp.each_micro_batch else 1)
        if zero == 3:
            # With `reshard_after_forward` the forward and the backward both gather the parameters.
            seconds = seconds + self._gathers_s(zero, cut) * (2 * runs if dp.gathers_twice else 1)
        elif dp.zero and dp.gather_overlap:
            seconds = seconds + self._gathers_s(zero, cut)
        busy: Floats = np.bincount(placement.rank_of_stage, seconds, placement.ranks) + self._epilogue_s(
            zero, placement, cut
        )
        return float(busy.max())

    # --- what layouts share

    def blocks(self, x: Layout) -> list[Blocks]:
        """Return the blocks of a layout, for each rank that is bounded."""
        s = self.space
        # The key must hold everything that changes a block or its price.
        paired = s.fixed["ep_overlap"] and schedule_form(s, x).pairs
        # Blocks depend on the cut into stages only if the first n layers of each stage are recomputed.
        by_stage = s.recomputes[x.recompute].layers is not None
        # Additions of unsharded gradients (`accumulated` of `sim.models.dims`) change the weight-gradient half.
        whole = x.zero < 2 or s.accumulates(x.pp, x.zero) or bool(s.base.parallelism.accumulate_in_a_row)
        stops_early = x.zero == 3 and s.recomputes[x.recompute].mode == "full"  # see `models.recompute`
        cut_of = (x.schedule, x.virtual_stages) if by_stage else None
        casts = x.zero if s.base.for_training.param_dtype == "fp32" else 0  # see `models.autocast`
        key = (x.sp, x.tp_overlap, x.micro_batch_size, x.recompute, whole, stops_early, paired, cut_of, casts)
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
        for part in cut_model(stage_layers(self.space, count), self.space.fixed["mtp_stage"]):
            ends = (NORM,) * part.normed + (MODULE,) * n * part.predicts + (HEAD, *[MTP] * n) * part.head
            out.append((EMBEDDING,) * part.embedding + order[part.layers.start : part.layers.stop] + ends)
        return Cut(order, tuple(out))

    @cached
    def _copied(self, cut: Cut, placement: StagePlacement) -> Cut:
        """Repeat the stages for a schedule whose ranks hold the model several times."""
        return Cut(cut.order, tuple([cut.stages[i] for i in placement.part_of_stage.tolist()]))


def _least_zeros(x: Layout) -> tuple[Layout, ...]:
    """Return the layout with the ZeRO stages that may have the least work: none, which adds up whole gradients, and 2,
    which adds up shards, but of gradients converted in every micro-batch."""
    return tuple([x._replace(zero=zero) for zero in ((0, 2) if x.dp * x.cp > 1 else (0,))])


def _fault_scale(scenario: Scenario) -> float:
    """Return the factor, at most 1, by which faults may make a step faster than priced; 0 with jitter."""
    if has_jitter(scenario):
        return 0.0
    # Prices here have no faults. A slower link only adds time; a faster link lowers the bound.
    return min([1.0, *(1 / scale for scale in link_scales(scenario).values())])
