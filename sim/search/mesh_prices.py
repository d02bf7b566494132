"""Price blocks and messages on one mesh, once for all layouts that share it."""

from __future__ import annotations

from functools import cached_property

from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.program import Block, BlockKind, Comm, Compute, Phase, Program
from sim.core.timeline import DP
from sim.inputs.zero_keys import as_reduced
from sim.prices.operator_prices import Costs
from sim.prices.price import Priced, together_s
from sim.prices.rank_prices import Pricing
from sim.programs.around_messages import gradients_of, unpack
from sim.programs.compile import compile_program
from sim.programs.data_parallel import DataParallel, make_data_parallel
from sim.programs.gathered_units import in_root, stays_all_step
from sim.programs.stages import PHASES, Stage
from sim.programs.weave import weave_backward
from sim.ranks.places import period_of
from sim.ranks.plan import make_plan
from sim.search.cached import cached
from sim.search.space import MeshSizes, Space, scenario_of, simplest
from topology.network import Network

PROGRAMS = ("forward", "backward", "recompute")


class PricedBlock:
    """Hold a block with its bytes and, computed on first use, its seconds.

    `computes_only`: count computation alone, because another action may hide the block's messages. `gathered`, here and
    below: each action gathers the block's parameters (ZeRO-3) and copies them into place.
    """

    def __init__(self, block: Block, prices: MeshPrices, computes_only: bool) -> None:
        shared = {name: prices.kept(p) for name in PROGRAMS if (p := getattr(block, name))}
        self.block, self._prices, self._computes_only = replace(block, **shared), prices, computes_only
        self.saved_bytes = sum(s.bytes for s in block.saved)

    @cached
    def action_s(self, kind: Kind, gathered: bool) -> float:
        """Return the seconds of one micro-batch's action in this block alone, including waits for the host."""
        program = self._program(kind, gathered)
        if self._computes_only:
            return sum(self._prices.price(i).seconds for i in program if isinstance(i, Compute))
        # The compiled program's time is less than the sum of its items by what the block hides within itself.
        return self._prices.program_s(program)

    @cached
    def work_s(self, gathered: bool) -> float:
        """Return the least seconds of a forward and a backward, whole or split, without compiling them.

        They are the computations and the blocking messages of the busiest stream. `together_s` is a norm of host and
        device seconds, so the same kernels in several programs wait for the host at least as long.
        """
        return sum(self._work_s(self._program(kind, gathered)) for kind in (Kind.F, Kind.B))

    def _work_s(self, program: Program) -> float:
        host_s = device_s = 0.0
        blocking: dict[str, float] = {}
        # Only a blocking message surely adds time; an asynchronous one may be hidden completely.
        for item in program:
            if isinstance(item, Compute):
                priced = self._prices.price(item)
                host_s, device_s = host_s + priced.host_s, device_s + priced.seconds
            elif isinstance(item, Comm) and item.blocking:
                stream = item.stream or item.group
                # The busiest stream counts alone, because two streams may block at the same time.
                blocking[stream] = blocking.get(stream, 0.0) + self._prices.price(item).seconds
        if self._computes_only:
            return device_s
        return together_s(host_s, device_s) + max(blocking.values(), default=0.0)

    def _program(self, kind: Kind, gathered: bool) -> Program:
        # `measured` replaces operators by the profile's measured blocks, as the simulation does.
        (block,) = Stage((self.block,), self._prices.dp(0), self._prices.costs, (), 0.0).measured(kind)
        if kind is Kind.F:
            program = block.forward
        else:
            # Recomputation precedes input gradients. The weight-gradient half recomputes nothing.
            again = block.recompute if Phase.INPUT_GRAD in PHASES[kind] else ()
            program = (*again, *(i for i in block.backward if i.phase in PHASES[kind]))
        # A weight gradient needs the inputs and the output's gradients, but no parameters.
        if gathered and kind is not Kind.W and self._surely_gathered(kind):
            dp = self._prices.dp(3)
            program = (*unpack(self.gathers(dp), dp, Phase.FORWARD), *program)
        return program

    def _surely_gathered(self, kind: Kind) -> bool:
        """Tell whether the block is gathered for such an action wherever it lies in a stage (`gathered_again`)."""
        engine, head = self._prices.dp(3).engine, self.block.kind is BlockKind.HEAD
        tied = engine.gathers_tied and kind is not Kind.F and self.block.kind is BlockKind.EMBEDDING
        if tied or stays_all_step(engine, self.block):
            return False
        if kind is Kind.F:
            return not (head and engine.ends_together)
        return not in_root(engine, self.block) and not (engine.kept_last and (head or engine.ends_together))

    def gathers(self, dp: DataParallel) -> list[Comm]:
        """Return the communications that gather the block's parameters."""
        return dp.gather_block(self.block, Phase.FORWARD, "g")

    @cached_property
    def gathers_s(self) -> float:
        """Return the seconds of gathering the block's parameters with ZeRO-3."""
        return self._prices.comms_s(self.gathers(self._prices.dp(3)))

    @cached_property
    def reduces_s(self) -> float:
        """Return the seconds that ZeRO-3's reduction of the block's gradients takes on the data-parallel stream."""
        reduced = self._prices.dp(3).reduce("", self.block.params, self.block.expert_params, "r")
        # All-reduces over replicas (hybrid sharding) have their own stream and may be hidden.
        return self._prices.comms_s([c for c in reduced if c.stream == DP])

    @cached_property
    def gradients(self) -> Block:
        """Return the block reduced to the operators that complete gradients and the last item of its backward."""
        # The last item decides which reductions are exposed after the backward.
        last = len(self.block.backward) - 1
        completes = [isinstance(item, Compute) and any(gradients_of(item)) for item in self.block.backward]
        ready = [item for i, item in enumerate(self.block.backward) if i == last or completes[i]]
        return replace(self.block, forward=(), recompute=(), backward=tuple(ready))


class MeshPrices:
    """Price operators on one mesh, and messages at the cheapest place that a stage has.

    `programs`: the programs of meshes priced before; this mesh's are added. Meshes that differ in pp or dp have equal
    programs and share one copy of each.
    """

    def __init__(
        self,
        space: Space,
        mesh: MeshSizes,
        costs: Costs,
        network: Network,
        programs: dict[Program, Program] | None = None,
    ) -> None:
        self._space, self._mesh = space, mesh
        self._programs = {} if programs is None else programs
        # Groups depend on the mesh alone, so the simplest layout serves.
        x = simplest(space, mesh)
        # Faults would make equal ranks differ. `_fault_scale` of `time_bound.py` replaces them by one factor.
        self.plan = make_plan(scenario_of(space, x).unchecked_copy(update={"faults": None}))
        self.costs = costs.near(self.plan.scenario)
        self.pricing = Pricing(self.plan, self.costs, network)
        self._comms: dict[tuple[str, str, float], Priced] = {}
        self._sends: dict[tuple[int, int, float, bool], float] = {}
        # Classes are listed stage by stage, with the same number of pipelines in each.
        self._stage_classes = self.plan.classes[: len(self.plan.classes) // mesh.pp]
        self.bounded_ranks = self._bounded_ranks()
        cluster = self.plan.scenario.cluster
        # A period of 0 says that no two places are alike. A period beyond the last rank expresses this too.
        self._period = period_of(cluster) or cluster.gpus_per_node * cluster.nodes + 1
        # One rank for each different placement of groups: ranks of a pipeline that differ by a period are alike.
        pipelines, classes = len(self._stage_classes), enumerate(self.plan.classes)
        self._places = list({(i % pipelines, c.rank % self._period): c.rank for i, c in classes}.values())
        self._pipelines_alike = list({c.rank % self._period: i for i, c in enumerate(self._stage_classes)}.values())

    def _bounded_ranks(self) -> list[int]:
        """Return the ranks of a stage whose work is bounded: one of the first class, and one of the last if its work
        differs. Of ranks with equal work the first is taken, as in the simulation."""
        # Uneven context splits and experts give ranks different work. Two ranks bound well enough.
        first: dict[tuple[int, int], int] = {}
        for c in self._stage_classes:
            first.setdefault(self.plan.work_of(c.rank), c.rank)
        ends = (self._stage_classes[0], self._stage_classes[-1])
        return list(dict.fromkeys(first[self.plan.work_of(c.rank)] for c in ends))

    @property
    def alike(self) -> bool:
        """Tell whether all ranks of a stage do the same work, and all stages have the same places on nodes."""
        return len(self._stage_classes) == 1 == len(self._places)

    def kept(self, program: Program) -> Program:
        """Return the one copy of the program that meshes with the same `programs` share."""
        return self._programs.setdefault(program, program)

    def price(self, item: Compute | Comm) -> Priced:
        """Return the price as `Pricing.on` does, for communications the least over all stages, each field by itself."""
        if isinstance(item, Compute):
            return self.pricing.compute(item)
        key = (item.kind, item.group, item.bytes)
        found = self._comms.get(key)
        if found is None:
            # A stage may lie at any of these places; the fastest keeps the bound below all of them.
            each = [self.pricing.comm(item, r) for r in self._places]
            quickest = min(each, key=lambda p: p.seconds)
            found = self._comms[key] = quickest._replace(
                host_s=min(p.host_s for p in each), slows=min(p.slows for p in each)
            )
        return found

    def program_s(self, program: Program) -> float:
        """Return the seconds until a program's computations and waits have ended."""
        return compile_program(program, self.price).done_s

    def comms_s(self, comms: list[Comm]) -> float:
        """Return the seconds of communications that run one after the other."""
        # The host issues each communication while the one before runs.
        return sum(together_s(p.host_s, p.seconds) for p in map(self.price, comms))

    def reductions_s(self, blocks: list[Block], dp: DataParallel) -> tuple[float, float]:
        """Return the seconds that one reduction of a stage's gradients takes on the data-parallel stream, and the
        seconds after the last computation of its backward. `blocks`: `PricedBlock.gradients`, first to last."""
        # Buckets extend over blocks, as in Megatron, so reductions cannot be summed block by block.
        woven = weave_backward(tuple(blocks), dp, PHASES[Kind.B], True)
        items = [i for part in woven for i in part if isinstance(i, Compute) or i.phase is Phase.WEIGHT_GRAD]
        # The items after the last computation are communications that nothing of this stage can hide.
        after = next((n for n, item in enumerate(reversed(items)) if isinstance(item, Compute)), len(items))
        sent = [i for i in items if isinstance(i, Comm)]
        left = sent[len(sent) - after :]
        # Reductions over replicas have their own stream; only the very last surely runs alone.
        ends = [c for n, c in enumerate(left, 1) if c.stream == DP or n == len(left)]
        return self.comms_s([c for c in sent if c.stream == DP]), self.comms_s(ends)

    def send_s(self, source: int, target: int, size: float, forward: bool) -> float:
        """Return the seconds of a message with a stage's output or gradient, in the fastest pipeline."""
        if source == target:
            return 0.0
        classes, per_stage = self.plan.classes, len(self._stage_classes)
        ends = [
            (classes[source * per_stage + pipeline].rank, classes[target * per_stage + pipeline].rank)
            for pipeline in self._pipelines_alike
        ]
        # The fastest pipeline is a bound for every pipeline.
        return min(self._send_s(a, b, size, forward) for a, b in ends)

    def _send_s(self, a: int, b: int, size: float, forward: bool) -> float:
        # Ranks that are moved by a period lie alike on nodes and leaves, so the price is the same.
        key = (a % self._period, b - a, size, forward)
        if key not in self._sends:
            self._sends[key] = self.pricing.send(a, b, size, forward).seconds
        return self._sends[key]

    @cached
    def dp(self, zero: int, alone: bool = False) -> DataParallel:
        """Return the data parallelism of a ZeRO stage; `alone`: as `Sharding` has it."""
        base = self.plan.scenario
        changes = {"zero": zero, **self._space.keys_of_zero(self._mesh.pp, self._mesh.dp, zero)}
        parallelism = base.parallelism.model_copy(update=changes)
        training = as_reduced(self._space.training, parallelism)
        scenario = base.unchecked_copy(update={"parallelism": parallelism, "training": training})
        sums = scenario.parallelism.accumulate_unsharded and not alone
        return make_data_parallel(replace(self.plan, scenario=scenario), sums)
