"""The data set of real runs: random sequences, which a distributed sampler splits over the ranks.

The data set has `EPOCH_STEPS` global batches. After as many steps an epoch ends, and the next has another order. All
ranks together draw what one device would draw, so losses can be compared.

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sim.inputs.scenario import Scenario

EPOCH_STEPS = 16


class DistributedSampler:
    """Chooses a rank's samples of an epoch; over all ranks each sample comes once.

    The permutation depends only on seed and epoch. Rank r takes every ranks-th sample from the r-th on, as torch's
    DistributedSampler with `drop_last`, so a remainder is left out of the epoch.
    """

    def __init__(self, samples: int, ranks: int, rank: int, seed: int = 0) -> None:
        if not 0 <= rank < ranks <= samples:
            raise ValueError(f"rank {rank} of {ranks} over {samples} samples")
        self.samples, self.ranks, self.rank, self.seed = samples, ranks, rank, seed

    def epoch(self, number: int) -> list[int]:
        """Return this rank's samples of an epoch, in order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.samples, generator=generator).tolist()
        return order[: self.samples // self.ranks * self.ranks][self.rank :: self.ranks]


def draw(scenario: Scenario, step: int, data_rank: int, device: str = "cpu") -> Tensor:
    """Return the sequences [m · b, s + 1] that one data-parallel rank takes in a step."""
    t, dp = scenario.for_training, scenario.parallelism.dp
    own = t.global_batch_size // dp
    epoch, at = divmod(step, EPOCH_STEPS)
    chosen = DistributedSampler(EPOCH_STEPS * t.global_batch_size, dp, data_rank).epoch(epoch)[at * own :][:own]
    rows = [_sequence(scenario.model.vocab, t.seq_len, number) for number in chosen]
    return torch.stack(rows).to(device)


def make_batch(scenario: Scenario, step: int, device: str = "cpu") -> Tensor:
    """Return the global batch [sequences, s + 1]: the sequences of all data-parallel ranks, one after the other."""
    return torch.cat([draw(scenario, step, rank, device) for rank in range(scenario.parallelism.dp)])


def _sequence(vocab: int, seq_len: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(7_919 + number)
    return torch.randint(vocab, (seq_len + 1,), generator=generator)
