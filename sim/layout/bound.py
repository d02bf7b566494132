"""Bounds of every layout of one mesh: a step time it cannot beat, and memory it cannot do with less of.

Both come from the very blocks, prices and states that the simulation uses, and are kept by what they depend on: a
layer is built and priced once per (sp, micro-batch size, recomputation), its gradients' reductions once per ZeRO stage.

Time: an action takes at least the makespan of its blocks, one after the other, with ZeRO-3's gathers and reductions
on their stream; `sim.layout.pipeline_bound` puts actions together. Messages are priced at the cheapest place that the
mesh gives them. Left out, so the bound stays below: waiting for the data-parallel stream's earlier
traffic, copies to the host, gathered stage inputs.

Memory: exact states, and the activations of the forwards that a schedule runs before its first backward.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from sim.actions import Kind
from sim.faults import compute_scales, has_jitter, link_scales
from sim.graph.data_parallel import DP, DataParallel, gather_units
from sim.graph.stages import Stage, epilogue
from sim.inputs.parallelism import split_layers
from sim.inputs.scenario import Scenario
from sim.layout.block_sums import EMBEDDING, HEAD, KINDS, MTP, Blocks, Signature, bucket_sizes
from sim.layout.grid_prices import GridPrices
from sim.layout.layouts import Grid, Layout, Space, is_legal, layouts_of, overlaps, scenario_of
from sim.layout.memory_bound import forwards_first, searched_forwards, stage_bytes
from sim.layout.pipeline_bound import Actions, Floats, Form, StageSeconds, form_of, pipeline_bound_s
from sim.memory import states
from sim.program import Phase

ROUNDING = 1 - 1e-9  # sums here run in another order than the engine's
RankBlocks = tuple[Signature, ...]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout with its bounds."""

    bound_s: float
    memory_bytes: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class GridBounds:
    """The layouts of one mesh that may be among the best, and how many were looked at, were legal, and were pruned."""

    bounded: list[Bounded]
    counts: Counter[str]
    cpu_s: float = 0.0  # that it took


class GridSearch:
    """Bounds the layouts of one mesh; what layouts share is computed once."""

    def __init__(self, space: Space, grid: Grid, prices: GridPrices, limit_bytes: float) -> None:
        self.space, self.grid, self.prices, self.limit_bytes = space, grid, prices, limit_bytes
        self.scale = _fault_scale(space.base)
        self._blocks: dict[tuple[object, ...], list[Blocks]] = {}
        self._parts: dict[tuple[int, tuple[int, ...]], list[Signature]] = {}
        self._memo: dict[tuple[object, ...], Any] = {}

    def run(self, ceiling_s: float = math.inf) -> GridBounds:
        """All layouts of the mesh, a legal one, that may fit in memory and take no longer than `ceiling_s`."""
        bounded: list[Bounded] = []
        counts: Counter[str] = Counter()
        for layout in layouts_of(self.space, self.grid):
            counts["enumerated"] += 1
            if is_legal(self.space, layout):
                counts["legal"] += 1
                found = self._bounded(layout, ceiling_s)
                if isinstance(found, Bounded):
                    bounded.append(found)
                else:
                    counts[found] += 1
        return GridBounds(bounded, counts)

    def _bounded(self, x: Layout, ceiling_s: float) -> Bounded | Literal["pruned_by_memory", "pruned_by_bound"]:
        """A layout with its bounds, the cheap ones first, or which of them rules it out."""
        if ceiling_s < math.inf and (self.least_work_s(x) > ceiling_s or self.work_bound_s(x) > ceiling_s):
            return "pruned_by_bound"
        if (memory := self.memory_bytes(x)) > self.limit_bytes:
            return "pruned_by_memory"
        if (bound := self.bound_s(x)) > ceiling_s:
            return "pruned_by_bound"
        if x.schedule == "zb_search" and (memory := self.memory_bytes(x, True)) > self.limit_bytes:
            return "pruned_by_memory"
        return Bounded(bound, memory, x)

    # --- memory

    def memory_bytes(self, x: Layout, timed: bool = False) -> float:
        """Bytes that the worst rank needs at the least; `timed`: by the seconds of actions, where they decide it."""
        blocks = self.blocks(x)[0]
        form = form_of(x.schedule, x.pp, x.virtual_stages)
        stages = self.stages(blocks, form)
        kept = self.state_bytes(x, blocks, form, stages) + self.activation_bytes(x, blocks, form, stages, timed)
        return float(kept.max()) * ROUNDING

    def state_bytes(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature]) -> Floats:
        """Exact states and what gathering them takes, by pipeline rank."""
        key = ("states", x.zero, x.schedule, x.virtual_stages, blocks.order)
        if key not in self._memo:
            dp = self.prices.dp(x.zero)
            found: dict[RankBlocks, float] = {}
            out = []
            for held in _by_rank(form, stages):
                if held not in found:
                    s = states(self.prices.plan, [self._stage(blocks, dp, sum(held, ()))])
                    found[held] = s.parameters + s.gradients + s.optimizer + s.gathered
                out.append(found[held])
            self._memo[key] = np.array(out)
        kept: Floats = self._memo[key]
        return kept

    def activation_bytes(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature], timed: bool) -> Floats:
        """What the forwards before a rank's first backward keep, or one micro-batch of any of its stages."""
        searched = timed and x.schedule == "zb_search"  # whose lists depend on seconds
        key = ("activations", id(blocks), x.schedule, x.virtual_stages, searched, searched and self._gathered(x))
        if key not in self._memo:
            sizes = [self._stage_bytes(blocks, s) for s in stages]
            saved, forward, backward = (np.array([s[i] for s in sizes]) for i in range(3))
            single = _extreme(form, saved + np.maximum(forward, backward), np.maximum)
            if not self.space.training.activation_offload:
                m = self.space.training.global_batch_size // (x.micro_batch_size * x.dp)
                count = forwards_first(x.schedule, x.pp, x.virtual_stages, m)
                if searched:
                    count[0] = self._searched_forwards(x, blocks, form, stages, m)
                many = np.bincount(form.rank_of_stage, count * saved, form.ranks)
                single = np.maximum(single, many + _extreme(form, backward, np.minimum))
            self._memo[key] = single
        kept: Floats = self._memo[key]
        return kept

    def _searched_forwards(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature], m: int) -> float:
        """Of rank 0, before its first backward; 1 where its forward's longest time is not known."""
        p, dp, prices = self.space.base.parallelism, self.prices.dp(x.zero), self.prices
        if not prices.alike or (p.p2p_scatter and x.tp > 1 and not x.sp):
            return 1.0
        gathers = [prices.comms_s(blocks.sorts[s].gathers(dp)) for s in stages[0]] if self._gathered(x) else []
        waits_s = sum(gathers) * (1.0 + prices.costs.collective_sm_share)  # and what computing beside them takes longer
        t = self._alone(x, blocks, form, stages)
        return searched_forwards(p.schedule_memory, m, t.forward, t.input_grad, waits_s)

    def _stage(self, blocks: Blocks, dp: DataParallel, sorts: Signature) -> Stage:
        offload = self.space.training.activation_offload
        return Stage(tuple(blocks.sorts[s].block for s in sorts), dp, self.prices.costs, offload, 0.0)

    def _stage_bytes(self, blocks: Blocks, stage: Signature) -> tuple[float, float, float]:
        key = ("stage", id(blocks), stage)
        if key not in self._memo:
            self._memo[key] = stage_bytes([blocks.sorts[s] for s in stage], self.space.training.activation_offload)
        kept: tuple[float, float, float] = self._memo[key]
        return kept

    # --- time

    def work_bound_s(self, x: Layout) -> float:
        """The work of all stages shared evenly by the ranks: a bound for every schedule and ZeRO stage at once."""
        blocks = self.blocks(x)[0]
        m = self.space.training.global_batch_size // (x.micro_batch_size * x.dp)
        return m * blocks.work_s(self._gathered(x)) / x.pp * self.scale * ROUNDING

    def least_work_s(self, x: Layout) -> float:
        """The same for all recomputations and ZeRO stages at once: what does without either is in all of them."""
        key = ("least work", x.sp, x.micro_batch_size, x.schedule)
        if key not in self._memo:
            light = x._replace(recompute="none", zero=2 if x.dp * x.cp > 1 else 0)
            self._memo[key] = self.work_bound_s(light)
        kept: float = self._memo[key]
        return kept

    def bound_s(self, x: Layout) -> float:
        """Seconds that a step of the layout takes at the least."""
        form = form_of(x.schedule, x.pp, x.virtual_stages)
        m = self.space.training.global_batch_size // (x.micro_batch_size * x.dp)
        bound = 0.0
        for blocks in self.blocks(x):
            stages = self.stages(blocks, form)
            t = self.stage_seconds(x, blocks, form, stages)
            end = self.epilogue_s(x, blocks, form, stages)
            bound = max(
                bound,
                pipeline_bound_s(form, t, m, not overlaps(self.space, x), end),
                self.stream_bound_s(x, blocks, form, stages, m, end),
            )
        return bound * self.scale * ROUNDING

    def _gathered(self, x: Layout) -> bool:
        """Whether every action gathers its parameters."""
        return x.zero == 3 and self.prices.dp(3).reshard

    def stage_seconds(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature]) -> StageSeconds:
        """Seconds by stage, with what of data parallelism cannot be hidden."""
        dp = self.prices.dp(x.zero)
        alone = self._alone(x, blocks, form, stages)
        queued, lag = self._queued(x, blocks, form, stages) if self._gathered(x) else (alone, np.zeros(len(stages)))
        exposed, gathered = [], []
        last = alone.weight_grad if form.backward == "split" else alone.backward
        for stage, action_s in zip(stages, last.tolist(), strict=True):
            total, final = self.reductions(x, blocks, stage)
            exposed.append(max(final, total - action_s))
            gathered.append(self._gathers_s(x, blocks, stage) if dp.zero in (1, 2) and dp.gather_overlap else 0.0)
        forward, backward = self._sends(blocks, form)
        return StageSeconds(alone, queued, lag, forward, backward, np.array(exposed), np.array(gathered))

    def _alone(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature]) -> Actions:
        gathered = self._gathered(x)
        key = ("alone", id(blocks), x.schedule, x.virtual_stages, gathered)
        if key not in self._memo:
            seconds = (np.array([blocks.action_s(kind, s, gathered) for s in stages]) for kind in KINDS)
            self._memo[key] = Actions(*seconds)
        kept: Actions = self._memo[key]
        return kept

    def _queued(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature]) -> tuple[Actions, Floats]:
        """With ZeRO-3's gathers; a weight gradient has none."""
        key = ("queued", id(blocks), x.schedule, x.virtual_stages)
        if key not in self._memo:
            dp = self.prices.dp(x.zero)
            found = {s: [blocks.zero3_s(kind, s, dp) for kind in (Kind.F, Kind.B, Kind.I)] for s in set(stages)}
            f, b, i = (np.array([found[s][n][0] for s in stages]) for n in range(3))
            w = self._alone(x, blocks, form, stages).weight_grad
            self._memo[key] = (Actions(f, b, i, w), np.array([found[s][1][1] for s in stages]))
        kept: tuple[Actions, Floats] = self._memo[key]
        return kept

    def _sends(self, blocks: Blocks, form: Form) -> tuple[Floats, Floats]:
        """Messages of each stage's result, forward and back; none from a chain's ends or to the same rank."""
        p = blocks.scenario.parallelism
        size = blocks.message_bytes / (p.tp if p.p2p_scatter and not p.sp else 1)
        key = ("sends", id(form), size)
        if key not in self._memo:
            forward, backward = np.zeros(len(form.rank_of_stage)), np.zeros(len(form.rank_of_stage))
            rank = form.rank_of_stage.tolist()
            for chain in form.chains:
                for a, b in pairwise(chain):
                    forward[a] = self.prices.send_s(rank[a], rank[b], size)
                    backward[b] = self.prices.send_s(rank[b], rank[a], size)
            self._memo[key] = (forward, backward)
        kept: tuple[Floats, Floats] = self._memo[key]
        return kept

    def reductions(self, x: Layout, blocks: Blocks, stage: Signature) -> tuple[float, float]:
        """Seconds of a stage's gradient reductions of one micro-batch, and of those after its last computation."""
        dp = self.prices.dp(x.zero)
        key = ("reductions", x.zero, stage, blocks.order)
        if key not in self._memo:
            if dp.sync == "after_backward" and not dp.each_micro_batch and dp.zero < 3:
                self._memo[key] = (0.0, 0.0)
            else:
                sizes, left = bucket_sizes(dp, [blocks.sorts[s] for s in reversed(stage)])
                each = [dp.reduce("", a, b, "g") for a, b in sizes]
                queued_s = sum(self.prices.comms_s([c for c in comms if c.stream == DP]) for comms in each)
                self._memo[key] = (queued_s, self.prices.comms_s(each[-1]) if left else 0.0)
        kept: tuple[float, float] = self._memo[key]
        return kept

    def _gathers_s(self, x: Layout, blocks: Blocks, stage: Signature) -> float:
        key = ("gathers", x.zero, stage, blocks.order)
        if key not in self._memo:
            dp = self.prices.dp(x.zero)
            units = gather_units([blocks.sorts[s].block for s in stage], dp)
            self._memo[key] = sum(self.prices.comms_s(dp.gather("", a, b, Phase.FORWARD, "g")) for a, b, _ in units)
        kept: float = self._memo[key]
        return kept

    def epilogue_s(self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature]) -> Floats:
        """Clipping, optimizer and exposed gathers, by pipeline rank."""
        key = ("epilogue", x.zero, x.schedule, x.virtual_stages, blocks.order)
        if key not in self._memo:
            dp = self.prices.dp(x.zero)
            plan = self.prices.plan
            tied_model = self.space.base.model.tied_embeddings and x.pp > 1
            found: dict[tuple[RankBlocks, bool], float] = {}
            out = []
            for rank, held in enumerate(_by_rank(form, stages)):
                tied = tied_model and rank in (0, x.pp - 1)
                if (held, tied) not in found:
                    program = epilogue((self._stage(blocks, dp, sum(held, ())),), plan, tied)
                    found[held, tied] = self.prices.program_s(program)
                out.append(found[held, tied])
            self._memo[key] = np.array(out)
        kept: Floats = self._memo[key]
        return kept

    def stream_bound_s(
        self, x: Layout, blocks: Blocks, form: Form, stages: list[Signature], m: int, epilogue_s: Floats
    ) -> float:
        """The data-parallel stream of the busiest rank: all that it carries, one after the other, then the epilogue."""
        dp = self.prices.dp(x.zero)
        key = ("stream", x.zero, m, x.schedule, x.virtual_stages, blocks.order)
        if key not in self._memo:
            runs = m // form.copies
            total = []
            for stage in stages:
                seconds = self.reductions(x, blocks, stage)[0] * (runs if dp.each_micro_batch else 1)
                if x.zero == 3:
                    seconds += self._gathers_s(x, blocks, stage) * (2 * runs if dp.reshard else 1)
                elif dp.zero and dp.gather_overlap:
                    seconds += self._gathers_s(x, blocks, stage)
                total.append(seconds)
            self._memo[key] = float((np.bincount(form.rank_of_stage, total, form.ranks) + epilogue_s).max())
        kept: float = self._memo[key]
        return kept

    # --- what layouts share

    def blocks(self, x: Layout) -> list[Blocks]:
        """The blocks of a layout, for each rank that is bounded."""
        s, p = self.space, self.space.base.parallelism
        paired = bool(s.fixed.get("ep_overlap")) and x.schedule.startswith("dualpipe")
        by_stage = s.recomputes[x.recompute].layers is not None
        whole = x.zero < 2 or p.accumulate_unsharded
        stops_early = x.zero == 3 and s.recomputes[x.recompute].mode == "full"  # see `models.recompute`
        key = (
            x.sp,
            x.micro_batch_size,
            x.recompute,
            whole,
            stops_early,
            paired,
            (x.schedule, x.virtual_stages) if by_stage else None,
        )
        if key not in self._blocks:
            scenario = scenario_of(s, x)
            self._blocks[key] = [Blocks(scenario, self.prices, rank) for rank in self.prices.bounded_ranks]
        return self._blocks[key]

    def stages(self, blocks: Blocks, form: Form) -> list[Signature]:
        """The sorts of blocks of every schedule stage."""
        count = len(form.chains[0])
        key = (count, blocks.order)
        if key not in self._parts:
            m = self.space.base.model
            layers = self.space.fixed.get("layers_per_stage") or split_layers(m.layers, count)
            first, out = 0, []
            for i, n in enumerate(layers):
                ends = (HEAD, *((MTP,) * m.mtp_layers)) if i == count - 1 else ()
                out.append(((EMBEDDING,) if i == 0 else ()) + blocks.order[first : first + n] + ends)
                first += n
            self._parts[key] = out
        parts = self._parts[key]
        return parts if form.copies == 1 else [parts[i] for i in form.part_of_stage.tolist()]


def _by_rank(form: Form, stages: list[Signature]) -> list[RankBlocks]:
    """The stages of every pipeline rank."""
    held: list[list[Signature]] = [[] for _ in range(form.ranks)]
    for rank, stage in zip(form.rank_of_stage.tolist(), stages, strict=True):
        held[rank].append(stage)
    return [tuple(h) for h in held]


def _extreme(form: Form, per_stage: Floats, choose: np.ufunc) -> Floats:
    """The largest or least of each rank's stages."""
    out = np.full(form.ranks, -np.inf if choose is np.maximum else np.inf)
    choose.at(out, form.rank_of_stage, per_stage)
    return out


def _fault_scale(scenario: Scenario) -> float:
    """How much faster than priced faults can make a step: ranks or links scaled the other way; jitter without end."""
    if has_jitter(scenario):
        return 0.0
    links = (1 / scale for scale in link_scales(scenario).values())
    return min([1.0, *compute_scales(scenario).values(), *links])
