"""The program of one action of a stage: the programs of its blocks, joined, with everything around them.

Around the blocks: data parallelism (`data_parallel.py`, `updated_parameters.py`), activations offloaded to host memory
and fetched back, a stage's input sent in tensor-parallel pieces and gathered (Megatron's scatter/gather), and measured
blocks, which stand in for their operators where the profile has them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Action, Kind, Schedule
from sim.core.program import (
    BLOCK_END,
    PART_OF_BLOCK,
    Block,
    BlockKind,
    BlockRef,
    Comm,
    Compute,
    Item,
    Phase,
    Program,
    Wait,
)
from sim.core.timeline import HOST
from sim.models.dims import Shard
from sim.models.operators import rerun
from sim.models.output.reference import reading_scenario, reference_scenario, with_casts, without_gradients
from sim.models.source import source_of
from sim.prices.operator_prices import Costs
from sim.programs.data_parallel import DataParallel
from sim.programs.deferral import Deferral, deferral_of, without_product
from sim.programs.host_copies import HostCopy, host_copies
from sim.programs.updated_parameters import prologue, prologue_waits
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.equal_ranks import expert_rank, position_of
from sim.ranks.plan import ModelSlice, Plan

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

PHASES = {
    Kind.F: frozenset({Phase.FORWARD}),
    Kind.B: frozenset({Phase.INPUT_GRAD, Phase.WEIGHT_GRAD}),
    Kind.I: frozenset({Phase.INPUT_GRAD}),
    Kind.W: frozenset({Phase.WEIGHT_GRAD}),
}
MEASURED_PHASE = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad"}


def shard_of(plan: Plan, rank: int) -> Shard:
    """The context- and expert-parallel position of a rank; experts are numbered over the ranks of its stage."""
    expert = expert_rank(plan.scenario.parallelism, position_of(plan.mesh, rank))
    return Shard(plan.mesh.coordinate("cp", rank), expert)


def stage_blocks(plan: Plan, part: ModelSlice, rank: int) -> tuple[Block, ...]:
    """The blocks of a part as `rank` runs them, first to last."""
    s = plan.scenario
    shard, source = shard_of(plan, rank), source_of(s)
    blocks = [source.first()] if part.embedding else []
    of_kind: dict[tuple[object, ...], Block] = {}  # layers of one kind differ in their name alone
    for layer in part.layers:
        kind = source.layer_kind(layer)
        if kind not in of_kind:
            of_kind[kind] = source.layer(layer, shard)
        blocks.append(replace(of_kind[kind], name=f"layer {layer}"))
    norm, *modules = source.apart(shard) if part.normed or part.predicts else (None,)
    blocks += [norm] if norm is not None and part.normed else []
    blocks += modules if part.predicts else []
    return (*blocks, *source.last(shard)) if part.head else tuple(blocks)


def reference_blocks(plan: Plan, part: ModelSlice, rank: int) -> tuple[Block, ...]:
    """The blocks of the frozen reference, which has the trained model's layout; none without one."""
    if not plan.scenario.for_training.runs_reference:
        return ()
    return _read_only(plan, reference_scenario(plan.scenario), part, rank)


def reading_blocks(plan: Plan, part: ModelSlice, rank: int) -> tuple[Block, ...]:
    """The trained model's blocks as they run over answers that it does not learn from; none without such."""
    if not plan.scenario.for_training.reads_others:
        return ()
    return _read_only(plan, reading_scenario(plan.scenario), part, rank)


def _read_only(plan: Plan, own: Scenario, part: ModelSlice, rank: int) -> tuple[Block, ...]:
    blocks = without_gradients(own, stage_blocks(replace(plan, scenario=own), part, rank), shard_of(plan, rank))
    may_learn = own.for_training.lora is None or plan.scenario.for_training.reference == "model"
    return with_casts(own, blocks) if may_learn else blocks  # of weights that are frozen autocast keeps no copies


def with_copy(blocks: tuple[Block, ...], plan: Plan, held: bool) -> tuple[Block, ...]:
    """The blocks, with the copy of the embedding matrix that a tied output or prediction modules need on this rank.

    None is added if the rank has the matrix already (`held`).

    It is a parameter as all others: reduced and gathered over data-parallel ranks, and updated (Megatron-LM,
    core/models/common/language_module/language_module.py: `setup_embeddings_and_output_layer`; a `shared` parameter is
    left out of the norm alone). Beside adapters it is frozen.
    """
    source = source_of(plan.scenario)
    elements = {BlockKind.MTP: source.copied_elements(), BlockKind.HEAD: source.tied_elements()}
    kinds = [b.kind for b in blocks]
    kind = next((kind for kind in elements if kind in kinds), None)
    if held or kind is None or elements[kind] == 0:
        return blocks
    at, n = kinds.index(kind), elements[kind]
    block = blocks[at]
    if plan.scenario.for_training.lora is not None:
        block = replace(block, frozen_params=block.frozen_params + n)
    else:
        block = replace(block, params=block.params + n, tensors=(*block.tensors, n))
    return (*blocks[:at], block, *blocks[at + 1 :])


class Stage(Struct, frozen=True, eq=False):
    """A part of the model on one rank, with all that decides its programs."""

    blocks: tuple[Block, ...]
    dp: DataParallel
    costs: Costs
    offload: tuple[HostCopy, ...]
    gather_input: float  # bytes of a stage's input gathered over tp on arrival; 0 = arrives whole
    before_forward: Program = ()
    reference: tuple[Block, ...] = ()  # of a frozen model, run forward behind each forward of `blocks`
    deferral: Deferral | None = None
    reading: tuple[Block, ...] = ()  # of the trained model, run forward over answers that it does not learn from
    part_of: Stage | None = None  # the stage whose time its blocks take, of which these hold a part of the memory

    def forward(self, first: bool, gathers_input: bool, early: bool = False) -> Program:
        """Forward of one micro-batch; `first`: the step's first here; `gathers_input`: it comes from another rank;
        `early`: no backward has ended here."""
        blocks = self.measured(Kind.F)
        out: list[Item] = [*self._gather(gathers_input, Phase.FORWARD), *self.before_forward]
        parameter_waits = prologue_waits(self.blocks, self.dp) if first else [[] for _ in blocks]
        for i, items in enumerate(weave_forward(blocks, self.dp, first, early)):
            out += parameter_waits[i]
            out += self._copied_by(i - 1)
            out += (*items, BLOCK_END)
            out += [self._copy("offload", c, f"o{i}", Phase.FORWARD) for c in self.offload if c.block == i]
        out += self._copied_by(len(blocks) - 1)
        for others in self.read_only():
            for items in weave_forward(tuple(_measured(b, Kind.F, self.costs) for b in others), self.dp, first, early):
                out += (*items, BLOCK_END)
        return tuple(out)

    def defers(self, action: Action) -> bool:
        """Tell whether an action puts off what `deferral` says."""
        return self.deferral is not None and action.kind is Kind.B and action.micro_batch < self.deferral.micro_batches

    def backward(
        self, kind: Kind, last: bool, gathers_input: bool, defers: bool = False, early: bool = False
    ) -> Program:
        """Backward of one micro-batch, whole or split; `last`: after it gradients are reduced; `defers`: it puts off
        what `deferral` says; `early`: it is the first here."""
        phases = PHASES[kind]
        out: list[Item] = self._gather(gathers_input and kind is not Kind.W, Phase.INPUT_GRAD)
        copies = self.offload[::-1] if kind is not Kind.W else ()
        last_block = len(self.blocks) - 1
        blocks = without_product(self.measured(kind)) if defers else self.measured(kind)
        for i, items in enumerate(weave_backward(blocks, self.dp, phases, last, early)):
            block = last_block - i
            out += [self._copy("reload", c, f"r{c.block}", Phase.INPUT_GRAD) for c in copies if c.until == block]
            out += [Wait(f"r{block}", Phase.INPUT_GRAD) for c in copies if c.block == block]
            out += (*items, BLOCK_END)
        return tuple(out)

    def measured(self, kind: Kind) -> tuple[Block, ...]:
        """The blocks, with measured seconds in place of operators if the profile has all runs of a block."""
        return tuple(_measured(b, kind, self.costs) for b in self.blocks)

    def read_only(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each forward beside the training's own, all of which keep nothing: the trained model and the
        reference read further answers, and the reference reads those that are learned from."""
        further = (self.reading, self.reference) if self.reading else ()
        return tuple(blocks for blocks in (*further, self.reference) if blocks)

    def prologue(self) -> Program:
        """The program at the beginning of the step: see `updated_parameters.prologue`."""
        return prologue(self.blocks, self.dp)

    def block_seconds(self, kind: Kind) -> list[float]:
        """Seconds of each block's own computations in an action, in the order in which they run; of a forward those
        beside the training's own, too."""
        if self.part_of is not None:
            return self.part_of.block_seconds(kind)
        out = []
        for b in (*self.blocks, *chain.from_iterable(self.read_only())) if kind is Kind.F else self.blocks[::-1]:
            program = b.forward if kind is Kind.F else (*b.recompute, *b.backward)
            mine = (i for i in program if isinstance(i, Compute) and i.phase in PHASES[kind])
            out.append(sum(self.costs.compute(i).seconds for i in mine))
        return out

    def _gather(self, wanted: bool, phase: Phase) -> list[Item]:
        if not wanted or self.gather_input <= 0:
            return []
        return [Comm("stage input", "all_gather", "tp", self.gather_input, phase)]

    def _copy(self, kind: str, copy: HostCopy, handle: str, phase: Phase) -> Item:
        name = f"{self.blocks[copy.block].name} activations"
        return Comm(name, kind, HOST, copy.bytes, phase, False, handle)

    def _copied_by(self, block: int) -> list[Item]:
        """Waits for the copies that must have ended when this block's forward has."""
        return [Wait(f"o{c.block}", Phase.FORWARD) for c in self.offload if c.until == block]


def _measured(block: Block, kind: Kind, costs: Costs) -> Block:
    """A block in which measured seconds replace the computations of one action, run by run between communications."""
    if not block.key or not costs.profile.blocks:
        return block
    phases = PHASES[kind]
    forward = kind is Kind.F
    program = block.forward if forward else tuple(i for i in block.backward if i.phase in phases)
    replaced = replace_runs(program, block, MEASURED_PHASE[kind], costs)
    if replaced is None:
        return block
    recompute = block.recompute
    if recompute and kind is not Kind.W:
        again = replace_runs(recompute, block, "recompute", costs)
        if again is None and recompute == rerun(block.forward)[: len(recompute)]:
            again = replace_runs(recompute, block, "forward", costs)
        recompute = again if again is not None else recompute
    if forward:
        return replace(block, forward=replaced, recompute=recompute)
    return replace(block, backward=replaced, recompute=recompute)


def replace_runs(program: Program, block: Block, phase: str, costs: Costs) -> Program | None:
    """Each run of computations between communications as one measured item; None if one was not measured.

    `program` is `block`'s, for an action of this `phase`.
    """
    out: list[Item] = []
    run, open_run = 0, False
    for item in program:
        if not isinstance(item, Compute):
            open_run = False
            out.append(item)
            continue
        if not open_run:
            ref = BlockRef(block.key, phase, run)
            if costs.block(*ref) is None:
                return None
            part = PART_OF_BLOCK[block.kind]
            out.append(Compute(block.kind, "block", (), "", 0.0, 0.0, item.phase, 0, block=ref, part=part))
            run, open_run = run + 1, True
    return tuple(out)


def stage_input_bytes(plan: Plan, part: int | None = None) -> float:
    """Bytes of the input of one micro-batch on one rank of the stage that holds a part; None: the least of all cuts.

    Prediction modules on a stage of their own hand on their input and their results, joined along the sequence, for the
    output layer (Megatron-LM, core/transformer/multi_token_prediction.py: `MultiTokenPredictionBlock.forward`).
    """
    source = source_of(plan.scenario)
    if part is None:
        return source.input_bytes(None)
    apart = plan.scenario.parallelism.mtp_apart
    joined = 1 if apart is None or part <= apart else 1 + plan.scenario.model.mtp_layers
    return joined * source.input_bytes(plan.parts[part].layers.start)


def class_stages(
    plan: Plan,
    schedule: Schedule,
    costs_of: Callable[[int], Costs],
    dp: DataParallel,
    named: bool,
    made: dict[tuple[object, ...], Stage],
) -> list[dict[int, Stage]]:
    """The stages that each class of ranks holds, by schedule stage. Unless `named`, equal stages are one object (whose
    layers then carry the first one's names); those in `made` are not made again. `costs_of`: the costs of a rank."""
    p = plan.scenario.parallelism
    pieces = p.p2p_scatter and p.tp > 1 and not p.sp
    gathered = [stage_input_bytes(plan, part.index) if pieces else 0.0 for part in plan.parts]
    kind = source_of(plan.scenario).layer_kind
    works = [
        (part.embedding, part.head, part.normed, part.predicts, size, tuple([kind(n) for n in part.layers]))
        for part, size in zip(plan.parts, gathered, strict=True)
    ]
    stages = list[list[int]]([] for _ in schedule.ranks)
    for i, r in enumerate(schedule.rank_of_stage):
        stages[r].append(i)
    out, (first, first_of_rank, later) = list[dict[int, Stage]](), dp.by_place
    for c in plan.classes:
        out.append({})
        mine, costs = plan.work_of(c.rank), costs_of(c.rank)
        parts = [plan.parts[schedule.part_of_stage[i]] for i in stages[c.pipeline_rank]]
        for i in stages[c.pipeline_rank]:
            part = schedule.part_of_stage[i]
            # One matrix on a rank is enough for the embedding, prediction modules and the output.
            held = any(x.embedding or (x.predicts and not plan.parts[part].predicts) for x in parts)
            own = first if i == 0 else first_of_rank if i == stages[c.pipeline_rank][0] else later
            work = i if named else works[part]
            key: tuple[object, ...] = (work, mine, costs.gpu.name, held, own is first, own.gathered_early)
            if key not in made:
                blocks = with_copy(stage_blocks(plan, plan.parts[part], c.rank), plan, held)
                made[key] = _new_stage(plan, part, c.rank, blocks, own, costs, gathered[part])
            out[-1][i] = made[key]
    return out


def _new_stage(
    plan: Plan, part: int, rank: int, blocks: tuple[Block, ...], own: DataParallel, costs: Costs, gathered: float
) -> Stage:
    """A stage of these blocks. `gathered`: bytes of its input that arrive in pieces."""
    s = plan.scenario
    copies = host_copies(blocks, s.for_training.activation_offload)
    frozen, reading = (blocks_of(plan, plan.parts[part], rank) for blocks_of in (reference_blocks, reading_blocks))
    put_off = deferral_of(blocks, s.deferred_micro_batches)
    return Stage(blocks, own, costs, copies, gathered, source_of(s).before_forward(), frozen, put_off, reading)
