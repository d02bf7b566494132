"""Bounds of every layout of one mesh: a step time it cannot beat, and memory it cannot do with less of.

Both come from the very blocks, prices and states that the simulation uses, and are kept by what they depend on: a layer is
built and priced once per (sp, micro-batch size, recomputation), its gradients' reductions once per ZeRO stage.

Time: an action takes at least the makespan of its blocks, one after the other, with ZeRO-3's gathers and reductions
on their stream; `sim.pipeline_bound` puts actions together. Messages are priced at the cheapest place that the
mesh gives them. Left out, so the bound stays below: waiting for the data-parallel stream's earlier
traffic, copies to the host, gathered stage inputs.

Memory: exact states, and the activations of the forwards that a schedule runs before its first backward.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from sim.actions import Kind
from sim.data_parallel import DataParallel
from sim.grid_prices import GridPrices, Sort
from sim.layouts import Grid, Layout, Space, grid_is_legal, is_legal, layouts_of, overlaps, scenario_of
from sim.memory import states
from sim.models.dims import Shard
from sim.models.embedding import embedding_block
from sim.models.head import head_block
from sim.models.layer import layer_block
from sim.models.mtp import mtp_block
from sim.parallelism import split_layers
from sim.pipeline_bound import Actions, Floats, Form, StageSeconds, form_of, pipeline_bound_s
from sim.plan import expert_rank
from sim.program import Phase
from sim.scenario import Scenario
from sim.stages import Stage, epilogue, layer_sort, stage_input_bytes
from sim.template import compile_program

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
ROUNDING = 1 - 1e-9  # sums here run in another order than the engine's
EMBEDDING, HEAD, MTP = -1, -2, -3  # sorts of blocks; layers' sorts are 0 and up
Signature = tuple[int, ...]  # the sorts of a stage's blocks, first to last
RankBlocks = tuple[Signature, ...]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout with its bounds."""

    bound_s: float
    memory_bytes: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class GridBounds:
    """The layouts of one mesh that may fit in memory, and how many were looked at."""

    bounded: list[Bounded]
    enumerated: int
    legal: int
    pruned_by_memory: int
    pruned_by_bound: int


class _Blocks:
    """The blocks of one way to run a layer (sp, micro-batch size, recomputation), with sums by stage."""

    def __init__(self, scenario: Scenario, prices: GridPrices, lane: int) -> None:
        plan, p = prices.plan, scenario.parallelism
        self.prices, self.scenario = prices, scenario
        shard = _shard(prices, lane)
        paired = p.ep_overlap and p.schedule.startswith("dualpipe")
        self.sorts: dict[int, Sort] = {}
        numbers: dict[tuple[object, ...], int] = {}
        order = []
        for layer in range(scenario.model.layers):
            sort = numbers.setdefault(layer_sort(scenario, layer), len(numbers))
            if sort not in self.sorts:
                self.sorts[sort] = Sort(layer_block(scenario, layer, shard), prices, paired)
            order.append(sort)
        self.order = tuple(order)
        self.sorts[EMBEDDING] = Sort(embedding_block(scenario, shard), prices, paired)
        self.sorts[HEAD] = Sort(head_block(scenario, shard), prices, paired)
        if scenario.model.mtp_layers:
            self.sorts[MTP] = Sort(mtp_block(scenario, shard), prices, paired)
        self.message_bytes = stage_input_bytes(replace(plan, scenario=scenario))
        self._seconds: dict[tuple[Kind, Signature], float] = {}
        self.work_s: float | None = None  # of all blocks

    def least_s(self, sort: int) -> float:
        """Forward and backward of a block on the device, whichever way backward runs."""
        f, b, i, w = (self.sorts[sort].action(k).device_s for k in KINDS)
        return f + min(b, i + w)

    def action_s(self, kind: Kind, stage: Signature) -> float:
        """Seconds of an action of a stage: its blocks one after the other."""
        key = (kind, stage)
        found = self._seconds.get(key)
        if found is None:
            actions = [self.sorts[s].action(kind) for s in stage]
            found = self._seconds[key] = max(sum(a.device_s for a in actions), sum(a.host_s for a in actions))
        return found

    def zero3_s(self, kind: Kind, stage: Signature, dp: DataParallel) -> tuple[float, float]:
        """`action_s` with each block's parameters gathered one block ahead, and its gradients reduced behind.

        Both queue on one stream in the order of the program: a gather, then the reduction of the block before.
        The next action's first gather waits for this action's last computation, so seconds are counted up to there.
        Second: how much later the stream is done, which holds that gather up too.
        """
        blocks = [self.sorts[s] for s in (stage if kind is Kind.F else stage[::-1])]
        gathers = [self.prices.comms_s(dp.gather("", b.block.params, b.block.expert_params, Phase.FORWARD, "g"))
                   for b in blocks]
        reduces = dp.each_micro_batch and kind is Kind.B
        stream = arrived = gathers[0] if gathers else 0.0
        done = 0.0
        for i, block in enumerate(blocks):
            here = arrived
            if i + 1 < len(blocks):
                stream = max(stream, done) + gathers[i + 1]
            done = max(done, here) + block.action(kind).device_s
            arrived = stream
            if reduces:
                stream = max(stream, done) + self.prices.comms_s(
                    dp.reduce("", block.block.params, block.block.expert_params, "r"))
        done = max(done, self.action_s(kind, stage)) - (blocks[-1].action(kind).tail_s if blocks else 0.0)
        return done, max(0.0, stream - done)


def _shard(prices: GridPrices, lane: int) -> Shard:
    """The context- and expert-parallel place of a class of the first stage."""
    plan = prices.plan
    p = plan.scenario.parallelism
    rank = plan.classes[lane].rank
    position = plan.mesh.along(["tp", "cp", "dp"], rank).index(rank) if p.ep > 1 else 0
    return Shard(plan.mesh.coordinate("cp", rank), expert_rank(p, position))


class GridSearch:
    """Bounds the layouts of one mesh; what layouts share is computed once."""

    def __init__(self, space: Space, grid: Grid, prices: GridPrices, limit_bytes: float) -> None:
        self.space, self.grid, self.prices, self.limit_bytes = space, grid, prices, limit_bytes
        self.scale = _fault_scale(space.base)
        self._blocks: dict[tuple[object, ...], list[_Blocks]] = {}
        self._parts: dict[tuple[int, tuple[int, ...]], list[Signature]] = {}
        self._memo: dict[tuple[object, ...], object] = {}

    def run(self, ceiling_s: float = math.inf) -> GridBounds:
        """All layouts of the mesh that may fit in memory and take no longer than `ceiling_s`."""
        out: list[Bounded] = []
        enumerated = legal = memory_pruned = bound_pruned = 0
        fine = grid_is_legal(self.space, self.grid)
        for layout in layouts_of(self.space, self.grid):
            enumerated += 1
            if not fine or not is_legal(self.space, layout):
                continue
            legal += 1
            if ceiling_s < math.inf and self.work_bound_s(layout) > ceiling_s:
                bound_pruned += 1
                continue
            memory = self.memory_bytes(layout)
            if memory > self.limit_bytes:
                memory_pruned += 1
                continue
            bound = self.bound_s(layout)
            if bound > ceiling_s:
                bound_pruned += 1
                continue
            out.append(Bounded(bound, memory, layout))
        return GridBounds(out, enumerated, legal, memory_pruned, bound_pruned)

    # --- memory

    def memory_bytes(self, x: Layout) -> float:
        """Bytes that the worst rank needs at the least."""
        blocks = self.blocks(x)[0]
        form = form_of(x.schedule, x.pp, x.virtual_stages)
        stages = self.stages(blocks, form)
        return float((self.state_bytes(x, blocks, form, stages)
                      + self.activation_bytes(x, blocks, form, stages)).max()) * ROUNDING

    def state_bytes(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature]) -> Floats:
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
        return self._memo[key]

    def activation_bytes(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature]) -> Floats:
        """What the forwards before a rank's first backward keep, or one micro-batch of any of its stages."""
        key = ("activations", id(blocks), x.schedule, x.virtual_stages)
        if key not in self._memo:
            sizes = [self._stage_bytes(blocks, s) for s in stages]
            saved, forward, backward = (np.array([s[i] for s in sizes]) for i in range(3))
            single = _extreme(form, saved + np.maximum(forward, backward), np.maximum)
            if not self.space.training.activation_offload:
                m = self.space.training.global_batch_size // (x.micro_batch_size * x.dp)
                count = forwards_first(x.schedule, x.pp, x.virtual_stages, m)
                many = np.bincount(form.rank_of_stage, count * saved, form.ranks)
                single = np.maximum(single, many + _extreme(form, backward, np.minimum))
            self._memo[key] = single
        return self._memo[key]

    def _stage(self, blocks: _Blocks, dp: DataParallel, sorts: Signature) -> Stage:
        offload = self.space.training.activation_offload
        return Stage(tuple(blocks.sorts[s].block for s in sorts), dp, self.prices.costs, offload, 0.0)

    def _stage_bytes(self, blocks: _Blocks, stage: Signature) -> tuple[float, float, float]:
        key = ("stage", id(blocks), stage)
        if key not in self._memo:
            self._memo[key] = _stage_bytes([blocks.sorts[s] for s in stage], self.space.training.activation_offload)
        return self._memo[key]

    # --- time

    def work_bound_s(self, x: Layout) -> float:
        """The work of all stages shared evenly by the ranks: a bound for every schedule and ZeRO stage at once."""
        blocks = self.blocks(x)[0]
        if blocks.work_s is None:
            sorts = [(EMBEDDING, 1), (HEAD, 1), (MTP, self.space.base.model.mtp_layers), *Counter(blocks.order).items()]
            blocks.work_s = sum(n * blocks.least_s(s) for s, n in sorts if n)
        m = self.space.training.global_batch_size // (x.micro_batch_size * x.dp)
        return m * blocks.work_s / x.pp * self.scale * ROUNDING

    def bound_s(self, x: Layout) -> float:
        """Seconds that a step of the layout takes at the least."""
        form = form_of(x.schedule, x.pp, x.virtual_stages)
        m = self.space.training.global_batch_size // (x.micro_batch_size * x.dp)
        bound = 0.0
        for blocks in self.blocks(x):
            stages = self.stages(blocks, form)
            t = self.stage_seconds(x, blocks, form, stages)
            end = self.epilogue_s(x, blocks, form, stages)
            bound = max(bound, pipeline_bound_s(form, t, m, not overlaps(self.space, x), end),
                        self.stream_bound_s(x, blocks, form, stages, m, end))
        return bound * self.scale * ROUNDING

    def stage_seconds(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature]) -> StageSeconds:
        """Seconds by stage, with what of data parallelism cannot be hidden."""
        dp = self.prices.dp(x.zero)
        alone = self._alone(x, blocks, form, stages)
        queued, lag = self._queued(x, blocks, form, stages) if x.zero == 3 and dp.reshard else (alone, np.zeros(len(stages)))
        exposed, gathered = [], []
        last = alone.weight_grad if form.backward == "split" else alone.backward
        for stage, action_s in zip(stages, last.tolist(), strict=True):
            total, final = self.reductions(x, blocks, stage)
            exposed.append(max(final, total - action_s))
            gathered.append(self._gathers_s(x, blocks, stage) if dp.zero in (1, 2) and dp.gather_overlap else 0.0)
        forward, backward = self._sends(blocks, form)
        return StageSeconds(alone, queued, lag, forward, backward, np.array(exposed), np.array(gathered))

    def _alone(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature]) -> Actions:
        key = ("alone", id(blocks), x.schedule, x.virtual_stages)
        if key not in self._memo:
            self._memo[key] = Actions(*(np.array([blocks.action_s(kind, s) for s in stages]) for kind in KINDS))
        return self._memo[key]

    def _queued(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature]) -> tuple[Actions, Floats]:
        """With ZeRO-3's gathers; a weight gradient has none."""
        key = ("queued", id(blocks), x.schedule, x.virtual_stages)
        if key not in self._memo:
            dp = self.prices.dp(x.zero)
            found = {s: [blocks.zero3_s(kind, s, dp) for kind in (Kind.F, Kind.B, Kind.I)] for s in set(stages)}
            f, b, i = (np.array([found[s][n][0] for s in stages]) for n in range(3))
            w = self._alone(x, blocks, form, stages).weight_grad
            self._memo[key] = (Actions(f, b, i, w), np.array([found[s][1][1] for s in stages]))
        return self._memo[key]

    def _sends(self, blocks: _Blocks, form: Form) -> tuple[Floats, Floats]:
        """Messages of each stage's result, forward and back; none from a chain's ends or to the same rank."""
        p = blocks.scenario.parallelism
        size = blocks.message_bytes / (p.tp if p.p2p_scatter and not p.sp else 1)
        key = ("sends", id(form), size)
        if key not in self._memo:
            forward, backward = np.zeros(len(form.rank_of_stage)), np.zeros(len(form.rank_of_stage))
            rank = form.rank_of_stage.tolist()
            for chain in form.chains:
                for a, b in zip(chain, chain[1:], strict=False):
                    forward[a] = self.prices.send_s(rank[a], rank[b], size)
                    backward[b] = self.prices.send_s(rank[b], rank[a], size)
            self._memo[key] = (forward, backward)
        return self._memo[key]

    def reductions(self, x: Layout, blocks: _Blocks, stage: Signature) -> tuple[float, float]:
        """Seconds of a stage's gradient reductions of one micro-batch, and of those after its last computation."""
        dp = self.prices.dp(x.zero)
        key = ("reductions", x.zero, stage, blocks.order)
        if key not in self._memo:
            if dp.sync == "after_backward" and not dp.each_micro_batch and dp.zero < 3:
                self._memo[key] = (0.0, 0.0)
            else:
                sizes, left = _buckets(dp, [blocks.sorts[s] for s in reversed(stage)])
                seconds = [self.prices.comms_s(dp.reduce("", a, b, "g")) for a, b in sizes]
                self._memo[key] = (sum(seconds), seconds[-1] if left else 0.0)
        return self._memo[key]

    def _gathers_s(self, x: Layout, blocks: _Blocks, stage: Signature) -> float:
        key = ("gathers", x.zero, stage, blocks.order)
        if key not in self._memo:
            dp = self.prices.dp(x.zero)
            held = (blocks.sorts[s].block for s in stage)
            self._memo[key] = sum(
                self.prices.comms_s(dp.gather("", b.params, b.expert_params, Phase.FORWARD, "g")) for b in held)
        return self._memo[key]

    def epilogue_s(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature]) -> Floats:
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
                    found[held, tied] = compile_program(program, self.prices.price).makespan_s
                out.append(found[held, tied])
            self._memo[key] = np.array(out)
        return self._memo[key]

    def stream_bound_s(self, x: Layout, blocks: _Blocks, form: Form, stages: list[Signature], m: int,
                       epilogue_s: Floats) -> float:
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
        return self._memo[key]

    # --- what layouts share

    def blocks(self, x: Layout) -> list[_Blocks]:
        """The blocks of a layout, for each lane that is bounded."""
        s, p = self.space, self.space.base.parallelism
        paired = bool(s.fixed.get("ep_overlap")) and x.schedule.startswith("dualpipe")
        by_stage = s.recomputes[x.recompute].layers is not None
        whole = x.zero < 2 or p.accumulate_unsharded
        key = (x.sp, x.micro_batch_size, x.recompute, whole, paired, (x.schedule, x.virtual_stages) if by_stage else None)
        if key not in self._blocks:
            scenario = scenario_of(s, x)
            self._blocks[key] = [_Blocks(scenario, self.prices, lane) for lane in self.prices.lanes]
        return self._blocks[key]

    def stages(self, blocks: _Blocks, form: Form) -> list[Signature]:
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



def _stage_bytes(blocks: list[Sort], offload: bool) -> tuple[float, float, float]:
    """What a stage keeps of a micro-batch, and what running its forward and its backward takes beyond that at the most.

    Block by block: those after it are not there yet, or not any more. Of offloaded activations two blocks' are.
    """
    saved = [b.saved_bytes for b in blocks]
    if offload:
        return (sum(sorted(saved)[-2:]), max((b.block.forward_peak_bytes for b in blocks), default=0.0),
                max((b.block.backward_peak_bytes for b in blocks), default=0.0))
    total = sum(saved)
    now = -total
    forward = backward = 0.0
    for block, size in zip(blocks, saved, strict=True):
        now += size
        forward = max(forward, now + block.block.forward_peak_bytes)
        backward = max(backward, now + block.block.backward_peak_bytes)
    return total, forward, backward


def forwards_first(schedule: str, p: int, v: int, m: int) -> Floats:
    """By stage: forwards that a rank runs before its first backward, where the schedule's definition tells; else 1."""
    r = np.arange(p)
    if p == 1 or schedule in ("naive", "zb_search"):
        return np.ones(p * v)
    if schedule == "gpipe":
        return np.full(p, float(m))
    if schedule in ("1f1b", "zb_h1"):
        return np.minimum(m, p - r).astype(float)
    if schedule == "zb_h2":
        return np.minimum(m, 2 * (p - r) - 1).astype(float)
    if schedule == "interleaved_1f1b":
        n = np.minimum(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1)
        rounds, rest = np.divmod(n, p * v)
        counts = [rounds * p + np.clip(rest - c * p, 0, p) for c in range(v)]
        return np.concatenate(counts).astype(float)
    if schedule == "zb_v":
        return np.concatenate([np.minimum(m, 2 * p - 1 - r), np.minimum(m, r[::-1] + 1)]).astype(float)
    n = p // 2 if schedule == "dualpipe" else p
    local = np.minimum(r, p - 1 - r) if schedule == "dualpipe" else r
    near, far = 2 * (n - 1 - local) + local + 1, local + 1
    if schedule == "dualpipe":
        down = np.where(r < n, near, far)
        return np.concatenate([down, down]).astype(float)  # stage p + i is on rank p − 1 − i, which mirrors rank i
    return np.concatenate([near, far[::-1]]).astype(float)


def _buckets(dp: DataParallel, blocks: list[Sort]) -> tuple[list[tuple[float, float]], bool]:
    """What each reduction of a stage's gradients carries, in elements, and whether the last comes after all computation.

    As `data_parallel.weave_backward` fills them.
    """
    limit = {"per_parameter": 0.0, "bucketed": dp.bucket_bytes}.get(dp.sync, float("inf")) if dp.zero < 3 else float("inf")
    limit = max(limit, 1.0)
    sizes: list[tuple[float, float]] = []
    dense = experts = 0.0
    left = False
    for n, block in enumerate(blocks):
        for i, (a, b) in enumerate(block.gradients):
            dense, experts = dense + a, experts + b
            ends = i == len(block.gradients) - 1
            if (dense + experts) * dp.gradient_bytes >= limit or (ends and (dp.zero == 3 or n == len(blocks) - 1)):
                left = ends and dense + experts > 0
                sizes += [(dense, experts)] if dense + experts > 0 else []
                dense = experts = 0.0
    return sizes, left


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
    """How much faster than priced here faults can make a step: links or ranks scaled the other way, jitter by any factor."""
    faults = scenario.faults
    if faults is None:
        return 1.0
    if getattr(faults, "jitter", None) is not None:
        return 0.0
    return min([1.0, *(s.compute_scale for s in faults.stragglers), *(1 / x.bandwidth_scale for x in faults.links)])
