"""Runs one rank of a scenario for real: its stages, its data-parallel groups, its optimizer and its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import WeightGrads
from calibrate.bundled_model.model import Build, Embedding, Head, Layer, make_blocks
from calibrate.parallel.comm import cut_records
from calibrate.parallel.data import DataParallel, Sync
from calibrate.parallel.expert_data_parallel import ExpertDataParallel
from calibrate.parallel.fsdp import ShardedParameters, ShardedStage
from calibrate.parallel.loss_scale import LossScale, square_sum
from calibrate.parallel.master import MasterAdamW
from calibrate.parallel.model_parallel import ModelParallel, expert_modules, whole_model
from calibrate.parallel.offload import HostStream, Offload
from calibrate.parallel.pipeline import Pipeline, Record, Stage
from calibrate.parallel.recompute import recompute
from calibrate.parallel.samples import draw
from calibrate.parallel.zero import ShardedOptimizer, Sharding, Shared
from sim.core.actions import Kind, Schedule, parts
from sim.inputs.scenario import Scenario
from sim.models.activation_memory.recompute import mode_of_layer
from sim.ranks.plan import Plan, make_parts, make_plan
from sim.ranks.rank_mesh import Mesh, make_mesh
from sim.simulation import simulate

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0


def make_schedule(scenario: Scenario) -> Schedule:
    """Return the same schedule that the simulator uses for this scenario."""
    p = scenario.parallelism
    if p.form.follows_times:
        return simulate(scenario).schedule  # it depends on the times of the scenario's calibration
    return p.form.build(p.pp, scenario.micro_batches, p.virtual_stages)


def block_numbers(scenario: Scenario, part: int) -> list[int]:
    """Return the numbers of one part's blocks (0 embedding, 1 to `layers` layers, then the head)."""
    p = make_parts(scenario.parallelism)[part]
    numbers = [0] if p.embedding else []
    numbers += [layer + 1 for layer in p.layers]
    return numbers + ([scenario.model.layers + 1] if p.head else [])


def seed_dropout(block_number: int, micro_batch: int) -> None:
    """Seed the dropout masks of one block and micro-batch (global numbers), so that they are equal in all layouts."""
    torch.manual_seed(block_number * 1_000_003 + micro_batch)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates and its process groups."""

    rank: int
    pipeline_rank: int
    data_rank: int
    peers: tuple[int, ...]
    data_group: dist.ProcessGroup | None  # ranks with the same parameters
    model_group: dist.ProcessGroup | None  # ranks with the rest of the model
    sharding: Sharding
    model: ModelParallel  # tensor, context and expert parallelism
    copies: dist.ProcessGroup | None = None  # DualPipe: ranks with the same two parts of the model
    tied: dist.ProcessGroup | None = None  # first and last pipeline rank, if they share the embedding matrix
    ways: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)  # up and down the pipeline


def make_place(scenario: Scenario, rank: int, device: str = "cpu") -> Place:
    """Return a rank's coordinates on the scenario's mesh. Collective, as it makes process groups."""
    plan, mesh = make_plan(scenario), make_mesh(scenario.parallelism)
    names = ["dp_cp", "model", "shard", "replica", "copies"]
    names += ["embedding"] if scenario.model.tied_embeddings else []
    groups = {name: _own_group(plan, name, rank) for name in names}
    sharding = Sharding(
        groups["shard"], plan.group_size("shard"), plan.group("shard", rank).index(rank), groups["replica"]
    )
    return Place(
        rank=rank,
        pipeline_rank=mesh.coordinate("pp", rank),
        data_rank=mesh.coordinate("dp", rank),
        peers=tuple(mesh.along(["pp"], rank)),
        data_group=groups["dp_cp"],
        model_group=groups["model"],
        sharding=sharding,
        model=ModelParallel(plan, rank, device),
        copies=groups["copies"],
        tied=groups.get("embedding"),
        ways=_ways(plan, mesh, rank) if scenario.parallelism.pp > 1 else (None, None),
    )


def _ways(plan: Plan, mesh: Mesh, rank: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Make two groups of this rank's pipeline, for messages up and down. Collective."""
    own: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    for first in range(plan.scenario.parallelism.ranks):
        members = list(mesh.along(["pp"], first))
        if members[0] == first:
            pair: Any = dist.new_group(members), dist.new_group(members)
            own = pair if rank in members else own
    return own


def _own_group(plan: Plan, name: str, rank: int) -> dist.ProcessGroup | None:
    """Make this rank's process group of a name of `Plan.group`; None if it would be alone. Collective."""
    own: dist.ProcessGroup | None = None
    if plan.group_size(name) > 1:
        for first in range(plan.scenario.parallelism.ranks):
            members = plan.group(name, first)
            if members[0] == first:
                group: Any = dist.new_group(members)
                own = group if rank in members else own
    return own


class Runner:
    """Executes steps of a scenario on this rank."""

    def __init__(self, scenario: Scenario, place: Place, dtype: torch.dtype, device: str = "cpu") -> None:
        self.scenario, self.place, self.device, self.dtype = scenario, place, device, dtype
        self.schedule = make_schedule(scenario)
        p = scenario.parallelism
        self.micro_batches = self.schedule.micro_batches
        self.mean = 1.0 / (self.micro_batches * p.dp * p.cp)  # weight of a micro-batch in the global batch's loss
        self.store = WeightGrads() if self._splits() else None
        self.numbers: dict[int, list[int]] = {}
        self.stages: dict[int, Stage] = {}
        self.modes: dict[int, str] = {}  # id of a layer: its mode of recomputation
        self.host_stream = HostStream(device)
        self.offloads: dict[int, Offload] = {}
        self.data: dict[int, DataParallel | ExpertDataParallel | ShardedOptimizer | ShardedParameters] = {}
        for s, owner in enumerate(self.schedule.rank_of_stage):
            if owner == place.pipeline_rank:
                self._add_stage(s)
        self.pipeline = Pipeline(
            self.schedule,
            place.pipeline_rank,
            place.peers,
            self.stages,
            place.model.shape,
            dtype,
            device,
            p.p2p_overlap and p.pp > 1,
            place.ways,
            together=p.ep_overlap and p.ep > 1,
        )
        self.tied = self._tied()
        self.loss_scale = LossScale() if dtype == torch.float16 else None
        self.scaled_by = 1.0  # loss scale of the last step
        self.optimizer = self._make_optimizer()

    def _splits(self) -> bool:
        return any(a.kind is Kind.W for rank in self.schedule.ranks for entry in rank for a in parts(entry))

    def _add_stage(self, s: int) -> None:
        scenario = self.scenario
        numbers = block_numbers(scenario, self.schedule.part_of_stage[s])
        build_ = Build(self.device, self.dtype, store=self.store)
        blocks = self.place.model.cut(make_blocks(whole_model(scenario), scenario.for_training, numbers, build_))
        modes = [mode_of_layer(scenario, max(n - 1, 0)) for n in numbers]
        recompute(blocks, modes)
        if scenario.for_training.activation_offload:
            self.offloads[s] = Offload(blocks, self.host_stream, s)
        self.modes.update({id(b): mode for b, mode in zip(blocks, modes, strict=True) if isinstance(b, Layer)})
        data = self.data[s] = self._make_data(s, blocks)
        scale, store = self.mean, self.store or WeightGrads()
        if isinstance(data, ShardedParameters):
            stage: Stage = ShardedStage(blocks, scale, store, after_block=data.graded, sharded=data)
        else:
            stage = Stage(blocks, scale, store)
        number_of = {id(b): n for b, n in zip(blocks, numbers, strict=True)}
        first = self.place.data_rank * self.micro_batches

        def before_block(block: nn.Module, micro_batch: int) -> None:
            data.before_block(block)
            if scenario.model.dropout > 0:
                seed_dropout(number_of[id(block)], first + micro_batch)

        stage.before_block = before_block
        self.stages[s], self.numbers[s] = stage, numbers

    def _make_data(
        self, s: int, blocks: Sequence[nn.Module]
    ) -> DataParallel | ExpertDataParallel | ShardedOptimizer | ShardedParameters:
        p, place = self.scenario.parallelism, self.place
        each_stage = self.micro_batches // len(self.schedule.chains)
        sync = Sync(p.dp_sync, p.bucket_bytes, each_stage)
        each, once = p.zero >= 2 and not self.scenario.sums_unsharded, p.holds_back_replicas
        if p.zero == 0 and self.scenario.model.moe is not None:
            groups = (place.data_group, place.model.expert_group)
            return ExpertDataParallel(blocks, groups, sync, s, self.store)
        if p.zero == 0:
            return DataParallel(blocks, place.data_group, sync, s, self.store)
        alone = self.scenario.model.tied_embeddings and (p.zero == 3 or p.pp > 1)
        shared = Shared(
            place.sharding,
            place.model.expert_sharding,
            frozenset(id(p) for x in expert_modules(blocks) for p in x.parameters()),
            frozenset(id(p) for p in _ends(blocks)) if alone else frozenset(),
        )
        if p.zero == 3:
            stays = (p.reshard_after_forward, p.keeps_gathered)
            return ShardedParameters(blocks, shared, sync, each, once, stays, s)
        return ShardedOptimizer(blocks, shared, sync, each, once, p.param_gather_overlap, s, self.store)

    def _tied(self) -> list[nn.Parameter]:
        """Return the embedding matrix if another pipeline rank holds it too."""
        if self.place.tied is None:
            return []
        return _ends(self.blocks())

    def _make_optimizer(self) -> torch.optim.Optimizer | MasterAdamW:
        if self.scenario.for_training.optimizer == "sgd":
            return torch.optim.SGD(self.owned(), lr=LEARNING_RATE, fused=True)
        if self.dtype.itemsize == 2:
            return MasterAdamW(self.owned(), LEARNING_RATE)
        return torch.optim.AdamW(self.owned(), lr=LEARNING_RATE, fused=True)

    def owned(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer updates: its parameters, or with ZeRO its shards."""
        return [p for data in self.data.values() for p in data.owned()]

    def own_gradient(self, p: nn.Parameter, row: int) -> Tensor:
        """Return this rank's part of the reduced gradient of `p` from a row on, flat: all of it, or ZeRO's shard."""
        return self._data_of(p).own_gradient(p, row)

    def copied_gradients(self) -> list[Tensor]:
        """Return the gradients of `tied`, which first and last pipeline rank sum."""
        return [self._data_of(p).copied_gradient(p) for p in self.tied]

    def _data_of(self, p: nn.Parameter) -> DataParallel | ExpertDataParallel | ShardedOptimizer | ShardedParameters:
        (stage,) = (s for s, stage in self.stages.items() if any(q is p for b in stage.blocks for q in b.parameters()))
        return self.data[stage]

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of all stages of this rank."""
        return [b for s in self.stages.values() for b in s.blocks]

    def recomputes(self, block: nn.Module) -> bool:
        """Return whether a block recomputes in its backward."""
        return self.modes.get(id(block), "none") != "none"

    def parameters(self) -> list[nn.Parameter]:
        """Return the distinct parameters of this rank's stages."""
        found = {id(p): p for s in self.stages.values() for b in s.blocks for p in b.parameters()}
        return list(found.values())

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of parameters that no optimizer updates."""
        return 0

    def free(self) -> None:
        """Free all memory; the runner cannot be used afterwards. Autograd's hooks would keep the parameters alive."""
        held = [x for data in self.data.values() for x in data.state()]
        for x in (*self.parameters(), *self.owned(), *(p.grad for p in (*self.parameters(), *self.owned())), *held):
            if x is not None:
                x.untyped_storage().resize_(0)

    def batch(self, number: int) -> Tensor:
        """Return the sequences [m · b, s + 1] that this rank takes in a step."""
        return draw(self.scenario, number, self.place.data_rank, self.device)

    def micro_batch_tokens(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and targets of a batch, each [micro-batches, b, s / cp]."""
        rows = batch.view(self.micro_batches, self.scenario.for_training.micro_batch_size, -1)
        return self.place.model.own_tokens(rows[:, :, :-1]), self.place.model.own_tokens(rows[:, :, 1:])

    def gradients(self, batch: Tensor) -> list[Record]:
        """Run forward, backward and gradient synchronization; gradients are in the parameters' `.grad`."""
        self.host_stream.copies.clear()
        for data in self.data.values():
            data.begin()
        self.scaled_by = self.loss_scale.value if self.loss_scale else 1.0
        for stage in self.stages.values():
            stage.scale = self.mean * self.scaled_by
        tape = self.place.model.tape
        tape.take()
        records = cut_records(self.pipeline.step(*self.micro_batch_tokens(batch)), tape.take())
        for data in self.data.values():
            data.finish()
        records += [r for data in self.data.values() for r in data.records]
        self.place.model.sum_partial(self.blocks(), self.own_gradient)
        return records + self._reduce_copies()

    def _reduce_copies(self) -> list[Record]:
        """Sum gradients over pipeline ranks with copies of the same parameters: DualPipe's parts, a tied matrix."""
        spans = []
        same: list[tuple[Tensor, dist.ProcessGroup | None]] = [(g, self.place.tied) for g in self.copied_gradients()]
        if self.place.copies is not None:
            for s in sorted(self.data, key=lambda s: self.schedule.part_of_stage[s]):
                same += [(g, self.place.copies) for g in self.data[s].owned_gradients()]
        for shared, group in same:
            start = self.pipeline.now()
            dist.all_reduce(shared, group=group)
            spans.append(Record("ALL_REDUCE", -1, -1, start, self.pipeline.now()))
        return spans

    def optimize(self) -> list[Record]:
        """Clip the gradients, update the parameters and zero the gradients."""
        records = self._clip() if self.scenario.for_training.gradient_clipping else []
        start = self.pipeline.now()
        self._update()
        records.append(Record("OPTIMIZER", -1, -1, start, self.pipeline.now()))
        for data in self.data.values():
            before = len(data.records)
            data.updated()
            records += data.records[before:]
            data.zero()
        return records

    def _update(self) -> None:
        """Run the optimizer; with loss scaling undo the factor, or skip the step after an overflow."""
        if self.loss_scale is None:
            self.optimizer.step()
            return
        assert isinstance(self.optimizer, MasterAdamW)
        if self.loss_scale.apply is not None:
            self.optimizer.step(self.loss_scale.apply)
        self.loss_scale.stepped()

    def _clip(self) -> list[Record]:
        """Scale the gradients to a norm of at most `CLIP_NORM`, taken over all ranks' parts of them.

        Returns the records of norm, all-reduces and scaling.
        """
        gradients = [g for data in self.data.values() for g in data.owned_gradients()]
        groups = [self.place.model_group]
        groups += [self.place.sharding.group] if self.scenario.parallelism.zero else []
        times, kinds = [self.pipeline.now()], ["OPTIMIZER"]
        scaling = self.loss_scale
        square = torch.stack([g.dot(g) if scaling is None else square_sum(g) for g in gradients]).sum()
        shards = self.place.sharding.shards if self.scenario.parallelism.zero else 1
        square += self.place.model.square_correction(self.blocks(), self.own_gradient, shards)
        if self.place.copies is not None:
            square /= 2
        if self.tied and self.place.pipeline_rank > 0:  # the first stage counts the tied matrix
            square -= sum((square_sum(self.own_gradient(p, 0)) for p in self.tied), torch.zeros_like(square))
        times.append(self.pipeline.now())
        for group in groups:
            if group is not None:
                dist.all_reduce(square, group=group)
                times.append(self.pipeline.now())
                kinds.append("ALL_REDUCE")
        scale = (CLIP_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
        if scaling is not None:
            scaling.found(square.sqrt(), CLIP_NORM)
        for g in gradients if scaling is None else ():
            g.mul_(scale)
        times.append(self.pipeline.now())
        kinds.append("OPTIMIZER")
        return [Record(k, -1, -1, a, b) for k, (a, b) in zip(kinds, pairwise(times), strict=True)]

    def step(self, batch: Tensor) -> list[Record]:
        """Run a whole training step."""
        self.zero_losses()
        return [*self.gradients(batch), *self.optimize()]

    def zero_losses(self) -> None:
        """Forget the losses of the last step."""
        for s in self.stages.values():
            s.losses.clear()

    def zero_gradients(self) -> None:
        """Zero the gradients, as before the first step."""
        for data in self.data.values():
            data.zero()

    def loss(self) -> float:
        """Return this rank's share of the global batch's mean loss.

        It is zero without the last stage, and on all tensor-parallel ranks but the first.
        """
        counts = self.place.model.tp.index == 0
        losses = [float(x) / self.scaled_by for s in self.stages.values() for x in s.losses.values()]
        return sum(losses) if counts else 0.0


def _ends(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the matrices over the vocabulary."""
    found = [b.weight for b in blocks if isinstance(b, Embedding)]
    return found + [b.output.weight for b in blocks if isinstance(b, Head)]


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Sum each value over all ranks. Collective."""
    x = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(x)
    return x.tolist()
