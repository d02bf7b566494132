"""The blocks of one way to run a model's layers, and sums over those of a stage: seconds, and gradients by bucket."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sim.actions import Kind
from sim.folding import expert_rank
from sim.graph.data_parallel import DP, DataParallel
from sim.graph.stages import layer_sort, stage_input_bytes
from sim.inputs.scenario import Scenario
from sim.layout.grid_prices import GridPrices, Sort
from sim.models.dims import Shard
from sim.models.embedding import embedding_block
from sim.models.head import head_block
from sim.models.layer import layer_block
from sim.models.mtp import mtp_block

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
EMBEDDING, HEAD, MTP = -1, -2, -3  # sorts of blocks; layers' sorts are 0 and up
Signature = tuple[int, ...]  # the sorts of a stage's blocks, first to last


class Blocks:
    """The blocks of one way to run a layer (sp, micro-batch size, recomputation) on a rank, with sums by stage."""

    def __init__(self, scenario: Scenario, prices: GridPrices, rank: int) -> None:
        plan, p = prices.plan, scenario.parallelism
        self.prices, self.scenario = prices, scenario
        shard = _shard(prices, rank)
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
        self.sorts[EMBEDDING] = Sort(embedding_block(scenario), prices, paired)
        self.sorts[HEAD] = Sort(head_block(scenario), prices, paired)
        if scenario.model.mtp_layers:
            self.sorts[MTP] = Sort(mtp_block(scenario, shard), prices, paired)
        self.message_bytes = stage_input_bytes(replace(plan, scenario=scenario))
        self._seconds: dict[tuple[Kind, Signature, bool], float] = {}
        self._works: dict[bool, float] = {}

    def work_s(self, gathered: bool) -> float:
        """Forward and backward of all blocks at the least, whichever way backward runs."""
        if gathered not in self._works:
            counts = Counter({EMBEDDING: 1, HEAD: 1, MTP: self.scenario.model.mtp_layers, **Counter(self.order)})
            self._works[gathered] = sum(n * self.sorts[sort].work_s(gathered) for sort, n in counts.items() if n)
        return self._works[gathered]

    def action_s(self, kind: Kind, stage: Signature, gathered: bool) -> float:
        """Seconds of an action of a stage: its blocks one after the other."""
        key = (kind, stage, gathered)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = sum(self.sorts[s].action_s(kind, gathered) for s in stage)
        return found

    def zero3_s(self, kind: Kind, stage: Signature, dp: DataParallel) -> tuple[float, float]:
        """`action_s` with each block's parameters gathered one block ahead, and its gradients reduced behind.

        Both queue on one stream in the order of the program: a gather, then the reduction of the block before.
        Second: how much later the stream is done, which holds up the next action's first gather.
        """
        blocks = [self.sorts[s] for s in (stage if kind is Kind.F else stage[::-1])]
        gathers = [self.prices.comms_s(b.gathers(dp)) for b in blocks]
        reduces = dp.each_micro_batch and kind is Kind.B
        stream = arrived = gathers[0] if gathers else 0.0
        done = 0.0
        for i, block in enumerate(blocks):
            here = arrived
            if i + 1 < len(blocks):
                stream = max(stream, done) + gathers[i + 1]
            done = max(done, here) + block.action_s(kind, True)
            arrived = stream
            if reduces:
                reduced = dp.reduce("", block.block.params, block.block.expert_params, "r")
                stream = max(stream, done) + self.prices.comms_s([c for c in reduced if c.stream == DP])
        return done, max(0.0, stream - done)


def _shard(prices: GridPrices, rank: int) -> Shard:
    """The context- and expert-parallel place of a rank of the first stage."""
    plan = prices.plan
    p = plan.scenario.parallelism
    position = plan.mesh.along(["tp", "cp", "dp"], rank).index(rank) if p.ep > 1 else 0
    return Shard(plan.mesh.coordinate("cp", rank), expert_rank(p, position))


def bucket_sizes(dp: DataParallel, blocks: list[Sort]) -> tuple[list[tuple[float, float]], bool]:
    """What each reduction of a stage's gradients carries, in elements, as `data_parallel.weave_backward` fills them.

    Second: whether the last one comes after all computation.
    """
    limit = (
        {"per_parameter": 0.0, "bucketed": dp.bucket_bytes}.get(dp.sync, float("inf")) if dp.zero < 3 else float("inf")
    )
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
