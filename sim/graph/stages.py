"""What one stage executes for one action: the programs of its blocks, joined, with everything around them.

Around the blocks: data parallelism (`sim.graph.data_parallel`), activations offloaded to host memory and fetched back,
a stage's input sent in tensor-parallel pieces and gathered (Megatron's scatter/gather), and measured blocks, which
stand in for their operators where the profile has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.actions import Kind
from sim.folding import expert_rank
from sim.graph.data_parallel import (
    DataParallel,
    after_backward,
    compute_bytes,
    gather_after_optimizer,
    prologue,
    prologue_waits,
    weave_backward,
    weave_forward,
)
from sim.inputs.scenario import Scenario
from sim.models.dims import Shard
from sim.models.embedding import embedding_block
from sim.models.head import head_block
from sim.models.layer import layer_block
from sim.models.mtp import mtp_block
from sim.models.operators import rerun
from sim.models.optimizer import clip_items, gradient_buffer_items, optimizer_items
from sim.models.recompute import mode_of_layer
from sim.plan import Part, Plan
from sim.prices.costs import Costs
from sim.program import BLOCK_END, Block, Comm, Compute, Item, Phase, Program, Wait

PHASES = {
    Kind.F: frozenset({Phase.FORWARD}),
    Kind.B: frozenset({Phase.INPUT_GRAD, Phase.WEIGHT_GRAD}),
    Kind.I: frozenset({Phase.INPUT_GRAD}),
    Kind.W: frozenset({Phase.WEIGHT_GRAD}),
}
MEASURED_PHASE = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad"}


def stage_blocks(plan: Plan, part: Part, rank: int) -> tuple[Block, ...]:
    """The blocks of a part as `rank` runs them, first to last."""
    s = plan.scenario
    plane = rank - plan.pipeline_rank(rank) * plan.mesh.strides["pp"]
    position = plan.mesh.along(["tp", "cp", "dp"], plane).index(plane) if s.parallelism.ep > 1 else 0
    shard = Shard(plan.mesh.coordinate("cp", rank), expert_rank(s.parallelism, position))
    blocks = [embedding_block(s)] if part.embedding else []
    sorts: dict[tuple[object, ...], Block] = {}  # layers of one sort differ in their name alone
    for layer in part.layers:
        sort = layer_sort(s, layer)
        if sort not in sorts:
            sorts[sort] = layer_block(s, layer, shard)
        blocks.append(replace(sorts[sort], name=f"layer {layer}"))
    if part.head:
        blocks.append(head_block(s))
        blocks += [mtp_block(s, shard)] * s.model.mtp_layers
    return tuple(blocks)


def layer_sort(scenario: Scenario, layer: int) -> tuple[object, ...]:
    """What a layer's program depends on besides its rank; experts of uneven load differ from layer to layer."""
    moe = scenario.model.is_moe_layer(layer)
    uneven = moe and scenario.model.moe is not None and scenario.model.moe.imbalance != "balanced"
    first = layer == 0 and scenario.training is not None and scenario.training.lora is not None
    return moe, mode_of_layer(scenario, layer), layer if uneven else 0, first


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of the model on one rank, with all that decides its programs."""

    blocks: tuple[Block, ...]
    dp: DataParallel
    costs: Costs
    offload: bool
    gather_input: float  # bytes of a stage's input gathered over tp on arrival; 0 = arrives whole

    def forward(self, first: bool, gathers_input: bool) -> Program:
        """Forward of one micro-batch; `first`: the step's first here; `gathers_input`: it comes from another rank."""
        blocks = self.measured(Kind.F)
        out: list[Item] = self._gather(gathers_input, Phase.FORWARD)
        parameter_waits = prologue_waits(self.blocks, self.dp) if first else [[] for _ in blocks]
        for i, items in enumerate(weave_forward(blocks, self.dp, first)):
            out += parameter_waits[i]
            out += [Wait(f"o{i - 2}", Phase.FORWARD)] if self.offload and i >= 2 else []
            out += (*items, BLOCK_END)
            out += self._copy("offload", i, f"o{i}", Phase.FORWARD)
        if self.offload:
            out += [Wait(f"o{i}", Phase.FORWARD) for i in range(max(0, len(blocks) - 2), len(blocks))]
        return tuple(out)

    def backward(self, kind: Kind, last: bool, gathers_input: bool) -> Program:
        """Backward of one micro-batch, whole or split; `last`: the step's last here."""
        phases = PHASES[kind]
        out: list[Item] = self._gather(gathers_input and kind is not Kind.W, Phase.INPUT_GRAD)
        n = len(self.blocks)
        reload = self.offload and kind is not Kind.W
        out += self._copy("reload", n - 1, "r0", Phase.INPUT_GRAD) if reload else []
        for i, items in enumerate(weave_backward(self.measured(kind), self.dp, phases, last)):
            if reload:
                out += self._copy("reload", n - 2 - i, f"r{i + 1}", Phase.INPUT_GRAD) if i + 1 < n else []
                out.append(Wait(f"r{i}", Phase.INPUT_GRAD))
            out += (*items, BLOCK_END)
        return tuple(out)

    def measured(self, kind: Kind) -> tuple[Block, ...]:
        """The blocks, with measured seconds in place of operators wherever the profile has all of a block's pieces."""
        return tuple(_measured(b, kind, self.costs) for b in self.blocks)

    def prologue(self) -> Program:
        """What the step begins with: see `data_parallel.prologue`."""
        return prologue(self.blocks, self.dp)

    def block_seconds(self, kind: Kind) -> list[float]:
        """Seconds of each block's own computations in an action, in the order in which they run."""
        out = []
        for b in self.blocks if kind is Kind.F else self.blocks[::-1]:
            program = b.forward if kind is Kind.F else (*b.recompute, *b.backward)
            mine = (i for i in program if isinstance(i, Compute) and i.phase in PHASES[kind])
            out.append(sum(self.costs.compute(i).seconds for i in mine))
        return out

    def _gather(self, wanted: bool, phase: Phase) -> list[Item]:
        if not wanted or self.gather_input <= 0:
            return []
        return [Comm("stage input", "all_gather", "tp", self.gather_input, phase)]

    def _copy(self, kind: str, i: int, handle: str, phase: Phase) -> list[Item]:
        if not self.offload or i < 0:
            return []
        block = self.blocks[i]
        size = sum(s.bytes for s in block.saved)
        return [Comm(f"{block.name} activations", kind, "host", size, phase, False, handle)]


def _measured(block: Block, kind: Kind, costs: Costs) -> Block:
    """A block whose computations of one action are replaced by measured ones, piece by piece between messages."""
    if not block.key or not costs.profile.blocks:
        return block
    phases = PHASES[kind]
    forward = kind is Kind.F
    program = block.forward if forward else tuple(i for i in block.backward if i.phase in phases)
    replaced = replace_runs(program, block.key, MEASURED_PHASE[kind], costs)
    if replaced is None:
        return block
    recompute = block.recompute
    if recompute and kind is not Kind.W:
        again = replace_runs(recompute, block.key, "recompute", costs)
        if again is None and recompute == rerun(block.forward)[: len(recompute)]:
            again = replace_runs(recompute, block.key, "forward", costs)
        recompute = again if again is not None else recompute
    if forward:
        return replace(block, forward=replaced, recompute=recompute)
    return replace(block, backward=replaced, recompute=recompute)


def replace_runs(program: Program, key: str, phase: str, costs: Costs) -> Program | None:
    """Each run of computations between communications as one measured item; None if one was not measured."""
    out: list[Item] = []
    run, open_run = 0, False
    for item in program:
        if not isinstance(item, Compute):
            open_run = False
            out.append(item)
            continue
        if not open_run:
            if costs.block(key, phase, run) is None:
                return None
            out.append(Compute(f"{key}#{phase}#{run}", "block", (), "", 0.0, 0.0, item.phase))
            run, open_run = run + 1, True
    return tuple(out)


def epilogue(stages: tuple[Stage, ...], plan: Plan, tied: bool) -> Program:
    """The end of a rank's step: what is left of gradient synchronization, clipping, optimizer, parameter gathers.

    `tied`: this rank is an end of the pipeline and shares the embedding matrix with the other end.
    """
    scenario = plan.scenario
    t = scenario.training
    assert t is not None
    blocks = tuple(b for s in stages for b in s.blocks)
    dp = stages[0].dp
    dense, experts = sum(b.params for b in blocks), sum(b.expert_params for b in blocks)
    sharded = (-(-dense // dp.shard), -(-experts // dp.expert_shard)) if dp.zero >= 1 else (dense, experts)
    buffered = sum(sharded) if dp.each_micro_batch else dense + experts
    out: list[Item] = [*gradient_buffer_items(buffered, scenario), *after_backward(blocks, dp)]
    if tied:
        m, p = scenario.model, scenario.parallelism
        size = m.padded_vocab(p.tp) * m.hidden / p.tp * dp.gradient_bytes
        out.append(Comm("tied embedding gradients", "all_reduce", "embedding", size, Phase.OPTIMIZER))
    dense, experts = sharded
    if plan.group_size("copies") > 1:
        size = (dense + experts) * dp.gradient_bytes
        out.append(Comm("DualPipe copies' gradients", "all_reduce", "copies", size, Phase.OPTIMIZER))
    if t.gradient_clipping:
        clip = clip_items(dense + experts, scenario)  # nothing on a stage without parameters
        out += [*clip[:1], *_norm_reductions(plan, dp), *clip[1:]]
    out += optimizer_items(dense + experts, scenario)
    out += gather_after_optimizer(blocks, dp)
    return tuple(out)


def _norm_reductions(plan: Plan, dp: DataParallel) -> list[Item]:
    """The squared norm, four bytes, summed over everyone who holds another part of the gradients."""
    groups = ["model"] if plan.group_size("model") > 1 else []
    groups += ["shard"] if dp.zero >= 1 and dp.shard > 1 else []
    return [Comm("gradient norm", "all_reduce", g, 4.0, Phase.OPTIMIZER) for g in groups]


def stage_input_bytes(plan: Plan) -> float:
    """Bytes of a stage's input of one micro-batch on one rank: [micro-batch, seq/cp, hidden], cut by tp under sp."""
    s = plan.scenario
    t, p = s.training, s.parallelism
    assert t is not None
    tokens = t.micro_batch_size * t.seq_len / p.cp / (p.tp if p.sp else 1)
    return tokens * s.model.hidden * compute_bytes(t.precision)
