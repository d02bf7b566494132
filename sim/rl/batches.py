"""The micro-batches of a training step, made of answers of unlike lengths.

`sim.simulation` trains on micro-batches of equal sequences, so the step's real lengths are put into such:

- padded: every sequence is as long as the longest of the step.
- mean: every sequence has the mean length. The tokens are right; attention, which grows with the square, is too cheap.
- packed: sequences are put into packs of up to micro_batch_size·seq_len tokens, and a pack is one micro-batch
  (NeMo-RL's `sequence_packing`, verl's `use_remove_padding` with `ppo_max_token_len_per_gpu`). Tokens see their own
  sequence alone. A micro-batch then stands for the mean pack: it has its tokens T, in k equal sequences of T/k tokens,
  with k the whole number that brings k·(T/k)² nearest to the pack's sum of squared lengths, and T/k within seq_len.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from msgspec import Struct

from sim.inputs.parallelism import Parallelism
from sim.inputs.rl_config import Rl
from sim.inputs.scenario import Scenario
from sim.rl.answers import Answers, Counts


class Batch(Struct, frozen=True):
    """A training step's share of an rl step. `updates`: such steps in it; `useful_tokens`: of all sequences of all
    updates, without padding; `filled`: their part of all tokens that are computed."""

    updates: int
    micro_batches: int
    micro_batch_size: int
    seq_len: int
    useful_tokens: int
    filled: float


def make_batch(scenario: Scenario, rl: Rl, answers: Answers) -> Batch:
    """The updates of an rl step, taken to be equal: each has the mean number of sequences and tokens."""
    t, dp = scenario.for_training, scenario.parallelism.dp
    lengths, updates = answers.tokens, rl.answers // t.global_batch_size
    useful = int(lengths.sum())
    if rl.sequences == "packed":
        packs = count_packs(lengths, t.micro_batch_size * t.seq_len)
        micro = _legal(scenario.parallelism, -(-packs // (updates * dp)))
        each = useful / (updates * micro * dp)
        nearest = round(each * useful / float((lengths.astype(float) ** 2).sum()))
        size = max(1, nearest, math.ceil(each / t.seq_len))  # a pack of several sequences' room may hold few long ones
        seq_len = -(-each // size)
    else:
        micro, size = t.global_batch_size // (t.micro_batch_size * dp), t.micro_batch_size
        seq_len = float(lengths.max()) if rl.sequences == "padded" else -(-useful // rl.answers)
    unit = _divisor(scenario.parallelism)
    tokens = min(-(-int(seq_len) // unit) * unit, t.seq_len)
    computed = updates * micro * dp * size * tokens
    return Batch(updates, micro, size, tokens, useful, useful / computed)


def _legal(p: Parallelism, micro_batches: int) -> int:
    """The next number of micro-batches that the schedule can run: packs are then less full, as trainers add packs."""
    beyond = range(micro_batches, micro_batches + 4 * p.pp * p.virtual_stages + 1)
    return next((m for m in beyond if p.form.micro_batches_problem(p.pp, m) is None), micro_batches)


def _divisor(p: Parallelism) -> int:
    """Return what a sequence's length is rounded up to: context parallelism deals out two pieces to a rank, sequence
    parallelism one to each rank of tp (NeMo-RL pads likewise)."""
    return (2 * p.cp if p.cp > 1 else 1) * (p.tp if p.sp else 1)


def count_packs(lengths: Counts, room: int) -> int:
    """Packs that hold all sequences: the longest first, each into the fullest pack that it fits in, or a new one
    (best-fit decreasing: at most 11/9 of the fewest, and one more; Johnson et al. 1974). NeMo-RL's
    `modified_first_fit_decreasing` has the same bound.

    >>> import numpy as np
    >>> count_packs(np.array([60, 50, 40, 30, 20]), 100), count_packs(np.array([100, 100]), 100)
    (2, 2)
    """
    left: list[int] = []  # ascending
    packs = 0
    for length in sorted(lengths.tolist(), reverse=True):
        i = bisect_left(left, length)
        if i < len(left):
            insort(left, left.pop(i) - length)
        else:
            insort(left, room - length)
            packs += 1
    return packs
