"""Estimates the critical batch size by the gradient noise scale of short real runs.

    python -m calibrate.noise_scale

McCandlish et al. 2018, arXiv 1812.06162: section 2.2 (B_simple = tr Σ / |G|²) and appendix A.1 (an unbiased estimate
from the gradient's norm at two batch sizes). Batch sizes are in sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch
from torch import Tensor, nn

from calibrate.quantization import loss, make_small, perplexity, text, train
from sim.commands.command import Command, run_command

BATCH = 4  # sequences of one of the independent batches


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """`gradient`: |G|² of the true gradient; `noise`: tr Σ, the variance of one sequence's gradient around it."""

    gradient: float
    noise: float

    @property
    def critical_batch(self) -> float:
        """tr Σ / |G|², in sequences."""
        return self.noise / self.gradient if self.gradient > 0 else float("inf")


def estimate(small: Sequence[Tensor], batch: int) -> NoiseScale:
    """Estimate the noise scale from gradients of n independent batches of `batch` sequences each.

    The mean of the gradients is that of a batch n times as large:

    |G|² = (B·|G_B|² − b·|G_b|²) / (B − b), tr Σ = (|G_b|² − |G_B|²) / (1/b − 1/B), norms averaged over batches.
    """
    n = len(small)
    big = batch * n
    norm_small = sum(float(g.square().sum()) for g in small) / n
    norm_big = float((sum(small[1:], small[0]) / n).square().sum())
    gradient = (big * norm_big - batch * norm_small) / (big - batch)
    noise = (norm_small - norm_big) / (1 / batch - 1 / big)
    return NoiseScale(gradient, noise)


def gradient_of(blocks: list[nn.Module], tokens: Tensor) -> Tensor:
    """Return the whole model's gradient as one vector."""
    parameters = [p for b in blocks for p in b.parameters()]
    grads = torch.autograd.grad(loss(blocks, tokens), parameters)
    return torch.cat([g.flatten() for g in grads])


def noise_scale(blocks: list[nn.Module], batches: int = 64) -> NoiseScale:
    """Estimate a model's noise scale at its present weights from new sequences."""
    return estimate([gradient_of(blocks, text(BATCH, 200_000 + i)) for i in range(batches)], BATCH)


@click.command("noise-scale", cls=Command)
def main() -> None:
    """Train and print the noise scale every now and then; it grows as the loss falls."""
    torch.set_num_threads(1)
    blocks, done = make_small(), 0
    for steps in (0, 50, 150):
        if steps:
            train(blocks, steps)
        done += steps
        found = noise_scale(blocks)
        print(
            f"after {done:4} steps: perplexity {perplexity(blocks, text(32, 1)):6.1f}, "
            f"critical batch {found.critical_batch:8.1f} sequences"
        )


if __name__ == "__main__":
    run_command(main)
