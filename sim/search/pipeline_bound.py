"""Compute a lower bound of a step's time for every pipeline schedule, from the seconds of its stages' actions.

Let rank r have the stages H, let m be the number of micro-batches, and F, B, I, W the seconds of a stage's actions:

- before r's first forward, the same micro-batch's forwards of all stages before (one of) r's stages run in turn;
- r works Σ m·(F + B) over H, or Σ m·(F + I + W) if backward is split;
- after r's last backward the same micro-batch goes back through all stages before; the exposed gradient synchronization
  and the optimizer follow that, or r's own last action.

The largest such sum over all ranks is the bound. It holds for every order of actions that a schedule may choose,
because each sum is a chain of actions that wait for each other or share a rank. For 1F1B and GPipe with equal stages it
is the pipeline's exact time, (m + p − 1)(F + B) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from msgspec import Struct

from sim.core.columns import Floats, Ints
from sim.schedules import FORMS, ONE_RANK
from sim.schedules.form import Backward
from sim.search.cached import cached


class StagePlacement(Struct, frozen=True, eq=False, dict=True):
    """Hold where a schedule's stages lie, how its backwards run, and whether micro-batches run one at a time."""

    name: str
    stages_per_rank: int
    ranks: int
    rank_of_stage: Ints
    part_of_stage: Ints
    chains: tuple[tuple[int, ...], ...]
    backward: Backward
    one_at_a_time: bool

    @property
    def copies(self) -> int:
        """Return the number of chains that share the micro-batches."""
        return len(self.chains)

    def sum(self, per_stage: Floats) -> Floats:
        """Return the sum over each rank's stages."""
        return self._by_rank(per_stage, np.add, 0.0)

    def least(self, per_stage: Floats) -> Floats:
        """Return the least of each rank's stages."""
        return self._by_rank(per_stage, np.minimum, np.inf)

    def most(self, per_stage: Floats) -> Floats:
        """Return the largest of each rank's stages."""
        return self._by_rank(per_stage, np.maximum, -np.inf)

    def _by_rank(self, per_stage: Floats, combine: np.ufunc, of_none: float) -> Floats:
        if len(per_stage) == self.ranks and self.copies == 1:  # one stage on each rank, in order
            return per_stage
        out = np.full(self.ranks, of_none)
        combine.at(out, self.rank_of_stage, per_stage)
        return out

    @cached
    def forwards_first(self, micro_batches: int) -> Floats:
        """Return each stage's number of forwards before its rank's first backward."""
        return np.array(FORMS[self.name].forwards_first(self.ranks, micro_batches, self.stages_per_rank), dtype=float)


@cache
def placement_of(name: str, p: int, v: int) -> StagePlacement:
    """Return where the stages of a schedule lie on p ranks with v stages each."""
    form = FORMS[name] if p > 1 else ONE_RANK
    built = form.fewest(p, v)
    # The lists for the fewest micro-batches already show where every stage lies, and are built fast.
    ranks, parts = np.array(built.rank_of_stage), np.array(built.part_of_stage)
    return StagePlacement(name, v, p, ranks, parts, built.chains, form.backward, form.one_at_a_time)


class Actions(Struct, frozen=True, eq=False):
    """Hold the seconds of the forward, the whole backward and its halves, by schedule stage."""

    forward: Floats
    backward: Floats
    input_grad: Floats
    weight_grad: Floats

    def back(self, placement: StagePlacement) -> Floats:
        """Return the seconds of one micro-batch's backward as the schedule runs it, by stage."""
        if placement.backward == "whole":
            return self.backward
        split = self.input_grad + self.weight_grad
        return split if placement.backward == "split" else np.minimum(self.backward, split)


class StageSeconds(Struct, frozen=True, eq=False):
    """Hold seconds by schedule stage.

    `alone`: actions without ZeRO-3's gathers, for a rank that gathered while it waited for its input. `queued`: actions
    that follow another at once, with their gathers. `lag`: the delay of the next action by a whole backward's
    reductions. `send_forward`, `send_backward`: the messages of a stage's result (0 to the same rank or to none).
    `exposed`: communication of gradients after the stage's last action. `gathered`: when the parameters of the stage's
    first forward are gathered.
    """

    alone: Actions
    queued: Actions
    lag: Floats
    send_forward: Floats
    send_backward: Floats
    exposed: Floats
    gathered: Floats


def pipeline_bound_s(
    placement: StagePlacement, t: StageSeconds, micro_batches: int, blocking: bool, epilogue_s: Floats
) -> float:
    """Return the bound in seconds. `blocking`: ranks wait for the messages that they send; `epilogue_s`: by rank."""
    # A bidirectional schedule (DualPipe) runs half of the micro-batches through each copy of the model.
    m = micro_batches // placement.copies
    whole = placement.backward == "whole"
    # A blocking message delays its sender. Nothing follows the last backward's message, hence m - 1.
    held = (m * t.send_forward + (m - 1) * t.send_backward) if blocking else np.zeros_like(t.lag)
    # Each backward but the last is followed by an action that queues behind its reductions.
    lag = (m - 1) * t.lag if whole else 0.0

    def work(of: Actions, extra: Floats | float, with_weights: bool) -> Floats:
        return placement.sum(m * (of.forward + (of.back(placement) if with_weights else of.input_grad)) + extra)

    # Gathers may run while a rank waits for its messages, so only the longer of the two counts.
    full = np.maximum(work(t.queued, lag, True), work(t.alone, held, True))
    # The work up to the last input gradient. Weight gradients may run later (zero bubble), so they are left out.
    early = full if whole else np.maximum(work(t.queued, lag, False), work(t.alone, held, False))
    # On the way back the next stage waits only for the input gradient.
    chain_back = t.alone.backward if whole else t.alone.input_grad
    before, after = _chains(placement, t.alone.forward + t.send_forward, chain_back, t.send_backward)
    ends = _chain_ends(placement, t, epilogue_s)
    first = np.maximum(np.maximum(before + t.alone.forward, t.gathered), t.queued.forward)  # end of a first forward
    # The schedule chooses which of a rank's stages is first or last, so the least counts. `full` and `early` contain
    # all m forwards, so the first one is subtracted here. The queued time is the longer one; subtracting it keeps the
    # sum a bound with either kind of work.
    start = placement.least(first - t.queued.forward)
    # Chain 1: forwards of the stages before, all work of the rank, its exposed reductions and its optimizer.
    own = start + full + placement.least(t.exposed) + epilogue_s
    # Chain 2: after the rank's last input gradient the micro-batch goes back to stage 0, which ends its own step.
    tail = start + early + placement.least(after + ends)
    bound = max(float(own.max()), float(tail.max()))
    if placement.one_at_a_time:
        # Micro-batches run one at a time, so the whole way there and back counts m times.
        way = t.alone.forward + chain_back + t.send_forward + t.send_backward
        bound = max(bound, m * float(way.sum()) + float(ends[0]))
    return bound


def _chains(
    placement: StagePlacement, forward: Floats, backward: Floats, send_backward: Floats
) -> tuple[Floats, Floats]:
    """Return, by stage, the seconds of the forwards before it, and of the backwards after its own on the way back."""
    before, after = np.empty_like(forward), np.empty_like(forward)
    for chain in placement.chains:
        index = np.array(chain)
        down = np.cumsum(forward[index])
        # Rounding may make a difference of sums negative.
        before[index] = np.maximum(0.0, down - forward[index])
        after[index] = np.cumsum(backward[index] + send_backward[index]) - backward[index]  # its own message included
    return before, after


def _chain_ends(placement: StagePlacement, t: StageSeconds, epilogue_s: Floats) -> Floats:
    """Return, by stage, the seconds that follow the input gradient of the first stage of its chain."""
    out = np.empty_like(t.lag)
    for chain in placement.chains:
        first = chain[0]
        # A whole backward includes weight gradients. A mixed form may run them earlier, so they need not follow.
        weights = t.alone.weight_grad[first] if placement.backward == "split" else 0.0
        out[list(chain)] = weights + t.exposed[first] + epilogue_s[placement.rank_of_stage[first]]
    return out
