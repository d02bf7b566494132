"""Blocks and their prices on one mesh, kept for all layouts that share it."""

from __future__ import annotations

from functools import cached_property

from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.program import Block, Comm, Compute, Item, Phase, Program
from sim.prices.operator_prices import Costs
from sim.prices.price import Priced, together_s
from sim.prices.rank_prices import Pricing
from sim.programs.compile import compile_program
from sim.programs.data_parallel import DP, DataParallel, gradients_of, make_data_parallel, unpack, weave_backward
from sim.programs.stages import PHASES, Stage
from sim.ranks.places import period_of
from sim.ranks.plan import make_plan
from sim.schedules import ONE_RANK
from sim.search.cached import cached
from sim.search.space import Grid, Layout, Space, scenario_of
from topology.network import Network

PROGRAMS = ("forward", "backward", "recompute")


class BlockSort:
    """One sort of block: its seconds, computed when first asked for, and its sizes.

    `computes_only`: its messages are hidden by another action's, and its kernels issued among those. `gathered`, here
    and below: with its parameters gathered for every action (ZeRO-3), what is gathered being copied into place.
    """

    def __init__(self, block: Block, grid: GridPrices, computes_only: bool) -> None:
        shared = {name: grid.kept(p) for name in PROGRAMS if (p := getattr(block, name))}
        self.block, self._grid, self._computes_only = replace(block, **shared), grid, computes_only
        self.saved_bytes = sum(s.bytes for s in block.saved)

    @cached
    def action_s(self, kind: Kind, gathered: bool) -> float:
        """Seconds of one micro-batch's action in this block alone, what the device waits for the host included."""
        program = self._program(kind, gathered)
        if self._computes_only:
            return sum(self._grid.price(i).seconds for i in program if isinstance(i, Compute))
        # The compiled program and no sum of its items: what a block hides within itself must not count.
        return self._grid.program_s(program)

    @cached
    def work_s(self, gathered: bool) -> float:
        """A forward and a backward at the least, whole or split, without compiling them: computations, and what holds
        up computing on one stream. Issuing kernels piece by piece waits no less for the host (`together_s` is a norm).
        """
        return sum(self._work_s(self._program(kind, gathered)) for kind in (Kind.F, Kind.B))

    def _work_s(self, program: Program) -> float:
        host_s = device_s = 0.0
        blocking: dict[str, float] = {}
        # Only a message that blocks is sure to add time. Asynchronous ones may hide completely, so they count as free.
        for item in program:
            if isinstance(item, Compute):
                priced = self._grid.price(item)
                host_s, device_s = host_s + priced.host_s, device_s + priced.seconds
            elif isinstance(item, Comm) and item.blocking:
                stream = item.stream or item.group
                # By stream, and the busiest counts: two streams may block at the same time.
                blocking[stream] = blocking.get(stream, 0.0) + self._grid.price(item).seconds
        if self._computes_only:
            return device_s
        return together_s(host_s, device_s) + max(blocking.values(), default=0.0)

    def _program(self, kind: Kind, gathered: bool) -> Program:
        # `measured` puts a profile's measured pieces in place of operators, as the simulation does.
        (block,) = Stage((self.block,), self._grid.dp(0), self._grid.costs, False, 0.0).measured(kind)
        if kind is Kind.F:
            program = block.forward
        else:
            # Recomputation comes before input gradients. A backward of weights alone needs no activations again.
            again = block.recompute if Phase.INPUT_GRAD in PHASES[kind] else ()
            program = (*again, *(i for i in block.backward if i.phase in PHASES[kind]))
        # A weight gradient needs the inputs and the result's gradients, but no parameters.
        if gathered and kind is not Kind.W:
            dp = self._grid.dp(3)
            program = (*unpack(self.gathers(dp), dp, Phase.FORWARD), *program)
        return program

    def gathers(self, dp: DataParallel) -> list[Comm]:
        """What gathers the block's parameters."""
        return dp.gather_block(self.block, Phase.FORWARD, "g")

    @cached_property
    def gathers_s(self) -> float:
        """Seconds of gathering them for ZeRO-3."""
        return self._grid.comms_s(self.gathers(self._grid.dp(3)))

    @cached_property
    def reduces_s(self) -> float:
        """Seconds of the data-parallel stream for ZeRO-3's reduction of the block's gradients."""
        reduced = self._grid.dp(3).reduce("", self.block.params, self.block.expert_params, "r")
        # All-reduces over replicas have a stream of their own, on which they may hide behind these.
        return self._grid.comms_s([c for c in reduced if c.stream == DP])

    @cached_property
    def gradients(self) -> Block:
        """The block with nothing left but what completes gradients, and what its backward ends with."""
        # The last item stays, since what ends a backward decides which reductions are exposed after it.
        last = len(self.block.backward) - 1
        ready = [item for i, item in enumerate(self.block.backward) if i == last or _completes(item)]
        return replace(self.block, forward=(), recompute=(), backward=tuple(ready))


def _completes(item: Item) -> bool:
    return isinstance(item, Compute) and any(gradients_of(item))


class GridPrices:
    """Prices on one mesh: operators, and messages at the cheapest of the places that stages have.

    `programs`: those of meshes priced before, to which this one's are added. Meshes that differ in pp or dp have equal
    programs, and hold each once.
    """

    def __init__(
        self, space: Space, grid: Grid, costs: Costs, network: Network, programs: dict[Program, Program] | None = None
    ) -> None:
        self.costs, self._space, self._grid = costs, space, grid
        self._programs = {} if programs is None else programs
        # Any layout of the mesh gives its groups. The plainest is taken: nothing here depends on the other keys.
        x = Layout(grid.tp, False, grid.cp, grid.pp, grid.dp, grid.ep, 0, ONE_RANK.name, 1, 1, "none")
        # Without faults, as these keep equal ranks apart. `_fault_scale` makes up for them with one factor.
        self.plan = make_plan(scenario_of(space, x).model_copy(update={"faults": None}))
        self.pricing = Pricing(self.plan, costs, network)
        self._dps: dict[int, DataParallel] = {}
        self._comms: dict[tuple[str, str, float], Priced] = {}
        self._sends: dict[tuple[int, int, float, bool], float] = {}
        # Classes are listed stage by stage, with as many lanes in each.
        self._stage_classes = self.plan.classes[: len(self.plan.classes) // grid.pp]
        self.bounded_ranks = self._bounded_ranks()
        cluster = self.plan.scenario.cluster
        # 0 says that no two places are alike. A period beyond the last rank then makes all of them different.
        self._period = period_of(cluster) or cluster.gpus_per_node * cluster.nodes + 1
        self._places = self._distinct_places()
        self._lanes_alike = list({c.rank % self._period: i for i, c in enumerate(self._stage_classes)}.values())

    def _distinct_places(self) -> list[int]:
        """Ranks whose groups lie differently: a lane's are moved from stage to stage, and are alike a period on."""
        lanes = len(self._stage_classes)
        return list({(i % lanes, c.rank % self._period): c.rank for i, c in enumerate(self.plan.classes)}.values())

    def _bounded_ranks(self) -> list[int]:
        """Ranks of a stage whose work is bounded: that of the first class, and that of the last where it differs. Of
        equal work the first rank's shapes are simulated."""
        # Uneven context splits and experts give ranks different work. Two of them bound well; each more costs time.
        first: dict[tuple[int, int], int] = {}
        for c in self._stage_classes:
            first.setdefault(self.plan.work_of(c.rank), c.rank)
        ends = (self._stage_classes[0], self._stage_classes[-1])
        return list(dict.fromkeys(first[self.plan.work_of(c.rank)] for c in ends))

    @property
    def alike(self) -> bool:
        """Whether all ranks of a stage do the same, and all stages lie alike on nodes."""
        return len(self._stage_classes) == 1 == len(self._places)

    def kept(self, program: Program) -> Program:
        """The program's one copy among the meshes that share `programs`."""
        return self._programs.setdefault(program, program)

    def price(self, item: Compute | Comm) -> Priced:
        """As `Pricing.on`; a communication's least over all stages, in seconds and in what it slows: the two may differ
        in where they are least."""
        if isinstance(item, Compute):
            return self.pricing.compute(item)
        key = (item.kind, item.group, item.bytes)
        found = self._comms.get(key)
        if found is None:
            # A stage may lie at any of these places. The quickest keeps the bound below wherever it does.
            each = [self.pricing.comm(item, r) for r in self._places]
            quickest = min(each, key=lambda p: p.seconds)
            found = self._comms[key] = quickest._replace(
                host_s=min(p.host_s for p in each), slows=min(p.slows for p in each)
            )
        return found

    def program_s(self, program: Program) -> float:
        """Seconds until a program has computed and all is there that it waits for."""
        return compile_program(program, self.price).done_s

    def comms_s(self, comms: list[Comm]) -> float:
        """Seconds of communications one after the other."""
        # A data-parallel stream runs one at a time, and the host issues each while the one before runs.
        return sum(together_s(p.host_s, p.seconds) for p in map(self.price, comms))

    def reductions_s(self, blocks: list[Block], dp: DataParallel) -> tuple[float, float]:
        """Seconds of the data-parallel stream for one reduction of a stage's gradients, and of what follows the last
        computation of its backward. `blocks`: first to last; see `BlockSort.gradients`."""
        # The simulation's own weaving fills buckets across blocks, as Megatron does. A sum by block would not.
        woven = weave_backward(tuple(blocks), dp, PHASES[Kind.B], True)
        items = [i for part in woven for i in part if isinstance(i, Compute) or i.phase is Phase.WEIGHT_GRAD]
        # How many items follow the last computation. They are communications that nothing of this stage can hide.
        after = next((n for n, item in enumerate(reversed(items)) if isinstance(item, Compute)), len(items))
        sent = [i for i in items if isinstance(i, Comm)]
        left = sent[len(sent) - after :]
        # Reductions over replicas have a stream of their own, and only the very last is not beside others.
        ends = [c for n, c in enumerate(left, 1) if c.stream == DP or n == len(left)]
        return self.comms_s([c for c in sent if c.stream == DP]), self.comms_s(ends)

    def send_s(self, source: int, target: int, size: float, forward: bool) -> float:
        """A stage's output or its gradient between two pipeline ranks, at the cheapest lane."""
        if source == target:
            return 0.0
        per_stage = len(self._stage_classes)
        ends = [
            (self.plan.classes[source * per_stage + lane].rank, self.plan.classes[target * per_stage + lane].rank)
            for lane in self._lanes_alike
        ]
        # All lanes send at once and the slowest holds up the step; the quickest is a bound whichever lane is looked at.
        return min(self._send_s(a, b, size, forward) for a, b in ends)

    def _send_s(self, a: int, b: int, size: float, forward: bool) -> float:
        # Moved by a period, both ends lie alike on nodes and leaves, and the price is the same.
        key = (a % self._period, b - a, size, forward)
        if key not in self._sends:
            self._sends[key] = self.pricing.send(a, b, size, forward).seconds
        return self._sends[key]

    def dp(self, zero: int) -> DataParallel:
        """Data parallelism at a ZeRO stage."""
        if zero not in self._dps:
            base = self.plan.scenario
            changes = {"zero": zero, "accumulate_unsharded": self._space.accumulates(self._grid.pp, zero)}
            parallelism = base.parallelism.model_copy(update=changes)
            scenario = base.model_copy(update={"parallelism": parallelism})
            self._dps[zero] = make_data_parallel(replace(self.plan, scenario=scenario))
        return self._dps[zero]
