"""Who does what: the mesh of ranks, the groups of each parallelism, and the part of the model on each stage.

Ranks are numbered with `rank_order`'s first dimension varying fastest (Megatron's tp-cp-dp-pp by default).
Experts use the same ranks of a pipeline stage in another arrangement: within one stage, in rank order, first
`expert_tp`, then `ep`, and what is left replicates the experts (Megatron Core's folding).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.timeline import RankClass
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import Scenario
from sim.ranks.equal_ranks import (
    embedding_ranks,
    expert_rank,
    pipeline_numbers,
    position_of,
    uneven_context,
    uneven_experts,
)
from sim.ranks.rank_mesh import ALONG, CUTS, Mesh, make_mesh


class ModelSlice(Struct, frozen=True):
    """A slice of the model: what one stage holds.

    Modules of multi-token prediction belong to the output (`head`), unless they have a stage of their own (`predicts`).
    Then the stage of the last layer has the final norm (`normed`), whose result output and modules take.
    """

    index: int
    layers: range
    embedding: bool
    head: bool
    normed: bool = False
    predicts: bool = False


def make_parts(p: Parallelism) -> tuple[ModelSlice, ...]:
    """The model's parts, one for each stage."""
    return cut_model(p.stage_layers, p.mtp_stage)


def cut_model(counts: tuple[int, ...], mtp_stage: int | None) -> tuple[ModelSlice, ...]:
    """The model cut into consecutive parts; `counts`: layers of each. The first embeds, the last has the output.

    Which part has the final norm follows Megatron-LM's `has_final_layernorm_in_this_stage`
    (core/transformer/transformer_block.py).
    """
    last = len(counts) - 1
    apart = mtp_stage is not None and mtp_stage < last
    parts, first, layers = [], 0, sum(counts)
    for i, n in enumerate(counts):
        normed = apart and n > 0 and first + n == layers
        parts.append(ModelSlice(i, range(first, first + n), i == 0, i == last, normed, apart and i == mtp_stage))
        first += n
    return tuple(parts)


class Plan(Struct, frozen=True):
    """A scenario laid out on ranks.

    `classes` are the ranks that are simulated; each stands for equal ranks (`sim.ranks.equal_ranks`). There is one for
    each pipeline rank, and more where ranks of one stage differ: in work (an uneven context split, uneven experts), in
    speed, or in the cost of their messages. The classes of one pipeline rank are consecutive, one for each simulated
    pipeline.
    """

    scenario: Scenario
    mesh: Mesh
    parts: tuple[ModelSlice, ...]
    classes: tuple[RankClass, ...]
    pipeline_of: tuple[int, ...]  # by position in a stage; () where a stage is one class

    def pipeline_rank(self, rank: int) -> int:
        """The pipeline coordinate of `rank`."""
        return self.mesh.coordinate("pp", rank)

    def class_of(self, rank: int) -> int:
        """Index into `classes` of the class that stands for `rank`."""
        pipeline_rank = self.pipeline_rank(rank)
        if not self.pipeline_of:
            return pipeline_rank
        return pipeline_rank * self.pipelines + self.pipeline_of[position_of(self.mesh, rank)]

    def work_of(self, rank: int) -> tuple[int, int]:
        """Return what decides a rank's share of its stage's work: context and expert coordinate, 0 where these are
        even."""
        context = self.mesh.coordinate("cp", rank) if uneven_context(self.scenario) else 0
        position = position_of(self.mesh, rank)
        return context, expert_rank(self.scenario.parallelism, position) if uneven_experts(self.scenario) else 0

    @property
    def pipelines(self) -> int:
        """Pipelines that are simulated: classes of each pipeline rank."""
        return max(1, len(self.classes) // self.scenario.parallelism.pp)

    def group_size(self, name: str) -> int:
        """Members of each group of this name."""
        return self.group_sizes[name]

    @property
    def group_sizes(self) -> dict[str, int]:
        """Return the number of members of each group, by name."""
        p = self.scenario.parallelism
        plane = p.tp * p.cp * p.dp
        shard, expert_shard = p.sharded_over
        local = min(shard, self.scenario.cluster.gpus_per_node) if p.zero_quantized_gradients else 1
        return {
            "tp": p.tp,
            "cp": p.cp,
            "cp_exchanged": p.cp_exchanged,
            "cp_ring": p.cp // p.cp_exchanged,
            "dp": p.dp,
            "pp": p.pp,
            "plane": plane,
            "dp_cp": p.dp * p.cp,
            "shard": shard,
            "replica": p.dp * p.cp // shard,
            "secondary": p.zero_hpz_partition_size or 1,
            "local": local,
            "between": shard // local,
            "experts": p.ep * p.expert_tp,
            "ep": p.ep,
            "expert_tp": p.expert_tp,
            "expert_dp": p.expert_replicas,
            "expert_shard": expert_shard,
            "expert_replica": p.expert_replicas // expert_shard,
            "model": p.tp * p.pp,
            "embedding": len(embedding_ranks(self.scenario)),
            "copies": p.form.model_copies,
        }

    def group(self, name: str, rank: int) -> list[int]:
        """The members of the group of this name that `rank` belongs to, ascending.

        - tp, cp, dp, pp: ranks that differ in this coordinate alone. plane: all ranks of one pipeline rank.
        - cp_exchanged: consecutive ranks of cp that exchange heads; cp_ring: one of each of these groups.
        - dp_cp: ranks that hold the same dense parameters. shard, replica: parts of dp_cp; ranks of a shard
          (consecutive ones) shard the states, ranks of a replica hold the same shard.
        - secondary: consecutive ranks of a shard that have a second copy of parameters together. local, between: ranks
          of a shard on one node, and one of each node, which exchange gradients in two steps (ZeRO++).
        - experts: ranks that together hold each expert of a stage once. expert_tp: ranks that split each of their
          experts; ep: ranks with different experts; expert_dp: ranks with the same part of the same experts.
          expert_shard, expert_replica: parts of expert_dp, as shard and replica are of dp_cp.
        - model: all ranks of one replica along tp and pp, which sum the gradient norm. embedding: `embedding_ranks`.
          copies: pipeline ranks i and p-1-i, which hold the same two parts under DualPipe.

        Raises:
            ValueError: for another name.
        """
        if name in ALONG:
            return self.mesh.along(ALONG[name], rank)
        if name in CUTS:
            cut = CUTS[name]
            ranks, size = self.group(cut.outer, rank), self.group_size(cut.size)
            run, place = divmod(ranks.index(rank), size)
            return ranks[place::size] if cut.across else ranks[run * size : (run + 1) * size]
        stages = self.mesh.along(["pp"], rank)
        if name == "embedding":
            return [stages[i] for i in embedding_ranks(self.scenario)]
        if name == "copies":
            i = self.mesh.coordinate("pp", rank)
            both = [stages[i], stages[len(stages) - 1 - i]]
            return sorted(both) if self.group_size(name) > 1 else [rank]
        raise ValueError(f"group: {name!r} is none of {', '.join(self.group_sizes)}")


def make_plan(scenario: Scenario, fold: bool = True, apart: frozenset[int] = frozenset()) -> Plan:
    """Lay a scenario out: mesh, parts, and the classes of equal ranks that are simulated.

    With `fold` a class stands for equal ranks, but each rank of `apart` has a class of its own. Without it every rank
    has one.
    """
    p = scenario.parallelism
    mesh = make_mesh(p)
    plan = Plan(scenario, mesh, make_parts(scenario.parallelism), (), ())
    plane = plan.group("plane", 0)
    ranks = np.array(plane)
    pipeline_of = pipeline_numbers(scenario, mesh, ranks, plan.group_sizes, apart) if fold else np.arange(len(plane))
    if pipeline_of is None:
        return replace(plan, classes=tuple(_folded_class(mesh, plane, i) for i in range(p.pp)))
    order = np.argsort(pipeline_of, kind="stable")  # pipeline after pipeline, ranks ascending in each
    split = [m.tolist() for m in np.split(ranks[order], np.cumsum(np.bincount(pipeline_of))[:-1])]
    shift = mesh.strides["pp"]
    classes = tuple(RankClass(m[0] + i * shift, tuple(r + i * shift for r in m), i) for i in range(p.pp) for m in split)
    return replace(plan, classes=classes, pipeline_of=tuple(pipeline_of.tolist()))


def _folded_class(mesh: Mesh, plane: list[int], pipeline_rank: int) -> RankClass:
    first = pipeline_rank * mesh.strides["pp"]
    if plane[-1] - plane[0] == len(plane) - 1:  # a range takes no memory, and a million ranks may be in it
        return RankClass(first, range(first, first + len(plane)), pipeline_rank)
    return RankClass(first, tuple(r + first for r in plane), pipeline_rank)
