"""Bounds of every layout of one mesh: a step time it cannot beat, and memory it cannot do with less of.

Both come from the very blocks, prices and states that the simulation uses, and are kept by what they depend on: a
layer is built and priced once per (sp, micro-batch size, recomputation), its gradients' reductions once per ZeRO stage.

Time: an action takes at least the makespan of its blocks, one after the other, with ZeRO-3's gathers and reductions
on their stream; `sim.search.pipeline_bound` puts actions together. Messages are priced at the cheapest place that the
mesh gives them. Left out, so the bound stays below: waiting for the data-parallel stream's earlier
traffic, copies to the host, gathered stage inputs.

Memory: exact states, and the activations of the forwards that a schedule runs before its first backward.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct

from sim.core.actions import Kind
from sim.core.program import Phase
from sim.inputs.scenario import Scenario
from sim.programs.data_parallel import gather_units
from sim.programs.stages import Stage, epilogue
from sim.ranks.faults import has_jitter, link_scales
from sim.results.states import states
from sim.schedules import FORMS
from sim.search.block_sums import EMBEDDING, HEAD, KINDS, MTP, Blocks, Cut, Signature
from sim.search.cached import cached
from sim.search.memory_bound import stage_bytes
from sim.search.mesh_prices import GridPrices
from sim.search.pipeline_bound import Actions, Floats, Form, StageSeconds, form_of, pipeline_bound_s
from sim.search.space import (
    Grid,
    Layout,
    Space,
    Way,
    layouts_of,
    overlaps,
    scenario_of,
    schedule_form,
    stage_layers,
    ways_of,
)

ROUNDING = 1 - 1e-9  # sums here run in another order than the engine's


class Bounded(NamedTuple):
    """A part of the space with its bounds. Parts sort by these; equal ones by `depth` in one fixed order.

    `depth`: 0 for a mesh, 1 for a way to run its layers, 2 for a layout. `legal`: so many legal layouts are in it.
    """

    bound_s: float
    memory_bytes: float
    depth: int
    part: Grid | Way | Layout
    legal: int = 1


class Bounds(Struct, frozen=True):
    """What a mesh or a way was divided into, without what the bounds rule out; `counts`: layouts by their outcome."""

    bounded: list[Bounded]
    counts: Counter[str]
    cpu_s: float = 0.0  # that it took


class GridSearch:
    """Bounds the ways and layouts of one mesh; what layouts share is computed once."""

    def __init__(self, space: Space, grid: Grid, prices: GridPrices, limit_bytes: float) -> None:
        self.space, self.grid, self.prices, self.limit_bytes = space, grid, prices, limit_bytes
        self.scale = _fault_scale(space.base)
        self._blocks: dict[tuple[object, ...], list[Blocks]] = {}
        self._of_order: dict[Signature, Blocks] = {}  # an example: those of one order have the same parameters

    def ways(self) -> Bounds:
        """The ways to run layers on the mesh, a legal one, each with the least work of its layouts."""
        bounded, counts = [], Counter[str]()
        for way in ways_of(self.space, self.grid):
            found = list(layouts_of(self.space, way))
            legal = [x for x, fine in found if fine]
            counts.update(enumerated=len(found), legal=len(legal))
            if legal:
                # Of all that decides the least work, layouts of a way differ in this alone (see `blocks`).
                examples = {schedule_form(self.space, x).pairs: x for x in legal}.values()
                bounded.append(Bounded(min(map(self.least_work_s, examples)), 0.0, 1, way, len(legal)))
        return Bounds(bounded, counts)

    def layouts(self, way: Way, patience_s: float, ceiling_s: float) -> Bounds:
        """The layouts of a way that may fit in memory and take no longer than `ceiling_s`; or the way itself, where
        its work alone takes longer than `patience_s`."""
        legal = [x for x, fine in layouts_of(self.space, way) if fine]
        # Sums of whole gradients only add work, so the blocks of ZeRO-0 and 1 are not built for a way that is put off.
        # ZeRO-3 gathers, but may stop computing again earlier.
        if (work_s := min(map(self.work_bound_s, {x if x.zero == 3 else _least_zero(x) for x in legal}))) > patience_s:
            return Bounds([Bounded(work_s, 0.0, 1, way, len(legal))], Counter())
        bounded, counts = [], Counter[str]()
        for layout in legal:
            found = self._bounded(layout, ceiling_s)
            if isinstance(found, Bounded):
                bounded.append(found)
            else:
                counts[found] += 1
        return Bounds(bounded, counts)

    def _bounded(self, x: Layout, ceiling_s: float) -> Bounded | Literal["pruned_by_memory", "pruned_by_bound"]:
        """A layout with its bounds, the cheap ones first, or which of them rules it out."""
        # From the cheapest test to the dearest, as each spares those after it: states, for which no blocks of its own
        # are built, work, all memory, the pipeline's bound.
        if self._states_alone(x) > self.limit_bytes:
            return "pruned_by_memory"
        if self.work_bound_s(x) > ceiling_s:
            return "pruned_by_bound"
        if (memory := self.memory_bytes(x)) > self.limit_bytes:
            return "pruned_by_memory"
        if (bound := self.bound_s(x)) > ceiling_s:
            return "pruned_by_bound"
        # Only a searched schedule decides its forwards by seconds, which takes prices that others need not.
        if FORMS[x.schedule].follows_times and (memory := self.memory_bytes(x, True)) > self.limit_bytes:
            return "pruned_by_memory"
        return Bounded(bound, memory, 2, x)

    # --- memory

    def _states_alone(self, x: Layout) -> float:
        """Bytes of parameters, gradients and optimizer on the worst rank, the same for every recomputation."""
        form = form_of(x.schedule, x.pp, x.virtual_stages)
        return self._most_state_bytes(x.zero, form, self.cut(self.blocks(_least_work(x))[0].order, form))

    @cached
    def _most_state_bytes(self, zero: int, form: Form, cut: Cut) -> float:
        return float(self._state_bytes(zero, form, cut).max()) * ROUNDING

    def memory_bytes(self, x: Layout, timed: bool = False) -> float:
        """Bytes that the worst rank needs at the least; `timed`: by the seconds of actions, where they decide it."""
        blocks, form = self.blocks(x)[0], form_of(x.schedule, x.pp, x.virtual_stages)
        cut = self.cut(blocks.order, form)
        # By pipeline rank; the fullest one decides.
        kept = self._state_bytes(x.zero, form, cut) + self._activation_bytes(blocks, form, cut, self._micro_batches(x))
        if timed and (count := self._searched_forwards(x, blocks, cut)) > 1:
            # Its other ranks are not known to begin with more forwards than one.
            saved, _, backward = self._stage_bytes(blocks, cut)
            # The arrays are cached, and changing one in place would change the bound of the next layout.
            kept = kept.copy()
            # Rank 0 keeps `count` micro-batches when its first backward starts, and running that takes `backward` more.
            first = self._state_bytes(x.zero, form, cut)[0] + count * saved[0] + backward[0]
            kept[0] = max(kept[0], first)
        return float(kept.max()) * ROUNDING

    @cached
    def _state_bytes(self, zero: int, form: Form, cut: Cut) -> Floats:
        """Exact states and what gathering them takes, by pipeline rank."""
        found: dict[Signature, float] = {}
        for held in cut.by_rank(form):
            if held not in found:
                # The very function that the simulation's memory uses, so states are exact and no bound.
                s = states(self.prices.plan, [self._stage(zero, cut.order, held)])
                found[held] = s.parameters + s.gradients + s.optimizer + s.gathered
        return np.array([found[held] for held in cut.by_rank(form)])

    @cached
    def _activation_bytes(self, blocks: Blocks, form: Form, cut: Cut, m: int) -> Floats:
        """What the forwards before a rank's first backward keep, or one micro-batch of any of its stages."""
        saved, forward, backward = self._stage_bytes(blocks, cut)
        # Any schedule runs each of its stages once, with at least that micro-batch's activations there.
        single = form.most(saved + np.maximum(forward, backward))
        if self.space.training.activation_offload:
            return single
        # When the first backward starts, all forwards before it are kept. Which stage it is of is the schedule's
        # choice, so the least backward counts.
        many = np.bincount(form.rank_of_stage, form.forwards_first(m) * saved, form.ranks)
        return np.maximum(single, many + form.least(backward))

    def _searched_forwards(self, x: Layout, blocks: Blocks, cut: Cut) -> float:
        """Of rank 0, before its first backward; 1 where its forward's longest time is not known."""
        p, prices = self.space.base.parallelism, self.prices
        first_forwards = FORMS[x.schedule].first_forwards
        # Scattered messages are gathered on arrival, for a time that is no part of the forward's program here.
        scattered = p.p2p_scatter and x.tp > 1 and not x.sp
        # The list is chosen by exact seconds. Where ranks or places differ, only least times are known here.
        if first_forwards is None or self.space.training.activation_offload or not prices.alike or scattered:
            return 1.0
        gathered = self._gathered(x)
        gathers = [blocks.sorts[s].gathers_s for s in cut.stages[0]] if gathered else []
        slowed = prices.costs.coefficients.collective_sm_share  # what computing beside them takes longer
        t = self._alone(blocks, cut, gathered)
        # An upper bound here, unlike everywhere else: the longer the forward may take, the fewer forwards are sure.
        waits_s = sum(gathers) * (1.0 + slowed)
        return first_forwards(p.schedule_memory, self._micro_batches(x), t.forward, t.input_grad, waits_s)

    def _stage(self, zero: int, order: Signature, sorts: Signature) -> Stage:
        sort_of, offload = self._of_order[order].sorts, self.space.training.activation_offload
        return Stage(tuple([sort_of[s].block for s in sorts]), self.prices.dp(zero), self.prices.costs, offload, 0.0)

    @cached
    def _stage_bytes(self, blocks: Blocks, cut: Cut) -> tuple[Floats, Floats, Floats]:
        """See `memory_bound.stage_bytes`; by stage."""
        offload = self.space.training.activation_offload
        each = cut.each(lambda stage: stage_bytes([blocks.sorts[s] for s in stage], offload))
        saved, forward, backward = each.T
        return saved, forward, backward

    # --- time

    def work_bound_s(self, x: Layout) -> float:
        """The work of all stages shared evenly by the ranks: a bound for every schedule and ZeRO stage at once."""
        work_s = self.blocks(x)[0].work_s(self._gathered(x))
        # The slowest rank has at least the mean work. Bubbles, messages and the optimizer are left out.
        return self._micro_batches(x) * work_s / x.pp * self.scale * ROUNDING

    def least_work_s(self, x: Layout) -> float:
        """The same for all recomputations and ZeRO stages at once: what does without either is in all of them."""
        # One answer for dozens of layouts. Full recomputation and ZeRO-3's gathers only add work.
        return self.work_bound_s(_least_work(x))

    def bound_s(self, x: Layout) -> float:
        """Seconds that a step of the layout takes at the least."""
        form, m = form_of(x.schedule, x.pp, x.virtual_stages), self._micro_batches(x)
        bound = 0.0
        # A step ends with its last rank, so the largest of the ranks' bounds is a bound.
        for blocks in self.blocks(x):
            cut = self.cut(blocks.order, form)
            t, end = self.stage_seconds(x, blocks, form, cut), self._epilogue_s(x.zero, form, cut)
            pipeline_s = pipeline_bound_s(form, t, m, not overlaps(self.space, x), end)
            bound = max(bound, pipeline_s, self._stream_bound_s(x.zero, form, cut, m))
        return bound * self.scale * ROUNDING

    def _micro_batches(self, x: Layout) -> int:
        return self.space.training.global_batch_size // (x.micro_batch_size * x.dp)

    def _gathered(self, x: Layout) -> bool:
        """Whether every action gathers its parameters."""
        return x.zero == 3 and self.prices.dp(3).reshard

    def stage_seconds(self, x: Layout, blocks: Blocks, form: Form, cut: Cut) -> StageSeconds:
        """Seconds by stage, with what of data parallelism cannot be hidden."""
        dp, none = self.prices.dp(x.zero), np.zeros(len(cut.stages))
        alone = self._alone(blocks, cut, self._gathered(x))
        queued, lag = self._queued(blocks, cut) if self._gathered(x) else (alone, none)
        # with ZeRO-3 the last backward waits for its gathers too, and its reductions hide under all of that
        last = queued.weight_grad if form.backward == "split" else queued.backward
        total, final = self._reductions_s(x.zero, cut)
        # Beside the forward, ZeRO-1 and 2 gather updated parameters. The first forward cannot end before the last of
        # them.
        gathered = self._gathers_s(x.zero, cut) if dp.zero in (1, 2) and dp.gather_overlap else none
        # Reductions of the last backward may hide under it, but no longer than it takes.
        return StageSeconds(alone, queued, lag, *self._sends(blocks, form), np.maximum(final, total - last), gathered)

    @cached
    def _alone(self, blocks: Blocks, cut: Cut, gathered: bool) -> Actions:
        """Actions of all stages, block after block."""
        return Actions(*cut.each(lambda stage: [blocks.action_s(kind, stage, gathered) for kind in KINDS]).T)

    @cached
    def _queued(self, blocks: Blocks, cut: Cut) -> tuple[Actions, Floats]:
        """With ZeRO-3's gathers; a weight gradient has none. Second: the lag of `StageSeconds`."""
        dp, kinds = self.prices.dp(3), (Kind.F, Kind.B, Kind.I)
        each = cut.each(lambda stage: [seconds for k in kinds for seconds in blocks.zero3_s(k, stage, dp)])
        f, _, b, lag, i, _ = each.T
        return Actions(f, b, i, self._alone(blocks, cut, True).weight_grad), lag

    def _sends(self, blocks: Blocks, form: Form) -> tuple[Floats, Floats]:
        p = blocks.scenario.parallelism
        # Without sequence parallelism Megatron can send 1 / tp of a tensor that all tp ranks hold.
        return self._sends_of(form, blocks.message_bytes / (p.tp if p.p2p_scatter and not p.sp else 1))

    @cached
    def _sends_of(self, form: Form, size: float) -> tuple[Floats, Floats]:
        """Messages of each stage's result, forward and back; none from a chain's ends or to the same rank."""
        forward, backward = np.zeros(len(form.rank_of_stage)), np.zeros(len(form.rank_of_stage))
        rank = form.rank_of_stage.tolist()
        for chain in form.chains:
            for a, b in pairwise(chain):
                forward[a] = self.prices.send_s(rank[a], rank[b], size, forward=True)
                backward[b] = self.prices.send_s(rank[b], rank[a], size, forward=False)
        return forward, backward

    @cached
    def _reductions_s(self, zero: int, cut: Cut) -> tuple[Floats, Floats]:
        """Seconds of each stage's gradient reductions of one micro-batch, and of those after its last computation."""
        dp, sort_of = self.prices.dp(zero), self._of_order[cut.order].sorts
        # Then the epilogue holds the reductions. Counting them here too would count them twice.
        if dp.at_the_end and not dp.each_micro_batch and dp.zero < 3:
            return np.zeros(len(cut.stages)), np.zeros(len(cut.stages))
        total, final = cut.each(lambda stage: self.prices.reductions_s([sort_of[s].gradients for s in stage], dp)).T
        return total, final

    @cached
    def _gathers_s(self, zero: int, cut: Cut) -> Floats:
        """Seconds in which each stage's parameters are gathered once."""
        dp, sort_of = self.prices.dp(zero), self._of_order[cut.order].sorts

        def seconds(stage: Signature) -> list[float]:
            units = gather_units([sort_of[s].block for s in stage], dp)
            return [sum(self.prices.comms_s(dp.gather("", a, b, Phase.FORWARD, "g")) for a, b, _ in units)]

        return cut.each(seconds)[:, 0]

    @cached
    def _epilogue_s(self, zero: int, form: Form, cut: Cut) -> Floats:
        """Clipping, optimizer and exposed gathers, by pipeline rank."""
        # The first and the last rank all-reduce the gradient of tied embeddings; with one rank there is nothing to add.
        tied_model = self.space.base.model.tied_embeddings and form.ranks > 1
        found: dict[tuple[Signature, bool], float] = {}
        out = []
        for rank, held in enumerate(cut.by_rank(form)):
            key = (held, tied_model and rank in (0, form.ranks - 1))
            if key not in found:
                program = epilogue((self._stage(zero, cut.order, held),), self.prices.plan, key[1])
                found[key] = self.prices.program_s(program)
            out.append(found[key])
        return np.array(out)

    @cached
    def _stream_bound_s(self, zero: int, form: Form, cut: Cut, m: int) -> float:
        """The data-parallel stream of the busiest rank: all that it carries, one after the other, then the epilogue."""
        dp, runs = self.prices.dp(zero), m // form.copies
        # NCCL runs the collectives of a communicator one after the other, so the stream's sum is a bound by itself.
        seconds = self._reductions_s(zero, cut)[0] * (runs if dp.each_micro_batch else 1)
        if zero == 3:
            # Forward and backward gather the parameters anew where these are freed after each
            # (`reshard_after_forward`).
            seconds = seconds + self._gathers_s(zero, cut) * (2 * runs if dp.reshard else 1)
        elif dp.zero and dp.gather_overlap:
            seconds = seconds + self._gathers_s(zero, cut)
        busy: Floats = np.bincount(form.rank_of_stage, seconds, form.ranks) + self._epilogue_s(zero, form, cut)
        return float(busy.max())

    # --- what layouts share

    def blocks(self, x: Layout) -> list[Blocks]:
        """The blocks of a layout, for each rank that is bounded."""
        s = self.space
        # The key holds all that changes a block or its price. A missing part would hand out wrong blocks.
        paired = bool(s.fixed.get("ep_overlap")) and schedule_form(s, x).pairs
        # Recomputing the first n layers of each stage makes blocks depend on the cut; all else does not.
        by_stage = s.recomputes[x.recompute].layers is not None
        # Sums of whole gradients (`accumulated` of `sim.models.dims`) change the weights' part of a backward.
        whole = x.zero < 2 or s.accumulates(x.pp, x.zero)
        stops_early = x.zero == 3 and s.recomputes[x.recompute].mode == "full"  # see `models.recompute`
        cut_of = (x.schedule, x.virtual_stages) if by_stage else None
        key = (x.sp, x.micro_batch_size, x.recompute, whole, stops_early, paired, cut_of)
        if key not in self._blocks:
            scenario = scenario_of(s, x)
            self._blocks[key] = [Blocks(scenario, self.prices, rank) for rank in self.prices.bounded_ranks]
            for blocks in self._blocks[key]:
                self._of_order.setdefault(blocks.order, blocks)
        return self._blocks[key]

    def cut(self, order: Signature, form: Form) -> Cut:
        """The sorts of blocks of every schedule stage."""
        whole = self._cut(order, len(form.chains[0]))
        return whole if form.copies == 1 else self._copied(whole, form)

    @cached
    def _cut(self, order: Signature, count: int) -> Cut:
        """Into so many stages; schedules of equal numbers of stages share it, and all that follows from it."""
        m = self.space.base.model
        layers = stage_layers(self.space, count)
        first, out = 0, []
        for i, n in enumerate(layers):
            ends = (HEAD, *((MTP,) * m.mtp_layers)) if i == count - 1 else ()
            out.append(((EMBEDDING,) if i == 0 else ()) + order[first : first + n] + ends)
            first += n
        return Cut(order, tuple(out))

    @cached
    def _copied(self, cut: Cut, form: Form) -> Cut:
        """Of a schedule whose ranks hold the model several times."""
        return Cut(cut.order, tuple([cut.stages[i] for i in form.part_of_stage.tolist()]))


def _least_zero(x: Layout) -> Layout:
    """The layout with the ZeRO stage that has the least work: no sums of whole gradients, nothing gathered."""
    return x._replace(zero=2 if x.dp * x.cp > 1 else 0)


def _least_work(x: Layout) -> Layout:
    """The same, with nothing computed again."""
    return _least_zero(x)._replace(recompute="none")


def _fault_scale(scenario: Scenario) -> float:
    """How much faster than priced faults can make a step: links scaled the other way; jitter without end."""
    if has_jitter(scenario):
        return 0.0
    # Prices here know no faults. What is slower only adds time; a link that is quicker lowers the bound.
    return min([1.0, *(1 / scale for scale in link_scales(scenario).values())])
