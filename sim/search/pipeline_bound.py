"""A step time that no pipeline schedule can beat, from the seconds of its stages' actions.

Of rank r with its stages H, m micro-batches, and F, B, I, W the seconds of a stage's actions:

- r's first forward needs those of all stages before (one of) its own, one after the other;
- r works Σ m·(F + B) over H, or Σ m·(F + I + W) where backward is split;
- after its last backward the same micro-batch goes back through all stages before; after that, or after its own
  last action, comes what is exposed of gradient synchronization, and the optimizer.

The largest such sum over all ranks is the bound. It holds for every order of actions that a schedule may choose, as
each sum is a chain of actions that wait for each other or share a rank. For 1F1B and GPipe with equal stages it is
the pipeline's exact time, (m + p − 1)(F + B) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.schedules import FORMS, ONE_RANK
from sim.schedules.form import Backward
from sim.search.cached import cached

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Form(Struct, frozen=True, eq=False, dict=True):
    """Where a schedule's stages live, how its backwards run, and whether micro-batches take turns."""

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
        """Chains that share the micro-batches."""
        return len(self.chains)

    def sum(self, per_stage: Floats) -> Floats:
        """Sums over each rank's stages."""
        total = np.zeros(self.ranks)
        np.add.at(total, self.rank_of_stage, per_stage)
        return total

    def least(self, per_stage: Floats) -> Floats:
        """The least of each rank's stages."""
        return self._extreme(per_stage, np.minimum)

    def most(self, per_stage: Floats) -> Floats:
        """The most of each rank's stages."""
        return self._extreme(per_stage, np.maximum)

    def _extreme(self, per_stage: Floats, choose: np.ufunc) -> Floats:
        if len(per_stage) == self.ranks and self.copies == 1:  # a stage a rank, in their order
            return per_stage
        out = np.full(self.ranks, np.inf if choose is np.minimum else -np.inf)
        choose.at(out, self.rank_of_stage, per_stage)
        return out

    @cached
    def forwards_first(self, micro_batches: int) -> Floats:
        """Forwards of each stage before its rank's first backward."""
        return np.array(FORMS[self.name].forwards_first(self.ranks, micro_batches, self.stages_per_rank), dtype=float)


@cache
def form_of(name: str, p: int, v: int) -> Form:
    """The form of a schedule on p ranks; its lists are built for as few micro-batches as it takes."""
    form = FORMS[name] if p > 1 else ONE_RANK
    built = form.fewest(p, v)
    # The lists for the fewest micro-batches already show where every stage lives, and are quick to build.
    ranks, parts = np.array(built.rank_of_stage), np.array(built.part_of_stage)
    return Form(name, v, p, ranks, parts, built.chains, form.backward, form.one_at_a_time)


class Actions(Struct, frozen=True, eq=False):
    """Seconds of F, whole backward, and its halves, by schedule stage."""

    forward: Floats
    backward: Floats
    input_grad: Floats
    weight_grad: Floats

    def back(self, form: Form) -> Floats:
        """The backward of one micro-batch, as the schedule runs it."""
        if form.backward == "whole":
            return self.backward
        split = self.input_grad + self.weight_grad
        return split if form.backward == "split" else np.minimum(self.backward, split)


class StageSeconds(Struct, frozen=True, eq=False):
    """By schedule stage. `alone`: actions without what ZeRO-3 gathers, which a rank that waits for its input has
    already; `queued`: actions that follow another at once, gathers included. `lag`: what a whole backward's reductions
    hold up the next action by; the messages of a stage's result forward and back (0 to the same rank or to none);
    `exposed`: communication of gradients after the stage's last action; `gathered`: when the parameters of its first
    forward are there."""

    alone: Actions
    queued: Actions
    lag: Floats
    send_forward: Floats
    send_backward: Floats
    exposed: Floats
    gathered: Floats


def pipeline_bound_s(form: Form, t: StageSeconds, micro_batches: int, blocking: bool, epilogue_s: Floats) -> float:
    """The bound in seconds. `blocking`: a rank waits for its own messages; `epilogue_s`: of the optimizer, by rank."""
    # A bidirectional schedule (DualPipe) runs half of the micro-batches through each copy of the model.
    m = micro_batches // form.copies
    whole = form.backward == "whole"
    # A blocking message holds its sender up. After the last backward nothing waits on the rank, hence m - 1 of these.
    held = (m * t.send_forward + (m - 1) * t.send_backward) if blocking else np.zeros_like(t.lag)
    # Each backward but the last is followed by an action that queues behind its reductions.
    lag = (m - 1) * t.lag if whole else 0.0

    def work(of: Actions, extra: Floats | float, with_weights: bool) -> Floats:
        return form.sum(m * (of.forward + (of.back(form) if with_weights else of.input_grad)) + extra)

    # gathers run beside a rank's waiting for its messages, so either of the two counts
    full = np.maximum(work(t.queued, lag, True), work(t.alone, held, True))
    # Up to the last input gradient. Weight gradients may run after it (zero bubble), so they are no part of this chain.
    early = full if whole else np.maximum(work(t.queued, lag, False), work(t.alone, held, False))
    # On the way back only what the next stage waits for counts: of a split backward the input gradient.
    chain_back = t.alone.backward if whole else t.alone.input_grad
    before, after = _chains(form, t.alone.forward + t.send_forward, chain_back, t.send_backward)
    ends = _chain_ends(form, t, epilogue_s)
    first = np.maximum(np.maximum(before + t.alone.forward, t.gathered), t.queued.forward)  # end of a first forward
    # which of a rank's stages is first or last is the schedule's choice, so the least counts
    # `full` and `early` count all m forwards, the first among them. It is taken off here. Taking off the queued time,
    # the longer one, keeps the sum a bound with either kind of work.
    start = form.least(first - t.queued.forward)
    # Chain 1: forwards of the stages before, all work of the rank, its exposed reductions, its optimizer.
    own = start + full + form.least(t.exposed) + epilogue_s
    # Chain 2: after the rank's last input gradient the micro-batch goes back to stage 0, which then ends its step.
    tail = start + early + form.least(after + ends)
    bound = max(float(own.max()), float(tail.max()))
    if form.one_at_a_time:
        # No two micro-batches are under way at once, so the whole way there and back adds up m times.
        way = t.alone.forward + chain_back + t.send_forward + t.send_backward
        bound = max(bound, m * float(way.sum()) + float(ends[0]))
    return bound


def _chains(form: Form, forward: Floats, backward: Floats, send_backward: Floats) -> tuple[Floats, Floats]:
    """Seconds of the forwards before each stage, and of the backwards that follow its own on the way back."""
    before, after = np.empty_like(forward), np.empty_like(forward)
    for chain in form.chains:
        index = np.array(chain)
        down = np.cumsum(forward[index])
        # A difference of sums may come out below 0 by rounding.
        before[index] = np.maximum(0.0, down - forward[index])
        after[index] = np.cumsum(backward[index] + send_backward[index]) - backward[index]  # its own message counts
    return before, after


def _chain_ends(form: Form, t: StageSeconds, epilogue_s: Floats) -> Floats:
    """What follows the input gradient of the first stage of each stage's chain."""
    out = np.empty_like(t.lag)
    for chain in form.chains:
        first = chain[0]
        # A whole backward has them in it. A mixed form may have run them earlier, so nothing is sure to follow.
        weights = t.alone.weight_grad[first] if form.backward == "split" else 0.0
        out[list(chain)] = weights + t.exposed[first] + epilogue_s[form.rank_of_stage[first]]
    return out
