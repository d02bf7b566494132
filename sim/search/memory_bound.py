"""Bound the memory of every layout of one mesh from below.

States are exact. Activations are those of the forwards that a schedule runs before its first backward.
"""

from __future__ import annotations

import numpy as np

from sim.core.columns import Floats
from sim.programs.gathered_units import gathered_after_loss
from sim.results.states import states
from sim.schedules import FORMS
from sim.search.block_sums import Blocks, Cut, Signature
from sim.search.bounded import ROUNDING
from sim.search.cached import cached
from sim.search.mesh_blocks import MeshBlocks, Sharding, least_zeros
from sim.search.pipeline_bound import StagePlacement, placement_of
from sim.search.space import Layout, MeshSizes
from sim.search.stage_bytes import stage_bytes


class MemoryBound:
    """Bound the bytes of the worst rank."""

    def __init__(self, mesh: MeshSizes, mesh_blocks: MeshBlocks) -> None:
        self.mesh, self.mesh_blocks = mesh, mesh_blocks
        self.training = mesh_blocks.space.training

    def states_bytes(self, x: Layout) -> float:
        """Return bytes of parameters, gradients and optimizer on the worst rank."""
        # Recomputation and the micro-batch's size do not change them, so most layouts share the few that are left.
        return self._states_of(x.sp, self.mesh_blocks.sharding(x), x.schedule, x.virtual_stages, x.tp_overlap)

    @cached
    def _states_of(self, sp: bool, sharding: Sharding, schedule: str, virtual_stages: int, tp_overlap: str) -> float:
        (tp, cp, pp, dp, ep), placement = self.mesh, placement_of(schedule, self.mesh.pp, virtual_stages)
        x = Layout(tp, sp, cp, pp, dp, ep, sharding.zero, schedule, virtual_stages, 1, "none", tp_overlap)
        cut = self.mesh_blocks.cut(self.mesh_blocks.blocks(least_zeros(x)[-1])[0].order, placement)
        return float(self._state_bytes(sharding, placement, cut).max()) * ROUNDING

    def least_bytes(self, x: Layout, timed: bool = False) -> float:
        """Return the least bytes of the worst rank; `timed`: use the actions' seconds if the schedule follows them."""
        blocks, placement = self.mesh_blocks.blocks(x)[0], placement_of(x.schedule, x.pp, x.virtual_stages)
        cut = self.mesh_blocks.cut(blocks.order, placement)
        # By pipeline rank; the fullest rank decides.
        sharding = self.mesh_blocks.sharding(x)
        kept = self._state_bytes(sharding, placement, cut) + self._activation_bytes(
            blocks, placement, cut, self.mesh_blocks.micro_batches(x)
        )
        if timed and (count := self._searched_forwards(x, blocks, cut)) > 1:
            # Only rank 0 is known to run more than one forward first.
            saved, _, backward = self._stage_bytes(blocks, cut)
            # Arrays are cached: a change in place would change the bound of the next layout.
            kept = kept.copy()
            # Rank 0 keeps `count` micro-batches when its first backward starts, which needs `backward` bytes more.
            first = self._state_bytes(sharding, placement, cut)[0] + count * saved[0] + backward[0]
            kept[0] = max(kept[0], first)
        return float(kept.max()) * ROUNDING

    @cached
    def _state_bytes(self, sharding: Sharding, placement: StagePlacement, cut: Cut) -> Floats:
        """Return the exact bytes of states and the least bytes of gathered parameters, by pipeline rank: those that are
        there while the loss runs its backward, before which nothing else is gathered."""
        found: dict[Signature, float] = {}
        for held in cut.by_rank(placement):
            if held not in found:
                # The function of the simulation's memory: states are exact.
                stage = self.mesh_blocks.stage(sharding, cut, held)
                s = states(self.mesh_blocks.prices.plan, [stage])
                later = gathered_after_loss(stage.blocks, stage.dp) * stage.dp.parameter_bytes
                found[held] = s.parameters + s.gradients + s.optimizer + s.gathered - later
        return np.array([found[held] for held in cut.by_rank(placement)])

    @cached
    def _activation_bytes(self, blocks: Blocks, placement: StagePlacement, cut: Cut, m: int) -> Floats:
        """Return the larger of what the forwards before a rank's first backward keep and one micro-batch, in bytes."""
        saved, forward, backward = self._stage_bytes(blocks, cut)
        # Any schedule runs each stage, and then at least that micro-batch's activations are present.
        single = placement.most(saved + np.maximum(forward, backward))
        if self.training.activation_offload:
            return single
        # When the first backward starts, all forwards before it are kept. The schedule chooses the stage of this
        # backward, so the least one counts.
        many = np.bincount(placement.rank_of_stage, placement.forwards_first(m) * saved, placement.ranks)
        return np.maximum(single, many + placement.least(backward))

    def _searched_forwards(self, x: Layout, blocks: Blocks, cut: Cut) -> float:
        """Return rank 0's number of forwards before its first backward; 1 if a forward's longest time is unknown."""
        p, prices = self.mesh_blocks.space.base.parallelism, self.mesh_blocks.prices
        first_forwards = FORMS[x.schedule].first_forwards
        # Scattered messages are gathered on arrival, which is no part of the forward's program here.
        scattered = p.p2p_scatter and x.tp > 1 and not x.sp
        # The schedule is searched with exact seconds. If ranks or places differ, only least times are known here.
        if first_forwards is None or self.training.activation_offload or not prices.alike or scattered:
            return 1.0
        gathered = self.mesh_blocks.gathered(x)
        gathers = [blocks.priced[n].gathers_s for n in cut.stages[0]] if gathered else []
        slowed = prices.costs.coefficients.collective_sm_share  # by which computation beside a collective is slowed
        t = self.mesh_blocks.alone(blocks, cut, gathered)
        # Here an upper bound is needed: the longer a forward may take, the fewer forwards are sure.
        waits_s = sum(gathers) * (1.0 + slowed)
        return first_forwards(p.schedule_memory, self.mesh_blocks.micro_batches(x), t.forward, t.input_grad, waits_s)

    @cached
    def _stage_bytes(self, blocks: Blocks, cut: Cut) -> tuple[Floats, Floats, Floats]:
        """Return `stage_bytes` of each stage."""
        offload = self.training.activation_offload
        each = cut.each(lambda stage: stage_bytes([blocks.priced[n] for n in stage], offload))
        saved, forward, backward = each.T
        return saved, forward, backward
